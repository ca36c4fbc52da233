package userspace

import (
	"errors"
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

// acceptsAtOnce is how many connections a loop takes in before it looks after
// those it has; the other loops may take the next ones.
const acceptsAtOnce = 8

// acceptor is a loop's share in a listener, which all loops wait at together:
// the kernel wakes one of them (EPOLLEXCLUSIVE). Before each accept it takes the
// descriptors that the connection will need. While there are none it doesn't wait
// at the listener: clients wait in the kernel's backlog meanwhile, and connections of who
// has more than its share give way.
type acceptor struct {
	loop     *loop
	listener *tcpListener
	slot     int32
	watching bool
	stopped  bool
	retry    timer // after an accept that failed
	wait     time.Duration
	from     rawAddress // of whom was accepted last
}

func newAcceptor(l *loop, t *tcpListener, i int) *acceptor {
	a := &acceptor{loop: l, listener: t, slot: listenerSlot(i), wait: acceptWaitMin}
	a.retry.owner = a
	return a
}

// start waits at the listener.
func (a *acceptor) start() {
	if a.watching || a.stopped {
		return
	}
	if err := a.loop.watch(a.listener.fd, unix.EPOLLIN|unix.EPOLLEXCLUSIVE, a.slot, 0); err != nil {
		a.later(err)
		return
	}
	a.watching = true
	// There are descriptors again, and perhaps nobody who would show it by being
	// accepted: the probe mustn't find the listener waiting for ever.
	a.listener.supplied()
}

// alarm is retry's.
func (a *acceptor) alarm() { a.start() }

// pause doesn't.
func (a *acceptor) pause() {
	if a.watching {
		a.watching = false
		unix.EpollCtl(a.loop.epoll, unix.EPOLL_CTL_DEL, a.listener.fd, nil)
	}
}

// stop is pause for good.
func (a *acceptor) stop() {
	a.pause()
	a.stopped = true
	a.loop.timers.stop(&a.retry)
}

// accept takes in the clients that wait, as long as there are descriptors. No
// error ends it.
func (a *acceptor) accept() {
	if !a.watching {
		return // an event from before
	}
	s, t := a.loop.server, a.listener
	for range acceptsAtOnce {
		if !s.tcpBudget.tryOrWait(fdsPerConnection) {
			t.waiting.CompareAndSwap(0, sinceEpoch())
			a.pause()
			s.askForRoom()
			return
		}
		t.supplied()
		fd, err := sysAccept(t.fd, &a.from)
		if err != 0 {
			s.tcpBudget.release(fdsPerConnection)
			if err != unix.EAGAIN && !transient(err) {
				if t.starve(err); t.starved.Load() != 0 {
					s.askForRoom()
				}
				a.later(err)
			}
			return
		}
		a.wait = acceptWaitMin
		t.starved.Store(0)
		a.loop.place(t, fd, a.from.addrPort())
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

// supplied notes that clients don't wait for descriptors any more, if they did.
func (l *tcpListener) supplied() {
	if l.waiting.Load() != 0 {
		l.waited.Store(sinceEpoch())
		l.waiting.Store(0)
	}
}

// starve notes the first of several errors that say that the process, or the
// host, has no file descriptors left.
func (l *tcpListener) starve(err error) {
	if errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) {
		l.starved.CompareAndSwap(0, sinceEpoch())
	}
}
