package userspace

import (
	"net/netip"
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
	poller
	server *Server
	number int // its sockets' in the listeners
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
	answers  []origin // to what was looked up of them
	chain    [batchSize]link
	pieces   []piece
	outgoing outgoing

	upstreams []*upstream // by the number that the kernel names them by
	free      []int32
	tags      uint32
	again     []*upstream // have more to receive
	resumed   []*upstream // room for again
	resting   resting
	shedding  shedding
	closing   bool        // ends when it is set
	started   bool        // run was called
	pressed   atomic.Bool // somebody else asked it to make room
}

// workerListener and below are the numbers of the Server's UDP listeners.
const workerListener = bellNumber - 1

func (s *Server) newUDPWorker(number int) (*udpWorker, error) {
	w := &udpWorker{server: s, number: number, sessions: map[sessionKey]*session{}}
	err := w.init()
	if err != nil {
		return nil, err
	}
	w.resting.by = map[upstreamKey]*restList{}
	w.resting.sweep.owner = &w.resting
	w.resting.worker = w
	for i := range w.ages {
		w.ages[i].init()
	}
	if w.in, err = newBatch(); err == nil {
		w.out, err = newBatch()
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
	w.shut()
}

// run serves until close.
func (w *udpWorker) run() {
	w.replies.worker = w
	events := make([]unix.EpollEvent, eventsAtOnce)
	w.now = sinceEpoch()
	for !w.closing {
		n := w.wait(events)
		w.now = sinceEpoch()
		w.answer()
		for i := range events[:n] {
			w.dispatch(&events[i])
		}
		w.resume()
		w.replies.flush()
		w.timers.expire(w.now)
	}
	w.refusePosts()
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
