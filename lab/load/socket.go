package load

import (
	"errors"
	"fmt"
	"net/netip"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// read and write are read(2) and write(2), which no signal interrupts.
func read(fd int, b []byte) (int, unix.Errno) {
	return repeat(func() (uintptr, uintptr, unix.Errno) {
		return unix.RawSyscall(unix.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	})
}

func write(fd int, b []byte) (int, unix.Errno) {
	return repeat(func() (uintptr, uintptr, unix.Errno) {
		return unix.RawSyscall(unix.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	})
}

// readWithoutWait returns EAGAIN if there is nothing to read.
func readWithoutWait(fd int, b []byte) (int, unix.Errno) {
	return repeat(func() (uintptr, uintptr, unix.Errno) {
		return unix.RawSyscall6(unix.SYS_RECVFROM, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)), unix.MSG_DONTWAIT, 0, 0)
	})
}

func repeat(call func() (uintptr, uintptr, unix.Errno)) (int, unix.Errno) {
	for {
		n, _, e := call()
		switch e {
		case 0:
			return int(n), 0
		case unix.EINTR:
			continue
		}
		return 0, e
	}
}

func closeSocket(fd int) { _, _, _ = unix.RawSyscall(unix.SYS_CLOSE, uintptr(fd), 0, 0) }

// openSocket makes a socket. TCP ones send small messages at once, as those of
// every client that waits for answers do.
func openSocket(kind int) (int, error) {
	fd, _, e := unix.RawSyscall(unix.SYS_SOCKET, unix.AF_INET, uintptr(kind|unix.SOCK_CLOEXEC), 0)
	if e != 0 {
		return -1, fmt.Errorf("open socket: %w", e)
	}
	if kind&^unix.SOCK_NONBLOCK == unix.SOCK_STREAM {
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

// setWait bounds how long a socket waits in each call (socket(7), SO_RCVTIMEO).
func setWait(fd int, wait time.Duration) error {
	t := unix.NsecToTimeval(int64(wait))
	return errors.Join(unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &t), unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &t))
}

// bind and connect are bind(2) and connect(2).
func bind(fd int, at netip.AddrPort) unix.Errno { return call(unix.SYS_BIND, fd, at) }

func connect(fd int, to netip.AddrPort) unix.Errno { return call(unix.SYS_CONNECT, fd, to) }

func call(number uintptr, fd int, a netip.AddrPort) unix.Errno {
	_, e := repeat(func() (uintptr, uintptr, unix.Errno) {
		return unix.RawSyscall(number, uintptr(fd), uintptr(unsafe.Pointer(addressOf(a))), unix.SizeofSockaddrInet4)
	})
	return e
}

// dial connects; each of the socket's calls, this one included, waits for so long.
func dial(kind int, to netip.AddrPort, wait time.Duration) (int, error) {
	fd, err := openSocket(kind)
	if err != nil {
		return -1, err
	}
	if err = setWait(fd, wait); err == nil {
		err = errorOf(connect(fd, to), nil)
	}
	if err != nil {
		closeSocket(fd)
		return -1, fmt.Errorf("connect to %s: %w", to, err)
	}
	return fd, nil
}

// errorOf is the error of a call; otherwise where it succeeded. A socket that has waited
// for long enough says EAGAIN, or EINPROGRESS when it connects.
func errorOf(e unix.Errno, otherwise error) error {
	switch e {
	case 0:
		return otherwise
	case unix.EAGAIN, unix.EINPROGRESS:
		return unix.ETIMEDOUT
	}
	return e
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

// send sends those from the i-th to before the n-th, and returns how many the kernel took.
func (b *batch) send(fd, i, n int) (int, unix.Errno) {
	sent, _, e := unix.RawSyscall6(unix.SYS_SENDMMSG, uintptr(fd), uintptr(unsafe.Pointer(&b.headers[i])), uintptr(n-i), unix.MSG_DONTWAIT, 0, 0)
	if e != 0 {
		return 0, e
	}
	return int(sent), 0
}
