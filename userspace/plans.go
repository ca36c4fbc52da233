package userspace

import (
	"kproxy.dev/kproxy/lb"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// plans is what the Server knows of services. The Server's lock guards it.
type plans struct {
	views  map[service.Key]*view
	states map[service.Key]*serviceState

	// Since the last Commit: views that another one has replaced, services that
	// are gone, and services that changed.
	replaced []*view
	gone     map[service.Key]bool
	changed  map[service.Key]bool
}

func newPlans() plans {
	return plans{
		views: map[service.Key]*view{}, states: map[service.Key]*serviceState{},
		gone: map[service.Key]bool{}, changed: map[service.Key]bool{},
	}
}

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
			s.takeUp(c.Is)
		}
	}
}

// takeUp serves a service as next says.
func (s *Server) takeUp(next *plan.Service) {
	k := next.Port.Key
	delete(s.plans.gone, k)
	s.plans.changed[k] = true
	before := s.plans.views[k]
	if before != nil {
		s.plans.replaced = append(s.plans.replaced, before)
	}
	state := s.plans.states[k]
	if state == nil {
		state = newServiceState(k)
		s.plans.states[k] = state
	}
	if before != nil {
		state.recover(before.plan, next)
	}
	v := newView(next, state, before)
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
		delete(s.plans.states, k)
		delete(s.plans.changed, k)
	}
	for k := range s.plans.changed {
		sessions = sessions || k.Protocol == service.UDP
		s.plans.states[k].retain(s.plans.views[k])
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
	if st := s.plans.states[k]; st != nil {
		return st.affinity.Load()
	}
	return nil
}
