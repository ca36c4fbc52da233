package userspace

import (
	"fmt"
	"net/netip"
	"sync/atomic"
	"unsafe"

	"golang.org/x/sys/unix"
)

// records holds what outlives this process of its connections and sessions, if it ends without a word. It is the memory of
// a file without a name (memfd_create(2)). Each connection has its record there at the number of the client's socket, each
// session at that of the endpoint's. A keeper holds the descriptors and the file, and [Server.Recover] in another process
// goes on with them.
//
// Stores reach the memory in order, whenever the process is killed. So a record becomes valid by the last store to it, and is
// invalid before one of its descriptors is closed: its number may be another one's the next moment. What a loop
// is moving is between two places meanwhile, in its buffer, or uncounted in a pipe; the loop says which connection that is.
type records struct {
	fd     int
	memory []byte
	head   *recordsHead
	number []record
}

// recordsHead precedes the records.
type recordsHead struct {
	layout  [64]byte // layoutOf; another program's records can't be read
	tcp     [2]int32 // listeners by family; 0 for none
	udp     [2][maxLoops]int32
	highest atomic.Int32           // number that has had a record
	moving  [maxLoops]atomic.Int32 // by loop: the client's descriptor of the connection whose bytes it moves; 0 for none; or accepting
}

// accepting is a loop whose next client may be accepted and have no record yet.
const accepting = -1

const (
	// maxLoops is for how many loops there is room.
	maxLoops = 1024
	// maxRecords is the highest number of a descriptor that has a record: as many as a process may have by Linux's default
	// (fs.nr_open). Memory is used only where there is one.
	maxRecords = 1 << 20
)

// record is a connection's or a session's.
type record struct {
	phase       atomic.Uint32
	ended       [2]bool // as in relayState
	dead        [2]bool
	buffered    bool  // bytes are in this process's memory only
	worker      int32 // of a session
	in          int32 // index of the interface of a session's first datagram
	endpoint    int32 // descriptor
	pipes       [2]pipe32
	started     int64 // nanoseconds since 1970
	bytes       [2]uint64
	client      rawAddress
	orig        rawAddress
	to          rawAddress // the endpoint
	key         sessionKey
	source      rawAddress // of the endpoint's socket
	transparent bool
}

// pipe32 is a pump's pipe, with bytes in it; none without.
type pipe32 struct{ r, w, pending int32 }

// Phases of a record.
const (
	recordFree     = iota
	recordAccepted // there is a client: the number is its socket's
	recordRelaying // and an endpoint
	recordSession  // a UDP session: the number is that of the endpoint's socket
)

// layoutOf names this program: the records of another one may mean something else.
func layoutOf() (out [64]byte) {
	var program unix.Stat_t
	_ = unix.Stat("/proc/self/exe", &program) // zero is no program's
	copy(out[:], fmt.Sprintf("kproxy %d.%d %d.%09d %d", program.Dev, program.Ino, program.Mtim.Sec, program.Mtim.Nsec, unsafe.Sizeof(record{})))
	return out
}

const recordsStart = int((unsafe.Sizeof(recordsHead{}) + 4095) &^ 4095)

// makeRecords makes the memory for as many descriptors as the process may have, and notes the listeners.
func (s *Server) makeRecords(limit int) (*records, error) {
	if len(s.loops) > maxLoops {
		return nil, fmt.Errorf("record connections: there are %d loops, and at most %d can be recorded", len(s.loops), maxLoops)
	}
	n := min(limit, maxRecords)
	fd, err := unix.MemfdCreate("kproxy-connections", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make memory for records of connections: %w", err)
	}
	r, err := mapRecords(fd, n)
	if err != nil {
		unix.Close(fd)
		return nil, err
	}
	for _, l := range s.tcp {
		r.head.tcp[l.family] = int32(l.fds[0])
	}
	for _, l := range s.udp {
		for i, fd := range l.fds {
			r.head.udp[l.family][i] = int32(fd)
		}
	}
	for i, l := range s.loops {
		l.moving = &r.head.moving[i]
	}
	return r, nil
}

// mapRecords maps the memory, with room for n records; 0 leaves its size as it is.
func mapRecords(fd, n int) (*records, error) {
	if n > 0 {
		if err := unix.Ftruncate(fd, int64(recordsStart+n*int(unsafe.Sizeof(record{})))); err != nil {
			return nil, fmt.Errorf("make memory for records of connections: %w", err)
		}
	}
	var file unix.Stat_t
	err := unix.Fstat(fd, &file)
	if err == nil && file.Size < int64(recordsStart) {
		err = unix.EINVAL
	}
	var memory []byte
	if err == nil {
		memory, err = unix.Mmap(fd, 0, int(file.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	}
	if err != nil {
		return nil, fmt.Errorf("map records of connections: %w", err)
	}
	return &records{
		fd: fd, memory: memory, head: (*recordsHead)(unsafe.Pointer(&memory[0])),
		number: unsafe.Slice((*record)(unsafe.Pointer(&memory[recordsStart])), (len(memory)-recordsStart)/int(unsafe.Sizeof(record{}))),
	}, nil
}

func (r *records) close() {
	if r == nil {
		return
	}
	unix.Munmap(r.memory)
	unix.Close(r.fd)
}

// validate says that what is recorded is this process's from now on, and reports whether that is new.
func (r *records) validate() bool {
	if r == nil || r.head.layout == layoutOf() {
		return false
	}
	r.head.layout = layoutOf()
	return true
}

// void says that nothing is this process's any more: numbers of descriptors may soon be others'.
func (r *records) void() {
	if r != nil {
		r.head.layout = [64]byte{}
	}
}

// of returns the record of a descriptor; nil if it has none.
func (r *records) of(fd int) *record {
	if r == nil || fd <= 0 || fd >= len(r.number) {
		return nil
	}
	for was := r.head.highest.Load(); int(was) < fd; was = r.head.highest.Load() {
		r.head.highest.CompareAndSwap(was, int32(fd))
	}
	return &r.number[fd]
}

// state is the record's phase.
func (r *record) state() uint32 {
	if r == nil {
		return recordFree
	}
	return r.phase.Load()
}

func (r *record) forget() {
	if r != nil {
		r.phase.Store(recordFree)
	}
}

// accepting notes that a loop accepts a client, until accepted.
func (r *records) accepting(l *loop) {
	if r != nil {
		l.moving.Store(accepting)
	}
}

// accepted notes which client a loop has accepted; -1 for none.
func (r *records) accepted(l *loop, fd int) {
	if r != nil {
		r.of(fd).accepted()
		l.moving.Store(0)
	}
}

// accepted notes a client, which has no endpoint yet or none any more.
func (r *record) accepted() {
	if r != nil {
		r.phase.Store(recordAccepted)
	}
}

// relaying notes the endpoint that has taken a connection.
func (r *record) relaying(x *tcpConn) {
	if r == nil {
		return
	}
	r.client, r.orig, r.to = newRawAddress(x.client), newRawAddress(x.orig), newRawAddress(x.endpoint.Load().address)
	r.started, r.endpoint = x.started.UnixNano(), int32(x.sides[endpointSide].fd)
	r.note(x)
	r.phase.Store(recordRelaying)
}

// move notes that a connection's bytes are being moved, until moved.
func (r *record) move(x *tcpConn) {
	if r != nil {
		x.loop.moving.Store(int32(x.sides[clientSide].fd))
	}
}

func (r *record) moved(x *tcpConn) {
	if r == nil {
		return
	}
	if x.phase == relaying {
		r.note(x)
	}
	x.loop.moving.Store(0)
}

// note notes what changes from turn to turn.
func (r *record) note(x *tcpConn) {
	r.ended, r.dead, r.buffered = x.ended, x.dead, false
	for d := range x.pumps {
		p := &x.pumps[d]
		r.bytes[d], r.pipes[d] = x.meters[d].count.Load(), pipe32{}
		switch {
		case p.pending == 0:
		case p.buf != nil:
			r.buffered = true
		default:
			r.pipes[d] = pipe32{int32(p.pipe.r), int32(p.pipe.w), int32(p.pending)}
		}
	}
}

// session notes a session, and its endpoint.
func (r *record) session(x *session) {
	if r == nil {
		return
	}
	r.client, r.orig = newRawAddress(x.client), newRawAddress(x.orig)
	r.key, r.to = x.key, newRawAddress(x.endpoint.Load().address)
	r.source, r.transparent = rawAddress{}, x.upstream.key.from.transparent
	if a := x.upstream.key.from.addr; a.IsValid() {
		r.source = newRawAddress(netip.AddrPortFrom(a, 0))
	}
	r.worker, r.in, r.started = int32(x.worker.number), int32(x.in), x.started.UnixNano()
	r.phase.Store(recordSession)
}
