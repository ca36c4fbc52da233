package trace

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace/netfilter"
)

// withRules gives a tracer chains of iptables, all of which the packet has met.
func withRules(x *tracer, chains map[chain][]string) *tracer {
	x.met = map[chain][]netfilter.Step{}
	for c := range chains {
		x.met[c] = []netfilter.Step{{Table: c.table, Chain: c.name, Index: 1}}
	}
	if x.host == nil {
		x.host = &hostState{}
	}
	x.host.rules = func(table, name string) []string { return chains[chain{table, name}] }
	return x
}

func (t *tracer) differences() (out []string) {
	for _, m := range t.mismatches {
		out = append(out, m.Planned+", "+m.Kernel)
	}
	return out
}

// TestCompareChain: a chain that the packet met is compared with what is wanted.
func TestCompareChain(t *testing.T) {
	const one, two, last = "-p tcp -m statistic --mode nth --every 3 --packet 0 -j DNAT --to-destination 10.2.0.2:80",
		"-p tcp -m statistic --mode nth --every 2 --packet 0 -j DNAT --to-destination 10.2.0.3:80", "-p tcp -j DNAT --to-destination 10.2.0.4:80"
	for _, tt := range []struct {
		name  string
		found []string
		want  []string // planned, and in the kernel
	}{
		{"all", []string{one, two, last}, nil},
		{"the middle one is missing", []string{one, last}, []string{"there, missing"}},
		{"the last one is missing", []string{one, two}, []string{"there, missing"}},
		{"one too many", []string{"-j RETURN", one, two, last}, []string{"not there, rule 1"}},
		{"another destination", []string{one, one, last}, []string{"not there, rule 2", "there, missing"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			x := withRules(&tracer{}, map[chain][]string{{"nat", "KPROXY-SVC-A"}: tt.found})
			x.compareChain(kernel.Chain{Table: "nat", Name: "KPROXY-SVC-A", Rules: []string{one, two, last}})
			x.compareChain(kernel.Chain{Table: "nat", Name: "KPROXY-SVC-B", Rules: []string{one}}) // not met
			if diff := cmp.Diff(tt.want, x.differences()); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// TestCompareShared: shared chains that the packet met are those of a plan without services;
// those that lead to services aren't compared.
func TestCompareShared(t *testing.T) {
	const alive, dispatch = "-m set --match-set KPROXY-ALIVE-4 src -j KPROXY-PORTAL", "-j KPROXY-DISPATCH"
	for _, tt := range []struct {
		name  string
		found []string
		want  []string
	}{
		{"as planned", []string{alive, dispatch}, nil},
		{"one missing", []string{dispatch}, []string{"there, missing"}},
		{"one more", []string{alive, dispatch, "-j RETURN"}, []string{"not there, rule 3"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			proxy := forecasts(onePlan(plan.IPTables), "")
			proxy.Plan.Services[0].Port.ClusterIPs = nil // its sets are empty, as the scene's
			proxy.Render = func(*plan.Plan) (out kernel.Ruleset) {
				out.Chains[service.IPv4] = []kernel.Chain{
					{Table: "nat", Name: "KPROXY-DISPATCH"}, {Table: "nat", Name: "KPROXY-SERVICES", Rules: []string{alive, dispatch}},
				}
				return out
			}
			x := newTracer(Request{Address: netip.MustParseAddrPort("10.96.0.10:80"), Protocol: service.TCP}, proxy, usual().host(t))
			withRules(x, map[chain][]string{{"nat", "KPROXY-SERVICES"}: tt.found, {"nat", "KPROXY-DISPATCH"}: {"-d 10.96.0.0/16 -j KPROXY-D-1"}})
			x.findService()
			x.compare()
			if diff := cmp.Diff(tt.want, x.differences()); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// TestCompareJump: a jump is missing only where the packet met the whole chain.
func TestCompareJump(t *testing.T) {
	jump := kernel.Jump{Table: "nat", From: "PREROUTING", Rule: "-j KPROXY-SERVICES"}
	own := netfilter.Step{Table: "nat", Chain: "PREROUTING", Index: 1, Text: "-A PREROUTING -j KPROXY-SERVICES", Matched: netfilter.Yes, Outcome: "jump to KPROXY-SERVICES"}
	other := netfilter.Step{Table: "nat", Chain: "PREROUTING", Index: 1, Text: "-A PREROUTING -j ACCEPT", Matched: netfilter.Yes, Outcome: "accept"}
	policy := netfilter.Step{Table: "nat", Chain: "PREROUTING", Policy: true, Matched: netfilter.Yes, Outcome: "accept"}
	late := jump
	late.Last = true
	for _, tt := range []struct {
		name  string
		jump  kernel.Jump
		rules []string
		met   []netfilter.Step
		want  string
	}{
		{"there", jump, []string{jump.Rule}, []netfilter.Step{own, policy}, ""},
		{"missing", jump, nil, []netfilter.Step{policy}, "missing"},
		{"not reached", jump, []string{"-j ACCEPT", jump.Rule}, []netfilter.Step{other}, "not reached: rule 1 of chain PREROUTING in table nat ends the chain before (-j ACCEPT)"},
		{"the last one, and something before took it", late, []string{"-j ACCEPT", jump.Rule}, []netfilter.Step{other}, ""},
		{"never met", jump, nil, nil, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			x := withRules(&tracer{}, map[chain][]string{{"nat", "PREROUTING"}: tt.rules})
			x.met = map[chain][]netfilter.Step{}
			x.note(&netfilter.Walk{Steps: tt.met})
			x.compareJump(tt.jump)
			got := ""
			for _, m := range x.mismatches {
				got += m.Kernel
			}
			if got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}

// TestCompareSets: the service's addresses are in the sets that they are to be in.
func TestCompareSets(t *testing.T) {
	const entry = "10.96.0.10,tcp:80"
	for _, tt := range []struct {
		name  string
		plane plan.DataPlane
		user  []string
		want  string
	}{
		{"in userspace", plan.Userspace, []string{entry}, ""},
		{"in userspace, missing", plan.Userspace, []string{"10.96.0.11,tcp:80"}, "there missing"},
		{"in the kernel", plan.IPTables, nil, ""},
		{"in the kernel, and redirected", plan.IPTables, []string{entry}, "not there there"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := usual()
			s := c.host(t)
			s.sets = func(wanted func(string) bool) ([]kernel.SetState, error) {
				var out []kernel.SetState
				for _, x := range steering.EmptySetsOf(nil) {
					if x.Name == kernel.FamilySet(kernel.SetUser, service.IPv4) {
						x.Entries = tt.user
					}
					if wanted(x.Name) {
						out = append(out, kernel.SetState{Set: x})
					}
				}
				return out, nil
			}
			proxy := forecasts(onePlan(tt.plane), "")
			x := newTracer(Request{Address: netip.MustParseAddrPort("10.96.0.10:80"), Protocol: service.TCP}, proxy, s)
			x.findService()
			x.compareSets(proxy.Plan, nil)
			got := ""
			for _, m := range x.mismatches {
				got += m.Planned + " " + m.Kernel
			}
			if got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}
