package load

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// A stream carries its own offset in the first eight bytes of every markEvery,
// so that the server sees when bytes are missing, doubled or out of order.
const (
	streamBuffer = 256 << 10
	markEvery    = 4 << 10
)

// writesAtOnce bounds the writes of a stream before the next one has its turn.
const writesAtOnce = 4

// confirmWait is how long the end of a stream may take to arrive.
const confirmWait = 10 * time.Second

// bulk sends streams as fast as they go.
type bulk struct {
	client
	streams []stream
}

// stream is what one connection has sent.
type stream struct {
	buffer []byte
	at     int // in the buffer
	sent   uint64
	ended  bool // all is sent
	reply  []byte
	over   bool
}

func newBulk(c client) *bulk {
	w := &bulk{client: c, streams: make([]stream, c.conns)}
	for i := range w.streams {
		w.streams[i].buffer = make([]byte, streamBuffer)
		w.streams[i].mark()
	}
	return w
}

// mark prepares the buffer for the next time around.
func (s *stream) mark() {
	for at := 0; at < streamBuffer; at += markEvery {
		binary.BigEndian.PutUint64(s.buffer[at:], s.sent+uint64(at))
	}
	s.at = 0
}

func (w *bulk) open() error { return w.dialAll(unix.SOCK_STREAM, unix.EPOLLIN|unix.EPOLLOUT) }

func (w *bulk) run(deadline time.Time) {
	left := len(w.streams)
	for left > 0 {
		events := w.poll.wait(50)
		now := time.Now()
		if now.After(deadline.Add(confirmWait)) {
			w.fail(left, errors.New("the server didn't confirm a stream's end"))
			return
		}
		for i := range events {
			left -= w.event(int(events[i].Fd), events[i].Events, now.Before(deadline))
		}
	}
}

// event advances a stream; 1 when it is over.
func (w *bulk) event(i int, events uint32, more bool) int {
	s := &w.streams[i]
	if s.over {
		return 0
	}
	if events&(unix.EPOLLIN|unix.EPOLLERR|unix.EPOLLHUP) != 0 {
		if over, err := s.confirmed(w.fds[i]); over {
			return w.end(i, err)
		}
	}
	if s.ended || events&unix.EPOLLOUT == 0 {
		return 0
	}
	if !more {
		s.ended = true
		ev := unix.EpollEvent{Events: unix.EPOLLIN, Fd: int32(i)}
		if err := errors.Join(unix.Shutdown(w.fds[i], unix.SHUT_WR), unix.EpollCtl(w.poll.fd, unix.EPOLL_CTL_MOD, w.fds[i], &ev)); err != nil {
			return w.end(i, err)
		}
		return 0
	}
	if e := s.send(w.fds[i]); e != 0 {
		return w.end(i, e)
	}
	return 0
}

func (s *stream) send(fd int) unix.Errno {
	for range writesAtOnce {
		n, e := write(fd, s.buffer[s.at:])
		if e == unix.EAGAIN {
			return 0
		}
		if e != 0 && e != unix.EINTR {
			return e
		}
		s.sent += uint64(n)
		if s.at += n; s.at == streamBuffer {
			s.mark()
		}
	}
	return 0
}

// confirmed reads what the server got: the count of bytes, and of wrong marks.
func (s *stream) confirmed(fd int) (over bool, err error) {
	var b [16]byte
	n, e := read(fd, b[:])
	switch {
	case e == unix.EAGAIN || e == unix.EINTR:
		return false, nil
	case e != 0:
		return true, e
	case n == 0:
		return true, errors.New("the connection was closed before its end")
	}
	if s.reply = append(s.reply, b[:n]...); len(s.reply) < len(b) {
		return false, nil
	}
	got, wrong := binary.BigEndian.Uint64(s.reply), binary.BigEndian.Uint64(s.reply[8:])
	if got != s.sent || wrong > 0 {
		return true, fmt.Errorf("the server got %d bytes of %d, and %d wrong marks", got, s.sent, wrong)
	}
	return true, nil
}

func (w *bulk) end(i int, err error) int {
	s := &w.streams[i]
	s.over = true
	_ = unix.EpollCtl(w.poll.fd, unix.EPOLL_CTL_DEL, w.fds[i], nil) // it is there
	if err != nil {
		w.fail(1, err)
		return 1
	}
	w.done++
	w.bytes += s.sent
	return 1
}
