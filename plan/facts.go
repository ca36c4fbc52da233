package plan

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"kproxy.dev/kproxy/service"
)

// facts are what decides about a service port besides time and what the data
// planes report. They are made together with the parts of a Service that
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

// offloaded is where a service stands that the kernel carries.
func (f *facts) offloaded() standing {
	return standing{state: StateOffloaded, reason: f.qualified, cause: CauseQualified}
}

// choice is which kernel data plane mode auto fell back to, and why, in
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
	if !c.sameContests && !maps.Equal(c.previous.contests.lost[p.Key], c.contests.lost[p.Key]) {
		return false
	}
	if c.in.Dirty != nil {
		return true // health hasn't changed
	}
	for i := range was.Endpoints {
		e := &was.Endpoints[i]
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
	s := &Service{Port: p, entry: entry, Excluded: c.exclude(p, eps)}
	s.Frontends = c.frontends(p, s.Excluded)
	a, inexpressible := c.choosePlane(s)
	f := facts{inexpressible: inexpressible}
	f.qualified = reasonQualified
	if s.Beneath != c.kernel.at(0) {
		f.qualified += " (" + string(s.Beneath) + ": " + s.BeneathReason + ")"
	}
	s.Endpoints, f.flaps = c.rows(p, eps)
	if len(s.Frontends) == 0 && s.Excluded != [2]bool{} {
		f.left, f.inexpressible = c.leave(s), ""
		s.BeneathReason, s.Degraded, s.Scheduler, s.Problems = "", "", "", slices.Clone(p.Problems)
		f.steady = steadyHash(s)
		return s, f
	}
	if p.Protocol == service.SCTP && s.Beneath == None {
		for i := range s.Frontends {
			s.Frontends[i].Verdict = Reject
		}
		f.refused, f.refusal = CauseUnservable, "SCTP can't be served in userspace; "+c.kernel.why
	} else {
		f.panic = c.fillGroups(s, eps, a)
		f.refused, f.refusal = refusal(s)
	}
	s.Problems = c.problems(s, eps, a)
	c.heedItself(s, &f, a)
	c.heedForwarding(s, &f)
	s.KernelHash = kernelHash(s, &c.in.Policy, a)
	if s.Leaves() {
		s.leaves = someLeave
	} else {
		s.leaves = noneLeaves
	}
	f.steady = steadyHash(s)
	return s, f
}

// fillGroups fills the groups that frontends use and sets the verdicts. It
// returns what there is to say about panic.
func (c *computation) fillGroups(s *Service, eps []service.Endpoint, a *Abilities) string {
	var said string
	ours := c.ours(eps)
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
		sel := selectEndpoints(ours, fam, c.node)
		g := &s.Groups[fam]
		var clusterPanic, localPanic string
		if useCluster {
			g.Cluster, clusterPanic = c.group(s, sel.cluster, a)
		}
		if useLocal {
			g.Local, localPanic = c.group(s, sel.local, a)
		}
		said = cmp.Or(said, clusterPanic, localPanic)
		somewhere := slices.ContainsFunc(sel.anywhere, func(i int) bool { return eps[i].Weight > 0 })
		for i := range s.Frontends {
			if f := &s.Frontends[i]; f.Family == fam {
				f.Verdict = verdict(f, g, somewhere)
			}
		}
	}
	return said
}
