package load

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

var (
	errNoAnswer = errors.New("no answer came")
	errWrong    = errors.New("the answer isn't what was sent")
	errPart     = errors.New("only a part of the request could be sent")
	errEnded    = errors.New("the connection ended without the answer")
)

// How long a socket waits.
const (
	answerWait  = time.Second
	openWait    = 2 * time.Second        // of a new connection: a lost SYN is sent again after one second
	sessionWait = 300 * time.Millisecond // a lost datagram isn't sent again
	confirmWait = 10 * time.Second       // of a stream, until its end has arrived
)

// worker is one thread of a load.
type worker interface {
	// open makes what must be there before the clock starts.
	open() error
	// run works until the deadline, and a little longer for what is on its way then.
	run(deadline time.Time)
	base() *client
}

// client holds what every worker has. By itself it is the worker for streams and for large datagrams: it
// serves one of them with blocking system calls, or all of them for [Flood].
type client struct {
	load    *Load
	nth, of int // this one, of so many
	fds     []int

	done, failed      int
	sent              uint64 // large datagrams
	bytes             uint64
	err               error
	connect, exchange []time.Duration
	witnesses         []Witness
}

// samples is for how many durations a worker has room from the start.
const samples = 1 << 21

func newWorkers(l *Load) (out []worker) {
	of := min(threads, l.Conns)
	switch l.Kind {
	case Flood:
		of = 1
	case Bulk, Window:
		of = l.Conns
	}
	for nth := range of {
		c := client{load: l, nth: nth, of: of}
		if l.Kind == Bulk || l.Kind.large() {
			out = append(out, &c)
		} else {
			out = append(out, newAsker(c, (l.Conns-nth+of-1)/of))
		}
	}
	return out
}

func (c *client) base() *client { return c }

func (c *client) open() error {
	kind, wait := unix.SOCK_DGRAM, answerWait
	if c.load.Kind == Bulk {
		kind, wait = unix.SOCK_STREAM, confirmWait
	}
	for i := c.nth; i < c.load.Conns; i += c.of {
		fd, err := dial(kind, c.target(i), wait)
		if err != nil {
			return err
		}
		c.fds = append(c.fds, fd)
		c.witness(fd, i)
		if c.load.Kind.large() {
			if err := greet(fd); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *client) run(deadline time.Time) {
	switch c.load.Kind {
	case Bulk:
		c.fail(c.stream(deadline))
	case Window:
		c.window(deadline)
	case Flood:
		c.fail(c.flood(deadline))
	}
}

func (c *client) close() {
	for _, fd := range c.fds {
		closeSocket(fd)
	}
}

// target returns where the i-th of all connections goes.
func (c *client) target(i int) netip.AddrPort { return c.load.Targets[i%len(c.load.Targets)] }

// fail counts a failure, if it is one, and keeps the first.
func (c *client) fail(err error) {
	if err == nil {
		return
	}
	c.failed++
	if c.err == nil {
		c.err = err
	}
}

// maxWitnesses bounds the witnesses of a worker: the last ones, as conntrack forgets.
const maxWitnesses = 16

func (c *client) witness(fd, i int) {
	sa, err := unix.Getsockname(fd)
	in, ok := sa.(*unix.SockaddrInet4)
	if err != nil || !ok {
		return
	}
	if len(c.witnesses) == maxWitnesses {
		c.witnesses = slices.Delete(c.witnesses, 0, 1)
	}
	c.witnesses = append(c.witnesses, Witness{netip.AddrPortFrom(netip.AddrFrom4(in.Addr), uint16(in.Port)), c.target(i)})
}

// message is a request, or its answer.
type message [messageSize]byte

// number makes the n-th request of the i-th connection.
func (m *message) number(n, i int) {
	for at := 0; at < messageSize; at += 8 {
		binary.BigEndian.PutUint64(m[at:], uint64(n)<<20|uint64(i)<<4|uint64(at/8))
	}
}

// ask sends a request over a TCP connection and waits for its answer.
func (m *message) ask(fd int) error {
	if n, e := write(fd, m[:]); e != 0 || n != messageSize {
		return errorOf(e, errPart)
	}
	var answer message
	for got := 0; got < messageSize; {
		n, e := read(fd, answer[got:])
		if e != 0 || n == 0 {
			return errorOf(e, errEnded)
		}
		got += n
	}
	if answer != *m {
		return errWrong
	}
	return nil
}

// A stream carries its own offset in the first eight bytes of every markEvery,
// so that the server sees when bytes are missing, doubled or out of order.
const (
	streamBuffer = 256 << 10
	markEvery    = 4 << 10
)

// mark prepares a buffer of a stream of which so much was sent.
func mark(buffer []byte, sent uint64) {
	for at := 0; at < len(buffer); at += markEvery {
		binary.BigEndian.PutUint64(buffer[at:], sent+uint64(at))
	}
}

// stream sends as fast as it goes, and has the server confirm what it got: the count
// of bytes, and of wrong marks.
func (c *client) stream(deadline time.Time) error {
	fd, buffer, sent := c.fds[0], make([]byte, streamBuffer), uint64(0)
	for time.Now().Before(deadline) {
		mark(buffer, sent)
		for rest := buffer; len(rest) > 0; {
			n, e := write(fd, rest)
			if e != 0 {
				return errorOf(e, nil)
			}
			sent, rest = sent+uint64(n), rest[n:]
		}
	}
	if err := unix.Shutdown(fd, unix.SHUT_WR); err != nil {
		return err
	}
	var b [16]byte
	for got := 0; got < len(b); {
		n, e := read(fd, b[got:])
		if e != 0 || n == 0 {
			return errorOf(e, errEnded)
		}
		got += n
	}
	if got, wrong := binary.BigEndian.Uint64(b[:]), binary.BigEndian.Uint64(b[8:]); got != sent || wrong > 0 {
		return fmt.Errorf("the server got %d bytes of %d, and %d wrong marks", got, sent, wrong)
	}
	c.done, c.bytes = 1, sent
	return nil
}

// hold opens n TCP connections that have had one exchange each, calls holding,
// and keeps them until ctx ends. It fails when one of them didn't last.
func hold(ctx context.Context, target netip.AddrPort, n int, holding func()) error {
	var fds []int
	for i := range n {
		fd, err := dial(unix.SOCK_STREAM, target, confirmWait)
		if err == nil {
			fds = append(fds, fd)
			var m message
			m.number(1, i)
			err = m.ask(fd)
		}
		if err != nil {
			return fmt.Errorf("open connection %d of %d: %w", i+1, n, err)
		}
	}
	holding()
	<-ctx.Done()
	for i, fd := range fds {
		if _, e := readWithoutWait(fd, make([]byte, 1)); e != unix.EAGAIN {
			return fmt.Errorf("connection %d of %d didn't last: %w", i+1, n, e)
		}
	}
	return nil
}
