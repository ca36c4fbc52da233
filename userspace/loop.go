package userspace

import (
	"fmt"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// loop serves the connections that it accepted: one goroutine that waits for all
// of their sockets at once (epoll(7), edge-triggered) and never for one of them.
// What belongs to a connection is touched by its loop alone, so it needs no lock;
// others ask the loop by post.
//
// An idle connection costs its tcpConn, two sockets, and nothing else: neither
// goroutine, nor stack, nor buffer, nor pipe.
type loop struct {
	server *Server
	epoll  int
	bell   int // eventfd: somebody posted
	now    int64

	slots  []*tcpConn // by the number that the kernel names them by; nil where there is none
	free   []int32    // slots without a connection
	tags   uint32
	timers timers
	busy   []*tcpConn // whose turn ended before they ran out of bytes
	young  []youth
	buf    []byte // what is copied: one read at a time

	acceptors []*acceptor
	closing   bool // ends when it is set

	mu     sync.Mutex // guards what follows
	posted []func()
	rung   bool
	ended  bool
}

// The numbers of what isn't a connection.
const bellSlot = -1

// listenerSlot is that of the loop's i-th listener.
func listenerSlot(i int) int32 { return int32(-2 - i) }

// eventsAtOnce is how many events one wait returns at most.
const eventsAtOnce = 64

func (s *Server) newLoop() (*loop, error) {
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make epoll: %w", err)
	}
	bell, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		unix.Close(epoll)
		return nil, fmt.Errorf("make eventfd: %w", err)
	}
	l := &loop{server: s, epoll: epoll, bell: bell, buf: make([]byte, copySize)}
	if err := l.watch(bell, unix.EPOLLIN|unix.EPOLLET, bellSlot, 0); err != nil {
		l.release()
		return nil, err
	}
	for i, t := range s.tcp {
		l.acceptors = append(l.acceptors, newAcceptor(l, t, i))
	}
	return l, nil
}

// release closes what the loop itself holds.
func (l *loop) release() {
	unix.Close(l.bell)
	unix.Close(l.epoll)
}

// watch asks for events of a socket.
func (l *loop) watch(fd int, events uint32, slot int32, tag uint32) error {
	ev := unix.EpollEvent{Events: events, Fd: slot, Pad: int32(tag)}
	if err := sysControl(l.epoll, unix.EPOLL_CTL_ADD, fd, &ev); err != 0 {
		return fmt.Errorf("watch socket: %w", err)
	}
	return nil
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
		l.mature()
	}
	l.mu.Lock()
	l.ended, l.posted = true, nil
	l.mu.Unlock()
	l.release()
}

// shortWait is how long a loop waits for events, in milliseconds, before the Go
// scheduler hears of it (see makeRoom, which lets it keep its place): under load
// there are some before, and nobody has to look for a place then. A goroutine that
// is to stop, for the garbage collector say, gets a signal, which ends the wait.
const shortWait = 5

// wait waits for events, until the next timer is due at most.
func (l *loop) wait(events []unix.EpollEvent) int {
	patience := l.patience()
	short := shortWait
	if patience >= 0 {
		short = min(short, patience)
	}
	if n := sysEvents(l.epoll, events, short); n > 0 || short == patience {
		return n
	}
	if n, err := unix.EpollWait(l.epoll, events, l.patience()); err == nil {
		return n
	}
	return 0 // EINTR: nothing else can be wrong with it
}

// patience is how long the next wait may take, in milliseconds: until the next
// timer is due, rounded up so that it is.
func (l *loop) patience() int {
	if len(l.busy) > 0 {
		return 0
	}
	due := int64(-1)
	if len(l.timers) > 0 {
		due = l.timers[0].at
	}
	if len(l.young) > 0 && (due < 0 || l.young[0].due < due) {
		due = l.young[0].due
	}
	if due < 0 {
		return -1
	}
	return int(max(0, due-sinceEpoch()+int64(time.Millisecond)-1) / int64(time.Millisecond))
}

// dispatch hands an event to whom it concerns, if that is still there: a socket
// may have been closed since the wait.
func (l *loop) dispatch(ev *unix.EpollEvent) {
	switch {
	case ev.Fd == bellSlot:
		l.answer()
	case ev.Fd < 0:
		l.acceptors[-2-ev.Fd].accept()
	default:
		c, tag := l.slots[ev.Fd], uint32(ev.Pad)
		if c == nil {
			return
		}
		for i := range c.sides {
			if c.sides[i].tag == tag {
				c.event(i, ev.Events)
				return
			}
		}
	}
}

// resumesAtOnce is how many of those who had more to move have another turn before
// the loop looks for events: a thousand of them would keep it for half a second.
const resumesAtOnce = 16

// resume gives another turn to those who have waited longest.
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

// post lets the loop call f soon; it does nothing once the loop has ended.
func (l *loop) post(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return
	}
	l.posted = append(l.posted, f)
	if !l.rung {
		l.rung = true
		unix.Write(l.bell, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	}
}

// answer does what was posted.
func (l *loop) answer() {
	var b [8]byte
	unix.Read(l.bell, b[:])
	l.mu.Lock()
	posted := l.posted
	l.posted, l.rung = nil, false
	l.mu.Unlock()
	for _, f := range posted {
		f()
	}
}

// accept lets the loop wait at the listeners.
func (l *loop) accept() {
	for _, a := range l.acceptors {
		a.start()
	}
}

// close ends run once every connection has ended.
func (l *loop) close() { l.post(func() { l.closing = true }) }

// seat gives c a slot.
func (l *loop) seat(c *tcpConn) {
	if n := len(l.free); n > 0 {
		c.slot = l.free[n-1]
		l.free = l.free[:n-1]
	} else {
		c.slot = int32(len(l.slots))
		l.slots = append(l.slots, nil)
	}
	l.slots[c.slot] = c
}

// unseat takes c's slot away.
func (l *loop) unseat(c *tcpConn) {
	l.slots[c.slot] = nil
	l.free = append(l.free, c.slot)
}

// tag is what tells a socket from those that were in its place before.
func (l *loop) tag() uint32 {
	l.tags = max(l.tags+1, 1) // 0 is no socket's
	return l.tags
}
