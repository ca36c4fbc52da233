package userspace

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// backlog is as large as listen(2) takes; the kernel cuts it to
// net.core.somaxconn. It holds the clients while accept waits for descriptors.
const backlog = 1<<16 - 1

// portTries is how often another port is tried when the operating system chose
// one that is taken in the other family.
const portTries = 16

// listenerBuffer is the size of the kernel's buffers of a UDP listener's socket: all
// services' datagrams pass through it.
const listenerBuffer = 8 << 20

// listener is one family's port of a protocol.
type listener struct {
	family service.Family
	port   uint16
	fds    []int // one of TCP; of UDP one for each worker, among which the kernel distributes the clients (SO_REUSEPORT)

	// Of UDP:
	prober *net.UDPConn                   // of Probe, nil before its first one
	probe  atomic.Pointer[netip.AddrPort] // prober's; datagrams from there are answered
}

// Listen opens the shared listeners, and raises the limit on file descriptors.
// A family this host doesn't have is left out.
func (s *Server) Listen() error {
	return s.listenWith(func() (err error) {
		if s.tcp, err = listen(s.cfg.TCPPort, s.openTCP); err != nil {
			return fmt.Errorf("listen on TCP :%d: %w", s.cfg.TCPPort, err)
		}
		if s.cfg.Origin == nil {
			return nil
		}
		if s.udp, err = listen(s.cfg.UDPPort, s.openUDP); err != nil {
			return fmt.Errorf("listen on UDP :%d: %w", s.cfg.UDPPort, err)
		}
		return nil
	})
}

// listenWith gets the listeners by open, and makes all that serves them.
func (s *Server) listenWith(open func() error) error {
	limit := s.cfg.MaxFDs
	if limit == 0 {
		var err error
		if limit, err = raiseFDs(); err != nil {
			return err
		}
	}
	if limit < minFDs {
		return fmt.Errorf("open listeners: this process may have %d file descriptors; it needs at least %d (ulimit -n)", limit, minFDs)
	}
	l := divide(limit)
	if s.cfg.MaxSessions > 0 {
		l.udp = min(l.udp, s.cfg.MaxSessions*fdsPerSession)
	}
	s.tcpBudget, s.udpBudget, s.pipes = newBudget(l.tcp), newBudget(l.udp), newPipes(l.pipes)
	s.tcpBudget.notify = s.acceptAgain
	s.locals.refresh()
	err := open()
	if err == nil {
		makeRoomForFDs(s.tcp[0].fds[0], limit)
		err = s.makeLoops()
	}
	if err == nil && s.cfg.Recorded != nil {
		s.records, err = s.makeRecords(limit)
	}
	if err != nil {
		s.closeAll()
	}
	return err
}

// Ports returns the ports of the shared listeners; 0 for one that isn't open.
func (s *Server) Ports() (tcp, udp uint16) {
	if len(s.tcp) > 0 {
		tcp = s.tcp[0].port
	}
	if len(s.udp) > 0 {
		udp = s.udp[0].port
	}
	return tcp, udp
}

// listen opens a listener in each family that this host has, at the port given or, if that is 0,
// one that the operating system chooses for the first.
func listen(port uint16, open func(*listener) error) ([]*listener, error) {
	for try := 1; ; try++ {
		var opened []*listener
		var missing, err error
		at := port
		for _, f := range service.Families {
			l := &listener{family: f, port: at}
			if err = open(l); err == nil {
				opened, at = append(opened, l), l.port
				continue
			}
			l.close()
			if !errors.Is(err, unix.EAFNOSUPPORT) && !errors.Is(err, unix.EADDRNOTAVAIL) {
				break
			}
			missing, err = errors.Join(missing, err), nil
		}
		if err == nil && len(opened) > 0 {
			return opened, nil
		}
		for _, l := range opened {
			l.close()
		}
		if port != 0 || try == portTries || !errors.Is(err, unix.EADDRINUSE) {
			return nil, cmp.Or(err, missing)
		}
	}
}

// close closes its sockets. A worker that still has events of one finds none.
func (l *listener) close() {
	for i, fd := range l.fds {
		sysClose(fd)
		l.fds[i] = -1
	}
}

// bind opens a socket of a kind at the port, which it notes. What prepare does comes before.
func (l *listener) bind(kind int, prepare func(fd int) error) (fd int, err error) {
	address := newRawAddress(netip.AddrPortFrom(wildcard(l.family), l.port))
	fd, errno := sysSocket(int(address.family), kind)
	if errno != 0 {
		return -1, errno
	}
	l.fds = append(l.fds, fd)
	if l.family == service.IPv6 {
		err = unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_V6ONLY, 1)
	}
	if err == nil {
		err = prepare(fd)
	}
	if err == nil {
		err = failure(sysBind(fd, &address))
	}
	if err == nil {
		err = failure(sysLocal(fd, &address))
	}
	l.port = address.addrPort().Port()
	return fd, err
}

// openTCP sets what accepted sockets inherit, so that it costs no system calls for each
// connection, and listens.
func (s *Server) openTCP(l *listener) error {
	fd, err := l.bind(unix.SOCK_STREAM, func(fd int) error {
		return failure(cmp.Or(
			sysOption(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
			keepAlive(fd, s.cfg.KeepAlive),
			sysOption(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1),
		))
	})
	if err == nil {
		err = unix.Listen(fd, backlog)
	}
	return err
}

// openUDP opens a socket for each worker. The first one is bound before it allows others, so
// that a port which some other process has, or another Server, is found taken.
func (s *Server) openUDP(l *listener) error {
	share := func(fd int) error { return unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEPORT, 1) }
	for i := range s.cfg.Loops {
		fd, err := l.bind(unix.SOCK_DGRAM, func(fd int) error {
			err := tuneUDP(fd, l.family)
			if err == nil && i > 0 {
				err = share(fd)
			}
			return err
		})
		if err == nil && i == 0 {
			err = share(fd)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func tuneUDP(fd int, f service.Family) error {
	// Beyond net.core.rmem_max only with CAP_NET_ADMIN; less does as well.
	unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, listenerBuffer)
	unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, listenerBuffer)
	if f == service.IPv4 {
		return failure(cmp.Or(sysOption(fd, unix.SOL_IP, unix.IP_PKTINFO, 1), tellHops(fd, f)))
	}
	// The address that rules lead datagrams to, and answers come from, is no
	// interface's (ip6_datagram_send_ctl in net/ipv6/datagram.c).
	return failure(cmp.Or(sysOption(fd, unix.SOL_IPV6, unix.IPV6_FREEBIND, 1), sysOption(fd, unix.SOL_IPV6, unix.IPV6_RECVPKTINFO, 1), tellHops(fd, f)))
}

// tellHops has each datagram come with its TTL.
func tellHops(fd int, f service.Family) unix.Errno {
	if f == service.IPv4 {
		return sysOption(fd, unix.SOL_IP, unix.IP_RECVTTL, 1)
	}
	return sysOption(fd, unix.SOL_IPV6, unix.IPV6_RECVHOPLIMIT, 1)
}

// keepAlive lets the kernel ask the peer whether it is still there, after the
// connection was silent for idle and then every 15 s, four times.
func keepAlive(fd int, idle time.Duration) unix.Errno {
	return cmp.Or(
		sysOption(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1),
		sysOption(fd, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, max(1, int32(idle/time.Second))),
		sysOption(fd, unix.IPPROTO_TCP, unix.TCP_KEEPINTVL, 15),
		sysOption(fd, unix.IPPROTO_TCP, unix.TCP_KEEPCNT, 4),
	)
}

func wildcard(f service.Family) netip.Addr {
	if f == service.IPv6 {
		return netip.IPv6Unspecified()
	}
	return netip.IPv4Unspecified()
}
