package traffic

import (
	"bytes"
	"encoding/binary"
	"errors"
	"time"

	"golang.org/x/sys/unix"
)

// short makes connections, a number of them at a time: each sends a request,
// gets the answer and awaits that the server closes it, so that the client's port
// is free for the next one.
type short struct {
	tally
	load  *Load
	limit int // of connections; 0 for none
	begun int
	poll  *poll
	to    *address
	slots []shortConn
}

type shortConn struct {
	fd              int // -1 for none
	request, answer [messageSize]byte
	asked           bool
	got             int
	begun           time.Time
}

func newShort(l *Load, conns, limit int) *short {
	w := &short{load: l, limit: limit, to: addressOf(l.Target), slots: make([]shortConn, conns)}
	w.exchange = make([]time.Duration, 0, samples)
	for i := range w.slots {
		w.slots[i].fd = -1
	}
	return w
}

func (w *short) open() (err error) {
	w.poll, err = newPoll()
	return err
}

func (w *short) close() {
	if w.poll != nil {
		w.poll.close()
	}
}

// run works until the deadline, and a little longer for what is on its way then.
func (w *short) run(deadline time.Time) {
	for i := range w.slots {
		w.begin(i)
	}
	checked := time.Now()
	for {
		events := w.poll.wait(50)
		now := time.Now()
		more := now.Before(deadline)
		for k := range events {
			i := int(events[k].Fd)
			if w.event(i, events[k].Events, more) && more {
				w.begin(i)
			}
		}
		if now.Sub(checked) < answerWait/4 && more && len(events) > 0 {
			continue
		}
		checked = now
		if w.overdue(now, more) == 0 {
			return
		}
	}
}

// begin makes the next connection, if there is to be one.
func (w *short) begin(i int) {
	if w.limit > 0 && w.begun == w.limit {
		return
	}
	w.begun++
	s := &w.slots[i]
	s.asked, s.got, s.begun = false, 0, time.Now()
	fd, err := openSocket(unix.SOCK_STREAM)
	if err == nil {
		if err = connect(fd, w.to); err == nil {
			err = w.poll.add(fd, unix.EPOLLIN|unix.EPOLLOUT|unix.EPOLLET, i)
		}
		if err != nil {
			closeSocket(fd)
		}
	}
	if err != nil {
		w.fail(1, err)
		return
	}
	s.fd = fd
}

// event takes a connection further; true when it is over.
func (w *short) event(i int, events uint32, count bool) bool {
	s := &w.slots[i]
	if s.fd < 0 {
		return false
	}
	if !s.asked {
		if events&unix.EPOLLOUT == 0 {
			return false
		}
		s.asked = true
		for at := 0; at < messageSize; at += 8 {
			binary.BigEndian.PutUint64(s.request[at:], uint64(w.begun)<<20|uint64(i)<<4|uint64(at/8))
		}
		if n, e := write(s.fd, s.request[:]); e != 0 || n != messageSize {
			return w.end(s, e, nil)
		}
		if events&unix.EPOLLIN == 0 {
			return false
		}
	}
	return w.receive(s, count)
}

func (w *short) receive(s *shortConn, count bool) bool {
	var end [1]byte
	for {
		into := s.answer[s.got:]
		if len(into) == 0 {
			into = end[:]
		}
		n, e := read(s.fd, into)
		switch {
		case e == unix.EAGAIN:
			return false
		case e == unix.EINTR:
			continue
		case e != 0:
			return w.end(s, e, nil)
		case n == 0 && !bytes.Equal(s.answer[:s.got], s.request[:]):
			return w.end(s, 0, errors.New("the connection ended without the answer"))
		case n == 0:
			if count {
				w.done++
				w.exchange = append(w.exchange, time.Since(s.begun))
			}
			closeSocket(s.fd)
			s.fd = -1
			return true
		case s.got == messageSize:
			return w.end(s, 0, errWrong)
		}
		s.got += n
	}
}

// end ends a connection that failed.
func (w *short) end(s *shortConn, e unix.Errno, err error) bool {
	if e != 0 {
		err = e
	}
	if err == nil {
		err = errors.New("only a part of the request could be sent")
	}
	w.fail(1, err)
	closeSocket(s.fd)
	s.fd = -1
	return true
}

// overdue ends connections that take too long; it returns how many are left.
func (w *short) overdue(now time.Time, more bool) int {
	left := 0
	for i := range w.slots {
		s := &w.slots[i]
		if s.fd >= 0 && now.Sub(s.begun) > 2*answerWait { // a lost SYN is sent again after one second
			w.end(s, unix.ETIMEDOUT, nil)
		}
		if s.fd < 0 && more {
			w.begin(i)
		}
		if s.fd >= 0 {
			left++
		}
	}
	return left
}
