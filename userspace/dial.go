package userspace

import (
	"cmp"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"syscall"

	"golang.org/x/sys/unix"
)

// dialers open marked sockets: towards endpoints by hand, with as few system calls as can be, and
// towards this process, for probes, by the standard library.
type dialers struct {
	own   net.Dialer // towards this process
	ports ports      // of sockets with an address that isn't this node's
	mark  int32
}

func newDialers(mark uint32) *dialers {
	d := &dialers{ports: belowClients(), mark: int32(mark)}
	d.own.Control = func(_, _ string, c syscall.RawConn) (err error) {
		ctrlErr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, int(mark)) })
		return errors.Join(ctrlErr, err)
	}
	return d
}

// source says from which address an endpoint is connected to.
type source struct {
	addr        netip.Addr // invalid: the kernel chooses
	transparent bool       // addr isn't this node's own
}

// target says what kind of socket, SOCK_STREAM or SOCK_DGRAM, is connected to which endpoint, and how.
type target struct {
	kind int
	source
	to   netip.AddrPort
	hops int32 // TTL of its packets; 0 for the node's default
}

// connect makes a socket and connects it to an endpoint, or begins to: its loop learns of the outcome.
func (d *dialers) connect(t target) (fd int, err error) {
	from := func(local netip.AddrPort) (err error) {
		fd, err = d.connectFrom(t, local)
		return err
	}
	switch {
	case t.transparent:
		err = d.ports.from(t.addr, from)
	case t.addr.IsValid():
		err = from(netip.AddrPortFrom(t.addr, 0))
	default:
		err = from(netip.AddrPort{})
	}
	return fd, err
}

// connectFrom is connect from one local address and port; an invalid address leaves
// both to the kernel.
func (d *dialers) connectFrom(t target, local netip.AddrPort) (int, error) {
	remote := newRawAddress(t.to)
	fd, err := sysSocket(int(remote.family), t.kind)
	if err != 0 {
		return -1, err
	}
	if err = d.prepare(fd, t, local); err == 0 {
		if err = sysConnect(fd, &remote); err == unix.EINPROGRESS || err == unix.EINTR {
			err = 0
		}
	}
	if err != 0 {
		sysClose(fd)
		return -1, err
	}
	return fd, nil
}

func (d *dialers) prepare(fd int, t target, local netip.AddrPort) (err unix.Errno) {
	set := func(level, option int, value int32) {
		if err == 0 {
			err = sysOption(fd, level, option, value)
		}
	}
	level, isTransparent, reportErrors := unix.SOL_IPV6, unix.IPV6_TRANSPARENT, unix.IPV6_RECVERR
	if t.to.Addr().Is4() {
		level, isTransparent, reportErrors = unix.SOL_IP, unix.IP_TRANSPARENT, unix.IP_RECVERR
	}
	set(unix.SOL_SOCKET, unix.SO_MARK, d.mark)
	if t.hops > 0 {
		set(level, unicastHops(level), t.hops)
	}
	if t.kind == unix.SOCK_STREAM {
		set(unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	} else {
		// By default a socket learns of unreachable ports, but not of unreachable hosts
		// (udp_err in net/ipv4/udp.c).
		set(level, reportErrors, 1)
	}
	if err != 0 || !local.IsValid() {
		return err
	}
	if t.transparent {
		set(level, isTransparent, 1)
		if t.kind == unix.SOCK_STREAM { // a port is one connection's for a destination, not for all of them
			set(unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
		}
	}
	if local.Port() == 0 {
		// connect chooses the port: then ports are unique for a destination, not for a source address,
		// and a client behind one address isn't bound to 28,000 connections. The option is the IPv4
		// level's for IPv6 sockets too (ip(7)).
		set(unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1)
	}
	address := newRawAddress(local)
	return cmp.Or(err, sysBind(fd, &address))
}

// blames reports whether a failed attempt says something about the endpoint,
// rather than about this node: its ports, descriptors, memory or firewall.
func blames(err error) bool {
	of := []error{errReset, unix.ECONNREFUSED, unix.ECONNRESET, unix.EHOSTUNREACH, unix.ENETUNREACH, unix.ETIMEDOUT, unix.EHOSTDOWN}
	return slices.ContainsFunc(of, func(e error) bool { return errors.Is(err, e) })
}

// ports are the source ports of connections from a client's address: ports
// that clients themselves don't use.
//
// The kernel would choose from the range that clients choose from as well. IPVS
// remembers a connection for two minutes after its end (TIME_WAIT in
// ip_vs_proto_tcp.c) by client, port and endpoint; an endpoint's answer to a
// socket of ours with the same three would be taken for one of that
// connection's, and get the service's address as its source (ip_vs_out). The
// same goes for a connection that the client makes through IPVS from a port that
// one of ours uses.
type ports struct{ low, high uint16 } // both included; the zero value leaves the choice to the kernel

const (
	// lowestPort keeps away from the ports that services listen on most.
	lowestPort = 10240
	// fewestPorts is the smallest range that is used.
	fewestPorts = 4096
	// sourceTries is how many ports are tried before the kernel chooses: in use are
	// those of the same client's connections, few of 20,000.
	sourceTries = 16
)

// belowClients are the ports below those that this host's own connections get,
// as those of most clients do: Linux's begin at 32768, others' at 49152.
func belowClients() ports {
	text, err := os.ReadFile("/proc/sys/net/ipv4/ip_local_port_range")
	if err != nil {
		return ports{}
	}
	var low, high uint16
	if _, err := fmt.Sscan(string(text), &low, &high); err != nil || low < lowestPort+fewestPorts {
		return ports{}
	}
	return ports{lowestPort, low - 1}
}

// from calls dial with a with one port after the other until one is free for
// the destination.
func (p ports) from(a netip.Addr, dial func(netip.AddrPort) error) error {
	if p.high > 0 {
		for range sourceTries {
			port := p.low + uint16(rand.UintN(uint(p.high-p.low)+1))
			if err := dial(netip.AddrPortFrom(a, port)); !errors.Is(err, unix.EADDRINUSE) && !errors.Is(err, unix.EADDRNOTAVAIL) {
				return err
			}
		}
	}
	return dial(netip.AddrPortFrom(a, 0))
}
