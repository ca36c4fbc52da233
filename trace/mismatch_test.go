package trace

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace/netfilter"
)

// TestCompareChain: what the packet met of a chain is compared with what is wanted.
func TestCompareChain(t *testing.T) {
	const one, two, last = "-p tcp -m statistic --mode nth --every 3 --packet 0 -j DNAT --to-destination 10.2.0.2:80",
		"-p tcp -m statistic --mode nth --every 2 --packet 0 -j DNAT --to-destination 10.2.0.3:80", "-p tcp -j DNAT --to-destination 10.2.0.4:80"
	rules := []string{one, two, last}
	step := func(i int, text string, matched netfilter.Answer, outcome string) netfilter.Step {
		return netfilter.Step{Table: "nat", Chain: "KPROXY-SVC-A", Index: i, Text: "-A KPROXY-SVC-A " + text, Matched: matched, Outcome: outcome}
	}
	tests := []struct {
		name string
		met  []netfilter.Step
		want []string // planned, and in the kernel
	}{
		{"all", []netfilter.Step{step(1, one, netfilter.Chance, "DNAT"), step(2, two, netfilter.Chance, "DNAT"), step(3, last, netfilter.Yes, "DNAT")}, nil},
		{"the middle one is missing", []netfilter.Step{step(1, one, netfilter.Chance, "DNAT"), step(2, last, netfilter.Yes, "DNAT")}, []string{"there missing"}},
		{"the last one is missing", []netfilter.Step{step(1, one, netfilter.Chance, "DNAT"), step(2, two, netfilter.Chance, "DNAT")}, []string{"there missing"}},
		{"one too many", []netfilter.Step{step(1, "-j RETURN", netfilter.Yes, "return")}, []string{"not there rule 1"}},
		{"what is behind a rule that took it isn't met", []netfilter.Step{step(1, one, netfilter.Yes, "DNAT")}, nil},
		{"another destination", []netfilter.Step{step(1, one, netfilter.Chance, "DNAT"), step(2, one, netfilter.Chance, "DNAT"), step(3, last, netfilter.Yes, "DNAT")},
			[]string{"not there rule 2", "there missing"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			var x tracer
			x.compareChain(kernel.Chain{Table: "nat", Name: "KPROXY-SVC-A", Rules: rules}, tt.met)
			var got []string
			for _, m := range x.mismatches {
				got = append(got, m.Planned+" "+m.Kernel)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// TestCompareChainOfChains: rules behind a jump are missing only where the chain
// that it leads to let the packet go on.
func TestCompareChainOfChains(t *testing.T) {
	const stays, others = "-m set --match-set KPROXY-AFF-A src -j KPROXY-SEP-A", "-j KPROXY-SEP-B"
	for outcome, want := range map[string]int{"DNAT --to-destination 10.2.0.2:80": 0, "return": 1, "jump to KPROXY-NONE": 1} {
		var x tracer
		x.seen.note(&netfilter.Walk{Steps: []netfilter.Step{
			{Table: "nat", Chain: "KPROXY-SVC-A", Index: 1, Text: "-A KPROXY-SVC-A " + stays, Matched: netfilter.Yes, Outcome: "jump to KPROXY-SEP-A"},
			{Table: "nat", Chain: "KPROXY-SEP-A", Index: 1, Matched: netfilter.Yes, Outcome: outcome},
		}})
		x.compareChain(kernel.Chain{Table: "nat", Name: "KPROXY-SVC-A", Rules: []string{stays, others}}, x.seen.steps[chain{"nat", "KPROXY-SVC-A"}])
		if len(x.mismatches) != want {
			t.Errorf("behind %q: %d mismatches, want %d: %v", outcome, len(x.mismatches), want, x.mismatches)
		}
	}
}

// TestCompareShared: rules of shared chains that the packet met are those of a plan
// without services; what leads to services isn't compared.
func TestCompareShared(t *testing.T) {
	const alive, dispatch = "-m set --match-set KPROXY-ALIVE-4 src -j KPROXY-PORTAL", "-j KPROXY-DISPATCH"
	step := func(chain string, i int, text string) netfilter.Step {
		return netfilter.Step{Table: "nat", Chain: chain, Index: i, Text: "-A " + chain + " " + text, Outcome: "no match"}
	}
	for _, tt := range []struct {
		name string
		met  []netfilter.Step
		want []string
	}{
		{"as planned", []netfilter.Step{step("KPROXY-SERVICES", 1, alive), step("KPROXY-SERVICES", 2, dispatch), step("KPROXY-DISPATCH", 1, "-d 10.96.0.0/16 -j KPROXY-D-1")}, nil},
		{"one missing", []netfilter.Step{step("KPROXY-SERVICES", 1, dispatch)}, []string{"there, missing"}},
		{"one more", []netfilter.Step{step("KPROXY-SERVICES", 1, alive), step("KPROXY-SERVICES", 2, dispatch), step("KPROXY-SERVICES", 3, "-j RETURN")}, []string{"not there, rule 3"}},
		{"not met", nil, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p := onePlan(plan.IPTables)
			proxy := forecasts(p, "")
			proxy.Render = func(p *plan.Plan) (out kernel.Ruleset) {
				if len(p.Services) > 0 {
					t.Error("rendered with services")
				}
				out.Chains[service.IPv4] = []kernel.Chain{
					{Table: "nat", Name: "KPROXY-DISPATCH"}, {Table: "nat", Name: "KPROXY-SERVICES", Rules: []string{alive, dispatch}},
				}
				return out
			}
			x := newTracer(Request{Address: netip.MustParseAddrPort("10.96.0.10:80"), Protocol: service.TCP}, proxy, usual().sight(t))
			x.findService()
			x.seen.note(&netfilter.Walk{Steps: tt.met})
			x.compareShared()
			var got []string
			for _, m := range x.mismatches {
				got = append(got, m.Planned+", "+m.Kernel)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// TestCompareDataPlane: rules that lead past kproxy are named while it lives.
func TestCompareDataPlane(t *testing.T) {
	for alive, want := range map[bool]int{true: 1, false: 0} {
		p := forecasts(onePlan(plan.Userspace), "")
		p.Alive = alive
		p.Render = func(*plan.Plan) kernel.Ruleset { return kernel.Ruleset{} }
		c := usual()
		c.rules = toEndpoints
		r := c.trace(t, "10.1.0.2", "10.96.0.10:80", p)
		got := 0
		for _, m := range r.Mismatches {
			if strings.Contains(m.Planned, "listener") {
				got++
			}
		}
		if got != want {
			t.Errorf("alive %v: %d mismatches, want %d: %v", alive, got, want, r.Mismatches)
		}
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
		name string
		jump kernel.Jump
		met  []netfilter.Step
		want string
	}{
		{"there", jump, []netfilter.Step{own, policy}, ""},
		{"missing", jump, []netfilter.Step{policy}, "missing"},
		{"not reached", jump, []netfilter.Step{other}, "not reached: rule 1 of chain PREROUTING in table nat ends the chain before (-j ACCEPT)"},
		{"the last one, and something before took it", late, []netfilter.Step{other}, ""},
		{"never met", jump, nil, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var x tracer
			x.seen.note(&netfilter.Walk{Steps: tt.met})
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

// TestComparePortal: the service's addresses are in the sets that they are to be in.
func TestComparePortal(t *testing.T) {
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
			s := c.sight(t)
			s.sets = func(wanted func(string) bool) ([]kernel.SetState, error) {
				var out []kernel.SetState
				for _, x := range kernel.PortalSets() {
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
			x.comparePortal(proxy.Plan, nil)
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

// TestCompareVirtual: scheduler, persistence, real servers and their weights, and
// the address on kproxy's link.
func TestCompareVirtual(t *testing.T) {
	at := netip.MustParseAddrPort("10.96.0.99:80")
	planned := kernel.Virtual{Protocol: service.TCP, Address: at, Scheduler: "rr"}
	for i, w := range []uint32{1, 2} {
		planned.Reals = append(planned.Reals, kernel.Real{Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 2, 0, byte(2 + i)}), 9000), Weight: w})
	}
	same := [][2]int{{1, 0}, {2, 0}}
	for _, tt := range []struct {
		name  string
		found *ipvs.Seen
		link  string
		want  []string
	}{
		{"as planned", seen("rr", 0, same...), kernel.DummyLink, nil},
		{"none", nil, kernel.DummyLink, []string{"virtual server tcp 10.96.0.99:80: there, missing"}},
		{"not on the link", seen("rr", 0, same...), "client", []string{"address 10.96.0.99 on link kproxy0: there, missing"}},
		{"another scheduler", seen("lc", 0, same...), kernel.DummyLink, []string{"scheduler of virtual server tcp 10.96.0.99:80: rr, lc"}},
		{"persistent", seen("rr", 60, same...), kernel.DummyLink, []string{"persistence of virtual server tcp 10.96.0.99:80: 0 s, 60 s"}},
		{"another weight", seen("rr", 0, [2]int{1, 0}, [2]int{1, 0}), kernel.DummyLink, []string{"real server 10.2.0.3:9000 of virtual server tcp 10.96.0.99:80: weight 2, weight 1"}},
		{"one less", seen("rr", 0, [2]int{1, 0}), kernel.DummyLink, []string{"real server 10.2.0.3:9000 of virtual server tcp 10.96.0.99:80: weight 2, missing"}},
		{"one too many", seen("rr", 0, [2]int{1, 0}, [2]int{2, 0}, [2]int{1, 0}), kernel.DummyLink, []string{"real server 10.2.0.4:9000 of virtual server tcp 10.96.0.99:80: not there, weight 1"}},
		{"one that drains", seen("rr", 0, [2]int{1, 0}, [2]int{2, 0}, [2]int{0, 0}), kernel.DummyLink, nil},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := usual()
			c.virtual = tt.found
			s := c.sight(t)
			s.addresses.links[at.Addr()] = tt.link
			x := newTracer(Request{Address: at, Protocol: service.TCP}, nil, s)
			x.compareVirtual(&kernel.Ruleset{Virtuals: []kernel.Virtual{planned}, Addresses: []netip.Addr{at.Addr()}})
			var got []string
			for _, m := range x.mismatches {
				got = append(got, m.Object+": "+m.Planned+", "+m.Kernel)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}
