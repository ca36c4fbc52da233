package userspace

import (
	"errors"
	"net"
	"os"
	"time"
)

// errorsInARow is how many errors that say nothing about the endpoint a
// session takes before it gives up.
const errorsInARow = 16

// serve is a session's goroutine: it finds out where the session leads, and
// brings back what the endpoint answers until the session is over.
func (x *session) serve() {
	defer x.kill()
	r, ok := x.admit()
	if !ok {
		return
	}
	x.mu.Lock()
	x.route = r
	x.mu.Unlock()
	state := r.front.view.state
	state.active.Add(1)
	defer state.active.Add(-1)
	id := x.server.live.add(x)
	defer x.server.live.remove(id)
	defer x.settle()
	var last *endpoint
	for first := true; ; first = false {
		e, u := x.connect(last)
		if e == nil {
			state.failed.Add(1)
			return
		}
		if !first {
			state.retried.Add(1)
		}
		open := x.open(u, e)
		if open {
			x.server.connected(state, e, first)
		}
		again := open && x.receive(u, e)
		x.settle()
		if !again {
			x.kill()
		}
		u.Close()
		e.load.Release()
		if !again {
			return
		}
		last = e
	}
}

// connect chooses an endpoint, other than the one that failed last if there is
// another, and makes a socket towards it. Where the plan has changed, the
// endpoints are those of the new one.
func (x *session) connect(failed *endpoint) (*endpoint, *upstream) {
	r := x.route
	if f, ok := x.server.table.lookup(r.front.Protocol, r.orig, x.server.locals.mustContain); ok && f.view.state == r.front.view.state {
		r.front = f
		x.mu.Lock()
		x.route = r
		x.mu.Unlock()
	}
	group := r.front.group(r.from, x.server.table.rules())
	c := newChoice(group, r.front.view.state.affinity.Load(), r.from.Address)
	if failed != nil && len(group.endpoints) > 1 {
		c.exclude(failed)
	}
	for range 1 + x.server.retries(r.front.view.plan.Port) {
		e := c.next()
		if e == nil {
			return nil, nil
		}
		u, err := x.server.openUpstream(x.server.table.source(r.front, r.from, e.address.Addr()), e.address)
		if err == nil {
			c.settled(e)
			return e, u
		}
		e.load.Release()
		x.server.cfg.Logger.Debug("open upstream socket failed", "service", r.front.view.state.key, "endpoint", e.address, "error", err)
	}
	return nil, nil
}

// receive brings back what the endpoint sends. It reports true when the
// session is to go on with another endpoint.
func (x *session) receive(u *upstream, e *endpoint) (again bool) {
	answered := false
	x.extend(u, x.idle())
	for failures := 0; failures < errorsInARow; {
		b, err := u.receive()
		if err == nil {
			failures = 0
			x.heard.Store(sinceEpoch())
			x.unanswered.Store(false)
			x.meters[endpointSide].add(len(b))
			x.reply.send(b)
			u.done(b)
			if !answered {
				answered = true
				e.ejection.Succeeded()
			}
			continue
		}
		switch broken := x.whyBroken(); {
		case errors.Is(err, net.ErrClosed):
			return false
		case broken != nil:
			x.server.endpointFailed(x.route.front.view.state, e, u.from, broken)
			return true
		case errors.Is(err, os.ErrDeadlineExceeded):
			left := x.idle() - x.silent()
			if left <= 0 {
				return false
			}
			x.extend(u, left)
		case blames(err):
			x.pause(err)
			x.server.endpointFailed(x.route.front.view.state, e, u.from, err)
			return true
		default:
			failures++
		}
	}
	return false
}

// idle returns how long the session may be silent. While draining that is
// short: datagrams have no end that could be waited for.
func (x *session) idle() time.Duration {
	if x.server.isStopped() {
		return trustFor
	}
	if d := x.route.front.view.plan.Port.IdleTimeout; d > 0 {
		return d
	}
	return x.server.cfg.UDPIdleTimeout
}

// pause queues datagrams until there is another endpoint.
func (x *session) pause(why error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.phase != over {
		x.fail(why)
	}
}

func (x *session) whyBroken() error {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.broken
}

// extend lets receive wait for d, unless it has been told to return now.
func (x *session) extend(u *upstream, d time.Duration) {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.broken == nil {
		u.expireIn(d)
	}
}

// hurry makes the session look at its idle time again.
func (x *session) hurry() {
	x.mu.Lock()
	u := x.upstream
	x.mu.Unlock()
	if u != nil {
		x.extend(u, trustFor)
	}
}
