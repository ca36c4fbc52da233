package userspace

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// dialers open marked sockets towards endpoints and towards this process: by the
// standard library for sessions and probes, by hand for connections (see connect).
type dialers struct {
	plain       net.Dialer // from an address the kernel chooses, or one of this node's
	transparent net.Dialer // from an address that isn't this node's
	ports       ports      // of those
	mark        int32
}

func newDialers(mark uint32, keepAlive net.KeepAliveConfig) *dialers {
	d := &dialers{ports: belowClients(), mark: int32(mark)}
	d.plain = net.Dialer{KeepAliveConfig: keepAlive, Control: func(network, _ string, c syscall.RawConn) error {
		return control(c, func(fd int) error { return setUpstream(fd, mark) })
	}}
	d.transparent = net.Dialer{KeepAliveConfig: keepAlive, Control: func(network, _ string, c syscall.RawConn) error {
		return control(c, func(fd int) error {
			if err := setUpstream(fd, mark); err != nil {
				return err
			}
			return setTransparent(fd, strings.HasSuffix(network, "6"))
		})
	}}
	return d
}

// setUpstream marks a socket, and leaves the choice of a source port to
// connect: then ports are unique for a destination, not for a source address,
// and a client behind one address isn't bound to 28,000 connections. The
// option is the IPv4 level's for IPv6 sockets too (ip(7)).
func setUpstream(fd int, mark uint32) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(mark)); err != nil {
		return err
	}
	return lateBind(fd)
}

func lateBind(fd int) error {
	return unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
}

// setTransparent lets a socket have an address that isn't this node's.
func setTransparent(fd int, v6 bool) error {
	if v6 {
		return unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 1)
	}
	return unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_TRANSPARENT, 1)
}

func control(c syscall.RawConn, f func(fd int) error) (err error) {
	if ctrlErr := c.Control(func(fd uintptr) { err = f(int(fd)) }); ctrlErr != nil {
		return ctrlErr
	}
	return err
}

// source says from which address an endpoint is connected to.
type source struct {
	addr        netip.Addr // invalid: the kernel chooses
	transparent bool       // addr isn't this node's own
}

// dial calls f with the dialer and the local address for s.
func (d *dialers) dial(s source, f func(*net.Dialer, netip.AddrPort) error) error {
	switch {
	case s.transparent:
		return d.ports.from(s.addr, func(local netip.AddrPort) error { return f(&d.transparent, local) })
	case s.addr.IsValid():
		return f(&d.plain, netip.AddrPortFrom(s.addr, 0))
	}
	return f(&d.plain, netip.AddrPort{})
}

// probe connects to a listener of this process.
func (d *dialers) probe(ctx context.Context, to netip.AddrPort) (*net.TCPConn, error) {
	return d.plain.DialTCP(ctx, "tcp"+familyDigit(to.Addr()), netip.AddrPort{}, to)
}

// udp makes a connected socket.
func (d *dialers) udp(s source, to netip.AddrPort) (c *net.UDPConn, err error) {
	err = d.dial(s, func(dialer *net.Dialer, local netip.AddrPort) (err error) {
		c, err = dialer.DialUDP(context.Background(), "udp"+familyDigit(to.Addr()), local, to)
		return err
	})
	return c, err
}

// udpSocket makes a connected socket by hand, with as few system calls as can be.
func (d *dialers) udpSocket(s source, to netip.AddrPort) (int, error) {
	family, domain := service.FamilyOf(to.Addr()), unix.AF_INET
	if family == service.IPv6 {
		domain = unix.AF_INET6
	}
	fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	if err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(d.mark)); err == nil {
		err = reportErrors(fd, family)
	}
	if err == nil && s.addr.IsValid() {
		err = d.bindUDP(fd, s)
	}
	if err == nil {
		raw := newRawAddress(to)
		err = failure(sysConnect(fd, &raw))
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// bindUDP gives a socket the address that the endpoint is to see.
func (d *dialers) bindUDP(fd int, s source) error {
	if !s.transparent {
		if err := lateBind(fd); err != nil {
			return err
		}
		return bindTo(fd, netip.AddrPortFrom(s.addr, 0))
	}
	if err := setTransparent(fd, s.addr.Is6()); err != nil {
		return err
	}
	return d.ports.from(s.addr, func(local netip.AddrPort) error { return bindTo(fd, local) })
}

func bindTo(fd int, local netip.AddrPort) error {
	raw := newRawAddress(local)
	return failure(sysBind(fd, &raw))
}

// reportErrors asks for every ICMP error. By default a socket learns of
// unreachable ports, but not of unreachable hosts (udp_err in net/ipv4/udp.c).
func reportErrors(fd int, f service.Family) error {
	if f == service.IPv6 {
		return unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_RECVERR, 1)
	}
	return unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_RECVERR, 1)
}

func familyDigit(a netip.Addr) string {
	if service.FamilyOf(a) == service.IPv6 {
		return "6"
	}
	return "4"
}

// blames reports whether a failed connect says something about the endpoint,
// rather than about this node: its ports, descriptors, memory or firewall.
func blames(err error) bool {
	for _, e := range []error{unix.ECONNREFUSED, unix.ECONNRESET, unix.EHOSTUNREACH, unix.ENETUNREACH, unix.ETIMEDOUT, unix.EHOSTDOWN} {
		if errors.Is(err, e) {
			return true
		}
	}
	var t net.Error
	return errors.As(err, &t) && t.Timeout()
}
