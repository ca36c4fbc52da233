package userspace

import (
	"container/heap"
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// wakeupNumber is what epoll names a poller's eventfd by.
const wakeupNumber = -1

// eventsAtOnce is how many events one wait returns at most.
const eventsAtOnce = 64

// poller lets a goroutine that serves many sockets wait for their events (epoll(7)),
// and for what others ask it to do. Others may call only post.
type poller struct {
	epoll  int
	wakeup int   // eventfd: something was posted
	used   int64 // when a client's or an endpoint's socket had an event

	mu     sync.Mutex // guards what follows
	posted []func()
	woken  bool
	open   bool // takes what is posted

	closing bool // the goroutine ends; it alone touches this
}

// init opens it. Nothing can be posted yet.
func (p *poller) init() error {
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return fmt.Errorf("make epoll: %w", err)
	}
	wakeup, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		unix.Close(epoll)
		return fmt.Errorf("make eventfd: %w", err)
	}
	p.epoll, p.wakeup = epoll, wakeup
	_ = unix.SetNonblock(epoll, true) // or os.NewFile doesn't take it for one that park can wait for
	if err := p.watch(wakeup, unix.EPOLLIN|unix.EPOLLET, wakeupNumber, 0); err != nil {
		p.shut()
		return err
	}
	return nil
}

// shut frees it.
func (p *poller) shut() {
	unix.Close(p.wakeup)
	unix.Close(p.epoll)
}

// watch asks for events of a socket, which epoll names by a number, and a tag that tells
// it from those that had the number before.
func (p *poller) watch(fd int, events uint32, number int32, tag uint32) error {
	ev := unix.EpollEvent{Events: events, Fd: number, Pad: int32(tag)}
	if err := sysControl(p.epoll, unix.EPOLL_CTL_ADD, fd, &ev); err != 0 {
		return fmt.Errorf("watch socket: %w", err)
	}
	return nil
}

// A poller is idle where heartbeats are all that has woken it for idleAfter nanoseconds, and it watches few sockets, of which the
// kernel looks at each one when park begins.
const (
	idleAfter    = int64(100 * time.Millisecond)
	parkedAtMost = 128
)

// parkedFrom is the lowest descriptor that park takes: its own comes and goes, and leaves the low ones to connections, which have
// them one after the other.
const parkedFrom = 1 << 10

func (p *poller) idle(now int64, sockets int) bool {
	return now-p.used > idleAfter && sockets <= parkedAtMost
}

// block waits for events; for wait milliseconds at most, unless that is negative.
func (p *poller) block(events []unix.EpollEvent, wait int) int {
	n, err := unix.EpollWait(p.epoll, events, wait)
	if err != nil {
		return 0 // EINTR: nothing else can be wrong with it
	}
	return n
}

// park waits as block does, for an idle poller; wait isn't 0. Of a thread that blocks in a system call the Go runtime wants to know for
// ten milliseconds, at first every 20 µs, whether it still does (retake in runtime/proc.go), which costs several times what a
// heartbeat does; of a goroutine that waits at the runtime's own epoll it knows. The poller is there no longer than that: else
// each of its events would wake a thread of the runtime's as well.
func (p *poller) park(events []unix.EpollEvent, wait int) (n int) {
	fd, err := unix.FcntlInt(uintptr(p.epoll), unix.F_DUPFD_CLOEXEC, parkedFrom)
	if err != nil {
		return p.block(events, wait)
	}
	f := os.NewFile(uintptr(fd), "epoll")
	defer f.Close()
	raw, err := f.SyscallConn()
	if err == nil && wait >= 0 {
		err = f.SetReadDeadline(time.Now().Add(time.Duration(wait) * time.Millisecond))
	}
	if err == nil {
		err = raw.Read(func(uintptr) bool {
			n = sysEvents(p.epoll, events, 0)
			return n > 0
		})
	}
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return sysEvents(p.epoll, events, 0) // what has come as well isn't late
	case err != nil:
		return p.block(events, wait)
	}
	return n
}

// admitPosts lets others post from now on.
func (p *poller) admitPosts() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open = true
}

// post has f called soon, by the goroutine that waits; false if that takes
// nothing, or nothing any more.
func (p *poller) post(f func()) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.open {
		return false
	}
	p.posted = append(p.posted, f)
	if !p.woken {
		p.woken = true
		unix.Write(p.wakeup, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	}
	return true
}

// runPosted does what was posted.
func (p *poller) runPosted() {
	p.mu.Lock()
	posted := p.posted
	p.posted = nil
	if p.woken {
		p.woken = false
		var b [8]byte
		unix.Read(p.wakeup, b[:])
	}
	p.mu.Unlock()
	for _, f := range posted {
		f()
	}
}

// close ends the goroutine that waits.
func (p *poller) close() { p.post(func() { p.closing = true }) }

// refusePosts takes no more posts and does the last ones.
func (p *poller) refusePosts() {
	p.mu.Lock()
	p.open = false
	p.mu.Unlock()
	p.runPosted()
}

// probe proves that the goroutine goes round, within ctx.
func (p *poller) probe(ctx context.Context) error {
	done := make(chan struct{})
	if !p.post(func() { close(done) }) {
		return errors.New("not serving")
	}
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// everyPoller has all of ps call f and waits until they have, those that run.
func everyPoller[P interface{ post(func()) bool }](ps []P, f func(P)) {
	var done sync.WaitGroup
	for _, p := range ps {
		done.Add(1)
		if !p.post(func() { defer done.Done(); f(p) }) {
			done.Done()
		}
	}
	done.Wait()
}

// slots number what epoll names by numbers, and tag sockets: a number is used again.
type slots[T comparable] struct {
	items []T // the zero value where there is none
	free  []int32
	tags  uint32
}

func (s *slots[T]) add(item T) (number int32) {
	if n := len(s.free); n > 0 {
		number, s.free = s.free[n-1], s.free[:n-1]
		s.items[number] = item
		return number
	}
	s.items = append(s.items, item)
	return int32(len(s.items) - 1)
}

func (s *slots[T]) remove(number int32) {
	var none T
	s.items[number] = none
	s.free = append(s.free, number)
}

// len returns how many there are.
func (s *slots[T]) len() int { return len(s.items) - len(s.free) }

// tag returns a tag that tells a socket from those that had its number before.
func (s *slots[T]) tag() uint32 {
	s.tags = max(s.tags+1, 1) // 0 is no socket's
	return s.tags
}

// timer calls its owner at a time. It belongs to one poller.
type timer struct {
	at    int64 // in nanoseconds since epoch; 0 while it isn't set
	index int   // in the heap
	owner interface{ expired() }
}

// timers are a poller's, the next one first.
type timers []*timer

// set has t expire at a time, instead of any earlier one.
func (ts *timers) set(t *timer, at int64) {
	if t.at != 0 {
		t.at = at
		heap.Fix(ts, t.index)
		return
	}
	t.at = at
	heap.Push(ts, t)
}

// stop has t not expire.
func (ts *timers) stop(t *timer) {
	if t.at != 0 {
		heap.Remove(ts, t.index)
		t.at = 0
	}
}

// expire calls those that are due.
func (ts *timers) expire(now int64) {
	for len(*ts) > 0 && (*ts)[0].at <= now {
		t := (*ts)[0]
		ts.stop(t)
		t.owner.expired()
	}
}

// wait returns how long to wait for events until the next timer is due, in milliseconds,
// rounded up so that it is; -1 if there is none.
func (ts timers) wait() int {
	if len(ts) == 0 {
		return -1
	}
	return int(max(0, ts[0].at-sinceEpoch()+int64(time.Millisecond)-1) / int64(time.Millisecond))
}

// Len, Less, Swap, Push and Pop implement heap.Interface.

func (ts timers) Len() int           { return len(ts) }
func (ts timers) Less(i, j int) bool { return ts[i].at < ts[j].at }
func (ts timers) Swap(i, j int) {
	ts[i], ts[j] = ts[j], ts[i]
	ts[i].index, ts[j].index = i, j
}

func (ts *timers) Push(x any) {
	t := x.(*timer)
	t.index = len(*ts)
	*ts = append(*ts, t)
}

func (ts *timers) Pop() any {
	last := len(*ts) - 1
	t := (*ts)[last]
	(*ts)[last] = nil
	*ts = (*ts)[:last]
	return t
}

// epoch is where sinceEpoch starts: a monotonic clock that fits an atomic. It stands still while connections are at rest (rest): what
// bounds their silence, or how long a connect takes, counts when this process could have served them.
var (
	epoch  = time.Now()
	rested atomic.Int64 // in nanoseconds
)

func sinceEpoch() int64 { return int64(time.Since(epoch)) - rested.Load() }

// rest ends a rest that began at a time, to which it sets the clock.
func rest(began int64) { rested.Add(sinceEpoch() - began) }
