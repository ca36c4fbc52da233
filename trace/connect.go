package trace

import (
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// beginConnect begins to connect to an endpoint from this node, in the network
// namespace of the calling thread. The function it returns waits until that has
// succeeded or failed, in any thread, and closes the socket.
func beginConnect(to netip.AddrPort, mark uint32) (wait func(time.Duration) error, err error) {
	family := unix.AF_INET
	if to.Addr().Is6() {
		family = unix.AF_INET6
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("open socket: %w", err)
	}
	if mark != 0 {
		if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(mark)); err != nil {
			unix.Close(fd)
			return nil, fmt.Errorf("mark socket: %w", err)
		}
	}
	if err := unix.Connect(fd, sockaddr(to)); err != nil && err != unix.EINPROGRESS {
		unix.Close(fd)
		return nil, err
	}
	return func(limit time.Duration) error {
		defer unix.Close(fd)
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		for end := time.Now().Add(limit); ; {
			n, err := unix.Poll(fds, max(0, int(time.Until(end).Milliseconds())))
			if err == unix.EINTR {
				continue
			}
			if err != nil {
				return err
			}
			if n == 0 {
				return unix.ETIMEDOUT
			}
			break
		}
		errno, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
		if err == nil && errno != 0 {
			err = unix.Errno(errno)
		}
		return err
	}, nil
}

func sockaddr(a netip.AddrPort) unix.Sockaddr {
	if a.Addr().Is6() {
		return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
	}
	return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
}
