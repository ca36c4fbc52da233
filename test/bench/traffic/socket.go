package traffic

import (
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// dial connects and waits for it.
func dial(kind int, to netip.AddrPort) (int, error) {
	fd, err := openSocket(kind)
	if err != nil {
		return -1, err
	}
	err = connect(fd, addressOf(to))
	if err == nil && kind == unix.SOCK_STREAM {
		err = connected(fd)
	}
	if err != nil {
		closeSocket(fd)
		return -1, fmt.Errorf("connect to %s: %w", to, err)
	}
	return fd, nil
}

// connected waits until a socket is.
func connected(fd int) error {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
	for deadline := time.Now().Add(5 * time.Second); ; {
		n, err := unix.Poll(p, int(time.Until(deadline)/time.Millisecond))
		switch {
		case errors.Is(err, unix.EINTR):
			continue
		case err != nil:
			return err
		case n == 0:
			return unix.ETIMEDOUT
		}
		return socketError(fd)
	}
}

// socketError is what is pending on a socket.
func socketError(fd int) error {
	code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err == nil && code != 0 {
		err = unix.Errno(code)
	}
	return err
}

// dialAll connects n sockets and has them watched, each with its number.
func dialAll(p *poll, kind, n int, to netip.AddrPort, events uint32) (fds []int, err error) {
	for i := range n {
		fd, err := dial(kind, to)
		if err != nil {
			return fds, err
		}
		fds = append(fds, fd)
		if err := p.add(fd, events, i); err != nil {
			return fds, err
		}
	}
	return fds, nil
}
