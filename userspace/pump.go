package userspace

import (
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// copySize is the size of the buffers for small messages, and the amount at
// one read from which on splice is worth its pipe.
const copySize = 16 << 10

var buffers = sync.Pool{New: func() any { return new([copySize]byte) }}

// side is one of a connection's two sockets. The raw connection is used
// directly: the standard library's splice holds two pipes for as long as a
// connection lasts and can't tell how much it has moved.
type side struct {
	*net.TCPConn
	raw syscall.RawConn
}

func newSide(c *net.TCPConn) (side, error) {
	raw, err := c.SyscallConn()
	return side{c, raw}, err
}

// ending is why a pump stopped.
type ending int

const (
	finished    ending = iota // the source has sent all it had
	sourceDied                // reading failed: reset, or it no longer answers
	sinkDied                  // writing failed
	interrupted               // somebody in this process closed a socket or set a deadline
)

// pump moves bytes one way. Messages that fit in a buffer are copied; as soon
// as one read fills the buffer, bytes go through a pipe without being copied
// (splice(2)) until the source has no more for the moment. While it waits for
// the source it holds neither buffer nor pipe. It doesn't read ahead of what
// the sink takes, so a slow sink slows the source down.
type pump struct {
	src, dst side
	pipes    *pipes
	meter    *meter
	heard    *atomic.Int64 // when bytes last moved, in nanoseconds since epoch
	read     uint64        // bytes taken from the source
	moved    func()        // called once, when the first bytes have moved; may be nil

	buf     *[copySize]byte
	pipe    pipe
	piped   bool // pipe is held
	bulk    bool // use the pipe
	burst   int  // bytes since the source last had none
	pending int  // bytes in buf or pipe
	offset  int  // of them in buf
	err     error
}

// run pumps until one end stops it.
func (p *pump) run() ending {
	defer p.drop()
	fill, flush := p.fill, p.flush
	for {
		if err := p.src.raw.Read(fill); err != nil {
			return interrupted
		}
		if p.err != nil {
			return sourceDied
		}
		if p.pending == 0 {
			return finished
		}
		p.read += uint64(p.pending)
		if err := p.dst.raw.Write(flush); err != nil {
			return interrupted
		}
		if p.err != nil {
			return sinkDied
		}
		p.heard.Store(sinceEpoch())
		if p.moved != nil {
			p.moved()
			p.moved = nil
		}
	}
}

// fill takes bytes from the source; false means that there are none yet.
func (p *pump) fill(fd uintptr) bool {
	for {
		n, err := p.take(int(fd))
		switch {
		case err == nil:
			p.pending, p.offset = n, 0
			p.burst += n
			return true
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN):
			p.bulk = p.burst >= 4*copySize
			p.burst = 0
			p.drop()
			return false
		case errors.Is(err, unix.EINVAL) && p.bulk: // can't be spliced
			p.bulk = false
			p.drop()
		default:
			p.err = err
			return true
		}
	}
}

func (p *pump) take(fd int) (int, error) {
	if p.bulk && !p.piped {
		p.dropBuffer()
		p.pipe, p.piped = p.pipes.get()
	}
	if p.bulk && p.piped {
		n, err := unix.Splice(fd, nil, p.pipe.w, nil, pipeSize, unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
		return int(n), err
	}
	if p.buf == nil {
		p.buf = buffers.Get().(*[copySize]byte)
	}
	n, err := unix.Read(fd, p.buf[:])
	p.bulk = n == copySize
	return n, err
}

// flush hands bytes to the sink; false means that it takes no more for now.
func (p *pump) flush(fd uintptr) bool {
	for p.pending > 0 {
		n, err := p.give(int(fd))
		switch {
		case err == nil:
			p.pending -= n
			p.offset += n
			p.meter.add(n)
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EAGAIN):
			return false
		default:
			p.err = err
			return true
		}
	}
	return true
}

func (p *pump) give(fd int) (int, error) {
	if p.piped {
		n, err := unix.Splice(p.pipe.r, nil, fd, nil, p.pending, unix.SPLICE_F_MOVE|unix.SPLICE_F_NONBLOCK)
		return int(n), err
	}
	return unix.Write(fd, p.buf[p.offset:p.offset+p.pending])
}

// drop gives back buffer and pipe.
func (p *pump) drop() {
	p.dropBuffer()
	if !p.piped {
		return
	}
	p.piped = false
	if p.pending > 0 {
		p.pipes.discard(p.pipe)
		return
	}
	p.pipes.put(p.pipe)
}

func (p *pump) dropBuffer() {
	if p.buf != nil {
		buffers.Put(p.buf)
		p.buf = nil
	}
}

// awaitDeath waits, on a socket whose peer has finished sending, until it is
// dead: a reset after a FIN would otherwise go unnoticed until the next write.
// It returns false when this process closed the socket.
func (s side) awaitDeath() bool {
	return s.raw.Read(func(fd uintptr) bool {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.SOL_TCP, unix.TCP_INFO)
		return err != nil || info.State == tcpClose
	}) == nil
}

// tcpClose is TCP_CLOSE of enum in net/tcp_states.h.
const tcpClose = 7

// abort closes with a reset instead of a FIN, after the peer has acknowledged
// what was sent, or patience has run out: a reset throws unsent bytes away, and
// an endpoint that answers and then resets has sent its answer.
func (s side) abort(patience time.Duration) {
	for wait, deadline := time.Millisecond, time.Now().Add(patience); s.unsent() && time.Now().Before(deadline); wait = min(2*wait, 50*time.Millisecond) {
		time.Sleep(wait)
	}
	s.SetLinger(0)
	s.Close()
}

// unsent reports whether the peer hasn't acknowledged everything.
func (s side) unsent() bool {
	n := 0
	err := s.raw.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.SIOCOUTQ) })
	return err == nil && n > 0
}

// epoch is where sinceEpoch starts: a monotonic clock that fits an atomic.
var epoch = time.Now()

func sinceEpoch() int64 { return int64(time.Since(epoch)) }
