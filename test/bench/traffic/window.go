package traffic

import (
	"encoding/binary"
	"time"

	"golang.org/x/sys/unix"
)

// A session of [Window] has at most windowSize datagrams on the way; the server
// answers every askEvery-th. As a sender that heeds its path does, it sends no
// faster than datagrams arrive.
const (
	windowSize = 64
	askEvery   = 16
)

// stallWait is how long a session waits before it takes what is on the way for lost.
const stallWait = 20 * time.Millisecond

// window sends datagrams in sessions that wait for answers.
type window struct {
	tally
	load  *Load
	conns int
	poll  *poll
	fds   []int
	slots []windowSlot
}

type windowSlot struct {
	next, answered uint64
	heard          time.Time
}

func newWindow(l *Load, conns int) *window {
	return &window{load: l, conns: conns, slots: make([]windowSlot, conns)}
}

func (w *window) open() (err error) {
	if w.poll, err = newPoll(); err != nil {
		return err
	}
	if w.fds, err = dialAll(w.poll, unix.SOCK_DGRAM, w.conns, w.load.Target, unix.EPOLLIN); err == nil {
		err = greet(w.fds)
	}
	return err
}

func (w *window) close() {
	for _, fd := range w.fds {
		closeSocket(fd)
	}
	if w.poll != nil {
		w.poll.close()
	}
}

func (w *window) run(deadline time.Time) {
	out, in := newBatch(DatagramSize, false), make([]byte, headerSize)
	start := time.Now()
	checked := start
	for i := range w.slots {
		w.slots[i].heard = start
		w.send(i, out)
	}
	for {
		events := w.poll.wait(5)
		now := time.Now()
		if !now.Before(deadline) {
			return
		}
		for k := range events {
			i := int(events[k].Fd)
			s := &w.slots[i]
			for {
				n, e := read(w.fds[i], in)
				if e != 0 || n < headerSize {
					break
				}
				s.answered, s.heard = max(s.answered, binary.BigEndian.Uint64(in)+1), now
			}
			w.send(i, out)
		}
		if now.Sub(checked) < stallWait/4 {
			continue
		}
		checked = now
		for i := range w.slots {
			if s := &w.slots[i]; now.Sub(s.heard) > stallWait {
				s.answered, s.heard = s.next, now
				w.send(i, out)
			}
		}
	}
}

// send fills the window, in batches as long as the distance between answers.
func (w *window) send(i int, out *batch) {
	s := &w.slots[i]
	for s.next-s.answered+askEvery <= windowSize {
		for k := range askEvery {
			number(out.buffers[k], s.next+uint64(k), k == askEvery-1)
		}
		n, e := out.send(w.fds[i], askEvery)
		if e != 0 {
			return
		}
		s.next += uint64(n)
		w.sent += uint64(n)
		if n < askEvery {
			return
		}
	}
}
