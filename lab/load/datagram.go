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

// stallWait is how long a session waits before it counts what is on the way as lost.
const stallWait = 20 * time.Millisecond

// greet begins a session before the clock starts: it sends a datagram until it has an
// answer.
func greet(fd int) error {
	b, answer := make([]byte, DatagramSize), make([]byte, DatagramSize)
	number(b, 0, true)
	if err := setWait(fd, 200*time.Millisecond); err != nil {
		return err
	}
	for range 10 {
		if _, e := write(fd, b); e != 0 {
			return fmt.Errorf("begin session: %w", e)
		}
		if _, e := read(fd, answer); e != 0 {
			continue
		}
		for e := unix.Errno(0); e == 0; { // all answers, if there is more than one
			_, e = readWithoutWait(fd, answer)
		}
		return setWait(fd, stallWait)
	}
	return fmt.Errorf("begin session: %w", errNoAnswer)
}

// flood sends datagrams in all sessions as fast as one thread can.
func (c *client) flood(deadline time.Time) error {
	b := newBatch(DatagramSize, false)
	for i := 0; time.Now().Before(deadline); i++ {
		for k := range b.buffers {
			number(b.buffers[k], c.sent+uint64(k), false)
		}
		n, e := b.send(c.fds[i%len(c.fds)], 0, batchSize)
		if e != 0 && e != unix.EAGAIN && e != unix.EINTR && e != unix.ENOBUFS {
			return e
		}
		c.sent += uint64(n)
	}
	return nil
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

// window sends the datagrams of a session, in batches as long as the distance
// between answers, for which it waits.
func (c *client) window(deadline time.Time) {
	out, in := newBatch(DatagramSize, false), make([]byte, headerSize)
	var next, answered uint64
	for time.Now().Before(deadline) {
		for next-answered+askEvery <= windowSize {
			for k := range askEvery {
				number(out.buffers[k], next+uint64(k), k == askEvery-1)
			}
			n, e := out.send(c.fds[0], 0, askEvery)
			if e == 0 {
				next += uint64(n)
			}
			if e != 0 || n < askEvery {
				break
			}
		}
		switch n, e := read(c.fds[0], in); {
		case e == unix.EAGAIN:
			answered = next
		case e == 0 && n == headerSize:
			answered = max(answered, binary.BigEndian.Uint64(in)+1)
		}
	}
	c.sent = next
}
