package load

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// socketTimeout bounds every wait on a socket.
const socketTimeout = 5 * time.Second

// socket is a blocking IPv4 socket.
type socket int

// openSocket makes a socket; connect(2) obeys SO_SNDTIMEO too (socket(7)).
func openSocket(kind int) (socket, error) {
	fd, err := unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, fmt.Errorf("open socket: %w", err)
	}
	s := socket(fd)
	if err := s.bound(); err != nil {
		s.close()
		return -1, err
	}
	return s, nil
}

func (s socket) bound() error {
	t := unix.NsecToTimeval(int64(socketTimeout))
	for _, o := range []int{unix.SO_RCVTIMEO, unix.SO_SNDTIMEO} {
		if err := unix.SetsockoptTimeval(int(s), unix.SOL_SOCKET, o, &t); err != nil {
			return fmt.Errorf("bound waits on a socket: %w", err)
		}
	}
	return nil
}

func (s socket) close() { _ = unix.Close(int(s)) }

func dialTCP(to netip.AddrPort) (socket, error) {
	s, err := openSocket(unix.SOCK_STREAM)
	if err != nil {
		return s, err
	}
	// Small messages go at once, as those of every client that waits for answers do.
	err = unix.SetsockoptInt(int(s), unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	if err == nil {
		err = s.connect(to)
	}
	if err != nil {
		s.close()
		return -1, err
	}
	return s, nil
}

func dialUDP(to netip.AddrPort) (socket, error) {
	s, err := openSocket(unix.SOCK_DGRAM)
	if err != nil {
		return s, err
	}
	if err := s.connect(to); err != nil {
		s.close()
		return -1, err
	}
	return s, nil
}

func sockaddr(a netip.AddrPort) *unix.SockaddrInet4 {
	return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
}

func (s socket) connect(to netip.AddrPort) error {
	if err := unix.Connect(int(s), sockaddr(to)); err != nil {
		return fmt.Errorf("connect to %s: %w", to, err)
	}
	return nil
}

func (s socket) bind(port uint16) error {
	if err := unix.Bind(int(s), &unix.SockaddrInet4{Port: int(port)}); err != nil {
		return fmt.Errorf("bind port %d: %w", port, err)
	}
	return nil
}

func (s socket) local() (netip.AddrPort, error) {
	sa, err := unix.Getsockname(int(s))
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("read socket's address: %w", err)
	}
	in, ok := sa.(*unix.SockaddrInet4)
	if !ok {
		return netip.AddrPort{}, errors.New("socket's address isn't IPv4")
	}
	return netip.AddrPortFrom(netip.AddrFrom4(in.Addr), uint16(in.Port)), nil
}

// read reads once; io.EOF at the end.
func (s socket) read(b []byte) (int, error) {
	for {
		n, err := unix.Read(int(s), b)
		switch {
		case err == unix.EINTR:
			continue
		case err != nil:
			return 0, fmt.Errorf("read: %w", err)
		case n == 0:
			return 0, io.EOF
		}
		return n, nil
	}
}

func (s socket) readFull(b []byte) error {
	for len(b) > 0 {
		n, err := s.read(b)
		if err != nil {
			return err
		}
		b = b[n:]
	}
	return nil
}

func (s socket) write(b []byte) error {
	for len(b) > 0 {
		n, err := unix.Write(int(s), b)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return fmt.Errorf("write: %w", err)
		}
		b = b[n:]
	}
	return nil
}
