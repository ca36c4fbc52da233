package userspace

import (
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// listenerBuffer is the size of the kernel's buffers of a listener's socket: all
// services' datagrams pass through it.
const listenerBuffer = 8 << 20

// udpListener is one family's port. It has a socket for each worker, among
// which the kernel distributes the clients (SO_REUSEPORT).
type udpListener struct {
	fds    []int
	addr   netip.AddrPort
	family service.Family
	prober *net.UDPConn                   // of Probe, nil before its first one
	probe  atomic.Pointer[netip.AddrPort] // prober's; datagrams from there are answered
}

func (l *udpListener) port() uint16 { return l.addr.Port() }

func (l *udpListener) close() {
	for _, fd := range l.fds {
		unix.Close(fd)
	}
	l.fds = nil
}

func (s *Server) openUDP(f service.Family, port uint16) (*udpListener, error) {
	l := &udpListener{addr: netip.AddrPortFrom(wildcard(f), port), family: f}
	for range s.cfg.Loops {
		if err := l.open(); err != nil {
			l.close()
			return nil, fmt.Errorf("listen on UDP %s: %w", l.addr, err)
		}
	}
	return l, nil
}

// open opens one more socket. The first one is bound before it allows others, so
// that a port which some other process has, or another Server, is found taken.
func (l *udpListener) open() error {
	domain := unix.AF_INET
	if l.family == service.IPv6 {
		domain = unix.AF_INET6
	}
	fd, err := unix.Socket(domain, unix.SOCK_DGRAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	share := func() error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) }
	err = tuneUDP(fd, l.family)
	if err == nil && len(l.fds) > 0 {
		err = share()
	}
	if err == nil {
		address := newRawAddress(l.addr)
		err = failure(sysBind(fd, &address))
	}
	if err == nil && len(l.fds) == 0 {
		err = share()
	}
	var local rawAddress
	if err == nil {
		err = failure(sysLocal(fd, &local))
	}
	if err != nil {
		unix.Close(fd)
		return err
	}
	l.fds = append(l.fds, fd)
	l.addr = netip.AddrPortFrom(l.addr.Addr(), local.addrPort().Port())
	return nil
}

func tuneUDP(fd int, f service.Family) error {
	level, option := unix.SOL_IP, unix.IP_PKTINFO
	if f == service.IPv6 {
		level, option = unix.SOL_IPV6, unix.IPV6_RECVPKTINFO
		if err := unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_V6ONLY, 1); err != nil {
			return err
		}
		// The address that rules lead datagrams to, and answers come from, is no
		// interface's (ip6_datagram_send_ctl in net/ipv6/datagram.c).
		if err := unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_FREEBIND, 1); err != nil {
			return err
		}
	}
	// Beyond net.core.rmem_max only with CAP_NET_ADMIN; less does as well.
	unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, listenerBuffer)
	unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, listenerBuffer)
	return unix.SetsockoptInt(fd, level, option, 1)
}
