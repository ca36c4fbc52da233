package traffic

import (
	"unsafe"

	"golang.org/x/sys/unix"
)

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
