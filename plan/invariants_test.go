package plan

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/service"
)

var allStates = []State{StateUserspace, StateQualifying, StateOffloaded, StateRecalled, StatePinned, StateRejecting, StateExcluded}

// checkPlan fails the test unless p has what every plan of in must have.
func checkPlan(t *testing.T, in *Inputs, p *Plan) {
	t.Helper()
	if !p.Time.Equal(in.Now) || len(p.Services) != in.Snapshot.Len() {
		t.Fatalf("plan isn't about its inputs")
	}
	if !p.Wake.IsZero() && !p.Wake.After(in.Now) {
		t.Fatalf("wake %v isn't after now %v", p.Wake, in.Now)
	}
	checkExcluded(t, in, p)
	taken := map[Binding]service.Key{}
	for i, s := range p.Services {
		port, eps, _ := in.Snapshot.At(i)
		if s.Port.Key != port.Key || p.Find(port.Key) != s {
			t.Fatalf("service %d is %v, want %v", i, s.Port.Key, port.Key)
		}
		if diff := cmp.Diff(eps, plainEndpoints(s.Endpoints), compareAddrs); diff != "" {
			t.Fatalf("%v: endpoints (-want +got):\n%s", s.Port.Key, diff)
		}
		for _, f := range s.Frontends {
			at := f.Binding()
			if other, ok := taken[at]; ok {
				t.Fatalf("%v and %v both have %v", s.Port.Key, other, at)
			}
			taken[at] = s.Port.Key
		}
		checkStanding(t, in, p, s)
		checkVerdicts(t, s)
		checkHealth(t, s)
		if s.State != StateExcluded {
			checkForwarding(t, in, s)
			checkKernel(t, in, p, s)
		}
	}
}

// checkExcluded: a service port has no frontend in a family in which all its
// endpoints are another proxy's, and none of those is in a group.
func checkExcluded(t *testing.T, in *Inputs, p *Plan) {
	t.Helper()
	for _, s := range p.Services {
		var ours, theirs [2]bool
		for _, e := range s.Endpoints {
			a := e.Address.Addr()
			f := service.FamilyOf(a)
			if e.Excluded != contains(in.Policy.ExcludeCIDRs, a) {
				t.Fatalf("%v: %v excluded: %v", s.Port.Key, a, e.Excluded)
			}
			ours[f], theirs[f] = ours[f] || !e.Excluded, theirs[f] || e.Excluded
		}
		for _, f := range s.Frontends {
			if theirs[f.Family] && !ours[f.Family] {
				t.Fatalf("%v: %s answers, and all its endpoints are another proxy's", s.Port.Key, f.Address)
			}
		}
		for _, g := range s.Groups {
			for _, b := range slices.Concat(g.Cluster, g.Local) {
				if contains(in.Policy.ExcludeCIDRs, b.Address.Addr()) {
					t.Fatalf("%v uses %v, which is another proxy's", s.Port.Key, b.Address)
				}
			}
		}
	}
}

func plainEndpoints(in []Endpoint) []service.Endpoint {
	var out []service.Endpoint
	for _, e := range in {
		out = append(out, *e.Endpoint)
	}
	return out
}

// checkStanding: one state, with a data plane that goes with it, and a reason.
func checkStanding(t *testing.T, in *Inputs, p *Plan, s *Service) {
	t.Helper()
	if !slices.Contains(allStates, s.State) || s.Reason == "" || !slices.Contains(Causes, s.Cause) {
		t.Fatalf("%v: state %q, reason %q, cause %q", s.Port.Key, s.State, s.Reason, s.Cause)
	}
	serves := slices.ContainsFunc(s.Frontends, func(f Frontend) bool { return s.Serves(&f) })
	if s.State == StateExcluded {
		if len(s.Frontends) > 0 || s.Kernel != None || s.KernelHash != 0 || s.DataPlane != None {
			t.Fatalf("%v is left to another proxy: %+v", s.Port.Key, s)
		}
		return
	}
	if serves != (s.DataPlane != None) || serves != (s.State != StateRejecting) {
		t.Fatalf("%v: serves %v in data plane %q, state %q", s.Port.Key, serves, s.DataPlane, s.State)
	}
	if s.Kernel != p.Preferred() && !p.Uses(s.Kernel) || (s.Kernel == None) != (s.KernelHash == 0) {
		t.Fatalf("%v: beneath %q with hash %d", s.Port.Key, s.Kernel, s.KernelHash)
	}
	if s.DataPlane != Userspace && s.DataPlane != None && s.DataPlane != s.Kernel {
		t.Fatalf("%v: data plane %q above %q", s.Port.Key, s.DataPlane, s.Kernel)
	}
	if s.DataPlane != None {
		switch s.State {
		case StateUserspace, StateQualifying, StateRecalled:
			if s.DataPlane != Userspace {
				t.Fatalf("%v: %s in data plane %q", s.Port.Key, s.State, s.DataPlane)
			}
		}
		if why := inexpressible(s.DataPlane, s.Port, in); why != "" && s.Port.Protocol != service.SCTP {
			t.Fatalf("%v: in data plane %q although %s", s.Port.Key, s.DataPlane, why)
		}
	}
	if !s.QualifiesAt.IsZero() && (!s.QualifiesAt.After(p.Time) || s.DataPlane != Userspace) {
		t.Fatalf("%v: qualifies at %v, now is %v", s.Port.Key, s.QualifiesAt, p.Time)
	}
}

// checkVerdicts: a frontend forwards if and only if its group takes connections.
func checkVerdicts(t *testing.T, s *Service) {
	t.Helper()
	usable := map[string]bool{}
	for _, f := range s.Frontends {
		g := s.Groups[f.Family].Cluster
		if f.Local {
			g = s.Groups[f.Family].Local
		}
		if (f.Verdict == Forward) != takesConnections(g) {
			t.Fatalf("%v: verdict %q with backends %v", s.Port.Key, f.Verdict, g)
		}
		if f.Verdict == Drop && !f.Local {
			t.Fatalf("%v: %v drops under policy Cluster", s.Port.Key, f.Address)
		}
	}
	for fam, g := range s.Groups {
		for _, b := range append(slices.Clone(g.Cluster), g.Local...) {
			if service.FamilyOf(b.Address.Addr()) != service.Family(fam) {
				t.Fatalf("%v: %v in the group of %v", s.Port.Key, b.Address, service.Family(fam))
			}
			usable[b.Address.String()] = usable[b.Address.String()] || b.Weight > 0
		}
		for _, b := range g.Local {
			if !b.Local {
				t.Fatalf("%v: %v in the local group", s.Port.Key, b.Address)
			}
		}
	}
	for _, e := range s.Endpoints {
		if e.Usable != usable[e.Address.String()] {
			t.Fatalf("%v: %v usable %v, want %v", s.Port.Key, e.Address, e.Usable, !e.Usable)
		}
	}
}

// checkHealth: a group has a backend that is down
// only if it has none that is up and takes connections.
func checkHealth(t *testing.T, s *Service) {
	t.Helper()
	down := map[string]bool{}
	for _, e := range s.Endpoints {
		down[e.Address.String()] = e.Health == "down"
	}
	for _, g := range s.Groups {
		for _, backends := range [][]Backend{g.Cluster, g.Local} {
			var anyDown, anyUp bool
			for _, b := range backends {
				anyDown = anyDown || down[b.Address.String()]
				anyUp = anyUp || !down[b.Address.String()] && b.Weight > 0
			}
			if anyDown && anyUp {
				t.Fatalf("%v: backends %v mix up and down (%v)", s.Port.Key, backends, down)
			}
		}
	}
}

// checkKernel: the kernel data plane of a service is one of the plan's; mode auto
// takes the other only with a reason, and never one that carries s less often.
func checkKernel(t *testing.T, in *Inputs, p *Plan, s *Service) {
	t.Helper()
	if s.Kernel != None && !p.Uses(s.Kernel) {
		t.Fatalf("%v: beneath %s, the plan has %s", s.Port.Key, s.Kernel, p.Kernel)
	}
	if (s.Scheduler != "") != (s.Kernel == IPVS) {
		t.Fatalf("%v: scheduler %q of %s", s.Port.Key, s.Scheduler, s.Kernel)
	}
	auto := in.Policy.Mode == ModeAuto && s.Kernel != None
	if auto != (s.KernelReason != "") {
		t.Fatalf("%v: mode %s, beneath %s because %q", s.Port.Key, in.Policy.Mode, s.Kernel, s.KernelReason)
	}
	if s.Kernel == IPVS && in.Caps.Planes[0].MissingSchedulers[s.Scheduler] != "" && s.Scheduler != "rr" {
		t.Fatalf("%v: scheduler %q, which this host lacks", s.Port.Key, s.Scheduler)
	}
	if s.Kernel != None && inexpressible(s.Kernel, s.Port, in) != "" &&
		slices.ContainsFunc(p.Kernel, func(d DataPlane) bool { return inexpressible(d, s.Port, in) == "" }) {
		t.Fatalf("%v: %s can't do it, and another can", s.Port.Key, s.Kernel)
	}
	for i := range s.Frontends {
		f := &s.Frontends[i]
		if s.ShortCircuits(f) && (s.Kernel == IPTables || !s.Serves(f) || s.Kernel == IPVS && s.Degraded == "") {
			t.Fatalf("%v: short-circuits clients on %s, degraded %q", s.Port.Key, s.Kernel, s.Degraded)
		}
	}
}

// checkForwarding: the kernel carries nothing in a family that the host
// doesn't forward, but what nobody else can carry.
func checkForwarding(t *testing.T, in *Inputs, s *Service) {
	t.Helper()
	if s.DataPlane == Userspace || s.Port.Protocol == service.SCTP {
		return
	}
	for _, f := range s.Frontends {
		if c := in.Caps.Forwarding[f.Family]; s.Serves(&f) && c.Name != "" && !c.Supported {
			t.Fatalf("%v: %v in data plane %q although %s is off", s.Port.Key, f.Address, s.DataPlane, c.Name)
		}
	}
}
