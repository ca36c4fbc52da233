package uring

import (
	"fmt"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// group is the number of a ring's buffers; there is one group.
const group = 0

// Buffer is one of a Ring's, which the kernel has chosen for what it received.
type Buffer struct {
	number uint16
	lent   bool
}

// buffers are those that the kernel may choose from: a request that waits has none.
type buffers struct {
	ring []byte // what it may choose from, as struct io_uring_buf
	area []byte
	size int
	free []buffer // ring's content
	tail uint16
}

func (b *buffers) open(fd, count, size int) (err error) {
	b.size = size
	const anonymous = unix.MAP_PRIVATE | unix.MAP_ANONYMOUS
	if b.ring, err = unix.Mmap(-1, 0, count*int(unsafe.Sizeof(buffer{})), unix.PROT_READ|unix.PROT_WRITE, anonymous); err != nil {
		return fmt.Errorf("map buffers' ring: %w", err)
	}
	if b.area, err = unix.Mmap(-1, 0, count*size, unix.PROT_READ|unix.PROT_WRITE, anonymous); err != nil {
		return fmt.Errorf("map buffers: %w", err)
	}
	b.free = unsafe.Slice((*buffer)(unsafe.Pointer(&b.ring[0])), count)
	reg := bufferRing{address: uint64(uintptr(unsafe.Pointer(&b.ring[0]))), entries: uint32(count), group: group}
	if _, _, e := unix.Syscall6(unix.SYS_IO_URING_REGISTER, uintptr(fd), registerBufferRing, uintptr(unsafe.Pointer(&reg)), 1, 0, 0); e != 0 {
		return fmt.Errorf("register buffers: %w", e)
	}
	for i := range count {
		b.put(uint16(i))
	}
	return nil
}

func (b *buffers) close() {
	for _, m := range [][]byte{b.ring, b.area} {
		if m != nil {
			unix.Munmap(m)
		}
	}
}

func (b *buffers) bytes(number uint16) []byte {
	return b.area[int(number)*b.size:][:b.size:b.size]
}

// put lets the kernel choose a buffer again.
func (b *buffers) put(number uint16) {
	f := &b.free[int(b.tail)&(len(b.free)-1)]
	f.address, f.length, f.number = uint64(uintptr(unsafe.Pointer(&b.area[int(number)*b.size]))), uint32(b.size), number
	b.tail++
	// The tail lies in the first one's last 16 bits, and the kernel has to see it after
	// what is before. There is no atomic store of 16 bits, so it is one of 32: the first
	// one's number and the tail.
	var word uint32
	*(*[2]uint16)(unsafe.Pointer(&word)) = [2]uint16{b.free[0].number, b.tail}
	atomic.StoreUint32((*uint32)(unsafe.Pointer(&b.free[0].number)), word)
}

// Bytes is a buffer's content.
func (r *Ring) Bytes(b Buffer) []byte { return r.buffers.bytes(b.number) }

// Return gives a buffer back.
func (r *Ring) Return(b Buffer) {
	if b.lent {
		r.buffers.put(b.number)
	}
}
