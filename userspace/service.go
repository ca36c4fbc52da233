package userspace

import (
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	"kproxy.dev/kproxy/lb"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// view is a service as one plan decided it. It is immutable; its state isn't.
type view struct {
	plan   *plan.Service
	state  *serviceState
	groups [2]groups
}

type groups struct{ cluster, local *group }

// group is a list of endpoints to choose from, and how. What choosing needs is made
// for the first client: most groups of many services never have one, as the kernel
// serves these.
type group struct {
	backends  []plan.Backend
	algorithm service.Algorithm
	state     *serviceState

	once      sync.Once   // clients may come to several loops at a time
	endpoints []*endpoint // of backends
	targets   []lb.Target
	picker    lb.Picker
}

// newView reuses the groups of old, which may be nil, where they didn't change:
// a picker remembers whose turn it is.
func newView(s *plan.Service, old *view) *view {
	v := &view{plan: s}
	if old != nil {
		v.state = old.state
	} else {
		v.state = &serviceState{key: s.Port.Key}
	}
	v.state.configure(s.Port)
	for f := range s.Groups {
		var before groups
		if old != nil {
			before = old.groups[f]
		}
		g := &s.Groups[f]
		v.groups[f].cluster = newGroup(v, g.Cluster, before.cluster)
		v.groups[f].local = newGroup(v, g.Local, before.local)
	}
	return v
}

func newGroup(v *view, backends []plan.Backend, old *group) *group {
	if len(backends) == 0 {
		return noEndpoints
	}
	algorithm, g := v.plan.Port.Algorithm, old
	if g == nil || g.algorithm != algorithm || !slices.Equal(g.backends, backends) {
		g = &group{backends: backends, algorithm: algorithm, state: v.state}
	}
	if v.plan.Port.Affinity > 0 {
		g.open() // what is kept of its endpoints says whose clients to forget
	}
	return g
}

// noEndpoints serves all groups without endpoints: most services have some, in a
// family that they aren't served in and for traffic policy Local.
var noEndpoints = &group{}

// open makes what choosing needs, unless that was done.
func (g *group) open() *group {
	g.once.Do(func() {
		g.endpoints = make([]*endpoint, len(g.backends))
		g.targets = make([]lb.Target, len(g.backends))
		for i, b := range g.backends {
			g.endpoints[i] = g.state.endpoint(b.Address)
			g.targets[i] = lb.Target{Address: b.Address, Weight: b.Weight, Load: &g.endpoints[i].load}
		}
		g.picker = lb.New(g.algorithm, g.targets, rand.Uint64())
	})
	return g
}

// group returns the endpoints that c's connections to f may go to. The plan
// decides which; this only finds the picker made for them.
func (f front) group(c plan.Client, p *plan.Policy) *group {
	g := &f.view.groups[f.Family]
	if f.view.plan.UsesLocal(f.Frontend, c, p) {
		return g.local.open()
	}
	return g.cluster.open()
}

// keeps reports whether UDP sessions to an endpoint may go on: it still
// serves, if only those it has.
func (v *view) keeps(a netip.AddrPort) bool {
	e := v.plan.EndpointAt(a)
	return e != nil && e.Keeps()
}

// serviceState is the state of a service port, which outlives plans. Connections hold on to it even longer.
type serviceState struct {
	key      service.Key
	counters traffic
	active   atomic.Int64
	failed   atomic.Uint64 // clients that no endpoint took
	retried  atomic.Uint64 // attempts on a further endpoint
	hops     hopCounts
	reached  atomic.Bool // OnFirst was called
	affinity atomic.Pointer[lb.Affinity]

	mu        sync.Mutex                   // guards the map, not what its values point to
	endpoints map[netip.AddrPort]*endpoint // those that a client could have been sent to
}

// endpoint is the state of one endpoint of a service port, from its first client on.
type endpoint struct {
	address  netip.AddrPort
	load     lb.Load
	counters traffic
	failures atomic.Uint64
	connects connectTimes
	departed atomic.Bool // the last plan hasn't it
}

// traffic counts what was carried.
type traffic struct {
	total    atomic.Uint64 // connections or sessions
	bytesIn  atomic.Uint64 // from client to endpoint
	bytesOut atomic.Uint64
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

// configure prepares the affinity table the port asks for. With another time-out, clients keep their endpoints.
func (s *serviceState) configure(p *service.Port) {
	switch a := s.affinity.Load(); {
	case p.Affinity <= 0:
		s.affinity.Store(nil)
	case a == nil:
		s.affinity.Store(lb.NewAffinity(p.Affinity))
	default:
		a.SetTimeout(p.Affinity)
	}
}

// retain forgets the endpoints that v doesn't have: their clients at once, the
// rest when their last connection has ended.
func (v *view) retain() {
	s := v.state
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.endpoints) == 0 {
		return
	}
	for a, e := range s.endpoints {
		departed := v.plan.EndpointAt(a) == nil
		if e.departed.Store(departed); !departed {
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

// plans holds what the Server knows of services. The Server's lock guards it.
type plans struct {
	views map[service.Key]*view

	// Since the last Commit: views that another one has replaced, services that
	// are gone, and services that changed.
	replaced []*view
	gone     map[service.Key]bool
	changed  map[service.Key]bool
}

// Ruled says by which policy the kernel's rules are; nil for not known.
func (s *Server) Ruled(p *plan.Policy) { s.table.ruled.Store(p) }

// Prepare serves what p adds from now on, to which d leads from the plan that was
// prepared last; what only earlier plans have is still served.
func (s *Server) Prepare(p *plan.Plan, d plan.Delta) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.table.policy.Store(&p.Policy)
	s.fallback.Store(p.Offloads())
	if d.Full {
		for k := range s.plans.views {
			s.plans.gone[k] = true // unless d has it
		}
	}
	for _, c := range d.Changes {
		if c.Is == nil {
			s.plans.gone[c.Key()] = true
		} else {
			s.update(c.Is)
		}
	}
}

// update serves a service by next.
func (s *Server) update(next *plan.Service) {
	k := next.Port.Key
	delete(s.plans.gone, k)
	s.plans.changed[k] = true
	before := s.plans.views[k]
	if before != nil {
		s.plans.replaced = append(s.plans.replaced, before)
	}
	v := newView(next, before)
	s.plans.views[k] = v
	s.table.set(v)
}

// Commit forgets what the plan that was prepared last doesn't hold. TCP connections
// live on, as they do in the kernel's data planes; UDP sessions end when their
// service or endpoint is gone.
func (s *Server) Commit() {
	if s.commit() {
		s.everySession((*session).follow)
	}
}

// commit reports whether there may be sessions to end.
func (s *Server) commit() (sessions bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, v := range s.plans.replaced {
		s.table.drop(v)
	}
	for k := range s.plans.gone {
		sessions = sessions || k.Protocol == service.UDP
		s.table.drop(s.plans.views[k])
		delete(s.plans.views, k)
		delete(s.plans.changed, k)
	}
	for k := range s.plans.changed {
		sessions = sessions || k.Protocol == service.UDP
		s.plans.views[k].retain()
	}
	// Not cleared: after the first plan they have room for every service.
	s.plans.replaced, s.plans.gone, s.plans.changed = nil, map[service.Key]bool{}, map[service.Key]bool{}
	return sessions
}

// Affinity returns the table of k's clients, nil if it has no affinity. It may
// be read and written, to take clients along when the service moves.
func (s *Server) Affinity(k service.Key) *lb.Affinity {
	s.mu.Lock()
	defer s.mu.Unlock()
	if v := s.plans.views[k]; v != nil {
		return v.state.affinity.Load()
	}
	return nil
}
