package load

import (
	"bytes"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// asker has one request on the way on each of a number of connections or sessions. It is
// an event loop: with a thread for each of 64 connections, what the kernel takes to wake
// them made a request cost the client twice to three times the processor time.
//
// An Exchange or Datagram connection is kept for the next request. A Short one waits
// until the server closes it, so that TIME_WAIT is the server's and the client's port
// is free for the next one. A First connection is reset by the client, so that neither
// keeps it in TIME_WAIT: through another service the client may use the port again at
// once, and the backend might take that SYN for one of the old connection (PAWS, RFC
// 7323 section 5). A Session is from a port that wasn't used before, as to conntrack a
// datagram from another belongs to an old flow.
type asker struct {
	client
	poll     *poll
	slots    []slot
	kept     bool // connections are
	patience time.Duration
	limit    int // of requests on connections of their own, of all clients; 0 for none
	begun    int // such connections of this one
	live     int // requests on their way
}

// slot is a connection with its request.
type slot struct {
	fd              int // -1 for none
	number          int
	request, answer message
	connecting      bool
	asked           bool // an answer is to come
	got             int
	begun           time.Time
	connected       time.Duration
}

func newAsker(c client, conns int) *asker {
	w := &asker{client: c, slots: make([]slot, conns), limit: c.load.Count, patience: openWait}
	switch c.load.Kind {
	case Exchange, Datagram:
		w.kept, w.limit, w.patience = true, 0, answerWait
	case Session:
		w.patience = sessionWait
		if most := portCount * len(c.load.Sources); w.limit == 0 || w.limit > most {
			w.limit = most
		}
	case First:
		w.connect = make([]time.Duration, 0, samples)
	}
	w.exchange = make([]time.Duration, 0, samples)
	for i := range w.slots {
		w.slots[i].fd = -1
	}
	return w
}

func (w *asker) open() (err error) {
	if w.poll, err = newPoll(); err != nil || !w.kept {
		return err
	}
	for i := range w.slots {
		s := &w.slots[i]
		s.number = i*w.of + w.nth
		if s.fd, err = dial(w.socketKind(), w.target(s.number), answerWait); err != nil {
			return err
		}
		w.fds = append(w.fds, s.fd)
		w.witness(s.fd, s.number)
		if err := errors.Join(unix.SetNonblock(s.fd, true), w.poll.add(s.fd, unix.EPOLLIN, i)); err != nil {
			return err
		}
	}
	return nil
}

func (w *asker) socketKind() int {
	if w.load.Kind.UDP() {
		return unix.SOCK_DGRAM
	}
	return unix.SOCK_STREAM
}

func (w *asker) run(deadline time.Time) {
	checked := time.Now()
	for i := range w.slots {
		w.next(i, checked)
	}
	for {
		events := w.poll.wait(50)
		now := time.Now()
		more := now.Before(deadline)
		for k := range events {
			w.event(int(events[k].Fd), events[k].Events, more)
		}
		if w.live == 0 && (!more || w.limited()) {
			return
		}
		if now.Sub(checked) < w.patience/4 && more && len(events) > 0 {
			continue
		}
		checked = now
		for i := range w.slots {
			s := &w.slots[i]
			busy := s.asked || s.connecting
			if busy && now.Sub(s.begun) > w.patience {
				w.end(i, unix.ETIMEDOUT, more)
			} else if !busy && more { // what could not even begin
				w.next(i, now)
			}
		}
	}
}

// limited reports whether all requests of a bounded number have begun.
func (w *asker) limited() bool { return w.limit > 0 && w.begun*w.of+w.nth >= w.limit }

// next sends the next request, on a connection of its own unless it is kept.
func (w *asker) next(i int, now time.Time) {
	s := &w.slots[i]
	switch {
	case w.kept && s.fd < 0, w.limited():
		return
	case w.kept:
		s.got, s.begun = 0, now
	default:
		*s = slot{fd: -1, number: w.begun*w.of + w.nth, begun: now}
	}
	w.begun++
	w.live++
	s.request.number(w.begun, i)
	var err error
	if !w.kept {
		err = w.begin(s, i)
	}
	if err == nil && !s.connecting {
		err = s.ask()
	}
	if err != nil {
		w.end(i, err, false)
	}
}

func (w *asker) begin(s *slot, i int) (err error) {
	if s.fd, err = openSocket(w.socketKind() | unix.SOCK_NONBLOCK); err != nil {
		return err
	}
	events, e := uint32(unix.EPOLLIN|unix.EPOLLOUT|unix.EPOLLET), unix.Errno(0)
	if s.connecting = w.load.Kind != Session; !s.connecting {
		n := w.load.FirstPort + s.number
		events, e = unix.EPOLLIN, bind(s.fd, netip.AddrPortFrom(w.load.Sources[n/portCount%len(w.load.Sources)], uint16(firstPort+n%portCount)))
	}
	if e == 0 {
		e = connect(s.fd, w.target(s.number))
	}
	if e != 0 && e != unix.EINPROGRESS {
		return fmt.Errorf("connect to %s: %w", w.target(s.number), e)
	}
	return w.poll.add(s.fd, events, i)
}

func (s *slot) ask() error {
	s.connecting, s.asked = false, true
	if n, e := write(s.fd, s.request[:]); e != 0 || n != messageSize {
		return errorOf(e, errPart)
	}
	return nil
}

// event advances a connection.
func (w *asker) event(i int, events uint32, more bool) {
	s := &w.slots[i]
	if s.connecting {
		if events&unix.EPOLLOUT == 0 {
			return
		}
		s.connected = time.Since(s.begun)
		if err := s.ask(); err != nil {
			w.end(i, err, more)
			return
		}
	}
	if s.fd < 0 || events&^unix.EPOLLOUT == 0 {
		return
	}
	over, err := w.receive(s)
	switch {
	case over && s.asked:
		w.end(i, err, more)
	case over: // between two requests
		w.stop(s)
	}
}

// receive reads what has come of an answer, and after it the end of a Short connection.
func (w *asker) receive(s *slot) (over bool, err error) {
	udp := w.load.Kind.UDP()
	for {
		var end [1]byte
		into := s.answer[s.got:]
		if len(into) == 0 {
			into = end[:]
		}
		n, e := read(s.fd, into)
		switch {
		case e == unix.EAGAIN:
			return false, nil
		case e != 0:
			return true, e
		case udp && (!s.asked || !bytes.Equal(into[:n], s.request[:])):
			continue // the late answer to a request that timed out
		case n == 0 && s.got == messageSize:
			return true, nil
		case n == 0:
			return true, errEnded
		case s.got == messageSize || !s.asked:
			return true, errWrong
		}
		if s.got += n; s.got < messageSize {
			continue
		}
		if s.answer != s.request {
			return true, errWrong
		}
		if w.load.Kind != Short {
			return true, nil
		}
	}
}

// end counts a request that is over, and begins the next one.
func (w *asker) end(i int, err error, more bool) {
	s, now := &w.slots[i], time.Now()
	w.live--
	s.asked, s.connecting = false, false
	if err == nil && w.load.Kind == First {
		// With linger 0 close sends RST (tcp(7)).
		err = unix.SetsockoptLinger(s.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	}
	w.fail(err)
	if err == nil && (more || w.load.Kind == Session) {
		if !w.kept && w.done%witnessEvery == 0 {
			w.witness(s.fd, s.number)
		}
		w.done++
		w.exchange = append(w.exchange, now.Sub(s.begun))
		if w.load.Kind == First {
			w.connect = append(w.connect, s.connected)
		}
	}
	if !w.kept || err != nil && !w.load.Kind.UDP() {
		w.stop(s)
	}
	if more {
		w.next(i, now)
	}
}

// stop ends a connection; one that was kept is closed with all others.
func (w *asker) stop(s *slot) {
	if s.fd >= 0 && w.kept {
		_ = unix.EpollCtl(w.poll.fd, unix.EPOLL_CTL_DEL, s.fd, nil) // it is there
	} else if s.fd >= 0 {
		closeSocket(s.fd)
	}
	s.fd = -1
}

// witnessEvery spares most connections getsockname(2).
const witnessEvery = 256
