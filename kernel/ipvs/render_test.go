package ipvs_test

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/kernel/kerneltest"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// onIPVS lets IPVS serve new connections.
func onIPVS(s *plan.Service) {
	kerneltest.Kernel(plan.IPVS)(s)
	s.DataPlane = plan.IPVS
}

// planOf is a plan of mode ipvs on a node with three addresses.
func planOf(services ...*plan.Service) *plan.Plan {
	p := kerneltest.Plan(plan.ModeIPVS, services...)
	p.Policy.NodeAddresses = []netip.Addr{
		netip.MustParseAddr("192.168.0.10"), netip.MustParseAddr("192.168.7.10"), netip.MustParseAddr("fd00:ffff::10"),
	}
	return p
}

func onlyRender(services ...*plan.Service) kernel.Ruleset {
	return ipvs.Render(planOf(services...), steering.DefaultOptions())
}

// entriesOf are the entries of r's sets of families and node ports, by name.
func entriesOf(r kernel.Ruleset) map[string][]string {
	out := map[string][]string{}
	for _, s := range r.Sets {
		if len(s.Entries) > 0 {
			out[s.Name] = s.Entries
		}
	}
	return out
}

func TestRenderServices(t *testing.T) {
	local := func(f *plan.Frontend) { f.Local, f.Masquerade = true, plan.MasqueradeNodeLocal }
	unlessPod := func(f *plan.Frontend) { f.Masquerade = plan.MasqueradeUnlessPod }
	tests := []struct {
		name    string
		service *plan.Service
		want    string              // text
		sets    map[string][]string // but endpoints
	}{
		{"cluster address", kerneltest.Service("s", service.TCP, kerneltest.Cluster("10.96.0.1:80"), kerneltest.Cluster("[fd00::1]:80"), kerneltest.Endpoints("10.1.0.2:8080", "10.1.0.1:8080", "[fd01::1]:8080"), onIPVS), `
TCP 10.96.0.1:80 rr
  -> 10.1.0.1:8080 Masq 1
  -> 10.1.0.2:8080 Masq 1
TCP [fd00::1]:80 rr
  -> [fd01::1]:8080 Masq 1
kproxy0 inet 10.96.0.1/32
kproxy0 inet6 fd00::1/128
`, map[string][]string{}},
		{"node port, on every address of its family", kerneltest.Service("s", service.UDP, kerneltest.NodePort(30053), kerneltest.Endpoints("10.1.0.1:53", "[fd01::1]:53"), onIPVS), `
UDP 192.168.0.10:30053 rr
  -> 10.1.0.1:53 Masq 1
UDP 192.168.7.10:30053 rr
  -> 10.1.0.1:53 Masq 1
UDP [fd00:ffff::10]:30053 rr
  -> [fd01::1]:53 Masq 1
`, map[string][]string{"KPROXY-MASQ-ALL-NP-UDP-4": {"30053"}, "KPROXY-MASQ-ALL-NP-UDP-6": {"30053"}}},
		{"node port of SCTP, which bitmaps don't know", kerneltest.Service("s", service.SCTP, kerneltest.NodePort(30007), kerneltest.Endpoints("10.1.0.1:7"), onIPVS), `
SCTP 192.168.0.10:30007 rr
  -> 10.1.0.1:7 Masq 1
SCTP 192.168.7.10:30007 rr
  -> 10.1.0.1:7 Masq 1
`, map[string][]string{"KPROXY-MASQ-ALL-4": {"192.168.0.10,sctp:30007", "192.168.7.10,sctp:30007"}}},
		{"no virtual server where an endpoint is", kerneltest.Service("s", service.TCP, kerneltest.NodePort(30080), kerneltest.Endpoints("192.168.0.10:30080", "10.1.0.1:80"), onIPVS), `
TCP 192.168.7.10:30080 rr
  -> 10.1.0.1:80 Masq 1
  -> 192.168.0.10:30080 Masq 1
`, map[string][]string{"KPROXY-MASQ-ALL-NP-TCP-4": {"30080"}}},
		{"the node's own address, which stays on its link", kerneltest.Service("s", service.TCP, kerneltest.External("192.168.7.10:80"), kerneltest.Endpoints("10.1.0.1:80"), onIPVS), `
TCP 192.168.7.10:80 rr
  -> 10.1.0.1:80 Masq 1
`, map[string][]string{"KPROXY-MASQ-ALL-4": {"192.168.7.10,tcp:80"}}},
		{"local endpoints for some", kerneltest.Service("s", service.TCP, kerneltest.Cluster("10.96.0.1:80", unlessPod), kerneltest.LoadBalancer("192.0.2.1:80", local), kerneltest.NodePort(30080, local),
			kerneltest.Endpoint("10.1.0.1:80", 1, true), kerneltest.Endpoint("10.1.0.2:80", 1, false), onIPVS), `
TCP 10.96.0.1:80 rr
  -> 10.1.0.1:80 Masq 1
  -> 10.1.0.2:80 Masq 1
TCP 192.0.2.1:80 rr
  -> 10.1.0.1:80 Masq 1
TCP 192.168.0.10:30080 rr
  -> 10.1.0.1:80 Masq 1
TCP 192.168.7.10:30080 rr
  -> 10.1.0.1:80 Masq 1
kproxy0 inet 10.96.0.1/32
kproxy0 inet 192.0.2.1/32
`, map[string][]string{"KPROXY-MASQ-NET-4": {"10.96.0.1,tcp:80"}, "KPROXY-MASQ-NODE-4": {"192.0.2.1,tcp:80"}, "KPROXY-MASQ-NODE-NP-TCP-4": {"30080"}}},
		{"weights and affinity", kerneltest.Service("s", service.TCP, kerneltest.Algorithm(service.WeightedRoundRobin), kerneltest.Affinity(90*time.Minute+time.Millisecond), kerneltest.Cluster("10.96.0.1:80"),
			kerneltest.Endpoint("10.1.0.1:80", 3, false), kerneltest.Endpoint("10.1.0.2:80", 0, false), onIPVS), `
TCP 10.96.0.1:80 wrr persistent 5401
  -> 10.1.0.1:80 Masq 3
  -> 10.1.0.2:80 Masq 0
kproxy0 inet 10.96.0.1/32
`, map[string][]string{}},
		{"hashes fall back", kerneltest.Service("s", service.TCP, kerneltest.Algorithm(service.Maglev), kerneltest.Affinity(time.Minute), kerneltest.Cluster("10.96.0.1:80"), kerneltest.Endpoints("10.1.0.1:80"), onIPVS), `
TCP 10.96.0.1:80 mh (mh-fallback) persistent 60
  -> 10.1.0.1:80 Masq 1
kproxy0 inet 10.96.0.1/32
`, map[string][]string{}},
		{"an endpoint that isn't usable keeps its connections", kerneltest.Service("s", service.TCP, kerneltest.Cluster("10.96.0.1:80"), kerneltest.LoadBalancer("192.0.2.1:80", local),
			kerneltest.Endpoint("10.1.0.1:80", 1, true), kerneltest.Unusable("10.1.0.2:80", true), kerneltest.Unusable("10.1.0.3:80", false), onIPVS), `
TCP 10.96.0.1:80 rr
  -> 10.1.0.1:80 Masq 1
  -> 10.1.0.2:80 Masq 0
  -> 10.1.0.3:80 Masq 0
TCP 192.0.2.1:80 rr
  -> 10.1.0.1:80 Masq 1
  -> 10.1.0.2:80 Masq 0
kproxy0 inet 10.96.0.1/32
kproxy0 inet 192.0.2.1/32
`, map[string][]string{"KPROXY-MASQ-NODE-4": {"192.0.2.1,tcp:80"}}},
		{"but not one of UDP that doesn't serve", kerneltest.Service("s", service.UDP, kerneltest.Cluster("10.96.0.1:80"), kerneltest.Endpoints("10.1.0.1:80"), kerneltest.Unusable("10.1.0.2:80", true), onIPVS), `
UDP 10.96.0.1:80 rr
  -> 10.1.0.1:80 Masq 1
kproxy0 inet 10.96.0.1/32
`, map[string][]string{}},
		{"also where all are so, and new connections are refused", kerneltest.Service("s", service.TCP, kerneltest.Cluster("10.96.0.1:80", func(f *plan.Frontend) { f.Verdict = plan.Reject }), kerneltest.Unusable("10.1.0.2:80", true), onIPVS), `
TCP 10.96.0.1:80 rr
  -> 10.1.0.2:80 Masq 0
kproxy0 inet 10.96.0.1/32
`, map[string][]string{}},
		{"nothing without endpoints", kerneltest.Service("s", service.TCP, kerneltest.Cluster("10.96.0.1:80", func(f *plan.Frontend) { f.Verdict = plan.Reject }), onIPVS), "\n", map[string][]string{}},
		{"nothing of iptables'", kerneltest.Service("s", service.TCP, kerneltest.Cluster("10.96.0.1:80"), kerneltest.Endpoints("10.1.0.1:80")), "\n", map[string][]string{}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			r := onlyRender(tt.service)
			if diff := cmp.Diff(tt.want, "\n"+ipvs.Text(r)); diff != "" {
				t.Errorf("virtual servers (-want +got):\n%s", diff)
			}
			got := entriesOf(r)
			for name := range got {
				if strings.HasPrefix(name, kernel.SetEndpoint) {
					delete(got, name)
				}
			}
			if diff := cmp.Diff(tt.sets, got); diff != "" {
				t.Errorf("sets (-want +got):\n%s", diff)
			}
			for _, s := range r.Sets {
				for _, e := range s.Entries {
					if err := kerneltest.CheckEntry(s, e); err != nil {
						t.Errorf("%s: %v", s.Name, err)
					}
				}
			}
		})
	}
}

// TestEveryRealIsAnEndpoint: the record of who is kproxy's holds every real
// server, those without weight as well.
func TestEveryRealIsAnEndpoint(t *testing.T) {
	r := onlyRender(
		kerneltest.Service("a", service.TCP, kerneltest.Cluster("10.96.0.1:80"), kerneltest.Endpoint("10.1.0.2:80", 0, false), kerneltest.Unusable("10.1.0.3:80", false), kerneltest.Endpoints("10.1.0.1:80"), onIPVS),
		kerneltest.Service("b", service.UDP, kerneltest.Cluster("[fd00::2]:80"), kerneltest.Endpoints("[fd01::1]:80"), onIPVS))
	want := map[string][]string{
		"KPROXY-ENDPOINT-4": {"10.1.0.1,tcp:80,10.1.0.1", "10.1.0.2,tcp:80,10.1.0.2", "10.1.0.3,tcp:80,10.1.0.3"},
		"KPROXY-ENDPOINT-6": {"fd01::1,udp:80,fd01::1"},
	}
	if diff := cmp.Diff(want, entriesOf(r)); diff != "" {
		t.Errorf("sets (-want +got):\n%s", diff)
	}
}

// TestLookup: what a service address leads to, and whose it is, as `kproxy trace`
// asks.
func TestLookup(t *testing.T) {
	r := onlyRender(
		kerneltest.Service("web", service.TCP, kerneltest.Cluster("10.96.0.1:80"), kerneltest.NodePort(30080), kerneltest.Endpoints("10.1.0.1:8080"), onIPVS),
		kerneltest.Service("web", service.UDP, kerneltest.Cluster("10.96.0.1:80"), kerneltest.Endpoints("10.1.0.2:8080"), onIPVS))
	tests := []struct {
		protocol service.Protocol
		address  string
		real     string // empty for no virtual server
	}{
		{service.TCP, "10.96.0.1:80", "10.1.0.1:8080"},
		{service.UDP, "10.96.0.1:80", "10.1.0.2:8080"},
		{service.TCP, "192.168.7.10:30080", "10.1.0.1:8080"},
		{service.UDP, "192.168.7.10:30080", ""},
		{service.TCP, "10.96.0.1:81", ""},
		{service.SCTP, "10.96.0.1:80", ""},
		{service.TCP, "10.96.0.1:30080", ""},
	}
	for _, tt := range tests {
		v, ok := r.Virtual(tt.protocol, netip.MustParseAddrPort(tt.address))
		if ok != (tt.real != "") {
			t.Errorf("%s %s: found %v", tt.protocol, tt.address, ok)
		}
		if !ok {
			continue
		}
		want := service.Key{Namespace: "default", Name: "web", Protocol: tt.protocol}
		if v.Owner != want || len(v.Reals) != 1 || v.Reals[0].Address.String() != tt.real {
			t.Errorf("%s %s: %+v, want %s of %+v", tt.protocol, tt.address, v, tt.real, want)
		}
	}
}

// TestContestedPlace: a service's address that is the node's own may have the
// number of another's node port; as in the rules of iptables, the address wins.
func TestContestedPlace(t *testing.T) {
	r := onlyRender(
		kerneltest.Service("a", service.TCP, kerneltest.NodePort(30080), kerneltest.Endpoints("10.1.0.1:80"), onIPVS),
		kerneltest.Service("b", service.TCP, kerneltest.External("192.168.7.10:30080"), kerneltest.Endpoints("10.1.0.2:80"), onIPVS))
	var owners []string
	for _, v := range r.Virtuals {
		owners = append(owners, v.Owner.Name+" "+v.Address.String())
	}
	if diff := cmp.Diff([]string{"a 192.168.0.10:30080", "b 192.168.7.10:30080"}, owners); diff != "" {
		t.Errorf("virtual servers (-want +got):\n%s", diff)
	}
}

func TestRenderIsEmptyWithoutIPVS(t *testing.T) {
	for _, m := range []plan.Mode{plan.ModeUserspace, plan.ModeIPTables} {
		if diff := cmp.Diff(kernel.Ruleset{}, ipvs.Render(kerneltest.Plan(m), steering.DefaultOptions())); diff != "" {
			t.Errorf("mode %s (-want +got):\n%s", m, diff)
		}
	}
}

func TestSkipIPv6(t *testing.T) {
	o := steering.DefaultOptions()
	o.SkipIPv6 = true
	r := ipvs.Render(planOf(kerneltest.Service("s", service.TCP, kerneltest.Cluster("10.96.0.1:80"), kerneltest.Cluster("[fd00::1]:80"), kerneltest.NodePort(30080), kerneltest.Endpoints("10.1.0.1:80", "[fd01::1]:80"), onIPVS)), o)
	if len(r.Chains[service.IPv6])+len(r.Jumps[service.IPv6]) > 0 {
		t.Errorf("rules of IPv6: %v, %v", r.Chains[service.IPv6], r.Jumps[service.IPv6])
	}
	if strings.Contains(ipvs.Text(r), "[") || !strings.Contains(ipvs.Text(r), "10.96.0.1:80") {
		t.Errorf("rendered\n%s", ipvs.Text(r))
	}
}

// TestRendererRemembers: what it remembers gives the same as rendering anew. A change of one
// service changes one virtual server.
func TestRendererRemembers(t *testing.T) {
	for seed := range uint64(20) {
		w := kerneltest.NewWalk(seed, plan.ModeAuto, plan.IPVS, 12)
		r := ipvs.NewRenderer(steering.DefaultOptions())
		var last *plan.Plan
		for range 10 {
			p := w.Next()
			got := r.Render(p, plan.Between(last, p))
			if diff := cmp.Diff(ipvs.Render(p, steering.DefaultOptions()), got, cmpopts.EquateComparable(netip.AddrPort{}, netip.Addr{})); diff != "" {
				t.Fatalf("seed %d (-anew +remembered):\n%s", seed, diff)
			}
			last = p
		}
	}
	services := func(port uint16) []*plan.Service {
		out := kerneltest.Many(50, 3)
		for i, s := range out {
			onIPVS(s)
			if i == 7 {
				s.Groups[0].Cluster[0].Address = netip.AddrPortFrom(s.Groups[0].Cluster[0].Address.Addr(), port)
			}
		}
		return out
	}
	r := ipvs.NewRenderer(steering.DefaultOptions())
	p, q := kerneltest.Plan(plan.ModeIPVS, services(8080)...), kerneltest.Plan(plan.ModeIPVS, services(8081)...)
	before, after := r.Render(p, plan.Between(nil, p)), r.Render(q, plan.Between(p, q))
	if changed := kernel.Diff(before, after).Virtuals; len(changed) != 1 {
		t.Errorf("%d virtual servers have changed, want 1", len(changed))
	}
}

// TestRulesDontGrow: rules are the same however many services there are.
func TestRulesDontGrow(t *testing.T) {
	none := ipvs.Render(planOf(), steering.DefaultOptions())
	many := kerneltest.Many(100, 2)
	for _, s := range many {
		onIPVS(s)
	}
	if diff := cmp.Diff([2][2]any{{none.Chains, none.Jumps}}, [2][2]any{{onlyRender(many...).Chains, onlyRender(many...).Jumps}}); diff != "" {
		t.Errorf("rules of no services and of 100 (-none +100):\n%s", diff)
	}
	for f := range service.Families {
		for _, c := range none.Chains[f] {
			if len(c.Rules) > 10 || len(c.Name) > kernel.MaxChainName || !kernel.Own(c.Name) {
				t.Errorf("chain %s has %d rules", c.Name, len(c.Rules))
			}
		}
	}
	if !slices.IsSortedFunc(none.Sets, func(a, b kernel.Set) int { return strings.Compare(a.Name, b.Name) }) {
		t.Errorf("sets aren't in order: %v", none.Sets)
	}
}

func BenchmarkRenderOneChange(b *testing.B) {
	for _, n := range []int{100, 1000, 5000} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			services := kerneltest.Many(n, 3)
			for _, s := range services {
				onIPVS(s)
			}
			changed := *services[n/2]
			plans := []*plan.Plan{kerneltest.Plan(plan.ModeIPVS, services...)}
			services[n/2] = &changed
			changed.Groups[0].Cluster = slices.Clone(changed.Groups[0].Cluster)
			changed.Groups[0].Cluster[0].Address = netip.MustParseAddrPort("10.250.0.1:8080")
			plans = append(plans, kerneltest.Plan(plan.ModeIPVS, services...))
			r := ipvs.NewRenderer(steering.DefaultOptions())
			have := r.Render(plans[0], plan.Between(nil, plans[0]))
			at := slices.IndexFunc(plans[0].Services, func(s *plan.Service) bool { return s.Port.Key == changed.Port.Key })
			for i := 0; b.Loop(); i++ {
				is, was := plans[(i+1)%2], plans[i%2]
				want := r.Render(is, plan.Delta{Changes: []plan.Change{{Was: was.Services[at], Is: is.Services[at]}}})
				if ops := kernel.Diff(have, want); len(ops.Virtuals) != 1 {
					b.Fatalf("%d virtual servers changed", len(ops.Virtuals))
				}
				have = want
			}
		})
	}
}
