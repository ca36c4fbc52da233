package userspace

import (
	"cmp"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

const (
	// trustFor is how long a silent session is believed to be still the one its
	// client means. After that its flow may have expired in the kernel and another
	// one, to another service, may look the same here; so the origin is looked up
	// again. It is far below the shortest lifetime of a flow
	// (nf_conntrack_udp_timeout, 30 s).
	trustFor = time.Second
	// copyLimit bounds the datagrams of which a copy is kept until an answer
	// comes: more than fits in one packet isn't worth the memory.
	copyLimit = 1500
	// movesAtOnce is how many endpoints a session goes on to for one batch of datagrams.
	movesAtOnce = 16
	// errorsInARow is how many errors that say nothing about the endpoint a
	// session takes before it gives up.
	errorsInARow = 16
)

// sessionPhase says what a session does with a datagram.
type sessionPhase int

const (
	unresolved sessionPhase = iota // its origin is looked up before
	stale                          // the same, again
	ready                          // sends it
	ended                          // drops it
)

// class says how much the two sides of a session have exchanged, and so how much is lost when
// the session has to make room for another one.
type class int

const (
	unanswered class = iota // the endpoint hasn't answered
	exchanged               // the client sent one datagram and the endpoint answered, as in a look-up of a name
	talking                 // anything more
	classes
)

// session carries one client's datagrams to one endpoint and back. It belongs to
// its worker but for what says otherwise.
type session struct {
	described // state is nil until its origin is known
	worker    *udpWorker
	key       sessionKey
	reply     destination // of what goes to the client
	in        int         // index of the interface that its first datagram came in on
	phase     sessionPhase
	hops      int32        // that the datagrams received last have left, the least of them
	active    atomic.Int64 // when a datagram last came, from either side
	front     front
	from      plan.Client

	first, last int16 // slots of its datagrams in the batch that is being received; -1 if none
	upstream    *upstream
	timer       timer // checks whether it's still in use
	asked       int   // datagrams from the client, as far as they matter: up to 2
	answers     int   // and from the endpoint
	owed        int   // answers that are to come, where a datagram has a known number of them
	class       atomic.Int32

	// An endpoint that is gone answers a datagram with an ICMP error. Then the
	// datagram is sent again, to the next endpoint, and the client needn't wait
	// until it does so itself.
	copied  []byte // the last one sent; empty if it was too large
	pending bool   // no answer since
	resends int    // of copied
	greeted bool   // this endpoint has answered
	errors  int    // in a row that say nothing about the endpoint

	refused error // why no endpoint took it
	cutOff  bool  // it had answers, and no endpoint takes it any more
}

// silent returns how long no datagram has come.
func (x *session) silent() time.Duration { return time.Duration(x.worker.now - x.active.Load()) }

// flow returns where the session's datagrams arrive, and its client.
func (x *session) flow() [2]netip.AddrPort {
	w := x.worker
	return [2]netip.AddrPort{netip.AddrPortFrom(x.key.address(&x.key.local, 0), w.server.udp[0].port), x.key.clientAddress()}
}

// revalidate notes a datagram from the client. After a silence, it has the session's
// origin looked up again.
func (x *session) revalidate() {
	silent := x.silent()
	x.active.Store(x.worker.now)
	x.resends = 0
	if x.phase == ready && silent > trustFor {
		x.phase = stale
		x.worker.unresolved = append(x.worker.unresolved, x)
	}
}

// forward sends the datagrams of the batch that is being received.
func (x *session) forward() {
	w := x.worker
	ds := w.datagrams[:0]
	for i := x.first; i >= 0; i = w.next[i] {
		data, _ := w.in.bytes(int(i))
		ds = append(ds, data)
	}
	w.datagrams, x.first, x.last = ds, -1, -1
	switch {
	case x.phase == ended:
	case !x.state.hops.pass(x.hops):
		x.exceed(ds[0])
	default:
		x.count(len(ds), 0)
		x.owed += len(ds) * x.front.view.plan.Port.UDPResponses()
		x.send(ds)
	}
}

// count counts datagrams from the client and from the endpoint.
func (x *session) count(asked, answers int) {
	if x.asked == 2 && x.answers > 0 || x.answers == 2 {
		return // it can't say more
	}
	x.asked, x.answers = min(x.asked+asked, 2), min(x.answers+answers, 2)
	switch {
	case x.answers == 0:
		x.class.Store(int32(unanswered))
	case x.asked == 1 && x.answers == 1:
		x.class.Store(int32(exchanged))
	default:
		x.class.Store(int32(talking))
	}
}

// resolved goes on with the session's original destination.
func (x *session) resolved(o origin) {
	switch {
	case x.phase == unresolved:
		x.begin(o)
	case x.phase == stale && o.err == nil && o.orig == x.orig && o.client == x.client:
		x.phase = ready
	case x.phase == stale:
		x.replace(o.err)
	}
}

// replace has what came since go to the session of the flow that looks the same now.
func (x *session) replace(err error) {
	first, last := x.first, x.last
	x.first, x.last = -1, -1
	x.end()
	if err != nil {
		return
	}
	if next := x.worker.open(x.key, x.in); next != nil {
		next.first, next.last, next.hops = first, last, x.hops
		x.worker.received = append(x.worker.received, next)
	}
}

// begin opens the session towards its service, if there is one and the client
// may use it.
func (x *session) begin(o origin) {
	if !x.admit(o) {
		x.end()
		return
	}
	x.state = x.front.view.state
	x.state.active.Add(1)
	x.worker.server.live.add(x)
	x.worker.timers.set(&x.timer, x.worker.now+int64(x.idle()))
	if !x.state.hops.pass(x.hops) {
		first, _ := x.worker.in.bytes(int(x.first))
		x.exceed(first)
		x.refused = errNoHops
		x.end()
		return
	}
	if !x.connect(nil) {
		x.fail(errNoEndpoint)
		return
	}
	x.worker.server.connected(x.state, x.endpoint.Load(), true)
	x.phase = ready
}

// admit finds out where the session leads; false if no plan knows, or the
// client may not use it.
func (x *session) admit(o origin) (ok bool) {
	s := x.worker.server
	if o.err != nil || o.orig == x.flow()[0] {
		return false
	}
	x.orig, x.client = o.orig, o.client
	if x.front, ok = s.table.lookup(service.UDP, o.orig, s.locals.mustContain); !ok {
		s.turnedAway(front{}, service.UDP, o.client, o.orig, plan.Client{})
		return false
	}
	x.from, ok = s.admit(x.front, o.client.Addr(), func() string {
		return arrival(x.worker.socket(x.key.family), x.in, o.client.Addr())
	})
	if !ok {
		s.turnedAway(x.front, service.UDP, o.client, o.orig, x.from)
	}
	return ok
}

// connect chooses an endpoint, other than the one that failed last if there is
// another, and gets a socket towards it. Where the plan has changed, the
// endpoints are those of the new one.
func (x *session) connect(failed *endpoint) bool {
	s := x.worker.server
	if f, ok := s.table.lookup(service.UDP, x.orig, s.locals.mustContain); ok && f.view.state == x.state {
		x.front = f
	}
	group := x.front.group(x.from, s.table.rules())
	c := newChoice(group, x.state.affinity.Load(), x.from.Address)
	if failed != nil && len(group.endpoints) > 1 {
		c.exclude(failed)
	} else if failed == nil {
		c.before = s.endpointBefore(x.client, x.orig)
	}
	for range 1 + s.retries(x.front.view.plan.Port) {
		e := c.next()
		if e == nil {
			return false
		}
		u, err := x.worker.upstream(socketKey{x.from.Address, s.table.source(x.front, x.from, e.address.Addr()), e.address})
		if err == nil {
			c.connected(e)
			x.endpoint.Store(e)
			x.upstream, u.session, x.greeted = u, x, false
			s.records.of(u.fd).session(x)
			return true
		}
		x.state.release(e)
		s.cfg.Logger.Debug("open upstream socket failed", "service", x.state.key, "endpoint", e.address, "error", err)
	}
	return false
}

// disconnect gives the socket up. It gets into the pool if it is sound, and the endpoint has
// nothing more to say to this client as far as one can tell.
func (x *session) disconnect(sound bool) {
	if x.upstream == nil {
		return
	}
	u := x.upstream
	x.upstream = nil
	x.worker.server.records.of(u.fd).forget()
	x.settle()
	x.state.release(x.endpoint.Load())
	// An endpoint that sent more answers than its service says may send still more.
	if answered := x.complete() && x.owed == 0; sound && !x.pending && (answered || class(x.class.Load()) == exchanged) {
		x.worker.pool.put(u, answered)
	} else {
		x.worker.closeUpstream(u)
	}
}

// fail ends a session that no endpoint takes, or none any more.
func (x *session) fail(why error) {
	x.state.failed.Add(1)
	if x.answers > 0 {
		x.cutOff = true
	} else {
		x.refused = why
	}
	x.end()
}

// end ends the session.
func (x *session) end() {
	if x.phase == ended {
		return
	}
	w := x.worker
	x.phase = ended
	x.active.Store(-1) // it isn't a victim any more
	if w.sessions[x.key] == x {
		delete(w.sessions, x.key)
	}
	w.timers.stop(&x.timer)
	w.server.udpBudget.release(fdsPerSession)
	x.disconnect(true)
	if x.state != nil {
		w.server.cfg.OnEnd(End{Connection: x.describe(), Reset: x.cutOff, Refused: x.refused})
		x.state.active.Add(-1)
		w.server.live.remove(x)
	}
	w.server.flows.Done()
}

// expired implements the timer's owner: it ends a session that is silent.
func (x *session) expired() {
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
	return cmp.Or(x.front.view.plan.Port.IdleTimeout, s.cfg.UDPIdleTimeout)
}

// send sends datagrams to the endpoint. When the endpoint is found to be gone,
// the next one gets them.
func (x *session) send(ds [][]byte) {
	for moves := 0; len(ds) > 0 && x.phase == ready; {
		x.upstream.limit(x.hops)
		n, err := x.upstream.send(x.worker, ds)
		x.sent(ds[:n])
		ds = ds[n:]
		switch {
		case err == nil:
		case !blames(err) || expired(err, x.upstream.hops) || moves > movesAtOnce:
			ds = ds[1:] // lost, as datagrams may be
		default:
			moves++
			x.move(err)
		}
	}
}

// sent counts what was sent, and keeps a copy of the last datagram.
func (x *session) sent(ds [][]byte) {
	if len(ds) == 0 {
		return
	}
	for _, d := range ds {
		x.meters[clientSide].add(len(d))
	}
	x.pending, x.copied = true, x.copied[:0]
	if last := ds[len(ds)-1]; len(last) <= copyLimit {
		x.copied = append(x.copied, last...)
	}
}

// answered notes datagrams from the endpoint.
func (x *session) answered(n, bytes int) {
	x.errors, x.pending = 0, false
	x.active.Store(x.worker.now)
	x.meters[endpointSide].add(bytes)
	x.count(0, n)
	x.owed -= n
	if !x.greeted {
		x.greeted = true
		x.worker.server.cfg.OnAnswered(service.UDP, x.endpoint.Load().address)
	}
}

// complete reports whether nothing more is to come, as each datagram has had as many answers as the service says.
func (x *session) complete() bool { return x.owed <= 0 && x.front.view.plan.Port.UDPResponses() > 0 }

// broken handles an error that came back from the endpoint or the way to it.
func (x *session) broken(err error) {
	if blames(err) && !expired(err, x.upstream.hops) {
		x.move(err)
	} else if x.errors++; x.errors >= errorsInARow {
		x.end()
	}
}

// move goes on with another endpoint, as this one is gone. It ends the session
// if there is none.
func (x *session) move(why error) {
	s, failed := x.worker.server, x.endpoint.Load()
	lost := x.pending && len(x.copied) > 0
	x.disconnect(false)
	s.endpointFailed(x.state, failed, x.client.Addr(), why)
	if !x.connect(failed) {
		x.fail(why)
		return
	}
	x.state.retried.Add(1)
	s.connected(x.state, x.endpoint.Load(), false)
	if lost && x.endpoint.Load() != failed && x.resends < s.retries(x.front.view.plan.Port) {
		x.resends++
		x.send([][]byte{slices.Clone(x.copied)})
	}
}

// follow ends a session that a new plan leaves without its service or
// endpoint: its next datagram opens another one.
func (x *session) follow() {
	e := x.endpoint.Load()
	if e == nil {
		return
	}
	s := x.worker.server
	f, ok := s.table.lookup(service.UDP, x.orig, s.locals.mustContain)
	if !ok || f.view.state != x.state || !f.view.keeps(e.address) {
		x.end()
	}
}

// kill implements flow.
func (x *session) kill() { x.worker.post(x.end) }

// everySession has all workers call f with each of their sessions and waits until they have.
func (s *Server) everySession(f func(*session)) {
	everyPoller(s.workers, func(w *udpWorker) {
		for _, x := range w.sessions {
			f(x)
		}
	})
}
