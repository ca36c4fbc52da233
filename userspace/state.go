package userspace

import (
	"net/netip"
	"sync"
	"sync/atomic"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/lb"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// serviceState is what is kept of a service port for as long as it exists,
// while plans come and go. Connections hold on to it even longer.
type serviceState struct {
	key      service.Key
	counters traffic
	active   atomic.Int64
	failed   atomic.Uint64 // clients that no endpoint took
	retried  atomic.Uint64 // attempts on a further endpoint
	carried  atomic.Bool   // OnFirst was called
	affinity atomic.Pointer[lb.Affinity]

	mu        sync.Mutex                   // guards the map, not what its values point to
	endpoints map[netip.AddrPort]*endpoint // those that a client could have been sent to
}

// endpoint is what is kept of one endpoint of a service port since a client came.
type endpoint struct {
	address  netip.AddrPort
	load     lb.Load
	counters traffic
	failures atomic.Uint64
	ejection health.Ejection
	departed atomic.Bool // the last plan hasn't it
}

// traffic counts what was carried.
type traffic struct {
	total    atomic.Uint64 // connections or sessions
	bytesIn  atomic.Uint64 // from client to endpoint
	bytesOut atomic.Uint64
}

func newServiceState(k service.Key) *serviceState {
	return &serviceState{key: k}
}

// endpoint returns the endpoint at a, and creates it when it's new.
func (s *serviceState) endpoint(a netip.AddrPort) *endpoint {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.endpoints[a]
	if e == nil {
		e = &endpoint{address: a}
		if s.endpoints == nil {
			s.endpoints = map[netip.AddrPort]*endpoint{}
		}
		s.endpoints[a] = e
	}
	return e
}

// configure prepares the affinity table the port asks for. A table with
// another time-out starts empty, as a new sessionAffinityConfig does upstream.
func (s *serviceState) configure(p *service.Port) {
	switch a := s.affinity.Load(); {
	case p.Affinity <= 0:
		s.affinity.Store(nil)
	case a == nil || a.Timeout() != p.Affinity:
		s.affinity.Store(lb.NewAffinity(lb.AffinityConfig{Timeout: p.Affinity}))
	}
}

// recover puts endpoints that active checks call up again back in good
// standing: that they were ejected says how they were before.
func (s *serviceState) recover(before, next *plan.Service) {
	var down map[netip.AddrPort]bool
	for i := range before.Endpoints {
		if e := &before.Endpoints[i]; e.Health == "down" {
			if down == nil {
				down = map[netip.AddrPort]bool{}
			}
			down[e.Address] = true
		}
	}
	if down == nil {
		return
	}
	for i := range next.Endpoints {
		if e := &next.Endpoints[i]; e.Health == "up" && down[e.Address] {
			s.recovered(e.Address)
		}
	}
}

// recovered ends an endpoint's ejection, if there is one.
func (s *serviceState) recovered(a netip.AddrPort) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.endpoints[a]; e != nil {
		e.ejection.Succeeded()
	}
}

// retain forgets the endpoints that v doesn't have: their clients at once, the
// rest when their last connection has ended.
func (s *serviceState) retain(v *view) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.endpoints) == 0 {
		return
	}
	keep := v.addresses()
	for a, e := range s.endpoints {
		e.departed.Store(!keep[a])
		if keep[a] {
			continue
		}
		if aff := s.affinity.Load(); aff != nil {
			aff.Forget(a)
		}
		if e.load.Active() == 0 {
			delete(s.endpoints, a)
		}
	}
}

// release ends a connection's use of e, and forgets it with the last one if it has departed.
func (s *serviceState) release(e *endpoint) {
	e.load.Release()
	if !e.departed.Load() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if e.departed.Load() && e.load.Active() == 0 && s.endpoints[e.address] == e {
		delete(s.endpoints, e.address)
	}
}
