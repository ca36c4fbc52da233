package userspace

import (
	"runtime"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/userspace/uring"
)

// exchanges is what a loop has for connections that exchange small messages, while
// many of them do: a ring by which all that they receive and send costs one system
// call a turn, and wakes the loop less often. Connections join and leave at any time.
// Those that aren't members are served by epoll, which the ring watches as well.
type exchanges struct {
	rules   exchangeRules
	ring    *uring.Ring // nil until it is needed
	off     bool        // there can't be one
	members int
	watched bool           // the ring tells of epoll's events
	held    []uring.Result // that came while another one was waited for
	next    int            // slot that thin looks at next
	left    int64          // when the last member did

	turns, arrivals int // since the load was last looked at
	came            int // messages of this turn
	crowded         bool
}

// exchangeRules say who may be a member.
type exchangeRules struct {
	after uint8 // so many small messages in a row
	// The loop is crowded when at least so many messages arrive in loadTurns turns, and
	// isn't any more when they are fewer than until. A single one is answered sooner
	// without the ring.
	from, until int
}

var usualExchanges = exchangeRules{after: 16, from: 3 * loadTurns, until: 3 * loadTurns / 2}

// ringConfig is how large a ring is. A message that fills a buffer isn't small. Both
// directions of all members can have a buffer, and two results when they leave: so nobody
// waits for others' buffers.
var ringConfig = uring.Config{Entries: 1024, Completions: 4096, Buffers: 2048, BufferSize: 2 << 10}

const maxMembers = 1000

// What is asked of the ring bears a tag: whose it is, the direction, and whether it is
// sent. These two are nobody's: they have a slot that no connection has.
const (
	epollTag  = ^uint64(0)
	cancelTag = epollTag - 1
)

// ringTag tells x from those that had its slot before.
func (x *tcpConn) ringTag(d int) uint64 {
	return uint64(x.sides[clientSide].tag)<<34 | uint64(uint32(x.slot))<<2 | uint64(d)<<1
}

const sendTag = 1

// owner is the connection that a tag belongs to, if that is a member still.
func (l *loop) owner(tag uint64) *tcpConn {
	slot := uint32(tag >> 2)
	if uint64(slot) >= uint64(len(l.slots)) {
		return nil
	}
	if x := l.slots[slot]; x != nil && x.member && x.ringTag(0) == tag&^3 {
		return x
	}
	return nil
}

// loadTurns is how many turns with messages are looked at to tell how busy a loop is.
const loadTurns = 32

// weigh finds out whether the loop is crowded, at the end of a turn in which epoll had
// so many events.
func (e *exchanges) weigh(events int) {
	arrivals := events + e.came
	e.came = 0
	if arrivals == 0 {
		return // in the ring, every other turn only tells what has been sent
	}
	e.turns++
	e.arrivals += arrivals
	if e.turns < loadTurns {
		return
	}
	switch {
	case e.arrivals >= e.rules.from:
		e.crowded = true
	case e.arrivals < e.rules.until:
		e.crowded = false
	}
	e.turns, e.arrivals = 0, 0
}

// openRing makes the ring, unless that has failed before: the kernel is too old, or
// io_uring forbidden.
func (l *loop) openRing() bool {
	e := &l.exchanges
	if e.ring != nil || e.off {
		return !e.off
	}
	runtime.LockOSThread()
	var err error
	if e.ring, err = uring.Open(ringConfig); err != nil {
		runtime.UnlockOSThread()
		e.off = true
		l.server.ringless.Do(func() {
			l.server.cfg.Logger.Info("busy connections are served by epoll alone, which costs more CPU time", "error", err)
		})
	}
	return !e.off
}

// close ends the ring, which has no members any more.
func (e *exchanges) close() {
	if e.ring != nil {
		e.ring.Close()
		e.ring, e.watched, e.held = nil, false, nil
		runtime.UnlockOSThread()
	}
}

// waitRing waits for results; that epoll has events is one of them.
func (l *loop) waitRing() {
	e := &l.exchanges
	if !e.watched {
		e.watched = true
		e.ring.Poll(l.epoll, epollTag)
	}
	patience := l.patience()
	if len(e.held) > 0 {
		patience = 0
	}
	short := shortWait
	if patience >= 0 {
		short = min(short, patience)
	}
	e.ring.Wait(time.Duration(short)*time.Millisecond, true)
	if short != patience && !e.ring.Ready() {
		e.ring.Wait(time.Duration(patience)*time.Millisecond, false)
	}
}

// abandonRing resets the ring's members when it has failed, and does without one from then on.
func (l *loop) abandonRing(err error) {
	e := &l.exchanges
	l.server.cfg.Logger.Error("io_uring failed: its connections are reset, and epoll alone serves others", "members", e.members, "error", err)
	for _, x := range l.slots {
		if x != nil && x.member {
			x.leaveRing()
		}
	}
	e.close()
	e.off = true
}

// result is the next one.
func (e *exchanges) result() (uring.Result, bool) {
	if len(e.held) == 0 {
		return e.ring.Next()
	}
	r := e.held[0]
	if e.held = e.held[1:]; len(e.held) == 0 {
		e.held = nil
	}
	return r, true
}

// epollTurns is after how many turns with messages the loop looks at epoll itself: what
// the ring has to say about it waits behind what it has to do for members.
const epollTurns = 8

// takeResults hands results to whom they concern: those that are there now, as more may
// come while it does, for ever. It returns how many events epoll has.
func (l *loop) takeResults(events []unix.EpollEvent) (n int) {
	e := &l.exchanges
	look := e.turns%epollTurns == 0
	for left := len(e.held) + e.ring.Count(); left > 0; left-- {
		r, ok := e.result()
		if !ok {
			break // somebody who left took theirs
		}
		switch {
		case r.Tag == cancelTag:
		case r.Tag == epollTag:
			e.watched, look = false, true
		default:
			l.takeResult(r)
		}
	}
	if look {
		n = sysEvents(l.epoll, events, 0)
	}
	return n
}

func (l *loop) takeResult(r uring.Result) {
	x, d := l.owner(r.Tag), int(r.Tag>>1&1)
	switch {
	case x == nil:
		l.exchanges.ring.Return(r.Bytes)
	case r.Tag&sendTag != 0:
		x.sent(d, r)
	default:
		x.received(d, r)
	}
}

// slotsAtOnce is how many slots one turn looks at for members that have to leave.
const slotsAtOnce = 64

// ringRest is how long a ring without members is kept: as long as it is there, the loop is
// locked to its thread, and answers a single connection later (p99 216 instead of 172 µs).
const ringRest = 100 * time.Millisecond

// thin lets some members leave when the loop isn't crowded any more, and gives the
// ring's memory back in the end.
func (l *loop) thin() {
	e := &l.exchanges
	if e.ring == nil {
		return
	}
	if e.members == 0 && l.now-e.left > int64(ringRest) {
		e.close()
		return
	}
	for range min(slotsAtOnce, len(l.slots)) {
		if e.members == 0 {
			return
		}
		e.next = (e.next + 1) % len(l.slots)
		if x := l.slots[e.next]; x != nil && x.member {
			x.leaveRing()
		}
	}
}
