package userspace

import (
	"math"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// udpWorker serves the sessions of the clients that the kernel gives it, on one
// socket of each UDP listener: a goroutine that waits for datagrams and for
// nothing else. It alone touches what belongs to its sessions, which so needs no
// lock; others ask it by post.
type udpWorker struct {
	poller
	server *Server
	number int // of its sockets in the listeners
	now    int64
	told   int64 // when a client was last told that its datagram may go no further

	in, out  *batch // of clients and of endpoints
	replies  replies
	outgoing outgoing
	sessions map[sessionKey]*session
	timers   timers
	pool     socketPool

	// While a batch is received: the sessions that got datagrams, the slot behind each slot in
	// the same session (-1 at the end), and a session's datagrams.
	received  []*session
	next      [batchSize]int16
	datagrams [][]byte

	unresolved []*session // whose original destination is to be looked up
	resolving  []*session // room for unresolved
	flows      [][2]netip.AddrPort
	origins    []origin

	upstreams slots[*upstream]
	readable  []*upstream // have more to receive
	turn      []*upstream // room for readable
}

// workerListener and below are the numbers of the Server's UDP listeners.
const workerListener = wakeupNumber - 1

func (s *Server) newUDPWorker(number int) (*udpWorker, error) {
	w := &udpWorker{server: s, number: number, sessions: map[sessionKey]*session{}}
	err := w.init()
	if err != nil {
		return nil, err
	}
	w.pool = socketPool{worker: w, idle: map[socketKey][]*upstream{}}
	w.pool.timer.owner = &w.pool
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
	w.pool.closeBefore(math.MaxInt64)
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
		w.runPosted()
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
	if n > 0 || len(w.readable) > 0 {
		return n
	}
	due := w.timers.wait()
	if due != 0 && w.idle(w.now, w.upstreams.len()) {
		return w.park(events, due)
	}
	return w.block(events, due)
}

func (w *udpWorker) dispatch(ev *unix.EpollEvent) {
	switch {
	case ev.Fd >= 0:
		if u := w.upstreams.items[ev.Fd]; u != nil && u.tag == uint32(ev.Pad) {
			w.used = w.now
			w.receive(u, ev.Events&unix.EPOLLERR != 0)
		}
	case ev.Fd <= workerListener:
		w.serve(w.server.udp[workerListener-ev.Fd])
	}
}

// socket returns the worker's socket of a family's listener.
func (w *udpWorker) socket(f service.Family) int {
	for _, l := range w.server.udp {
		if l.family == f {
			return l.fds[w.number]
		}
	}
	return -1
}

// receivesAtOnce is how many batches of clients' datagrams are received before the worker
// receives what endpoints sent.
const receivesAtOnce = 2

// serve receives from a listener's socket and forwards what came.
func (w *udpWorker) serve(l *listener) {
	for range receivesAtOnce {
		n, err := w.in.receive(l.fds[w.number], 0, batchSize, true)
		if err != nil {
			return // EAGAIN; an error of one of the replies concerns no other session
		}
		for i := range n {
			w.accept(l, i)
		}
		w.resolve()
		for i, x := range w.received {
			w.received[i], w.used = nil, w.now
			x.forward()
		}
		w.received = w.received[:0]
		if n < batchSize {
			return
		}
	}
}

// accept gives the datagram in a slot to its session, and opens one if there is none.
func (w *udpWorker) accept(l *listener, slot int) {
	data, whole := w.in.bytes(slot)
	k, in, hops, ok := keyOf(&w.in.names[slot], w.in.oob(slot))
	if !ok || !whole {
		return
	}
	x := w.sessions[k]
	if x == nil {
		if p := l.probe.Load(); p != nil && *p == k.clientAddress() {
			w.echo(k, data)
			return
		}
		if x = w.open(k, in); x == nil {
			return
		}
	}
	w.next[slot] = -1
	if x.first < 0 {
		x.first, x.hops = int16(slot), hops
		w.received = append(w.received, x)
		x.revalidate()
	} else {
		w.next[x.last] = int16(slot)
		x.hops = min(x.hops, hops)
	}
	x.last = int16(slot)
}

// echo answers a probe.
func (w *udpWorker) echo(k sessionKey, data []byte) {
	to := k.destination()
	w.outgoing.reset()
	w.outgoing.add([][]byte{data}, &to)
	w.outgoing.send(w.socket(k.family))
}

// open makes a session. Where room for them is short, another one gives way; where there is none, the
// datagram is lost, as datagrams may be.
func (w *udpWorker) open(k sessionKey, in int) *session {
	s := w.server
	if s.udpBudget.low() {
		w.makeRoom()
	}
	if !s.udpBudget.tryAcquire(fdsPerSession) {
		s.short[shortSessions].note()
		return nil
	}
	if !s.enter(false) {
		s.udpBudget.release(fdsPerSession)
		return nil
	}
	x := &session{worker: w, key: k, in: in, reply: k.destination(), first: -1, last: -1}
	x.started = time.Now()
	x.active.Store(w.now)
	x.timer.owner = x
	w.sessions[k] = x
	w.unresolved = append(w.unresolved, x)
	return x
}

// resolve looks up original destinations, many at once.
func (w *udpWorker) resolve() {
	for len(w.unresolved) > 0 { // a flow that has changed needs another look-up
		xs := w.unresolved
		w.unresolved, w.resolving = w.resolving[:0], xs
		w.flows, w.origins = w.flows[:0], w.origins[:0]
		for _, x := range xs {
			w.flows = append(w.flows, x.flow())
		}
		// What follows from an answer takes system calls, and other workers look up meanwhile.
		w.server.cfg.Origin.LookupAll(service.UDP, w.flows, func(_ int, orig, client netip.AddrPort, err error) {
			w.origins = append(w.origins, origin{orig, client, err})
		})
		for i, o := range w.origins {
			xs[i].resolved(o)
		}
		clear(xs)
		clear(w.origins)
	}
}

// perUpstream is how many datagrams of an endpoint are received by one system call, and
// upstreamCalls how many such calls there are before other sessions are served.
const (
	perUpstream   = 8
	upstreamCalls = 8
)

// receive brings back what an endpoint sends. Events come when there is
// something new, so it doesn't stop before nothing is left.
func (w *udpWorker) receive(u *upstream, failed bool) {
	x := u.session
	if x == nil { // what comes now is for no session
		w.pool.remove(u)
		w.closeUpstream(u)
		return
	}
	for range upstreamCalls {
		slot := w.replies.slot(x.key.family)
		room := min(perUpstream, batchSize-slot)
		n, err := w.out.receive(u.fd, slot, room, false)
		switch {
		case err == unix.EAGAIN:
			return
		case err != nil:
			forgetErrors(u.fd)
			x.broken(err)
			failed = true
		default:
			w.reply(x, slot, n)
		}
		if x.upstream != u || n < room && !failed {
			return
		}
	}
	if !u.queued {
		u.queued = true
		w.readable = append(w.readable, u)
	}
}

// reply takes what is in n slots to x's client.
func (w *udpWorker) reply(x *session, slot, n int) {
	count, total := 0, 0
	for i := slot; i < slot+n; i++ {
		if data, whole := w.out.bytes(i); whole {
			w.replies.add(x, data)
			count++
			total += len(data)
		}
	}
	w.replies.used += n
	if count > 0 {
		if x.answered(count, total); x.complete() {
			x.end()
		}
	}
}

// resume gives another turn to those that had more to receive.
func (w *udpWorker) resume() {
	if len(w.readable) == 0 {
		return
	}
	w.readable, w.turn = w.turn, w.readable
	for _, u := range w.turn {
		u.queued = false
		if u.fd >= 0 {
			w.receive(u, true)
		}
	}
	clear(w.turn) // and holds none of them
	w.turn = w.turn[:0]
}
