package userspace

import "slices"

// errorsInARow is how many errors that say nothing about the endpoint a
// session takes before it gives up.
const errorsInARow = 16

// connect chooses an endpoint, other than the one that failed last if there is
// another, and gets a socket towards it. Where the plan has changed, the
// endpoints are those of the new one.
func (x *session) connect(failed *endpoint) bool {
	s, r := x.worker.server, x.route
	x.unlink() // it must not be the one that is given up for its own socket
	defer func() { x.worker.ages[x.class].append(x) }()
	if f, ok := s.table.lookup(r.front.Protocol, r.orig, s.locals.mustContain); ok && f.view.state == r.front.view.state {
		r.front = f
	}
	group := r.front.group(r.from, s.table.rules())
	c := newChoice(group, r.front.view.state.affinity.Load(), r.from.Address)
	if failed != nil && len(group.endpoints) > 1 {
		c.exclude(failed)
	}
	for range 1 + s.retries(r.front.view.plan.Port) {
		e := c.next()
		if e == nil {
			return false
		}
		u, err := x.worker.upstream(upstreamKey{r.from.Address, s.table.source(r.front, r.from, e.address.Addr()), e.address})
		if err == nil {
			c.settled(e)
			x.mu.Lock()
			x.route, x.endpoint = r, e
			x.mu.Unlock()
			x.upstream, u.session, x.greeted = u, x, false
			return true
		}
		r.front.view.state.release(e)
		s.cfg.Logger.Debug("open upstream socket failed", "service", r.front.view.state.key, "endpoint", e.address, "error", err)
	}
	return false
}

// disconnect gives the socket back; it isn't used again unless it's sound, and the
// endpoint has nothing more to say to this client as far as one can tell.
func (x *session) disconnect(sound bool) {
	if x.upstream == nil {
		return
	}
	u := x.upstream
	x.upstream, u.session = nil, nil
	x.settle()
	x.route.front.view.state.release(x.endpoint)
	if sound && x.class == exchanged && !x.unanswered {
		u.heard = x.heard.Load()
		x.worker.resting.add(u)
	} else {
		x.worker.closeUpstream(u)
	}
}

// send hands datagrams to the endpoint. When the endpoint is found to be gone,
// the next one gets them.
func (x *session) send(ps []piece) {
	for moves := 0; len(ps) > 0 && x.phase == ready; {
		n, err := x.upstream.send(x.worker, ps)
		x.sent(ps[:n])
		ps = ps[n:]
		switch {
		case err == nil:
		case !blames(err) || moves > queueSize:
			ps = ps[1:] // lost, as datagrams may be
		default:
			moves++
			x.move(err)
		}
	}
}

// sent counts what was sent and remembers the last datagram of it.
func (x *session) sent(ps []piece) {
	if len(ps) == 0 {
		return
	}
	total := 0
	for _, p := range ps {
		total += len(p.data)
	}
	x.meters[clientSide].add(total)
	last := ps[len(ps)-1]
	b := last.data
	if last.segment != 0 {
		b = b[(last.datagrams()-1)*last.segment:]
	}
	x.unanswered = true
	x.copied = x.copied[:0]
	if len(b) <= rememberSize {
		x.copied = append(x.copied, b...)
	}
}

// move goes on with another endpoint, as this one is gone. It ends the session
// if there is none.
func (x *session) move(why error) {
	s, failed, from := x.worker.server, x.endpoint, x.upstream.key.from
	state := x.route.front.view.state
	lost := x.unanswered && len(x.copied) > 0
	x.disconnect(false)
	s.endpointFailed(state, failed, from, why)
	if !x.connect(failed) {
		x.fail()
		return
	}
	state.retried.Add(1)
	s.connected(state, x.endpoint, false)
	if lost && x.endpoint != failed && x.resends < s.retries(x.route.front.view.plan.Port) {
		x.resends++
		x.send([]piece{{data: slices.Clone(x.copied)}})
	}
}

// broken hears of an error that came back from the endpoint or the way to it.
func (x *session) broken(err error) {
	if !blames(err) {
		if x.failures++; x.failures >= errorsInARow {
			x.end()
		}
		return
	}
	x.move(err)
}

// answered takes note of datagrams from the endpoint.
func (x *session) answered(n, bytes int) {
	x.failures, x.unanswered = 0, false
	x.heard.Store(x.worker.now)
	x.meters[endpointSide].add(bytes)
	if x.answers += n; x.answers > 1 {
		x.answers = 2
	}
	x.aged(x.said())
	if !x.greeted {
		x.greeted = true
		x.endpoint.ejection.Succeeded()
	}
}
