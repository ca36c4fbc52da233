package userspace

import (
	"net/netip"
	"slices"
	"sync/atomic"
	"time"
)

const (
	// idleSocketFor is how long a socket waits for its next session.
	idleSocketFor = 10 * time.Second
	// idleSockets is how many of a worker do so.
	idleSockets = 1024
)

// socketKey is what sockets towards endpoints have in common that can stand in for each other.
// One client's never serve another, however they are masqueraded: what an endpoint sends
// very late stays on the host that asked.
type socketKey struct {
	client netip.Addr
	from   source
	to     netip.AddrPort
}

// socketPool holds a worker's sockets that serve no session now. To take one of them
// costs a quarter less processor time for each session than a new one, and no new flow in the kernel's
// table. But what an endpoint sends late must not reach another session. So only those
// get here that carried one question and its answer, and each is silent for a while first.
type socketPool struct {
	worker *udpWorker
	idle   map[socketKey][]*upstream // the one that was put first comes first
	n      atomic.Int32              // how many they are: others read it
	timer  timer                     // closes those that were in it for long
}

// put takes a socket, or closes it.
func (p *socketPool) put(u *upstream) {
	w := p.worker
	u.session, u.idleSince = nil, w.now
	if b := w.server.udpBudget; p.n.Load() >= idleSockets || w.server.isStopped() || b.low() || !b.tryAcquire(fdsPerSession) {
		w.closeUpstream(u)
		return
	}
	p.idle[u.key] = append(p.idle[u.key], u)
	p.n.Add(1)
	if p.timer.at == 0 {
		w.timers.set(&p.timer, w.now+int64(idleSocketFor))
	}
}

// take returns a socket that has been silent for long enough, nil if there is none.
func (p *socketPool) take(k socketKey) *upstream {
	us := p.idle[k]
	if len(us) == 0 || p.worker.now-us[0].idleSince < int64(trustFor) {
		return nil
	}
	u := us[0]
	p.remove(u)
	if nothingToReceive(u.fd) {
		return u
	}
	p.worker.closeUpstream(u) // its endpoint still sends
	return nil
}

// remove takes a socket out.
func (p *socketPool) remove(u *upstream) {
	us := p.idle[u.key]
	i := slices.Index(us, u)
	if p.idle[u.key] = slices.Delete(us, i, i+1); len(us) == 1 {
		delete(p.idle, u.key)
	}
	p.n.Add(-1)
	p.worker.server.udpBudget.release(fdsPerSession)
}

// closeBefore closes the sockets that were put before a time.
func (p *socketPool) closeBefore(at int64) {
	for _, us := range p.idle {
		for len(us) > 0 && us[0].idleSince < at {
			u := us[0]
			p.remove(u)
			p.worker.closeUpstream(u)
			us = p.idle[u.key]
		}
	}
}

// expired implements the timer's owner.
func (p *socketPool) expired() {
	w := p.worker
	p.closeBefore(w.now - int64(idleSocketFor) + 1)
	if p.n.Load() > 0 {
		w.timers.set(&p.timer, w.now+int64(idleSocketFor))
	}
}
