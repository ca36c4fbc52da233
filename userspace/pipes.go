package userspace

import (
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// pipeSize is the capacity asked for. It bounds what one splice moves and what
// waits in the kernel for a slow receiver.
const pipeSize = 512 << 10

// pipe is what splice(2) needs between two sockets.
type pipe struct{ r, w int }

// pipes is a bounded pool. A connection has a pipe only while bytes are in
// flight, so idle connections cost no pipes; who can't have one copies.
type pipes struct {
	free chan pipe
	room atomic.Int64 // how many more may be made
}

func newPipes(max int) *pipes {
	p := &pipes{free: make(chan pipe, max)}
	p.room.Store(int64(max))
	return p
}

// get returns an empty pipe, if there is one.
func (p *pipes) get() (pipe, bool) {
	select {
	case pp := <-p.free:
		return pp, true
	default:
	}
	if p.room.Add(-1) < 0 {
		p.room.Add(1)
		return pipe{}, false
	}
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC|unix.O_NONBLOCK); err != nil {
		p.room.Add(1)
		return pipe{}, false
	}
	// May fail for who isn't privileged; then it stays at 64 KiB.
	unix.FcntlInt(uintptr(fds[1]), unix.F_SETPIPE_SZ, pipeSize)
	return pipe{fds[0], fds[1]}, true
}

// put takes back an empty pipe.
func (p *pipes) put(pp pipe) { p.free <- pp }

// discard closes a pipe that has bytes left in it.
func (p *pipes) discard(pp pipe) {
	unix.Close(pp.r)
	unix.Close(pp.w)
	p.room.Add(1)
}

// close closes the pipes nobody uses.
func (p *pipes) close() {
	for {
		select {
		case pp := <-p.free:
			p.discard(pp)
		default:
			return
		}
	}
}
