package plan

import (
	"maps"
	"slices"
	"time"
	"weak"

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
	// places are those at which snapshot differs from the previous plan's, if both
	// have the same keys and that is known.
	places     []int
	samePlaced bool
	news       news
	place      int // in snapshot, of the service port that is being decided
}

// Compute decides. It is pure: equal inputs give equal plans.
//
// Services that nothing happened to are shared with the previous plan, and cost a
// comparison of two pointers each.
func Compute(in Inputs) *Plan {
	c := newComputation(in)
	n := c.snapshot.Len()
	p := &Plan{
		Generation: c.snapshot.Hash(), Time: in.Now, Mode: in.Policy.Mode, Kernel: c.kernel.plane, Fallback: c.kernel.fallback, Forwarding: in.Caps.Forwarding,
		Node: c.node, Policy: c.in.Policy,
		Services: make([]*Service, n), records: make([]*record, n),
		contests: c.contests, kernel: c.kernel, schedulers: in.Caps.Schedulers, health: in.Health,
		snapshot: c.snapshot, told: toldOf(&c.in),
	}
	if c.samePlaced && !c.news.ofAll {
		c.amend(p)
		return p
	}
	at := 0 // in the previous plan, whose services are in key order too
	for i := range n {
		port, _, _ := c.snapshot.At(i)
		known := false
		for ; c.previous != nil && at < len(c.previous.Services); at++ {
			if o := comparePorts(c.previous.port(at), port); o >= 0 {
				known = o == 0
				break
			}
		}
		if known && c.untouched(at, i) {
			p.Services[i], p.records[i] = c.previous.Services[at], c.previous.records[at]
		} else {
			p.Services[i], p.records[i] = c.decide(i, at, known)
		}
		p.Wake = sooner(p.Wake, p.records[i].wake)
	}
	return p
}

// amend makes p of the previous plan, from which it differs only in those services
// that there is news of.
func (c *computation) amend(p *Plan) {
	copy(p.Services, c.previous.Services)
	copy(p.records, c.previous.records)
	p.Wake, p.lineage.from = c.previous.Wake, weak.Make(c.previous)
	first := false // one that is decided anew was the first to wake
	for i, news := range c.news.of {
		if !news {
			continue
		}
		p.Services[i], p.records[i] = c.decide(i, i, true)
		if p.Services[i] != c.previous.Services[i] {
			p.lineage.differ = append(p.lineage.differ, i)
		}
		was, is := c.previous.records[i].wake, p.records[i].wake
		first = first || !was.IsZero() && was.Equal(p.Wake) && !is.Equal(was)
		p.Wake = sooner(p.Wake, is)
	}
	if !first {
		return
	}
	p.Wake = time.Time{}
	for _, r := range p.records {
		p.Wake = sooner(p.Wake, r.wake)
	}
}

// decide makes the Service of the snapshot's i-th service port, and what the next
// plan builds on. If it is known, it was the previous plan's at-th.
func (c *computation) decide(i, at int, known bool) (*Service, *record) {
	port, eps, entry := c.snapshot.At(i)
	c.place = i
	var r record
	var was *record
	if known {
		was = c.previous.records[at]
		r.memory = was.memory
	} else if c.in.Observed.Adopted[port.Key] {
		r.memory.offload(c.in.Now)
	}
	var s *Service
	reused := known && c.reusable(at, port, entry)
	if reused {
		s, r.facts = c.previous.Services[at], was.facts
	} else {
		s, r.facts = c.settle(port, eps, entry)
	}
	st := c.stand(s, &r.facts, &r.memory)
	r.wake = st.wake
	s = s.standing(st, &r.facts)
	if reused && r.memory == was.memory && r.wake == was.wake {
		return s, was
	}
	made := r // what is reused stays off the heap
	return s, &made
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
	if c.previous != nil {
		c.places, c.samePlaced = c.snapshot.Differ(c.previous.snapshot)
	}
	c.contests = c.contest()
	c.news = c.findNews()
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
