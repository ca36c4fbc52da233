package plan

import (
	"maps"
	"slices"
	"time"

	"kproxy.dev/kproxy/service"
)

// computation is one run of Compute: its inputs and what follows from them
// for every service alike.
type computation struct {
	in       Inputs
	snapshot *service.Snapshot
	node     service.Node
	previous *Plan // nil at start
	kernel   kernelChoice
	reasons  policyReasons
	contests *contests
	detects  [2]bool // pods are told from other clients, per family
	// sameWorld: everything that services have in common is as it was for the
	// previous plan, so that a service that didn't change needn't be settled again.
	sameWorld bool
}

// Compute decides. It is pure: equal inputs give equal plans.
//
// Services that nothing happened to are shared with the previous plan; those
// cost a few lookups each.
func Compute(in Inputs) *Plan {
	c := newComputation(in)
	n := c.snapshot.Len()
	p := &Plan{
		Generation: c.snapshot.Hash(), Time: in.Now, Mode: in.Policy.Mode, Kernel: c.kernel.plane, Fallback: c.kernel.fallback, Forwarding: in.Caps.Forwarding,
		Node: c.node, Policy: c.in.Policy,
		Services: make([]*Service, n), memory: make([]memory, n), facts: make([]facts, n),
		contests: c.contests, kernel: c.kernel, schedulers: in.Caps.Schedulers, health: in.Health,
	}
	at := 0 // in the previous plan, whose services are in key order too
	for i := range n {
		port, eps, entry := c.snapshot.At(i)
		known := false
		for ; c.previous != nil && at < len(c.previous.Services); at++ {
			if o := c.previous.Services[at].Port.Key.Compare(port.Key); o >= 0 {
				known = o == 0
				break
			}
		}
		var s *Service
		m := &p.memory[i]
		if known {
			*m = c.previous.memory[at]
		} else if in.Observed.Adopted[port.Key] {
			m.offload(in.Now)
		}
		if known && c.reusable(at, port, entry) {
			s, p.facts[i] = c.previous.Services[at], c.previous.facts[at]
		} else {
			s, p.facts[i] = c.settle(port, eps, entry)
		}
		st := c.stand(s, &p.facts[i], m)
		p.Services[i] = s.standing(st, &p.facts[i])
		p.Wake = sooner(p.Wake, st.wake)
	}
	return p
}

func newComputation(in Inputs) *computation {
	c := &computation{in: in, snapshot: in.Snapshot, previous: in.Previous}
	if c.snapshot == nil {
		c.snapshot = &service.Snapshot{}
	}
	c.node = c.snapshot.Node()
	c.in.Policy = in.Policy.of(&c.node)
	c.kernel = chooseKernel(in.Policy.Mode, in.Caps)
	c.reasons = reasonsOf(&in.Policy)
	for _, f := range service.Families {
		c.detects[f] = c.in.Policy.Detects(f)
	}
	c.sameWorld = c.previous != nil && c.previous.kernel == c.kernel && c.previous.Forwarding == in.Caps.Forwarding &&
		c.samePolicy(&c.previous.Policy) && c.sameSchedulers() && sameHost(&c.previous.Node, &c.node)
	c.contests = c.contest()
	return c
}

// standing returns s where it stands: itself if it stood there before, else a
// copy, because plans share services.
func (s *Service) standing(st standing, f *facts) *Service {
	reason := st.reason
	if f.panic != "" && reason != f.panic && st.state != StateRejecting {
		reason += "; " + f.panic
	}
	if s.DataPlane == st.plane && s.State == st.state && s.Reason == reason && s.Cause == st.cause && s.QualifiesAt.Equal(st.qualifiesAt) {
		return s
	}
	out := *s
	out.DataPlane, out.State, out.Reason, out.Cause, out.QualifiesAt = st.plane, st.state, reason, st.cause, st.qualifiesAt
	return &out
}

// samePolicy reports whether old and today's policy say the same of services.
// Links are no service's own.
func (c *computation) samePolicy(old *Policy) bool {
	p := &c.in.Policy
	return old.Mode == p.Mode && old.PanicThreshold == p.PanicThreshold &&
		old.MasqueradeAll == p.MasqueradeAll && old.SameDetector(p) && old.sameNodePorts(p) && slices.Equal(old.ExcludeCIDRs, p.ExcludeCIDRs) &&
		(!c.kernel.uses(IPVS) || old.Scheduler == p.Scheduler)
}

func (c *computation) sameSchedulers() bool {
	return !c.kernel.uses(IPVS) || maps.Equal(c.previous.schedulers, c.in.Caps.Schedulers)
}

func sameHost(a, b *service.Node) bool {
	return a.Name == b.Name && a.Zone == b.Zone && slices.Equal(a.Addresses, b.Addresses)
}

// sooner returns the earlier of two moments; the zero time is never.
func sooner(a, b time.Time) time.Time {
	if a.IsZero() || !b.IsZero() && b.Before(a) {
		return b
	}
	return a
}
