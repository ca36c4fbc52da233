package uring

import "unsafe"

// The kernel's interface, from include/uapi/linux/io_uring.h.

const (
	setupCQSize       = 1 << 3
	setupSubmitAll    = 1 << 7
	setupSingleIssuer = 1 << 12
	setupDeferTaskRun = 1 << 13

	featureSingleMap = 1 << 0
	featureNoDrop    = 1 << 1
	featureExtArg    = 1 << 8

	enterGetEvents = 1 << 0
	enterExtArg    = 1 << 3

	registerBufferRing = 22

	offsetRings   = 0
	offsetEntries = 0x10000000

	opPollAdd     = 6
	opAsyncCancel = 14
	opSend        = 26
	opReceive     = 27

	entryLink          = 1 << 2 // flags of an entry
	entryBufferSelect  = 1 << 5
	entrySkipSuccess   = 1 << 6
	completionBuffered = 1 << 0
	completionBuffer   = 16 // shift of the buffer's number
)

// parameters is struct io_uring_params.
type parameters struct {
	entries, completions uint32
	flags                uint32
	threadCPU            uint32
	threadIdle           uint32
	features             uint32
	workers              uint32
	_                    [3]uint32
	submit               struct {
		head, tail, mask, entries, flags, dropped, array, _ uint32
		_                                                   uint64
	}
	complete struct {
		head, tail, mask, entries, overflow, cqes, flags, _ uint32
		_                                                   uint64
	}
}

// entry is struct io_uring_sqe.
type entry struct {
	op       uint8
	flags    uint8
	priority uint16
	fd       int32
	offset   uint64
	address  uint64
	length   uint32
	opFlags  uint32
	tag      uint64
	group    uint16
	_        [22]byte
}

// completion is struct io_uring_cqe.
type completion struct {
	tag    uint64
	result int32
	flags  uint32
}

// wait is struct io_uring_getevents_arg, with what it points to.
type wait struct {
	mask     uint64
	maskSize uint32
	_        uint32
	time     uint64
	timespec struct{ sec, nsec int64 }
}

const sizeofWait = 24

// buffer is struct io_uring_buf. The first one's last field is the ring's tail.
type buffer struct {
	address uint64
	length  uint32
	number  uint16
	tail    uint16
}

// bufferRing is struct io_uring_buf_reg.
type bufferRing struct {
	address uint64
	entries uint32
	group   uint16
	_       uint16
	_       [3]uint64
}

// Sizes that the kernel knows them by; a difference doesn't compile.
var (
	_ [120]byte = [unsafe.Sizeof(parameters{})]byte{}
	_ [64]byte  = [unsafe.Sizeof(entry{})]byte{}
	_ [16]byte  = [unsafe.Sizeof(completion{})]byte{}
	_ [16]byte  = [unsafe.Sizeof(buffer{})]byte{}
	_ [40]byte  = [unsafe.Sizeof(bufferRing{})]byte{}
)
