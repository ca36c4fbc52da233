package userspace

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// dialers open marked sockets: towards endpoints by hand (see connect and
// udpSocket), and towards this process, for probes, by the standard library.
type dialers struct {
	own       net.Dialer // towards this process
	ports     ports      // of sockets with an address that isn't this node's
	mark      int32
	keepAlive time.Duration
}

func newDialers(mark uint32, keepAlive time.Duration) *dialers {
	d := &dialers{ports: belowClients(), mark: int32(mark), keepAlive: keepAlive}
	d.own.Control = func(_, _ string, c syscall.RawConn) error {
		return control(c, func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(mark)) })
	}
	return d
}

// lateBind leaves the choice of a source port to connect: then ports are unique
// for a destination, not for a source address, and a client behind one address
// isn't bound to 28,000 connections. The option is the IPv4 level's for IPv6
// sockets too (ip(7)).
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

// probe connects to a listener of this process.
func (d *dialers) probe(ctx context.Context, to netip.AddrPort) (*net.TCPConn, error) {
	return d.own.DialTCP(ctx, "tcp"+familyDigit(to.Addr()), netip.AddrPort{}, to)
}

// probeUDP makes a socket that is connected to a listener of this process.
func (d *dialers) probeUDP(to netip.AddrPort) (*net.UDPConn, error) {
	return d.own.DialUDP(context.Background(), "udp"+familyDigit(to.Addr()), netip.AddrPort{}, to)
}

// udpSocket makes a connected socket, with as few system calls as can be.
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
	return false
}
