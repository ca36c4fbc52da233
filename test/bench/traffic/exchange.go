package traffic

import (
	"bytes"
	"encoding/binary"
	"errors"
	"time"

	"golang.org/x/sys/unix"
)

// samples is how many times a worker keeps room for.
const samples = 1 << 21

// exchanger has one request on the way on each of its connections or sessions.
type exchanger struct {
	tally
	load  *Load
	conns int
	poll  *poll
	fds   []int
	slots []exchange
	next  uint64
}

// exchange is a request on its way.
type exchange struct {
	request, answer [messageSize]byte
	got             int
	sent            time.Time // zero for none
}

func newExchanger(l *Load, conns int) *exchanger {
	return &exchanger{load: l, conns: conns, slots: make([]exchange, conns), tally: tally{exchange: make([]time.Duration, 0, samples)}}
}

func (w *exchanger) open() (err error) {
	if w.poll, err = newPoll(); err != nil {
		return err
	}
	kind := unix.SOCK_STREAM
	if w.load.Kind.UDP() {
		kind = unix.SOCK_DGRAM
	}
	w.fds, err = dialAll(w.poll, kind, w.conns, w.load.Target, unix.EPOLLIN)
	return err
}

func (w *exchanger) close() {
	for _, fd := range w.fds {
		closeSocket(fd)
	}
	if w.poll != nil {
		w.poll.close()
	}
}

func (w *exchanger) run(deadline time.Time) {
	for i := range w.slots {
		w.ask(i, time.Now())
	}
	checked := time.Now()
	for {
		events := w.poll.wait(50)
		now := time.Now()
		more := now.Before(deadline)
		for i := range events {
			w.readable(int(events[i].Fd), more)
		}
		if now.Sub(checked) > answerWait/4 || !more {
			checked = now
			if w.overdue(now, more) == 0 && !more {
				return
			}
		}
	}
}

// ask sends the next request.
func (w *exchanger) ask(i int, now time.Time) {
	s := &w.slots[i]
	w.next++
	for at := 0; at < messageSize; at += 8 {
		binary.BigEndian.PutUint64(s.request[at:], w.next<<20|uint64(i)<<4|uint64(at/8))
	}
	s.got, s.sent = 0, now
	if n, e := write(w.fds[i], s.request[:]); e != 0 || n != messageSize {
		w.drop(i, e)
	}
}

// readable takes what has come of an answer.
func (w *exchanger) readable(i int, more bool) {
	s := &w.slots[i]
	n, e := read(w.fds[i], s.answer[s.got:])
	switch {
	case e == unix.EAGAIN || e == unix.EINTR:
		return
	case s.sent.IsZero():
		if e != 0 || n == 0 {
			w.stop(i)
		}
		return // the answer to a request that was given up
	case e != 0 || n == 0:
		w.drop(i, e)
		return
	}
	if s.got += n; s.got < messageSize && !w.load.Kind.UDP() {
		return
	}
	now := time.Now()
	if !bytes.Equal(s.answer[:s.got], s.request[:]) {
		if w.load.Kind.UDP() { // one that was given up, come late
			s.got = 0
			return
		}
		w.drop(i, 0)
		return
	}
	took := now.Sub(s.sent)
	s.sent = time.Time{}
	if more {
		w.done++
		w.exchange = append(w.exchange, took)
		w.ask(i, now)
	}
}

// overdue gives up requests without an answer for too long and asks again over
// UDP; it returns how many are on the way.
func (w *exchanger) overdue(now time.Time, more bool) int {
	left := 0
	for i := range w.slots {
		s := &w.slots[i]
		if s.sent.IsZero() {
			continue
		}
		if now.Sub(s.sent) < answerWait {
			left++
			continue
		}
		w.drop(i, unix.ETIMEDOUT)
		if more && w.load.Kind.UDP() {
			w.ask(i, now)
		}
	}
	return left
}

var errWrong = errors.New("the answer isn't what was sent")

// drop counts a failed exchange; a TCP connection ends with it.
func (w *exchanger) drop(i int, e unix.Errno) {
	w.slots[i].sent = time.Time{}
	switch {
	case e != 0:
		w.fail(1, e)
	case w.slots[i].got == 0:
		w.fail(1, errors.New("the connection was closed"))
	default:
		w.fail(1, errWrong)
	}
	if !w.load.Kind.UDP() {
		w.stop(i)
	}
}

// stop has a connection no more events.
func (w *exchanger) stop(i int) {
	_ = unix.EpollCtl(w.poll.fd, unix.EPOLL_CTL_DEL, w.fds[i], nil) // it is there
}
