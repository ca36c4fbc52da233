package load

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// poll is an epoll instance for one thread. Its calls don't tell Go's scheduler
// that they wait, so a wait is bounded and the process needs processors to spare
// ([prepareProcess]).
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

// errorOf is nil for 0.
func errorOf(e unix.Errno) error {
	if e == 0 {
		return nil
	}
	return e
}

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
		code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
		return cmp.Or(err, errorOf(unix.Errno(code)))
	}
}

// batchSize is how many datagrams one system call takes.
const batchSize = 32

// mmsghdr is struct mmsghdr of recvmmsg(2).
type mmsghdr struct {
	header unix.Msghdr
	length uint32
	_      [4]byte
}

// batch is datagrams for recvmmsg(2) and sendmmsg(2).
type batch struct {
	headers   [batchSize]mmsghdr
	vectors   [batchSize]unix.Iovec
	addresses [batchSize]address
	buffers   [batchSize][]byte
}

// newBatch makes room for datagrams of a size; with addresses for a socket that
// isn't connected.
func newBatch(size int, addresses bool) *batch {
	b := &batch{}
	for i := range b.headers {
		b.buffers[i] = make([]byte, size)
		b.vectors[i].Base = &b.buffers[i][0]
		b.vectors[i].SetLen(size)
		h := &b.headers[i].header
		h.Iov = &b.vectors[i]
		h.SetIovlen(1)
		if addresses {
			h.Name = (*byte)(unsafe.Pointer(&b.addresses[i]))
			h.Namelen = unix.SizeofSockaddrInet4
		}
	}
	return b
}

// receive takes what is there and returns how many datagrams that are.
func (b *batch) receive(fd int) int {
	for i := range b.vectors {
		b.vectors[i].SetLen(len(b.buffers[i]))
	}
	n, _, e := unix.RawSyscall6(unix.SYS_RECVMMSG, uintptr(fd), uintptr(unsafe.Pointer(&b.headers[0])), batchSize, unix.MSG_DONTWAIT, 0, 0)
	if e != 0 {
		return 0
	}
	return int(n)
}

// datagram is the i-th that was received.
func (b *batch) datagram(i int) []byte { return b.buffers[i][:b.headers[i].length] }

// setLength sets how long the i-th datagram to send is.
func (b *batch) setLength(i, n int) { b.vectors[i].SetLen(n) }

// send sends the first n and returns how many the kernel took.
func (b *batch) send(fd, n int) (int, unix.Errno) { return b.sendFrom(fd, 0, n) }

// sendFrom sends those from the i-th to before the n-th.
func (b *batch) sendFrom(fd, i, n int) (int, unix.Errno) {
	sent, _, e := unix.RawSyscall6(unix.SYS_SENDMMSG, uintptr(fd), uintptr(unsafe.Pointer(&b.headers[i])), uintptr(n-i), unix.MSG_DONTWAIT, 0, 0)
	if e != 0 {
		return 0, e
	}
	return int(sent), 0
}
