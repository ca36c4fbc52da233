package traffic

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// sessionWait is how long the answer of a session may take. It is shorter than
// [answerWait]: nobody sends it again.
const sessionWait = 300 * time.Millisecond

// sessions makes UDP sessions, a number of them at a time, each from a port of
// its own with one exchange.
type sessions struct {
	tally
	load  *Load
	limit int
	begun int // of this worker
	live  int // begun and not over
	nth   int // this worker
	step  int // of so many
	poll  *poll
	to    *address
	slots []sessionSlot
}

type sessionSlot struct {
	fd              int // -1 for none
	request, answer [messageSize]byte
	begun           time.Time
}

func newSessions(l *Load, conns, nth, of int) *sessions {
	limit := l.Count
	if most := portCount * len(l.Sources); limit == 0 || limit > most {
		limit = most
	}
	w := &sessions{load: l, limit: limit / of, nth: nth, step: of, to: addressOf(l.Target), slots: make([]sessionSlot, conns)}
	w.exchange = make([]time.Duration, 0, samples)
	for i := range w.slots {
		w.slots[i].fd = -1
	}
	return w
}

func (w *sessions) open() (err error) {
	w.poll, err = newPoll()
	return err
}

func (w *sessions) close() {
	if w.poll != nil {
		w.poll.close()
	}
}

func (w *sessions) run(deadline time.Time) {
	for i := range w.slots {
		w.begin(i)
	}
	checked := time.Now()
	for {
		events := w.poll.wait(20)
		now := time.Now()
		more := now.Before(deadline)
		for k := range events {
			if i := int(events[k].Fd); w.readable(i) && more {
				w.begin(i)
			}
		}
		if w.begun == w.limit && w.live == 0 {
			return // rather than wait for what won't come, as the clock is running
		}
		if now.Sub(checked) < sessionWait/4 && more && len(events) > 0 {
			continue
		}
		checked = now
		if w.overdue(now, more) == 0 {
			return
		}
	}
}

// begin begins the next session, if there is to be one.
func (w *sessions) begin(i int) {
	if w.begun == w.limit {
		return
	}
	n := w.load.FirstPort + w.begun*w.step + w.nth
	w.begun++
	s := &w.slots[i]
	from := addressOf(netip.AddrPortFrom(w.load.Sources[n/portCount%len(w.load.Sources)], uint16(firstPort+n%portCount)))

	w.live++
	s.begun = time.Now()
	for at := 0; at < messageSize; at += 8 {
		binary.BigEndian.PutUint64(s.request[at:], uint64(n)<<4|uint64(at/8))
	}
	fd, err := openSocket(unix.SOCK_DGRAM)
	if err == nil {
		s.fd = fd
		if err = bind(fd, from); err == nil {
			err = connect(fd, w.to)
		}
		if err == nil {
			err = w.poll.add(fd, unix.EPOLLIN, i)
		}
		if _, e := write(fd, s.request[:]); err == nil && e != 0 {
			err = e
		}
	}
	if err != nil {
		w.drop(s, err)
	}
}

// readable takes the answer; true when the session is over.
func (w *sessions) readable(i int) bool {
	s := &w.slots[i]
	if s.fd < 0 {
		return false
	}
	n, e := read(s.fd, s.answer[:])
	switch {
	case e == unix.EAGAIN || e == unix.EINTR:
		return false
	case e != 0:
		w.drop(s, e)
		return true
	case n != messageSize || !bytes.Equal(s.answer[:], s.request[:]):
		w.drop(s, errWrong)
		return true
	}
	w.done++
	w.live--
	w.exchange = append(w.exchange, time.Since(s.begun))
	closeSocket(s.fd)
	s.fd = -1
	return true
}

func (w *sessions) drop(s *sessionSlot, err error) {
	w.fail(1, err)
	w.live--
	if s.fd >= 0 {
		closeSocket(s.fd)
	}
	s.fd = -1
}

var errNoAnswer = errors.New("no answer came")

// overdue ends sessions without an answer; it returns how many are left.
func (w *sessions) overdue(now time.Time, more bool) int {
	left := 0
	for i := range w.slots {
		s := &w.slots[i]
		if s.fd >= 0 && now.Sub(s.begun) > sessionWait {
			w.drop(s, errNoAnswer)
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
