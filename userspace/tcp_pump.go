package userspace

import (
	"sync"
	"sync/atomic"

	"golang.org/x/sys/unix"
)

const (
	// copySize is the most that one read copies; from there on splice costs less.
	copySize = 16 << 10
	// turnSize is how many bytes one direction of one connection may move before
	// the loop's others have theirs.
	turnSize = 512 << 10
)

var buffers = sync.Pool{New: func() any { return new([copySize]byte) }}

// ending says why a pump stopped.
type ending int

const (
	blocked    ending = iota // until an event says that it can go on
	unfinished               // its turn is over
	finished                 // the source has sent all it had
	sourceDied               // reading failed: reset, or it no longer answers
	sinkDied                 // writing failed
)

// pump moves bytes one way. Small messages are copied, by way of the loop's
// buffer; as soon as one read fills that, bytes go through a pipe without being
// copied (splice(2)) until the source has no more for the moment. While it waits
// for the source it holds neither buffer nor pipe. It doesn't read ahead of what
// the sink takes, so a slow sink slows the source down.
type pump struct {
	meter *meter
	over  bool // nothing will be read any more

	buf     *[copySize]byte // holds what the sink didn't take at once
	offset  int             // of it in buf
	pending int             // bytes in buf or pipe
	pipe    pipe
	piped   bool // pipe is held
	bulk    bool // use the pipe
	burst   int  // bytes since the source last had none
}

// turn moves bytes from src to dst until it can't go on.
func (p *pump) turn(c *tcpConn, src, dst *side) ending {
	for moved := 0; ; {
		if p.pending > 0 {
			if e := p.flush(c, dst); p.pending > 0 {
				return e
			}
		}
		if !src.readable {
			p.drop(c.loop.server.pipes)
			return blocked
		}
		if moved >= turnSize {
			return unfinished
		}
		n, e := p.take(c, src, dst)
		if e != unfinished {
			return e
		}
		moved += n
	}
}

// take reads once; unfinished says that there may be more. What was copied is
// written at once. Where there is urgent data in the stream, a read returns what is
// before it and a splice returns nothing at all (tcp_recvmsg_locked and
// tcp_read_sock in net/ipv4/tcp.c): such a stream is copied until a read finds
// nothing. Urgent data itself isn't passed on.
func (p *pump) take(c *tcpConn, src, dst *side) (n int, e ending) {
	bulk := p.bulk && !src.urgent
	if bulk && !p.piped {
		p.pipe, p.piped = c.loop.server.pipes.get()
	}
	var err unix.Errno
	piping := bulk && p.piped
	if piping {
		n, err = sysSplice(src.fd, p.pipe.w, pipeSize)
	} else {
		n, err = sysReceive(src.fd, c.loop.buf)
	}
	switch {
	case err == 0 && n == 0:
		return 0, finished
	case err == 0:
		p.burst += n
	case err == unix.EINTR:
		return 0, unfinished
	case err == unix.EAGAIN:
		p.drained(src)
		src.urgent = src.urgent && piping // a read is past it now
		return 0, unfinished
	case err == unix.EINVAL && piping: // can't be spliced
		p.bulk, p.burst = false, 0
		p.drop(c.loop.server.pipes)
		return 0, unfinished
	default:
		return 0, sourceDied
	}
	if piping {
		p.pending = n
		return n, unfinished
	}
	if p.bulk = n == len(c.loop.buf); !p.bulk && !src.last && !src.urgent {
		p.drained(src) // a short read has emptied the source (epoll(7)); an end would have been announced
	}
	return n, p.give(c, dst, c.loop.buf[:n])
}

// drained notes that the source has no more for the moment. A burst stays in bulk.
func (p *pump) drained(src *side) {
	src.readable = false
	p.bulk = p.burst >= 4*copySize
	p.burst = 0
}

// give writes what was copied, and keeps what the sink doesn't take.
func (p *pump) give(c *tcpConn, dst *side, b []byte) ending {
	if dst.writable {
		n, err := sysSend(dst.fd, b)
		switch {
		case err == 0:
			p.count(c, n)
			if b = b[n:]; len(b) == 0 {
				return unfinished
			}
			dst.full(c)
		case err == unix.EAGAIN:
			dst.full(c)
		default:
			p.keep(c, b)
			return sinkDied
		}
	}
	p.keep(c, b)
	return unfinished
}

// keep keeps it in a pipe, which may outlive this process (see records); without one, in memory.
func (p *pump) keep(c *tcpConn, b []byte) {
	if c.record != nil && !p.piped {
		p.pipe, p.piped = c.loop.server.pipes.get()
	}
	if c.record != nil && p.piped {
		if n, err := unix.Write(p.pipe.w, b); n == len(b) && err == nil {
			p.pending = n
			return
		}
		c.loop.server.pipes.discard(p.pipe) // it holds less than was asked for (fs.pipe-user-pages-soft)
		p.piped = false
	}
	p.buf = buffers.Get().(*[copySize]byte)
	p.offset, p.pending = 0, copy(p.buf[:], b)
}

// flush hands the sink what is pending; while some of it is left, it says why.
func (p *pump) flush(c *tcpConn, dst *side) ending {
	for p.pending > 0 {
		if !dst.writable {
			return blocked
		}
		n, err := p.push(dst.fd)
		switch {
		case err == 0:
			p.pending -= n
			p.offset += n
			p.count(c, n)
		case err == unix.EINTR:
		case err == unix.EAGAIN:
			dst.full(c)
		default:
			return sinkDied
		}
	}
	p.dropBuffer()
	return unfinished
}

func (p *pump) push(fd int) (int, unix.Errno) {
	if p.buf == nil {
		return sysSplice(p.pipe.r, fd, p.pending)
	}
	return sysSend(fd, p.buf[p.offset:p.offset+p.pending])
}

// count notes that bytes have reached the sink.
func (p *pump) count(c *tcpConn, n int) {
	p.meter.add(n)
	c.active = c.loop.now
	if p == &c.pumps[endpointSide] {
		c.search = nil
	}
}

// drop gives back buffer and pipe, and what may be in them.
func (p *pump) drop(pipes *pipes) {
	p.dropBuffer()
	if !p.piped {
		return
	}
	p.piped = false
	if p.pending > 0 {
		pipes.discard(p.pipe)
		return
	}
	pipes.put(p.pipe)
}

func (p *pump) dropBuffer() {
	if p.buf != nil {
		buffers.Put(p.buf)
		p.buf = nil
	}
}

// pipeSize is the capacity asked for. It bounds what one splice moves and what
// waits in the kernel for a slow receiver.
const pipeSize = 512 << 10

// pipe holds the two ends of the pipe that splice(2) needs between two sockets.
type pipe struct{ r, w int }

// pipes is a bounded pool. A connection has a pipe only while bytes are in
// flight, so idle connections cost no pipes; one that can't have any copies.
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
	// Fails without privilege; then it stays at 64 KiB.
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

// close closes the pipes that are in it.
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
