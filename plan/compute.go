package plan

import (
	"cmp"
	"iter"
	"maps"
	"slices"
	"strings"
	"time"

	"kproxy.dev/kproxy/service"
)

// computation is one run of Compute: its inputs and what follows from them
// for every service alike.
type computation struct {
	in        Inputs
	snapshot  *service.Snapshot
	node      service.Node
	previous  *Plan // nil at start
	kernel    kernelChoice
	conflicts *conflicts
	detects   [2]bool // something tells pods from other clients, per family
	// localAddresses: a data plane that may be used answers on local addresses only.
	localAddresses  bool
	schedulersTitle string // of the data plane whose schedulers services may name, and a space
	// sameWorld: everything that services have in common is as it was for the
	// previous plan, so that a service that didn't change needn't be settled again.
	// sameConflicts: the same service ports want the same addresses.
	sameWorld, sameConflicts bool
	// all: every service port has to be decided again.
	all bool
	// changed are the indices of service ports that the snapshot changes, unless all.
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
		Time: in.Now, Kernel: c.kernel.names(), Forwarding: in.Caps.Forwarding,
		Node: c.node, Policy: c.in.Policy,
		Services: make([]*Service, n), conflicts: c.conflicts, kernel: c.kernel,
		TellsClients: len(c.kernel.planes) > 0 && !c.kernel.any(func(a *Abilities) bool { return !a.TellsClients }),
		snapshot:     c.snapshot,
	}
	d := Delta{Full: previous == nil}
	again := false // the service port that was the first to wake isn't any more
	if previous != nil {
		p.Wake = previous.Wake
	}
	before := previous.services()
	for i, j := range c.toDecide(p) {
		was, is := at(before, i), (*Service)(nil)
		changed := true
		if j >= 0 {
			is, changed = c.decide(was, j)
			p.Services[j] = is
			p.Wake = sooner(p.Wake, is.record.wake)
		}
		if changed {
			d.Changes = append(d.Changes, Change{was, is})
		}
		again = again || was != nil && !previous.Wake.IsZero() && was.record.wake.Equal(previous.Wake) && (is == nil || !is.record.wake.Equal(was.record.wake))
	}
	if again {
		p.Wake = time.Time{}
		for _, s := range p.Services {
			p.Wake = sooner(p.Wake, s.record.wake)
		}
	}
	return p, d
}

// toDecide yields the indices of service ports that have to be decided, in the
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
	indices := c.changed
	for k := range c.in.Dirty {
		if i, found := c.snapshot.Find(k); found {
			indices = append(indices, i)
		}
	}
	slices.Sort(indices)
	indices = slices.Compact(indices)
	return func(yield func(int, int) bool) {
		for _, i := range indices {
			yield(i, i)
		}
	}
}

// record holds what the next Compute may build on of one service port. It is never
// modified, and plans share it.
type record struct {
	facts  facts
	memory memory
	wake   time.Time // when time alone changes the outcome
}

// decide makes the Service of the snapshot's j-th service port; was is that of the
// previous plan, nil if it had none. It reports whether the two differ.
func (c *computation) decide(was *Service, j int) (*Service, bool) {
	port, eps, entry := c.snapshot.At(j)
	var r record
	if was != nil {
		r.memory = was.record.memory
	} else if c.in.Observed.Adopted[port.Key] {
		r.memory.offload(c.in.Now)
	}
	s := was
	reused := was != nil && c.reusable(was, entry)
	if reused {
		r.facts = was.record.facts
	} else {
		s, r.facts = c.settle(port, eps, entry)
	}
	st := c.outcomeOf(s, &r.facts, &r.memory)
	r.wake = st.wake
	if p := r.facts.panic; p != "" && st.reason != p && st.state != StateRejecting {
		st.reason += "; " + p
	}
	moved := s.DataPlane != st.plane || s.State != st.state || s.Reason != st.reason || s.Cause != st.cause || !s.QualifiesAt.Equal(st.qualifiesAt)
	if reused {
		if !moved && r.memory == was.record.memory && r.wake == was.record.wake {
			return was, false
		}
		made := *was // plans share services
		s = &made
	}
	s.DataPlane, s.State, s.Reason, s.Cause, s.QualifiesAt = st.plane, st.state, st.reason, st.cause, st.qualifiesAt
	made := r // what is reused stays off the heap
	s.record = &made
	return s, moved || !reused
}

func newComputation(previous *Plan, in Inputs) *computation {
	c := &computation{in: in, snapshot: in.Snapshot, previous: previous}
	if c.snapshot == nil {
		c.snapshot = &service.Snapshot{}
	}
	c.node = c.snapshot.Node()
	c.in.Policy = in.Policy.of(c.snapshot, &c.node)
	c.kernel = chooseKernel(in.Policy.Mode, in.Caps.Planes)
	c.localAddresses = c.kernel.any(func(a *Abilities) bool { return a.LocalAddresses })
	for _, a := range in.Caps.Planes {
		if a.Schedulers {
			c.schedulersTitle = a.Title + " "
		}
	}
	for _, f := range service.Families {
		c.detects[f] = c.in.Policy.Detects(f)
	}
	if previous != nil {
		c.sameWorld = previous.kernel.same(&c.kernel) && previous.Forwarding == in.Caps.Forwarding &&
			c.samePolicy(&previous.Policy) && sameHost(&previous.Node, &c.node)
		c.compareSnapshots(previous.snapshot)
	}
	if c.sameConflicts {
		c.conflicts = previous.conflicts
	} else {
		c.conflicts = c.findConflicts()
	}
	c.all = !c.sameWorld || !c.sameConflicts || in.Dirty == nil || !c.sameMoves(&previous.Policy) || !previous.Wake.IsZero() && !in.Now.Before(previous.Wake)
	return c
}

// compareSnapshots finds out what differs.
func (c *computation) compareSnapshots(old *service.Snapshot) {
	c.sameConflicts = true
	for i, j := range service.Changes(old, c.snapshot) {
		if i < 0 || j < 0 {
			c.sameConflicts = false
			return
		}
		was, _, _ := old.At(i)
		is, _, _ := c.snapshot.At(j)
		c.sameConflicts = c.sameConflicts && sameBindings(was, is)
		c.changed = append(c.changed, j)
	}
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
	return old.DrainedBy == p.DrainedBy && old.OffloadAfter == p.OffloadAfter && old.OffloadMinConnections == p.OffloadMinConnections &&
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

// facts holds what decides about a service port besides time and what the data
// planes report. It is made together with the parts of a Service that
// depend on nothing else either, and both serve the next plan as they are if
// nothing they depend on changed.
type facts struct {
	left          string // why another proxy serves it; empty if none does
	refusal       string // why no frontend serves anybody; empty if one does
	refused       Cause  // the same in a word
	inexpressible string // why the kernel can't carry it; empty if it can
	panic         string // why endpoints that are down are served; empty if they aren't
	qualified     string // the reason of a service that is offloaded; see choice
	steady        uint64 // what must not change for it to be steady
	flaps         []flap
}

// offloaded is the outcome for a service that the kernel carries.
func (f *facts) offloaded() outcome {
	return outcome{state: StateOffloaded, reason: f.qualified, cause: CauseQualified}
}

// choice returns the kernel data plane that mode auto fell back to, and why, in
// brackets; empty if it didn't.
func (f *facts) choice() string { return strings.TrimPrefix(f.qualified, reasonQualified) }

// flap is a change of health of the endpoint in a row of Service.Endpoints.
type flap struct {
	at  time.Time
	row int
}

// reusable reports whether the previous plan's Service is still right for what the
// snapshot has under entry, but for its data plane and state.
func (c *computation) reusable(was *Service, entry uint64) bool {
	p := was.Port
	if !c.sameWorld || was.entry != entry {
		return false
	}
	if !c.sameConflicts && !maps.Equal(c.previous.conflicts.lost[p.Key], c.conflicts.lost[p.Key]) {
		return false
	}
	if c.in.Dirty != nil && !c.in.Dirty[p.Key] {
		return true // health hasn't changed
	}
	for i := range was.Endpoints {
		e := &was.Endpoints[i]
		if e.Ejected != c.ejected(p, e.Address) {
			return false
		}
		st := c.in.Health.Of(p, e.Address)
		if st.Since != e.Since || st.LastError != e.Error || st.Status.String() != e.Health {
			return false
		}
	}
	return true
}

// settle makes the Service of a service port, without its data plane and
// state, and the facts that these are decided by.
func (c *computation) settle(p *service.Port, eps []service.Endpoint, entry uint64) (*Service, facts) {
	s := &Service{Port: p, entry: entry}
	f := facts{qualified: reasonQualified}
	s.Endpoints, f.flaps = c.rows(p, eps)
	s.exclude()
	s.Frontends = c.frontends(p, s.Excluded)
	a, inexpressible := c.choosePlane(s)
	f.inexpressible = inexpressible
	if len(c.kernel.planes) > 0 && s.Kernel != c.kernel.planes[0].Plane {
		f.qualified += " (" + string(s.Kernel) + ": " + s.KernelReason + ")"
	}
	if over := c.in.Caps.PassedOver; over != "" && s.Kernel != None && c.in.Policy.Mode == ModeAuto {
		s.KernelReason += "; " + over
	}
	if len(s.Frontends) == 0 && s.Excluded != [2]bool{} {
		f.left, f.inexpressible = c.leave(s), ""
		s.KernelReason, s.Degraded, s.Scheduler, s.Problems = "", "", "", slices.Clone(p.Problems)
		f.steady = steadyHash(s)
		return s, f
	}
	if p.Protocol == service.SCTP && s.Kernel == None {
		for i := range s.Frontends {
			s.Frontends[i].Verdict = Reject
		}
		f.refused, f.refusal = CauseUnservable, "SCTP can't be served in userspace; "+c.kernel.why
	} else {
		f.panic = c.fillGroups(s, a)
		f.refused, f.refusal = refusal(s)
	}
	s.Problems = c.problems(s, a)
	c.keepFromOwnAddress(s, &f, a)
	c.keepFromForwarding(s, &f)
	s.KernelHash = kernelHash(s, &c.in.Policy, a)
	s.Leaving = slices.ContainsFunc(s.Endpoints, func(e Endpoint) bool { return e.Leaves() })
	f.steady = steadyHash(s)
	return s, f
}

// fillGroups fills the groups that frontends use and sets the verdicts. It
// returns what there is to say about panic.
func (c *computation) fillGroups(s *Service, a *Abilities) string {
	var said string
	for _, fam := range service.Families {
		var useCluster, useLocal bool
		for i := range s.Frontends {
			if f := &s.Frontends[i]; f.Family == fam {
				useCluster = useCluster || !f.Local || f.ShortCircuit
				useLocal = useLocal || f.Local
			}
		}
		if !useCluster && !useLocal {
			continue
		}
		sel := selectEndpoints(s.Endpoints, fam, c.node)
		g := &s.Groups[fam]
		var clusterPanic, localPanic string
		if useCluster {
			g.Cluster, clusterPanic = c.group(s, sel.cluster, a)
		}
		if useLocal {
			g.Local, localPanic = c.group(s, sel.local, a)
		}
		said = cmp.Or(said, clusterPanic, localPanic)
		somewhere := slices.ContainsFunc(sel.anywhere, func(i int) bool { return s.Endpoints[i].Weight > 0 })
		for i := range s.Frontends {
			if f := &s.Frontends[i]; f.Family == fam {
				f.Verdict = verdict(f, g, somewhere)
			}
		}
	}
	return said
}
