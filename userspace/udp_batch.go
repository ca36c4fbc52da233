package userspace

import (
	"fmt"
	"unsafe"

	"golang.org/x/sys/unix"
)

// batchSize is how many datagrams, or trains, one system call receives or sends.
const batchSize = 64

const (
	// slotStride is the distance of two slots: a datagram's size and some cache
	// lines, or the beginnings of all slots would share the same few lines.
	slotStride = datagramSize + 1 + 17*64
	// controlSize holds IP_PKTINFO or IPV6_PKTINFO, and UDP_GRO or UDP_SEGMENT.
	controlSize = 96
)

// batch is where a worker receives datagrams, and sends them from. Its memory
// is touched as far as it is used.
type batch struct {
	data    []byte
	hdrs    [batchSize]mmsghdr
	iovs    [batchSize]unix.Iovec
	names   [batchSize]unix.RawSockaddrInet6
	control [batchSize][controlSize]byte
}

// newBatch takes the memory from the kernel: on the heap it would count as in use,
// touched or not, and let the garbage grow by as much before it is collected.
func newBatch() (*batch, error) {
	data, err := unix.Mmap(-1, 0, batchSize*slotStride, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		return nil, fmt.Errorf("get memory for datagrams: %w", err)
	}
	// A page that is touched isn't to bring 511 others; kernels without huge pages refuse.
	_ = unix.Madvise(data, unix.MADV_NOHUGEPAGE)
	b := &batch{data: data}
	for i := range b.hdrs {
		b.iovs[i].Base = &b.data[i*slotStride]
		b.hdrs[i].Iov = &b.iovs[i]
		b.hdrs[i].SetIovlen(1)
	}
	return b, nil
}

// release gives the memory back; b isn't used any more. It may be nil.
func (b *batch) release() {
	if b != nil {
		unix.Munmap(b.data)
	}
}

// receive receives into the slots from first on, at most n. With names, it
// notes who sent.
func (b *batch) receive(fd, first, n int, names bool) (int, error) {
	hs := b.hdrs[first : first+n]
	for i := range hs {
		h := &hs[i]
		b.iovs[first+i].SetLen(datagramSize)
		h.Control = &b.control[first+i][0]
		h.SetControllen(controlSize)
		h.Name, h.Namelen = nil, 0
		if names {
			h.Name, h.Namelen = (*byte)(unsafe.Pointer(&b.names[first+i])), unix.SizeofSockaddrInet6
		}
	}
	return receiveMany(fd, hs)
}

// bytes returns what was received in a slot; false if it was cut off.
func (b *batch) bytes(i int) ([]byte, bool) {
	h := &b.hdrs[i]
	at := i * slotStride
	return b.data[at : at+int(h.size) : at+datagramSize], h.Flags&unix.MSG_TRUNC == 0
}

// oob returns the control messages received in a slot.
func (b *batch) oob(i int) []byte { return b.control[i][:b.hdrs[i].Controllen] }
