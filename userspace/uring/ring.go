// Package uring sends and receives on many sockets with few system calls
// (io_uring(7)): what is to be done is written into a ring that the kernel shares,
// one call hands it over and waits for results, and those stand in another ring.
//
// It needs Linux 6.1, and a host and a container that allow io_uring (the sysctl
// kernel.io_uring_disabled, and the seccomp profile: those of Docker and containerd
// don't).
package uring

import (
	"fmt"
	"sync/atomic"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Ring is one goroutine's, which has to be locked to its thread from Open to Close:
// the kernel gives results to the thread that asked, when that asks for them
// (IORING_SETUP_DEFER_TASKRUN).
type Ring struct {
	fd      int
	rings   []byte // what the kernel shares, as the next two
	area    []byte
	buffers buffers

	entries    []entry
	submitHead *uint32 // the kernel's
	submitTail *uint32
	tail       uint32 // of what is written

	completions  []completion
	completeHead *uint32
	completeTail *uint32 // the kernel's

	wait   wait
	failed unix.Errno // see Err
	spare  entry      // is written then
}

// Config says how large a Ring is. All are powers of 2.
type Config struct {
	Entries     int // that may be handed over at once
	Completions int // that may be outstanding without costing more
	Buffers     int // for what is received
	BufferSize  int // in bytes
}

// Open makes a Ring. It fails where the kernel is too old, or where io_uring is
// forbidden.
func Open(c Config) (*Ring, error) {
	p := parameters{completions: uint32(c.Completions), flags: setupCQSize | setupSubmitAll | setupSingleIssuer | setupDeferTaskRun}
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, uintptr(c.Entries), uintptr(unsafe.Pointer(&p)), 0)
	if errno != 0 {
		return nil, fmt.Errorf("set up io_uring: %w", errno)
	}
	r := &Ring{fd: int(fd)}
	if err := r.share(&p, c); err != nil {
		r.Close()
		return nil, err
	}
	return r, nil
}

// share maps what r and the kernel share.
func (r *Ring) share(p *parameters, c Config) (err error) {
	const needed = featureSingleMap | featureNoDrop | featureExtArg
	if p.features&needed != needed {
		return fmt.Errorf("set up io_uring: %w", unix.ENOSYS)
	}
	size := max(int(p.submit.array)+4*int(p.entries), int(p.complete.cqes)+int(p.completions)*int(unsafe.Sizeof(completion{})))
	if r.rings, err = unix.Mmap(r.fd, offsetRings, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
		return fmt.Errorf("map rings: %w", err)
	}
	size = int(p.entries) * int(unsafe.Sizeof(entry{}))
	if r.area, err = unix.Mmap(r.fd, offsetEntries, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_POPULATE); err != nil {
		return fmt.Errorf("map entries: %w", err)
	}
	at := func(offset uint32) *uint32 { return (*uint32)(unsafe.Pointer(&r.rings[offset])) }
	r.entries = unsafe.Slice((*entry)(unsafe.Pointer(&r.area[0])), p.entries)
	r.submitHead, r.submitTail = at(p.submit.head), at(p.submit.tail)
	for i := range p.entries { // entries are handed over in the order of their places
		*at(p.submit.array + 4*i) = i
	}
	r.completions = unsafe.Slice((*completion)(unsafe.Pointer(&r.rings[p.complete.cqes])), p.completions)
	r.completeHead, r.completeTail = at(p.complete.head), at(p.complete.tail)
	return r.buffers.open(r.fd, c.Buffers, c.BufferSize)
}

// Close ends it, with what is outstanding.
func (r *Ring) Close() {
	unix.Close(r.fd)
	r.buffers.close()
	for _, m := range [][]byte{r.area, r.rings} {
		if m != nil {
			unix.Munmap(m)
		}
	}
}

// room sees to it that so many entries are empty: those of a chain have to be handed
// over at once.
func (r *Ring) room(n uint32) {
	for r.failed == 0 && uint32(len(r.entries))-(r.tail-atomic.LoadUint32(r.submitHead)) < n {
		r.enter(0, 0, true)
	}
}

// next returns an empty entry.
func (r *Ring) next() *entry {
	if r.room(1); r.failed != 0 {
		return &r.spare
	}
	e := &r.entries[r.tail&uint32(len(r.entries)-1)]
	r.tail++
	*e = entry{}
	return e
}

// Receive asks for what comes next on a socket, in a buffer of the ring.
//
// It is two requests, of which the second one begins when the first one has ended: to
// wait until there is something, or an end, and to receive it. One that does both
// would also wake up for urgent data, again and again while there is nothing else, and
// then keep a thread of the kernel's waiting (io_arm_poll_handler in
// io_uring/poll.c). There is one result: when the first one fails the second one has none
// (req_set_fail in io_uring/io_uring.h).
func (r *Ring) Receive(fd int, tag uint64) {
	r.room(2)
	e := r.next()
	e.op, e.fd, e.tag = opPollAdd, int32(fd), tag
	e.opFlags = unix.POLLIN | unix.POLLRDHUP
	e.flags = entryLink | entrySkipSuccess
	e = r.next()
	e.op, e.fd, e.tag = opReceive, int32(fd), tag
	e.opFlags = unix.MSG_DONTWAIT
	e.flags = entryBufferSelect
}

// Send asks for a part of a buffer of the ring to be sent, as much of it as goes
// without waiting: it is done when Wait returns.
func (r *Ring) Send(fd int, b []byte, tag uint64) {
	e := r.next()
	e.op, e.fd, e.tag = opSend, int32(fd), tag
	e.address, e.length = uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))), uint32(len(b))
	e.opFlags = unix.MSG_NOSIGNAL | unix.MSG_DONTWAIT
}

// Poll asks to be told once when a descriptor can be read.
func (r *Ring) Poll(fd int, tag uint64) {
	e := r.next()
	e.op, e.fd, e.tag = opPollAdd, int32(fd), tag
	e.opFlags = unix.POLLIN
}

// Cancel asks for another request to be ended; both have results.
func (r *Ring) Cancel(other, tag uint64) {
	e := r.next()
	e.op, e.fd, e.tag = opAsyncCancel, -1, tag
	e.address = other
}

// Err returns why the kernel takes nothing any more, nil as long as it does. What was asked for
// then has no result: the Ring is to be closed.
func (r *Ring) Err() error {
	if r.failed == 0 {
		return nil
	}
	return fmt.Errorf("enter io_uring: %w", r.failed)
}

// Wait hands over what was asked for and waits until there are results, or d has
// passed. brief says that this is so soon that the Go scheduler needn't hear of it.
func (r *Ring) Wait(d time.Duration, brief bool) {
	if r.Ready() {
		d = 0
	}
	r.enter(1, d, brief)
}

// Ready reports whether there are results.
func (r *Ring) Ready() bool { return r.Count() > 0 }

// Count is how many results there are.
func (r *Ring) Count() int { return int(atomic.LoadUint32(r.completeTail) - *r.completeHead) }

// enter is io_uring_enter(2). Errors that don't pass end the Ring's use.
func (r *Ring) enter(results int, d time.Duration, brief bool) {
	switch e := r.call(results, d, brief); e {
	case 0, unix.EINTR, unix.ETIME, unix.EAGAIN, unix.EBUSY:
	default:
		r.failed = e
	}
}

func (r *Ring) call(results int, d time.Duration, brief bool) unix.Errno {
	atomic.StoreUint32(r.submitTail, r.tail)
	count := r.tail - atomic.LoadUint32(r.submitHead)
	if results == 0 || d == 0 {
		_, _, e := unix.RawSyscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), uintptr(count), 0, enterGetEvents, 0, 0)
		return e
	}
	var argument, size uintptr
	flags := uintptr(enterGetEvents)
	if d > 0 {
		r.wait.timespec.sec, r.wait.timespec.nsec = int64(d/time.Second), int64(d%time.Second)
		r.wait.time = uint64(uintptr(unsafe.Pointer(&r.wait.timespec)))
		argument, size, flags = uintptr(unsafe.Pointer(&r.wait)), sizeofWait, flags|enterExtArg
	}
	if brief {
		_, _, e := unix.RawSyscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), uintptr(count), uintptr(results), flags, argument, size)
		return e
	}
	_, _, e := unix.Syscall6(unix.SYS_IO_URING_ENTER, uintptr(r.fd), uintptr(count), uintptr(results), flags, argument, size)
	return e
}

// Result is what came of a request.
type Result struct {
	Tag   uint64
	N     int        // bytes
	Err   unix.Errno // 0 where N says
	Bytes Buffer     // what was received
}

// Next returns the next result, if there is one.
func (r *Ring) Next() (Result, bool) {
	head := *r.completeHead
	if head == atomic.LoadUint32(r.completeTail) {
		return Result{}, false
	}
	c := r.completions[head&uint32(len(r.completions)-1)]
	atomic.StoreUint32(r.completeHead, head+1)
	out := Result{Tag: c.tag, N: int(c.result)}
	if c.result < 0 {
		out.N, out.Err = 0, unix.Errno(-c.result)
	}
	if c.flags&completionBuffered != 0 {
		out.Bytes = Buffer{number: uint16(c.flags >> completionBuffer), lent: true}
	}
	return out, true
}
