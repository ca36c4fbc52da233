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
	waiting phase = iota // queues it: its origin is looked up, or an endpoint chosen
	ready                // sends it
	over                 // doesn't take it any more
)

// session carries one client's datagrams to one endpoint and back.
type session struct {
	listener *udpListener
	server   *Server
	key      sessionKey
	in       int // index of the interface that its first datagram came in on
	reply    replier
	started  time.Time
	heard    atomic.Int64 // when a datagram last came, from either side
	meters   [2]meter

	mu       sync.Mutex // guards the rest
	phase    phase
	queue    [][]byte
	route    route
	endpoint *endpoint
	upstream *upstream
	broken   error // why upstream can't be used any more
	checking bool  // revalidate is under way
	robbed   bool  // its descriptors belong to another session

	// An endpoint that is gone answers a datagram with an ICMP error. Then the
	// datagram is sent again, to the next endpoint, and the client needn't wait
	// until it does so itself.
	last       []byte // copy of the last one sent; empty if it was too large
	lost       bool   // last is to be sent again
	resends    int    // of last
	unanswered atomic.Bool
}

// route is what a session's origin means under a plan.
type route struct {
	orig, client netip.AddrPort
	front        front
	from         plan.Client
}

func newSession(l *udpListener, k sessionKey) *session {
	x := &session{listener: l, server: l.server, key: k, started: time.Now(), reply: newReplier(l, k)}
	x.heard.Store(sinceEpoch())
	return x
}

// silent returns how long no datagram has come.
func (x *session) silent() time.Duration { return time.Duration(sinceEpoch() - x.heard.Load()) }

// deliver sends a datagram of the client on its way and never waits. It
// reports false when the session is over.
func (x *session) deliver(b []byte) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	silent := x.silent()
	x.heard.Store(sinceEpoch())
	x.resends = 0
	switch {
	case x.phase == over:
		return false
	case x.phase == ready && silent > trustFor:
		x.phase, x.checking = waiting, true
		x.enqueue(b)
		x.server.flows.Go(x.revalidate) // the session counts as one, so Drain isn't past waiting
	case x.phase == ready:
		x.send(b)
	default:
		x.enqueue(b)
	}
	return true
}

// enqueue keeps a copy of b until the session is ready. The caller holds mu.
func (x *session) enqueue(b []byte) {
	if len(x.queue) < queueSize {
		x.queue = append(x.queue, append([]byte(nil), b...))
	}
}

// send hands b to the endpoint. When the endpoint is found to be gone, it waits
// for the next one. The caller holds mu.
func (x *session) send(b []byte) {
	switch err := x.upstream.send(b); {
	case err == nil:
		x.meters[clientSide].add(len(b))
		x.remember(b)
	case blames(err):
		x.fail(err)
		x.enqueue(b)
		x.upstream.interrupt()
	}
}

func (x *session) remember(b []byte) {
	x.unanswered.Store(true)
	x.last = x.last[:0]
	if len(b) <= rememberSize {
		x.last = append(x.last, b...)
	}
}

// fail makes datagrams wait for another endpoint. The caller holds mu.
func (x *session) fail(why error) {
	x.phase, x.broken = waiting, why
	x.lost = x.unanswered.Load() && len(x.last) > 0
}

// open makes the session ready, with what was queued sent first. It reports
// false when it is over.
func (x *session) open(u *upstream, e *endpoint) bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.phase == over {
		return false
	}
	moved := e != x.endpoint
	x.endpoint, x.upstream, x.broken = e, u, nil
	if x.checking {
		return true
	}
	x.phase = ready
	if x.lost && moved && x.resends < x.server.retries(x.route.front.view.plan.Port) {
		x.resends++
		x.send(x.last)
	}
	x.flush()
	return true
}

// flush sends what was queued. The caller holds mu.
func (x *session) flush() {
	queue := x.queue
	x.queue = nil
	for _, b := range queue {
		if x.phase != ready {
			x.enqueue(b)
			continue
		}
		x.send(b)
	}
}

// revalidate asks whether the session's key still means the same flow. If it
// doesn't, the datagrams that came since open another session.
func (x *session) revalidate() {
	orig, client, err := x.lookup()
	x.mu.Lock()
	if x.phase == over {
		x.mu.Unlock()
		return
	}
	x.checking = false
	if err == nil && orig == x.route.orig && client == x.route.client {
		if x.broken == nil { // else the next endpoint gets them
			x.phase = ready
			x.flush()
		}
		x.mu.Unlock()
		return
	}
	queue := x.queue
	x.finish()
	x.mu.Unlock()
	x.listener.forget(x)
	if err != nil {
		return
	}
	for _, b := range queue {
		x.listener.deliver(x.key, x.in, b)
	}
}

// lookup asks for the origin of the session's flow.
func (x *session) lookup() (orig, client netip.AddrPort, err error) {
	return x.server.cfg.Origin.Lookup(service.UDP, x.key.local, x.key.client)
}

// admit finds out where the session leads; false if no plan knows, or the
// client may not use it.
func (x *session) admit() (route, bool) {
	orig, client, err := x.lookup()
	if err != nil || orig == x.key.local {
		return route{}, false
	}
	r := route{orig: orig, client: client}
	var ok bool
	if r.front, ok = x.server.table.lookup(service.UDP, orig, x.server.locals.mustContain); !ok {
		return route{}, false
	}
	r.from, ok = x.server.admit(r.front, client.Addr(), x.incoming)
	return r, ok
}

// incoming returns the name of the interface that the session's client is on.
func (x *session) incoming() (name string) {
	if raw, err := x.listener.SyscallConn(); err == nil {
		_ = control(raw, func(fd int) error { name = interfaceName(fd, x.in); return nil })
	}
	return name
}

// finish ends the session; its goroutine does the rest. The caller holds mu.
func (x *session) finish() {
	x.phase, x.queue = over, nil
	if x.upstream != nil {
		x.upstream.Close()
	}
}

// rob ends the session and takes over its descriptors; false if it's over.
func (x *session) rob() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.phase == over {
		return false
	}
	x.robbed = true
	x.finish()
	return true
}

// release gives back the session's descriptors at its end.
func (x *session) release() {
	x.mu.Lock()
	defer x.mu.Unlock()
	if !x.robbed {
		x.server.udpBudget.release(fdsPerSession)
	}
}

// kill implements flow.
func (x *session) kill() {
	x.mu.Lock()
	x.finish()
	x.mu.Unlock()
	x.listener.forget(x)
}

// follow ends a session that a new plan leaves without its service or
// endpoint: its next datagram opens another one.
func (x *session) follow() {
	x.mu.Lock()
	r, e := x.route, x.endpoint
	x.mu.Unlock()
	if r.front.view == nil || e == nil {
		return
	}
	f, ok := x.server.table.lookup(service.UDP, r.orig, x.server.locals.mustContain)
	if !ok || f.view.state != r.front.view.state || !f.view.keeps(e.address) {
		x.kill()
	}
}

// describe implements flow.
func (x *session) describe() Connection {
	x.mu.Lock()
	defer x.mu.Unlock()
	c := Connection{
		Protocol: service.UDP, Client: x.route.client, Address: x.route.orig, Started: x.started,
		BytesIn: x.meters[clientSide].count.Load(), BytesOut: x.meters[endpointSide].count.Load(),
	}
	if x.route.front.view != nil {
		c.Service = x.route.front.view.state.key
	}
	if x.endpoint != nil {
		c.Endpoint = x.endpoint.address
	}
	return c
}

// settle implements flow.
func (x *session) settle() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.settleLocked()
}

func (x *session) settleLocked() {
	if x.endpoint == nil {
		return
	}
	s := x.route.front.view.state
	x.meters[clientSide].settle(&s.counters.bytesIn, &x.endpoint.counters.bytesIn)
	x.meters[endpointSide].settle(&s.counters.bytesOut, &x.endpoint.counters.bytesOut)
}
