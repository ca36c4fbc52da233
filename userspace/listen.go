package userspace

import (
	"cmp"
	"errors"
	"fmt"
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

// Listen opens the shared listeners, and raises the limit on file descriptors.
// A family this host doesn't have is left out.
func (s *Server) Listen() error {
	if err := s.cfg.Validate(); err != nil {
		return fmt.Errorf("configure userspace: %w", err)
	}
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
	var err error
	if s.tcp, err = listen(s.cfg.TCPPort, s.openTCP); err != nil {
		return err
	}
	makeRoomForFDs(s.tcp[0].fd, limit)
	if s.cfg.Origin != nil {
		s.udp, err = listen(s.cfg.UDPPort, s.openUDP)
	}
	if err == nil {
		err = s.makeLoops()
	}
	if err != nil {
		s.closeAll()
	}
	return err
}

// Ports returns the ports of the shared listeners; 0 for one that isn't open.
func (s *Server) Ports() (tcp, udp uint16) {
	if len(s.tcp) > 0 {
		tcp = s.tcp[0].addr.Port()
	}
	if len(s.udp) > 0 {
		udp = s.udp[0].addr.Port()
	}
	return tcp, udp
}

// listen opens a listener in each family, with the same port in both.
func listen[L listener](port uint16, open func(service.Family, uint16) (L, error)) (opened []L, err error) {
	for range portTries {
		opened, err = openBoth(port, open)
		if err == nil || port != 0 || !errors.Is(err, unix.EADDRINUSE) {
			break
		}
	}
	return opened, err
}

// listener is what openBoth opens.
type listener interface {
	comparable
	port() uint16
	close()
}

// openBoth opens them at the port given or, if that is 0, one that the
// operating system chooses for the first.
func openBoth[L listener](port uint16, open func(service.Family, uint16) (L, error)) (opened []L, err error) {
	for _, f := range service.Families {
		l, openErr := open(f, port)
		switch {
		case openErr == nil:
			opened = append(opened, l)
			port = l.port()
		case familyMissing(openErr):
			err = errors.Join(err, openErr)
		default:
			for _, l := range opened {
				l.close()
			}
			return nil, openErr
		}
	}
	if len(opened) > 0 {
		return opened, nil
	}
	return nil, err
}

// familyMissing reports whether a socket can't be opened because the host has
// no such family.
func familyMissing(err error) bool {
	return errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EADDRNOTAVAIL)
}

// tcpListener accepts one family's connections.
type tcpListener struct {
	fd     int
	addr   netip.AddrPort
	family service.Family
	// waiting is since when the loop waits for file descriptors of its budget,
	// when it isn't expected to accept; waited is when that last ended. starved
	// is since when there are none although the budget has some. All are in
	// nanoseconds since epoch; 0 means that it isn't so.
	waiting, waited, starved atomic.Int64
}

func (l *tcpListener) port() uint16 { return l.addr.Port() }

func (l *tcpListener) close() {
	if l.fd >= 0 {
		unix.Close(l.fd)
		l.fd = -1
	}
}

func (s *Server) openTCP(f service.Family, port uint16) (*tcpListener, error) {
	fd, err := s.listenTCP(f, port)
	if err != nil {
		return nil, fmt.Errorf("listen on TCP %s: %w", netip.AddrPortFrom(wildcard(f), port), err)
	}
	var local rawAddress
	if err := sysLocal(fd, &local); err != 0 {
		unix.Close(fd)
		return nil, fmt.Errorf("ask for the TCP listener's port: %w", err)
	}
	return &tcpListener{fd: fd, addr: netip.AddrPortFrom(wildcard(f), local.addrPort().Port()), family: f}, nil
}

func (s *Server) listenTCP(f service.Family, port uint16) (int, error) {
	domain := unix.AF_INET
	if f == service.IPv6 {
		domain = unix.AF_INET6
	}
	fd, err := unix.Socket(domain, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	if f == service.IPv6 {
		err = unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_V6ONLY, 1)
	}
	if err == nil {
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	}
	if err == nil {
		to := newRawAddress(netip.AddrPortFrom(wildcard(f), port))
		err = failure(sysBind(fd, &to))
	}
	if err == nil {
		err = s.tuneListener(fd)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// tuneListener sets what accepted sockets inherit, so that it costs no system
// calls for each connection, and listens.
func (s *Server) tuneListener(fd int) error {
	if err := keepAlive(fd, s.cfg.KeepAlive); err != 0 {
		return err
	}
	if err := sysOption(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != 0 {
		return err
	}
	return unix.Listen(fd, backlog)
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
