package load

import (
	"bytes"
	"cmp"
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// exchanger has one request on the way on each of its connections or sessions.
type exchanger struct {
	client
	slots []exchange
	next  uint64
}

// exchange is a request on its way.
type exchange struct {
	request, answer [messageSize]byte
	got             int
	sent            time.Time // zero for none
}

func newExchanger(c client) *exchanger {
	c.exchange = make([]time.Duration, 0, samples)
	return &exchanger{client: c, slots: make([]exchange, c.conns)}
}

func (w *exchanger) open() error {
	kind := unix.SOCK_STREAM
	if w.load.Kind.UDP() {
		kind = unix.SOCK_DGRAM
	}
	return w.dialAll(kind, unix.EPOLLIN)
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

// readable reads what has come of an answer.
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
		return // the answer to a request that timed out
	case e != 0 || n == 0:
		w.drop(i, e)
		return
	}
	if s.got += n; s.got < messageSize && !w.load.Kind.UDP() {
		return
	}
	now := time.Now()
	if !bytes.Equal(s.answer[:s.got], s.request[:]) {
		if w.load.Kind.UDP() { // the late answer to a request that timed out
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

// overdue fails requests that have timed out, and sends the next ones over UDP; it
// returns how many are on the way.
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

// drop counts a failed exchange; a TCP connection ends with it.
func (w *exchanger) drop(i int, e unix.Errno) {
	w.slots[i].sent = time.Time{}
	switch {
	case e != 0:
		w.fail(1, e)
	case w.slots[i].got == 0:
		w.fail(1, errEnded)
	default:
		w.fail(1, errWrong)
	}
	if !w.load.Kind.UDP() {
		w.stop(i)
	}
}

// stop ends the events of a connection.
func (w *exchanger) stop(i int) {
	_ = unix.EpollCtl(w.poll.fd, unix.EPOLL_CTL_DEL, w.fds[i], nil) // it is there
}

// hold opens n TCP connections that have had one exchange each, calls holding,
// and keeps them until ctx ends. It fails when one of them didn't last.
func hold(ctx context.Context, target netip.AddrPort, n int, holding func()) error {
	w := newExchanger(client{load: &Load{Kind: Exchange, Targets: []netip.AddrPort{target}}, conns: n, of: 1})
	defer w.close()
	if err := w.open(); err != nil {
		return fmt.Errorf("open connection %d of %d: %w", len(w.fds)+1, n, err)
	}
	for i := range w.slots {
		w.ask(i, time.Now())
	}
	left := n
	for deadline := time.Now().Add(10 * time.Second); left > 0 && w.failed == 0 && time.Now().Before(deadline); {
		for _, e := range w.poll.wait(50) {
			w.readable(int(e.Fd), false)
		}
		left = 0
		for i := range w.slots {
			if !w.slots[i].sent.IsZero() {
				left++
			}
		}
	}
	if w.failed > 0 || left > 0 {
		return fmt.Errorf("open %d connections: %d don't answer: %w", n, w.failed+left, cmp.Or(w.err, errNoAnswer))
	}
	holding()
	<-ctx.Done()
	for i, fd := range w.fds {
		var b [1]byte
		if _, e := read(fd, b[:]); e != unix.EAGAIN {
			return fmt.Errorf("connection %d of %d didn't last: %w", i+1, n, e)
		}
	}
	return nil
}
