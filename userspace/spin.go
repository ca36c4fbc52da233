package userspace

import (
	"time"

	"golang.org/x/sys/unix"
)

// spinning lets a loop look for the next message a little before it sleeps, while a
// single connection exchanges small messages one after the other: there an idle
// processor that has to be woken twice an exchange costs more than what it does, most
// of all in a virtual machine. It goes on only as long as it pays, so that a loop
// with much to do, little to do, or others on its processor doesn't spin.
type spinning struct {
	off   bool
	last  *tcpConn // whose event the last one was
	trust int      // grows with waits that were short, and shrinks with others
}

// spinFor bounds the looks before one sleep. A longer wait doesn't count as short.
const spinFor = 50 * time.Microsecond

// spinGap is longer than a look that leaves the processor to others takes when there
// are none: they have something to do then.
const spinGap = 20 * time.Microsecond

// A loop spins from so much trust on. A wait that was long costs what several short
// ones gave.
const (
	spinFrom   = 16
	trustMost  = 2 * spinFrom
	trustPrice = 4
)

// pays reports whether spinning did, lately.
func (s *spinning) pays() bool { return s.trust >= spinFrom }

// judge learns from a wait that took so many nanoseconds and ended with an event of
// x alone; nil if it was another's, or nobody's.
func (s *spinning) judge(x *tcpConn, took int64) {
	switch {
	case s.off:
	case x != nil && x == s.last && took <= int64(spinFor):
		s.trust = min(s.trust+1, trustMost)
	default:
		s.trust = max(s.trust-trustPrice, 0)
	}
	s.last = x
}

// spin looks for events until there are some, it takes too long, or somebody else
// has had the processor.
func (l *loop) spin(events []unix.EpollEvent) int {
	began := sinceEpoch()
	for last := began; last-began < int64(spinFor); {
		sysYield()
		n := sysEvents(l.epoll, events, 0)
		now := sinceEpoch()
		if n > 0 || now-last > int64(spinGap) {
			return n
		}
		last = now
	}
	return 0
}

// sole is the connection that exchanges small messages and has the only event.
func (l *loop) sole(events []unix.EpollEvent) *tcpConn {
	if len(events) != 1 || events[0].Fd < 0 || int(events[0].Fd) >= len(l.slots) {
		return nil
	}
	if x := l.slots[events[0].Fd]; x != nil && x.small >= usualExchanges.after {
		return x
	}
	return nil
}
