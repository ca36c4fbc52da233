package userspace

import (
	"sync/atomic"

	"golang.org/x/sys/unix"
)

// loop serves the connections that it accepted, or another loop handed to it (see assign): one
// goroutine that waits for all of their sockets at once (epoll(7), edge-triggered)
// and never for one of them. It alone touches what belongs to a connection, which so needs no lock;
// others ask it by post.
//
// An idle connection costs its tcpConn, two sockets, and nothing else: neither
// goroutine, nor stack, nor buffer, nor pipe.
type loop struct {
	poller
	server *Server
	now    int64

	assigned atomic.Int32 // connections that it has, or that are on their way to it
	turn     int          // of neighbour

	conns  slots[*tcpConn]
	timers timers
	busy   []*tcpConn    // whose turn ended before they ran out of bytes
	buf    []byte        // what is copied: one read at a time
	moving *atomic.Int32 // of records; nil without

	acceptors []*acceptor
}

// listenerSlot is the number of the loop's i-th listener.
func listenerSlot(i int) int32 { return int32(wakeupNumber - 1 - i) }

func (s *Server) newLoop() (*loop, error) {
	l := &loop{server: s, buf: make([]byte, copySize)}
	if err := l.init(); err != nil {
		return nil, err
	}
	l.admitPosts()
	for i, t := range s.tcp {
		l.acceptors = append(l.acceptors, newAcceptor(l, t, i))
	}
	return l, nil
}

// run serves until close.
func (l *loop) run() {
	events := make([]unix.EpollEvent, eventsAtOnce)
	for !l.closing {
		n := l.wait(events)
		l.now = sinceEpoch()
		for i := range events[:n] {
			l.dispatch(&events[i])
		}
		l.timers.expire(l.now)
		l.resume()
	}
	l.refusePosts()
	l.shut()
}

// shortWait is how long a loop waits for events, in milliseconds, before the Go
// scheduler hears of it (see raiseProcessors, which lets it keep its place): under load
// there are some before, and no thread has to look for a place then. The runtime
// stops a goroutine, for the garbage collector say, by a signal, which ends the wait.
const shortWait = 5

// wait waits for events, until the next timer is due at most.
func (l *loop) wait(events []unix.EpollEvent) int {
	if len(l.busy) > 0 {
		return sysEvents(l.epoll, events, 0)
	}
	due := l.timers.wait()
	if due != 0 && l.idle(l.now, 2*l.conns.len()) {
		return l.park(events, due)
	}
	short := shortWait
	if due >= 0 {
		short = min(short, due)
	}
	if n := sysEvents(l.epoll, events, short); n > 0 || short == due {
		return n
	}
	return l.block(events, l.timers.wait())
}

// dispatch handles an event, if what it concerns is still there: a socket
// may have been closed since the wait.
func (l *loop) dispatch(ev *unix.EpollEvent) {
	switch {
	case ev.Fd == wakeupNumber:
		l.runPosted()
	case ev.Fd < 0:
		l.acceptors[wakeupNumber-1-ev.Fd].accept()
	default:
		c, tag := l.conns.items[ev.Fd], uint32(ev.Pad)
		if c == nil {
			return
		}
		l.used = l.now
		for i := range c.sides {
			if c.sides[i].tag == tag {
				c.event(i, ev.Events)
				return
			}
		}
	}
}

// resumesAtOnce is how many of those that had more to move have another turn before
// the loop waits for events: a thousand of them would keep it for half a second.
const resumesAtOnce = 16

// resume gives another turn to those that have waited longest.
func (l *loop) resume() {
	n := min(len(l.busy), resumesAtOnce)
	first := l.busy[:n]
	if l.busy = l.busy[n:]; len(l.busy) == 0 {
		l.busy = nil
	}
	for i, c := range first {
		first[i] = nil
		c.queued = false
		if c.phase == relaying {
			c.relay()
		}
	}
}

// startAccepting lets the loop wait at the listeners.
func (l *loop) startAccepting() {
	for _, a := range l.acceptors {
		a.start()
	}
}

// stopAccepting stops that, until stopped is reset.
func (l *loop) stopAccepting() {
	for _, a := range l.acceptors {
		a.stop()
	}
}
