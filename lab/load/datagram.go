package load

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"
)

// A large datagram begins with its number in the session, and a flag that asks
// the server for an answer: the first headerSize bytes. The rest is the number
// again and again, which the server checks at one place.
const (
	headerSize = 16
	flagAt     = 8
	checkAt    = DatagramSize - 8
)

// received asks the server itself how many large datagrams it has got
// so far, and how many of them were damaged.
func received(server netip.Addr) (got, wrong uint64, err error) {
	c, err := net.DialTimeout("tcp", netip.AddrPortFrom(server, controlPort).String(), answerWait)
	if err != nil {
		return 0, 0, fmt.Errorf("ask what arrived: %w", err)
	}
	defer c.Close()
	var b [16]byte
	if err = c.SetDeadline(time.Now().Add(answerWait)); err == nil {
		_, err = io.ReadFull(c, b[:])
	}
	if err != nil {
		return 0, 0, fmt.Errorf("ask what arrived: %w", err)
	}
	return binary.BigEndian.Uint64(b[:]), binary.BigEndian.Uint64(b[8:]), nil
}

// number writes the header of a datagram.
func number(b []byte, n uint64, ask bool) {
	binary.BigEndian.PutUint64(b, n)
	flag := uint64(0)
	if ask {
		flag = 1
	}
	binary.BigEndian.PutUint64(b[flagAt:], flag)
	binary.BigEndian.PutUint64(b[checkAt:], n)
}

// flood sends datagrams in several sessions as fast as one thread can.
type flood struct{ client }

func (w *flood) open() error { return w.greet(0) }

// greet opens every session before the clock starts: each sends a datagram until
// it has an answer.
func (c *client) greet(events uint32) error {
	if err := c.dialAll(unix.SOCK_DGRAM, events); err != nil {
		return err
	}
	b, answer := make([]byte, DatagramSize), make([]byte, DatagramSize)
	number(b, 0, true)
	for _, fd := range c.fds {
		p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		for try := 0; ; try++ {
			if _, e := write(fd, b); e != 0 {
				return fmt.Errorf("begin session: %w", e)
			}
			if n, _ := unix.Poll(p, 200); n == 1 {
				break
			}
			if try == 10 {
				return fmt.Errorf("begin session: %w", errNoAnswer)
			}
		}
		for { // all answers, if there is more than one
			if _, e := read(fd, answer); e != 0 {
				break
			}
		}
	}
	return nil
}

func (w *flood) run(deadline time.Time) {
	b := newBatch(DatagramSize, false)
	for i := 0; time.Now().Before(deadline); i++ {
		for k := range b.buffers {
			number(b.buffers[k], w.sent+uint64(k), false)
		}
		n, e := b.send(w.fds[i%len(w.fds)], batchSize)
		if e != 0 && e != unix.EAGAIN && e != unix.EINTR && e != unix.ENOBUFS {
			w.fail(1, e)
			return
		}
		w.sent += uint64(n)
	}
}

// settle compares what was sent with what arrived, when that has had time to. had
// and bad is what the server had received before.
func (o *Outcome) settle(server netip.Addr, sent, had, bad uint64) error {
	time.Sleep(100 * time.Millisecond)
	got, wrong, err := received(server)
	if err != nil {
		return err
	}
	o.Count, o.Lost = int(got-had), int(sent)-int(got-had)
	o.Bytes = (got - had) * DatagramSize
	if wrong > bad {
		o.Failed, o.Error = o.Failed+int(wrong-bad), errWrong.Error()
	}
	return nil
}

// A session of [Window] has at most windowSize datagrams on the way; the server
// answers every askEvery-th. It sends no
// faster than datagrams arrive, as a sender with congestion control does.
const (
	windowSize = 64
	askEvery   = 16
)

// stallWait is how long a session waits before it counts what is on the way as lost.
const stallWait = 20 * time.Millisecond

// window sends datagrams in sessions that wait for answers.
type window struct {
	client
	slots []windowSlot
}

type windowSlot struct {
	next, answered uint64
	heard          time.Time
}

func (w *window) open() error { return w.greet(unix.EPOLLIN) }

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
