package traffic

import (
	"fmt"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"
)

// poll is an epoll instance for one thread. Its calls don't tell Go's scheduler
// that they wait, so a wait is bounded and the process needs processors to spare
// ([ready]).
type poll struct {
	fd     int
	events [256]unix.EpollEvent
}

func newPoll() (*poll, error) {
	fd, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make epoll: %w", err)
	}
	return &poll{fd: fd}, nil
}

// add watches a socket; slot comes back with its events.
func (p *poll) add(fd int, events uint32, slot int) error {
	ev := unix.EpollEvent{Events: events, Fd: int32(slot)}
	if _, _, e := unix.RawSyscall6(unix.SYS_EPOLL_CTL, uintptr(p.fd), unix.EPOLL_CTL_ADD, uintptr(fd), uintptr(unsafe.Pointer(&ev)), 0, 0); e != 0 {
		return fmt.Errorf("watch socket: %w", e)
	}
	return nil
}

// wait waits for events, milliseconds at most.
func (p *poll) wait(milliseconds int) []unix.EpollEvent {
	n, _, e := unix.RawSyscall6(unix.SYS_EPOLL_PWAIT, uintptr(p.fd), uintptr(unsafe.Pointer(&p.events[0])), uintptr(len(p.events)), uintptr(milliseconds), 0, 0)
	if e != 0 {
		return nil // a signal came
	}
	return p.events[:n]
}

func (p *poll) close() { unix.Close(p.fd) }

// read and write are read(2) and write(2) that never wait.
func read(fd int, b []byte) (int, unix.Errno) {
	n, _, e := unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	if e != 0 {
		return 0, e
	}
	return int(n), 0
}

func write(fd int, b []byte) (int, unix.Errno) {
	n, _, e := unix.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	if e != 0 {
		return 0, e
	}
	return int(n), 0
}

func closeSocket(fd int) { _, _, _ = unix.RawSyscall(unix.SYS_CLOSE, uintptr(fd), 0, 0) }

// openSocket makes a socket that never waits. TCP ones send small messages at
// once, as those of every client that waits for answers do.
func openSocket(kind int) (int, error) {
	fd, _, e := unix.RawSyscall(unix.SYS_SOCKET, unix.AF_INET, uintptr(kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK), 0)
	if e != 0 {
		return -1, fmt.Errorf("open socket: %w", e)
	}
	if kind == unix.SOCK_STREAM {
		if err := unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NODELAY, 1); err != nil {
			closeSocket(int(fd))
			return -1, fmt.Errorf("set TCP_NODELAY: %w", err)
		}
	}
	return int(fd), nil
}

// address is a sockaddr_in.
type address = unix.RawSockaddrInet4

func addressOf(a netip.AddrPort) *address {
	network := [2]byte{byte(a.Port() >> 8), byte(a.Port())}
	return &address{Family: unix.AF_INET, Port: *(*uint16)(unsafe.Pointer(&network)), Addr: a.Addr().As4()}
}

// connect begins to connect; a TCP socket is writable when it has.
func connect(fd int, to *address) error {
	_, _, e := unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(to)), unix.SizeofSockaddrInet4)
	if e != 0 && e != unix.EINPROGRESS {
		return fmt.Errorf("connect: %w", e)
	}
	return nil
}

func bind(fd int, at *address) error {
	if _, _, e := unix.RawSyscall(unix.SYS_BIND, uintptr(fd), uintptr(unsafe.Pointer(at)), unix.SizeofSockaddrInet4); e != 0 {
		return fmt.Errorf("bind: %w", e)
	}
	return nil
}
