package userspace

import (
	"errors"
	"net/netip"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// acceptGrace is how long, once accepting stops, clients that the kernel has
// connected already are still taken in: closing the listener resets the others.
const acceptGrace = 250 * time.Millisecond

// Waits after an accept that failed for want of descriptors or memory.
const (
	acceptWaitMin = 5 * time.Millisecond
	acceptWaitMax = time.Second
)

// acceptsAtOnce is how many connections a loop accepts before it serves
// those it has; the other loops may take the next ones.
const acceptsAtOnce = 8

// acceptor is a loop's share in a listener, which all loops wait at together:
// the kernel wakes one of them (EPOLLEXCLUSIVE). Before each accept it takes the
// descriptors that the connection will need. While there are none it doesn't wait
// at the listener: clients wait in the kernel's backlog meanwhile, and connections of holders
// beyond their share give way.
type acceptor struct {
	loop     *loop
	listener *listener
	slot     int32
	watching bool
	stopped  bool
	retry    timer // after an accept that failed
	wait     time.Duration
	from     rawAddress // of the client that was accepted last
}

func newAcceptor(l *loop, t *listener, i int) *acceptor {
	a := &acceptor{loop: l, listener: t, slot: listenerSlot(i), wait: acceptWaitMin}
	a.retry.owner = a
	return a
}

// start waits at the listener.
func (a *acceptor) start() {
	if a.watching || a.stopped {
		return
	}
	if err := a.loop.watch(a.listener.fds[0], unix.EPOLLIN|unix.EPOLLEXCLUSIVE, a.slot, 0); err != nil {
		a.later(err)
		return
	}
	a.watching = true
	// There are descriptors again, and perhaps no client that would show it by being
	// accepted: without this, the probe would find the listener waiting for ever.
	a.loop.server.supplied()
}

// expired implements the owner of retry.
func (a *acceptor) expired() { a.start() }

// pause stops waiting at it.
func (a *acceptor) pause() {
	if a.watching {
		a.watching = false
		unix.EpollCtl(a.loop.epoll, unix.EPOLL_CTL_DEL, a.listener.fds[0], nil)
	}
}

// stop pauses for good.
func (a *acceptor) stop() {
	a.pause()
	a.stopped = true
	a.loop.timers.stop(&a.retry)
}

// accept accepts the clients that wait, while there are descriptors. No
// error ends it.
func (a *acceptor) accept() {
	if !a.watching {
		return // an event from before
	}
	s, t := a.loop.server, a.listener
	for range acceptsAtOnce {
		if !s.tcpBudget.tryOrWait(fdsPerConnection) {
			s.waiting.CompareAndSwap(0, sinceEpoch())
			a.pause()
			s.askForDescriptors()
			return
		}
		s.supplied()
		s.records.accepting(a.loop)
		fd, err := sysAccept(t.fds[0], &a.from)
		s.records.accepted(a.loop, fd)
		if err != 0 {
			s.tcpBudget.release(fdsPerConnection)
			if err != unix.EAGAIN && !transient(err) {
				if s.starve(err); s.starved.Load() != 0 {
					s.askForDescriptors()
				}
				a.later(err)
			}
			return
		}
		a.wait = acceptWaitMin
		s.starved.Store(0)
		client := a.from.addrPort()
		if !client.Addr().IsLoopback() { // as heartbeats are
			a.loop.used = a.loop.now
		}
		a.loop.assign(t, fd, client)
	}
}

// transient reports whether only one client's connection has failed (accept(2)).
func transient(err unix.Errno) bool {
	return err == unix.EINTR || err == unix.ECONNABORTED
}

// later tries again after a while, and after a longer one the next time.
func (a *acceptor) later(err error) {
	a.loop.server.cfg.Logger.Warn("accept failed; waiting", "error", err, "wait", a.wait)
	a.pause()
	a.loop.timers.set(&a.retry, sinceEpoch()+int64(a.wait))
	a.wait = min(2*a.wait, acceptWaitMax)
}

// starvation is since when clients wait for file descriptors, in nanoseconds since epoch; 0 means that they don't.
type starvation struct {
	waiting atomic.Int64 // for those of the budget: loops aren't expected to accept
	waited  atomic.Int64 // when that last ended
	starved atomic.Int64 // there are none although the budget has some
}

// supplied notes that clients don't wait for descriptors any more, if they did.
func (s *starvation) supplied() {
	if s.waiting.Load() != 0 {
		s.waited.Store(sinceEpoch())
		s.waiting.Store(0)
	}
}

// starve notes the first of several errors that say that the process, or the
// host, has no file descriptors left.
func (s *starvation) starve(err error) {
	if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
		s.starved.CompareAndSwap(0, sinceEpoch())
	}
}

// How many connections more than another loop one may have before it hands over what
// it accepts: this number, and an eighth. A loop that has none takes one at once: of two
// connections on one loop each waits for the other.
const (
	unevenBy    = 4
	unevenShare = 8
)

// assign has a connection that l has accepted served by l, unless another loop has
// clearly fewer, which serves it then. The kernel wakes a loop for a client, not
// for its share of them: in a burst, the one that is awake takes nearly all, and would
// serve them alone for as long as they last while other processors idle. It is compared with the
// next loop in turn, not with all: with many loops that evens them out as well.
func (l *loop) assign(t *listener, fd int, client netip.AddrPort) {
	other := l.neighbour()
	if l.keeps(other.assigned.Load()) {
		l.assigned.Add(1)
		l.admit(t, fd, client)
		return
	}
	other.assigned.Add(1) // before it can end
	if !other.post(func() { other.admit(t, fd, client) }) {
		other.assigned.Add(-1)
		l.assigned.Add(1)
		l.admit(t, fd, client)
	}
}

// keeps reports whether l serves one connection more itself, beside a loop with so
// many.
func (l *loop) keeps(theirs int32) bool {
	own := l.assigned.Load()
	if theirs == 0 {
		return own == 0
	}
	return own <= theirs+theirs/unevenShare+unevenBy
}

// neighbour is another loop, in turn; l itself where it is the only one.
func (l *loop) neighbour() *loop {
	loops := l.server.loops
	l.turn++
	if other := loops[l.turn%len(loops)]; other != l || len(loops) == 1 {
		return other
	}
	l.turn++
	return loops[l.turn%len(loops)]
}
