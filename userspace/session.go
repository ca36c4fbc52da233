package userspace

import (
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// trustFor is how long a silent session is believed to be still the one its
// client means. After that its flow may have expired in the kernel and another
// one, to another service, may look the same here; so the origin is asked
// again. It is far below the shortest lifetime of a flow
// (nf_conntrack_udp_timeout, 30 s).
const trustFor = time.Second

// rememberSize bounds the datagrams of which a copy is kept until an answer
// comes: more than fits in one packet isn't worth the memory.
const rememberSize = 1500

// queueSize is how many datagrams wait while a session isn't ready.
const queueSize = 16

// phase is what a session does with a datagram.
type phase int

const (
	waiting phase = iota // queues it: its origin is looked up
	ready                // sends it
	over                 // doesn't take it any more
)

// session carries one client's datagrams to one endpoint and back. It belongs to
// its worker but for what says otherwise.
type session struct {
	worker  *udpWorker
	key     sessionKey
	header  replyHeader
	in      int // index of the interface that its first datagram came in on
	phase   phase
	started time.Time
	heard   atomic.Int64 // when a datagram last came, from either side
	meters  [2]meter
	number  uint64 // in the live table

	first, last int16 // its datagrams in the batch that is in hand; -1 if none
	queue       [][]byte
	upstream    *upstream
	timer       timer // looks whether it's still in use
	class       class
	older       *session // in the list of its class
	younger     *session
	asks        int  // datagrams from the client, as far as they matter: up to 2
	answers     int  // and from the endpoint
	checking    bool // its origin is looked up again

	mu       sync.Mutex // guards what others read and the worker writes
	route    route
	endpoint *endpoint

	// An endpoint that is gone answers a datagram with an ICMP error. Then the
	// datagram is sent again, to the next endpoint, and the client needn't wait
	// until it does so itself.
	copied     []byte // the last one sent; empty if it was too large
	unanswered bool
	resends    int  // of copied
	greeted    bool // this endpoint has answered
	failures   int  // errors in a row that say nothing about the endpoint
}

// route is what a session's origin means under a plan.
type route struct {
	orig, client netip.AddrPort
	front        front
	from         plan.Client
}

func newSession(w *udpWorker, k sessionKey) *session {
	x := &session{worker: w, key: k, header: k.replyHeader(), started: time.Now(), first: -1, last: -1}
	x.heard.Store(w.now)
	x.timer.owner = x
	x.aged(asked)
	return x
}

// silent returns how long no datagram has come.
func (x *session) silent() time.Duration { return time.Duration(x.worker.now - x.heard.Load()) }

// flow returns where the session's datagrams arrive, and its client.
func (x *session) flow() [2]netip.AddrPort {
	w := x.worker
	return [2]netip.AddrPort{netip.AddrPortFrom(x.key.address(&x.key.local, 0), w.server.udp[0].port()), x.key.clientAddress()}
}

// touch takes note of a datagram from the client. After a silence, the session asks
// whether its key still means the same flow.
func (x *session) touch() {
	silent := x.silent()
	x.heard.Store(x.worker.now)
	x.resends = 0
	if x.phase == ready && silent > trustFor {
		x.phase, x.checking = waiting, true
		x.worker.ask(x)
	}
}

// forward sends the datagrams of the batch in hand.
func (x *session) forward() {
	w := x.worker
	ps := w.pieces[:0]
	for i := x.first; i >= 0; i = w.chain[i].next {
		data, _ := w.in.bytes(int(i))
		p := piece{data: data, segment: int(w.chain[i].segment)}
		if p.segment >= len(data) {
			p.segment = 0
		}
		ps = append(ps, p)
	}
	w.pieces, x.first, x.last = ps, -1, -1
	if x.phase == over || len(ps) == 0 {
		return
	}
	if x.asks += len(ps); x.asks > 1 || ps[0].segment != 0 {
		x.asks = 2
	}
	x.aged(x.said())
	if x.phase == waiting {
		for _, p := range ps {
			p.split(x.enqueue)
		}
		return
	}
	x.send(ps)
}

// said returns how much x has said.
func (x *session) said() class {
	switch {
	case x.answers == 0:
		return asked
	case x.asks == 1 && x.answers == 1:
		return exchanged
	}
	return talking
}

// enqueue keeps a copy of b until the session is ready.
func (x *session) enqueue(b []byte) {
	if len(x.queue) < queueSize {
		x.queue = append(x.queue, append([]byte(nil), b...))
	}
}

// flush sends what was queued.
func (x *session) flush() {
	queue := x.queue
	x.queue = nil
	if len(queue) == 0 {
		return
	}
	ps := make([]piece, len(queue))
	for i, b := range queue {
		ps[i].data = b
	}
	x.send(ps)
}

// found hears where the session's flow was headed.
func (x *session) found(orig, client netip.AddrPort, err error) {
	switch {
	case x.phase != waiting:
	case !x.checking:
		x.begin(orig, client, err)
	case err == nil && orig == x.route.orig && client == x.route.client:
		x.phase, x.checking = ready, false
		x.flush()
	default:
		x.replace(err)
	}
}

// replace has what came since go to the session of the flow that looks the same now.
func (x *session) replace(err error) {
	queue, first, last := x.queue, x.first, x.last
	x.first, x.last = -1, -1
	x.end()
	if err != nil {
		return
	}
	if next := x.worker.open(x.key, x.in); next != nil {
		next.queue, next.first, next.last = queue, first, last
		if first >= 0 {
			x.worker.touched = append(x.worker.touched, next)
		}
	}
}

// begin opens the session towards its service, if there is one and the client
// may use it.
func (x *session) begin(orig, client netip.AddrPort, err error) {
	r, ok := x.admit(orig, client, err)
	if !ok {
		x.end()
		return
	}
	x.mu.Lock()
	x.route = r
	x.mu.Unlock()
	r.front.view.state.active.Add(1)
	x.number = x.worker.server.live.add(x)
	x.worker.timers.set(&x.timer, x.worker.now+int64(x.idle()))
	if !x.connect(nil) {
		x.fail()
		return
	}
	x.worker.server.connected(r.front.view.state, x.endpoint, true)
	x.phase = ready
	x.flush()
}

// admit finds out where the session leads; false if no plan knows, or the
// client may not use it.
func (x *session) admit(orig, client netip.AddrPort, err error) (route, bool) {
	s := x.worker.server
	if err != nil || orig == x.flow()[0] {
		return route{}, false
	}
	r := route{orig: orig, client: client}
	var ok bool
	if r.front, ok = s.table.lookup(service.UDP, orig, s.locals.mustContain); !ok {
		return route{}, false
	}
	r.from, ok = s.admit(r.front, client.Addr(), func() string { return arrival(x.worker.descriptor(x.key.family), x.in, client.Addr()) })
	return r, ok
}

// fail ends a session that no endpoint takes.
func (x *session) fail() {
	x.route.front.view.state.failed.Add(1)
	x.end()
}

// end ends the session.
func (x *session) end() {
	if x.phase == over {
		return
	}
	w := x.worker
	x.phase, x.queue = over, nil
	if w.sessions[x.key] == x {
		delete(w.sessions, x.key)
	}
	x.unlink()
	w.timers.stop(&x.timer)
	x.disconnect(true)
	if v := x.route.front.view; v != nil {
		v.state.active.Add(-1)
		w.server.live.remove(x.number)
	}
	w.server.sessions.Add(-1)
	w.server.flows.Done()
}

// alarm implements the timer's owner: it ends a session that is silent.
func (x *session) alarm() {
	if left := x.idle() - x.silent(); left > 0 {
		x.worker.timers.set(&x.timer, x.worker.now+int64(left))
		return
	}
	x.end()
}

// idle returns how long the session may be silent. While draining that is
// short: datagrams have no end that could be waited for.
func (x *session) idle() time.Duration {
	s := x.worker.server
	if s.isStopped() {
		return trustFor
	}
	if d := x.route.front.view.plan.Port.IdleTimeout; d > 0 {
		return d
	}
	return s.cfg.UDPIdleTimeout
}

// follow ends a session that a new plan leaves without its service or
// endpoint: its next datagram opens another one.
func (x *session) follow() {
	s, r := x.worker.server, x.route
	if r.front.view == nil || x.endpoint == nil {
		return
	}
	f, ok := s.table.lookup(service.UDP, r.orig, s.locals.mustContain)
	if !ok || f.view.state != r.front.view.state || !f.view.keeps(x.endpoint.address) {
		x.end()
	}
}
