package load

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// sessionWait is how long the answer of a session may take. It is shorter than
// [answerWait], as a lost datagram isn't sent again.
const sessionWait = 300 * time.Millisecond

var (
	errNoAnswer = errors.New("no answer came")
	errWrong    = errors.New("the answer isn't what was sent")
	errEnded    = errors.New("the connection ended without the answer")
)

// opener opens connections or sessions with one exchange each, a number of them
// at a time. A Short connection waits until the server closes it, so that
// TIME_WAIT is the server's and the client's port is free for the next one. A
// First connection is reset by the client, so that neither keeps it in TIME_WAIT:
// through another service the client may use the port again at once, and the
// backend might take that SYN for one of the old connection (PAWS, RFC 7323
// section 5). A Session is from a port that wasn't used before, as to conntrack
// a datagram from another belongs to an old flow.
type opener struct {
	client
	slots    []opening
	patience time.Duration
	limit    int // of connections; 0 for none
	begun    int
	live     int // begun and not over
}

type opening struct {
	fd              int // -1 for none
	number          int
	request, answer [messageSize]byte
	asked           bool
	got             int
	begun           time.Time
	connected       time.Duration
}

func newOpener(c client) *opener {
	w := &opener{client: c, slots: make([]opening, c.conns), limit: c.load.Count / c.of, patience: 2 * answerWait} // a lost SYN is sent again after one second
	if c.load.Kind == Session {
		w.patience = sessionWait
		if most := portCount * len(c.load.Sources); w.limit == 0 || w.limit > most/c.of {
			w.limit = most / c.of
		}
	}
	w.exchange = make([]time.Duration, 0, samples)
	if c.load.Kind == First {
		w.connect = make([]time.Duration, 0, samples)
	}
	for i := range w.slots {
		w.slots[i].fd = -1
	}
	return w
}

func (w *opener) open() (err error) {
	w.poll, err = newPoll()
	return err
}

// run works until the deadline, and a little longer for what is on its way then.
func (w *opener) run(deadline time.Time) {
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
			if w.event(&w.slots[i], events[k].Events, more) && more {
				w.begin(i)
			}
		}
		if w.limit > 0 && w.begun == w.limit && w.live == 0 {
			return // the clock is running
		}
		if now.Sub(checked) < w.patience/4 && more && len(events) > 0 {
			continue
		}
		checked = now
		if w.overdue(now, more) == 0 {
			return
		}
	}
}

// begin opens the next connection, if there is to be one.
func (w *opener) begin(i int) {
	if w.limit > 0 && w.begun == w.limit {
		return
	}
	s := &w.slots[i]
	*s = opening{fd: -1, number: w.begun, begun: time.Now()}
	w.begun++
	w.live++
	for at := 0; at < messageSize; at += 8 {
		binary.BigEndian.PutUint64(s.request[at:], uint64(s.number)<<20|uint64(i)<<4|uint64(at/8))
	}
	if err := w.start(s, i); err != nil {
		w.drop(s, err)
	}
}

func (w *opener) start(s *opening, i int) (err error) {
	udp := w.load.Kind.UDP()
	kind, events := unix.SOCK_STREAM, uint32(unix.EPOLLIN|unix.EPOLLOUT|unix.EPOLLET)
	if udp {
		kind, events = unix.SOCK_DGRAM, unix.EPOLLIN
	}
	if s.fd, err = openSocket(kind); err != nil {
		return err
	}
	if udp {
		n := w.load.FirstPort + s.number*w.of + w.nth
		from := netip.AddrPortFrom(w.load.Sources[n/portCount%len(w.load.Sources)], uint16(firstPort+n%portCount))
		if err := bind(s.fd, addressOf(from)); err != nil {
			return err
		}
	}
	if err := connect(s.fd, addressOf(w.target(s.number))); err != nil {
		return err
	}
	if err := w.poll.add(s.fd, events, i); err != nil || !udp {
		return err
	}
	return s.ask()
}

func (s *opening) ask() error {
	s.asked = true
	n, e := write(s.fd, s.request[:])
	if e == 0 && n != messageSize {
		return errors.New("only a part of the request could be sent")
	}
	return errorOf(e)
}

// event advances a connection; true when it is over.
func (w *opener) event(s *opening, events uint32, count bool) bool {
	if s.fd < 0 {
		return false
	}
	if !s.asked {
		if events&unix.EPOLLOUT == 0 {
			return false
		}
		s.connected = time.Since(s.begun)
		if err := s.ask(); err != nil {
			return w.drop(s, err)
		}
		if events&unix.EPOLLIN == 0 {
			return false
		}
	}
	return w.receive(s, count)
}

func (w *opener) receive(s *opening, count bool) bool {
	var end [1]byte
	kind := w.load.Kind
	for {
		into := s.answer[s.got:]
		if len(into) == 0 {
			into = end[:]
		}
		n, e := read(s.fd, into)
		if e == unix.EAGAIN {
			return false
		}
		if e == unix.EINTR {
			continue
		}
		if e != 0 {
			return w.drop(s, e)
		}
		ended := n == 0 && kind == Short
		switch {
		case n == 0 && (kind != Short || s.got < messageSize):
			return w.drop(s, errEnded)
		case s.got == messageSize && !ended:
			return w.drop(s, errWrong)
		}
		s.got += n
		if s.got < messageSize && kind != Session {
			continue
		}
		if !bytes.Equal(s.answer[:s.got], s.request[:]) {
			return w.drop(s, errWrong)
		}
		if kind == Short && !ended {
			continue
		}
		return w.succeed(s, count)
	}
}

func (w *opener) succeed(s *opening, count bool) bool {
	took := time.Since(s.begun)
	if w.done%witnessEvery == 0 {
		w.witness(s.fd, s.number)
	}
	if w.load.Kind == First {
		// With linger 0 close sends RST (tcp(7)).
		if err := unix.SetsockoptLinger(s.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}); err != nil {
			return w.drop(s, err)
		}
	}
	if count || w.load.Kind == Session {
		w.done++
		w.exchange = append(w.exchange, took)
		if w.load.Kind == First {
			w.connect = append(w.connect, s.connected)
		}
	}
	w.end(s)
	return true
}

// witnessEvery spares most connections getsockname(2).
const witnessEvery = 256

func (w *opener) end(s *opening) {
	if s.fd >= 0 {
		closeSocket(s.fd)
	}
	s.fd = -1
	w.live--
}

func (w *opener) drop(s *opening, err error) bool {
	w.fail(1, err)
	w.end(s)
	return true
}

// overdue ends connections that take too long; it returns how many are left.
func (w *opener) overdue(now time.Time, more bool) int {
	left := 0
	for i := range w.slots {
		s := &w.slots[i]
		if s.fd >= 0 && now.Sub(s.begun) > w.patience {
			err := error(unix.ETIMEDOUT)
			if w.load.Kind == Session {
				err = errNoAnswer
			}
			w.drop(s, err)
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
