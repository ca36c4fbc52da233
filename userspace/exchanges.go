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

	turns, arrivals int // since the load was last looked at
	crowded         bool
}

// exchangeRules say who may be a member.
type exchangeRules struct {
	after uint8 // so many small messages in a row
	// The loop is crowded when at least so many messages, in halves, arrive in a turn,
	// and isn't any more when they are fewer than until. A single one is answered
	// sooner without the ring.
	from, until int
}

var usualExchanges = exchangeRules{after: 16, from: 6, until: 3}

// ringConfig is how large a ring is. A message that fills a buffer isn't small.
var ringConfig = uring.Config{Entries: 1024, Completions: 8192, Buffers: 128, BufferSize: 4 << 10}

// maxMembers have two results outstanding each, and two more when they leave.
var maxMembers = ringConfig.Completions/4 - 1

// What is asked of the ring bears a tag: the connection's slot, the direction, and
// whether it is sent. These two are nobody's.
const (
	epollTag  = ^uint64(0)
	cancelTag = epollTag - 1
)

func receiveTag(slot int32, d int) uint64 { return uint64(uint32(slot))<<2 | uint64(d)<<1 }
func sendTag(slot int32, d int) uint64    { return receiveTag(slot, d) | 1 }

// loadTurns is how many turns a loop is looked at to tell how busy it is.
const loadTurns = 32

// weigh finds out whether the loop is crowded.
func (e *exchanges) weigh(arrivals int) {
	e.turns++
	e.arrivals += arrivals
	if e.turns < loadTurns {
		return
	}
	switch perTurn := 2 * e.arrivals / e.turns; {
	case perTurn >= e.rules.from:
		e.crowded = true
	case perTurn < e.rules.until:
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
		e.ring = nil
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

// takeResults hands results to whom they concern. It returns how many events epoll has.
func (l *loop) takeResults(events []unix.EpollEvent) (n int) {
	e := &l.exchanges
	for {
		r, ok := e.result()
		switch {
		case !ok:
			return n
		case r.Tag == cancelTag:
		case r.Tag == epollTag:
			e.watched = false
			n = sysEvents(l.epoll, events, 0)
		case r.Tag&1 == 0:
			e.arrivals++
			l.slots[r.Tag>>2].received(int(r.Tag>>1&1), r)
		default:
			l.slots[r.Tag>>2].sent(int(r.Tag>>1&1), r)
		}
	}
}

// slotsAtOnce is how many slots one turn looks at for members that have to leave.
const slotsAtOnce = 64

// thin lets some members leave when the loop isn't crowded any more.
func (l *loop) thin() {
	e := &l.exchanges
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
