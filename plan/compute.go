package plan

import (
	"iter"
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
	// localAddresses: a data plane that may be used answers on local addresses only.
	localAddresses  bool
	schedulersTitle string // of the data plane whose schedulers services may name, and a space
	// sameWorld: everything that services have in common is as it was for the
	// previous plan, so that a service that didn't change needn't be settled again.
	// sameContests: the same service ports want the same addresses.
	sameWorld, sameContests bool
	// all: every service port has to be decided again.
	all bool
	// changed are the places of service ports that the snapshot changes, unless all.
	changed []int
}

// Compute decides. It returns the plan that follows previous, nil at start, and
// what differs between the two. It is pure: equal inputs give equal plans.
//
// A service port is decided again if the snapshot has another specification or
// other endpoints of it, if in.Dirty names it, or if something changed that
// concerns all of them. All others are shared with the previous plan.
func Compute(previous *Plan, in Inputs) (*Plan, Delta) {
	c := newComputation(previous, in)
	n := c.snapshot.Len()
	p := &Plan{
		Time: in.Now, Mode: in.Policy.Mode, Kernel: c.kernel.at(0), Fallback: c.kernel.at(1), Forwarding: in.Caps.Forwarding,
		Node: c.node, Policy: c.in.Policy,
		Services: make([]*Service, n), records: make([]*record, n),
		contests: c.contests, kernel: c.kernel,
		TellsClients: len(c.kernel.planes) > 0 && !c.kernel.any(func(a *Abilities) bool { return !a.TellsClients }),
		snapshot:     c.snapshot, refusals: len(in.Observed.Refused) > 0,
	}
	d := Delta{Full: previous == nil}
	again := false // the service port that was the first to wake isn't any more
	if previous != nil {
		p.Wake = previous.Wake
	}
	var before []*Service
	if previous != nil {
		before = previous.Services
	}
	for i, j := range c.toDecide(p) {
		var was *record
		if i >= 0 {
			was = previous.records[i]
		}
		if j < 0 {
			d.Changes = append(d.Changes, Change{Was: before[i]})
			again = again || was.wake.Equal(p.Wake)
			continue
		}
		s, r, changed := c.decide(i, j)
		p.Services[j], p.records[j] = s, r
		if changed {
			d.Changes = append(d.Changes, Change{at(before, i), s})
		}
		again = again || was != nil && was.wake.Equal(p.Wake) && !r.wake.Equal(was.wake)
		p.Wake = sooner(p.Wake, r.wake)
	}
	if again {
		p.Wake = time.Time{}
		for _, r := range p.records {
			p.Wake = sooner(p.Wake, r.wake)
		}
	}
	return p, d
}

// toDecide yields the places of service ports that have to be decided, in the
// previous plan and in p: -1 for one that isn't there. It gives p the others.
func (c *computation) toDecide(p *Plan) iter.Seq2[int, int] {
	if c.all {
		old := &service.Snapshot{}
		if c.previous != nil {
			old = c.previous.snapshot
		}
		return service.Pairs(old, c.snapshot)
	}
	copy(p.Services, c.previous.Services)
	copy(p.records, c.previous.records)
	places := c.changed
	for k := range c.in.Dirty {
		if i, found := c.snapshot.Find(k); found {
			places = append(places, i)
		}
	}
	slices.Sort(places)
	places = slices.Compact(places)
	return func(yield func(int, int) bool) {
		for _, i := range places {
			yield(i, i)
		}
	}
}

// record is what the next Compute may build on of one service port. It is never
// modified, and plans share it.
type record struct {
	facts  facts
	memory memory
	wake   time.Time // when time alone changes where the service stands
}

// decide makes the Service of the snapshot's j-th service port, and what the next
// plan builds on. If known, i is its place in the previous plan, else negative. It
// reports whether the Service differs from that in the previous plan.
func (c *computation) decide(i, j int) (*Service, *record, bool) {
	port, eps, entry := c.snapshot.At(j)
	var r record
	var was *record
	if i >= 0 {
		was = c.previous.records[i]
		r.memory = was.memory
	} else if c.in.Observed.Adopted[port.Key] {
		r.memory.offload(c.in.Now)
	}
	var s *Service
	reused := was != nil && c.reusable(i, port, entry)
	if reused {
		s, r.facts = c.previous.Services[i], was.facts
	} else {
		s, r.facts = c.settle(port, eps, entry)
	}
	st := c.stand(s, &r.facts, &r.memory)
	r.wake = st.wake
	s, moved := s.standing(st, &r.facts)
	if reused && !moved && r.memory == was.memory && r.wake == was.wake {
		return s, was, false
	}
	made := r // what is reused stays off the heap
	return s, &made, moved || !reused
}

func newComputation(previous *Plan, in Inputs) *computation {
	c := &computation{in: in, snapshot: in.Snapshot, previous: previous}
	if c.snapshot == nil {
		c.snapshot = &service.Snapshot{}
	}
	c.node = c.snapshot.Node()
	c.in.Policy = in.Policy.of(&c.node)
	c.kernel = chooseKernel(in.Policy.Mode, in.Caps.Planes)
	c.localAddresses = c.kernel.any(func(a *Abilities) bool { return a.LocalAddresses })
	for _, a := range in.Caps.Planes {
		if a.Schedulers {
			c.schedulersTitle = a.Title + " "
		}
	}
	c.reasons = reasonsOf(&in.Policy)
	for _, f := range service.Families {
		c.detects[f] = c.in.Policy.Detects(f)
	}
	if previous != nil {
		c.sameWorld = previous.kernel.same(&c.kernel) && previous.Forwarding == in.Caps.Forwarding &&
			c.samePolicy(&previous.Policy) && sameHost(&previous.Node, &c.node)
		c.compareSnapshots(previous.snapshot)
	}
	if c.sameContests {
		c.contests = previous.contests
	} else {
		c.contests = c.contest()
	}
	c.all = !c.sameWorld || !c.sameContests || in.Dirty == nil || !c.sameMoves(&previous.Policy) ||
		previous.refusals || len(in.Observed.Refused) > 0 || !previous.Wake.IsZero() && !in.Now.Before(previous.Wake)
	return c
}

// compareSnapshots finds out what differs.
func (c *computation) compareSnapshots(old *service.Snapshot) {
	c.sameContests = true
	for i, j := range service.Changes(old, c.snapshot) {
		if i < 0 || j < 0 {
			c.sameContests = false
			return
		}
		was, _, _ := old.At(i)
		is, _, _ := c.snapshot.At(j)
		c.sameContests = c.sameContests && wantSame(was, is)
		c.changed = append(c.changed, j)
	}
}

// standing returns s where it stands: itself if it stood there before, else a
// copy, because plans share services. It reports which.
func (s *Service) standing(st standing, f *facts) (*Service, bool) {
	reason := st.reason
	if f.panic != "" && reason != f.panic && st.state != StateRejecting {
		reason += "; " + f.panic
	}
	if s.DataPlane == st.plane && s.State == st.state && s.Reason == reason && s.Cause == st.cause && s.QualifiesAt.Equal(st.qualifiesAt) {
		return s, false
	}
	out := *s
	out.DataPlane, out.State, out.Reason, out.Cause, out.QualifiesAt = st.plane, st.state, reason, st.cause, st.qualifiesAt
	return &out, true
}

// samePolicy reports whether old and today's policy say the same of services.
// Links are no service's own.
func (c *computation) samePolicy(old *Policy) bool {
	p := &c.in.Policy
	return old.Mode == p.Mode && old.MasqueradeAll == p.MasqueradeAll && old.SameDetector(p) && old.sameNodePorts(p) && slices.Equal(old.ExcludeCIDRs, p.ExcludeCIDRs)
}

// sameMoves reports whether old and today's policy move services alike.
func (c *computation) sameMoves(old *Policy) bool {
	p := &c.in.Policy
	return old.OffloadAfter == p.OffloadAfter && old.OffloadMinConnections == p.OffloadMinConnections &&
		old.BackoffMax == p.BackoffMax && old.FlapLimit == p.FlapLimit
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
