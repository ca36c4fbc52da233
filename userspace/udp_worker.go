package userspace

import (
	"fmt"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// udpWorker serves the sessions of the clients that the kernel gives it, on one
// socket of each UDP listener: a goroutine that waits for datagrams and for
// nothing else. What belongs to its sessions is touched by it alone, so it needs no
// lock; others ask it by post.
type udpWorker struct {
	server *Server
	number int // its sockets' in the listeners
	epoll  int
	bell   int // eventfd: somebody posted
	now    int64

	in, out  *batch
	replies  replies
	sessions map[sessionKey]*session
	ages     [classes]ageList
	timers   timers
	touched  []*session // got datagrams from the batch that is in hand
	asking   []*session // those whose origin is to be looked up
	asked    []*session // room for asking
	flows    [][2]netip.AddrPort
	chain    [batchSize]link
	pieces   []piece
	outgoing outgoing

	upstreams []*upstream // by the number that the kernel names them by
	free      []int32
	tags      uint32
	again     []*upstream // have more to receive
	resting   resting
	crowd     crowd
	handled   int         // datagrams of this turn
	closing   bool        // ends when it is set
	pressed   atomic.Bool // somebody else asked it to make room

	mu      sync.Mutex // guards what follows
	posted  []func()
	rung    bool
	started bool
	ended   bool
}

// The numbers of what isn't an upstream.
const (
	workerBell     = -1
	workerListener = -2 // and below: of the Server's i-th UDP listener
)

func (s *Server) newUDPWorker(number int) (*udpWorker, error) {
	epoll, err := unix.EpollCreate1(unix.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("make epoll: %w", err)
	}
	bell, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		unix.Close(epoll)
		return nil, fmt.Errorf("make eventfd: %w", err)
	}
	w := &udpWorker{server: s, number: number, epoll: epoll, bell: bell, sessions: map[sessionKey]*session{}}
	w.resting.by = map[upstreamKey]*restList{}
	w.resting.sweep.owner = &w.resting
	w.resting.worker = w
	for i := range w.ages {
		w.ages[i].init()
	}
	if w.in, err = newBatch(); err == nil {
		w.out, err = newBatch()
	}
	if err == nil {
		err = w.watch(bell, unix.EPOLLIN, workerBell, 0)
	}
	for i, l := range s.udp {
		if err == nil {
			err = w.watch(l.fds[number], unix.EPOLLIN, int32(workerListener-i), 0)
		}
	}
	if err != nil {
		w.release()
		return nil, err
	}
	return w, nil
}

// release closes what the worker itself holds.
func (w *udpWorker) release() {
	w.resting.closeAll()
	w.in.release()
	w.out.release()
	unix.Close(w.bell)
	unix.Close(w.epoll)
}

func (w *udpWorker) watch(fd int, events uint32, number int32, tag uint32) error {
	ev := unix.EpollEvent{Events: events, Fd: number, Pad: int32(tag)}
	if err := unix.EpollCtl(w.epoll, unix.EPOLL_CTL_ADD, fd, &ev); err != nil {
		return fmt.Errorf("watch socket: %w", err)
	}
	return nil
}

// run serves until close.
func (w *udpWorker) run() {
	w.replies.worker = w
	runtime.LockOSThread() // never unlocked: how it is scheduled ends with the thread
	events := make([]unix.EpollEvent, eventsAtOnce)
	w.now = sinceEpoch()
	for !w.closing {
		w.crowd.giveWay(w.now)
		n := w.wait(events)
		w.now = sinceEpoch()
		w.answer()
		for i := range events[:n] {
			w.dispatch(&events[i])
		}
		w.resume()
		w.replies.flush()
		w.timers.expire(w.now)
		w.crowd.note(w.handled, w.now)
		w.handled = 0
	}
	w.end()
	w.release()
}

// wait waits for events, and tells the runtime of it only when there are none.
func (w *udpWorker) wait(events []unix.EpollEvent) int {
	n := sysEvents(w.epoll, events, 0)
	if n > 0 || len(w.again) > 0 {
		return n
	}
	n, err := unix.EpollWait(w.epoll, events, w.patience())
	if err != nil {
		return 0 // EINTR: nothing else can be wrong with it
	}
	return n
}

// patience is how long a wait may take, in milliseconds, rounded up.
func (w *udpWorker) patience() int {
	if len(w.timers) == 0 {
		return -1
	}
	return int(max(0, w.timers[0].at-sinceEpoch()+int64(time.Millisecond)-1) / int64(time.Millisecond))
}

func (w *udpWorker) dispatch(ev *unix.EpollEvent) {
	switch {
	case ev.Fd >= 0:
		if u := w.upstreams[ev.Fd]; u != nil && u.tag == uint32(ev.Pad) {
			w.receive(u, ev.Events&unix.EPOLLERR != 0)
		}
	case ev.Fd <= workerListener:
		w.serve(w.server.udp[workerListener-ev.Fd])
	}
}

// post lets the worker call f soon; false if it isn't running.
func (w *udpWorker) post(f func()) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.started || w.ended {
		return false
	}
	w.posted = append(w.posted, f)
	if !w.rung {
		w.rung = true
		unix.Write(w.bell, []byte{1, 0, 0, 0, 0, 0, 0, 0})
	}
	return true
}

// answer does what was posted.
func (w *udpWorker) answer() {
	w.mu.Lock()
	posted := w.posted
	w.posted = nil
	if w.rung {
		w.rung = false
		var b [8]byte
		unix.Read(w.bell, b[:])
	}
	w.mu.Unlock()
	for _, f := range posted {
		f()
	}
}

// start lets posts in; run follows.
func (w *udpWorker) start() {
	w.mu.Lock()
	w.started = true
	w.mu.Unlock()
}

// end does what was posted last.
func (w *udpWorker) end() {
	w.mu.Lock()
	posted := w.posted
	w.posted, w.ended = nil, true
	w.mu.Unlock()
	for _, f := range posted {
		f()
	}
}

// close ends run.
func (w *udpWorker) close() { w.post(func() { w.closing = true }) }

// descriptor returns the worker's socket of a family's listener.
func (w *udpWorker) descriptor(f service.Family) int {
	for _, l := range w.server.udp {
		if l.family == f {
			return l.fds[w.number]
		}
	}
	return -1
}

// eachUDPWorker has all workers call f and waits until they have, those that
// run.
func (s *Server) eachUDPWorker(f func(*udpWorker)) {
	var done sync.WaitGroup
	for _, w := range s.workers {
		done.Add(1)
		if !w.post(func() { defer done.Done(); f(w) }) {
			done.Done()
		}
	}
	done.Wait()
}
