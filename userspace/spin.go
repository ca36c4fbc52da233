package userspace

import (
	"time"

	"golang.org/x/sys/unix"
)

// spinning lets a loop look for the next message a little before it sleeps, while a
// single one of its connections exchanges small messages one after the other: there
// an idle processor that has to be woken twice an exchange costs more than what it
// does, most of all in a virtual machine. It goes on only as long as it pays, so a
// loop that has much to do, or little, or shares its processor, doesn't spin.
type spinning struct {
	off   bool
	last  *tcpConn // whose event the last one was
	trust int      // grows with waits that were short, and shrinks with others
	pause int64    // until when it doesn't spin, in nanoseconds since epoch
}

// spinFor bounds the looks before one sleep.
const spinFor = 50 * time.Microsecond

// shortSleep is the longest wait that counts as short: one that slept was longer by the
// time that waking up took.
const shortSleep = 2 * spinFor

// A look that takes longer than spinGap had to wait for somebody else on the
// processor, and the loop goes to sleep. After one that takes longer than spinLost it
// doesn't spin for spinPause: a neighbour that computes may keep the processor for
// milliseconds each time.
const (
	spinGap   = 20 * time.Microsecond
	spinLost  = 500 * time.Microsecond
	spinPause = 50 * time.Millisecond
)

// A loop spins from so much trust on. A wait that was long costs what several short
// ones gave. One that was short, and yet longer than the look, costs what a short one
// gave: half of the looks may be in vain. When too many are, trust begins anew.
const (
	spinFrom   = 16
	trustMost  = 2 * spinFrom
	trustPrice = 4
)

// pays reports whether spinning did, lately.
func (s *spinning) pays(now int64) bool { return s.trust >= spinFrom && now >= s.pause }

// judge learns from a wait that took so many nanoseconds, and whether it looked first. It
// ended with an event of x alone; nil if it was another's, or nobody's.
func (s *spinning) judge(x *tcpConn, took int64, looked bool) {
	if s.off {
		return
	}
	switch {
	case x == nil:
		s.trust = max(s.trust-trustPrice, 0)
		return // who comes next is compared with who came before
	case x == s.last && took <= int64(shortSleep) && looked && took > int64(spinFor):
		if s.trust--; s.trust < spinFrom {
			s.trust = 0
		}
	case x == s.last && took <= int64(shortSleep):
		s.trust = min(s.trust+1, trustMost)
	default:
		s.trust = max(s.trust-trustPrice, 0)
	}
	s.last = x
}

// forget lets go of a connection that has ended.
func (s *spinning) forget(x *tcpConn) {
	if s.last == x {
		s.last = nil
	}
}

// spin looks for events until there are some, it takes too long, or somebody else
// wants the processor.
func (l *loop) spin(events []unix.EpollEvent) int {
	began := sinceEpoch()
	for last := began; last-began < int64(spinFor); {
		if n := sysEvents(l.epoll, events, 0); n > 0 {
			return n
		}
		sysYield()
		now := sinceEpoch()
		if now-last > int64(spinLost) {
			l.spinning.pause = now + int64(spinPause)
		}
		if now-last > int64(spinGap) {
			break
		}
		last = now
	}
	return 0
}

// sole is the connection that exchanges small messages and has the only event.
func (l *loop) sole(events []unix.EpollEvent) *tcpConn {
	if len(events) != 1 || events[0].Fd < 0 {
		return nil
	}
	if x := l.slots[events[0].Fd]; x != nil && x.small >= usualExchanges.after {
		return x
	}
	return nil
}
