package steering_test

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

func TestSets(t *testing.T) {
	verdict := func(v plan.Verdict) func(*plan.Frontend) { return func(f *plan.Frontend) { f.Verdict = v } }
	ranges := func(p ...string) func(*plan.Frontend) {
		return func(f *plan.Frontend) {
			for _, s := range p {
				f.SourceRanges = append(f.SourceRanges, netip.MustParsePrefix(s))
			}
		}
	}
	oneFamily := func(s *plan.Service) {
		s.Frontends = slices.DeleteFunc(s.Frontends, func(f plan.Frontend) bool { return f.Family == service.IPv6 })
	}
	shortCircuit := func(f *plan.Frontend) { f.Verdict, f.Local, f.ShortCircuit = plan.Drop, true, true }
	tests := []struct {
		name    string
		service *plan.Service
		want    map[string][]string // sets that aren't empty
	}{
		{"in userspace", kerneltest.Service("s", service.TCP, kerneltest.InUserspace, kerneltest.Cluster("10.96.0.1:80"), kerneltest.Cluster("[fd00::1]:80"),
			kerneltest.External("192.0.2.1:80"), kerneltest.LoadBalancer("192.0.2.2:80"), kerneltest.NodePort(30080)),
			map[string][]string{
				"KPROXY-USER-4": {"10.96.0.1,tcp:80", "192.0.2.1,tcp:80", "192.0.2.2,tcp:80"}, "KPROXY-USER-6": {"fd00::1,tcp:80"},
				"KPROXY-USER-NP-TCP-4": {"30080"}, "KPROXY-USER-NP-TCP-6": {"30080"}, "KPROXY-LOCAL-NP-TCP-4": {"30080"}, "KPROXY-LOCAL-NP-TCP-6": {"30080"},
			}},
		{"in the kernel", kerneltest.Service("s", service.UDP, kerneltest.Cluster("10.96.0.1:53"), kerneltest.NodePort(30053)),
			map[string][]string{"KPROXY-LOCAL-NP-UDP-4": {"30053"}, "KPROXY-LOCAL-NP-UDP-6": {"30053"}}},
		{"of one family, whose node port the other one doesn't take", kerneltest.Service("s", service.TCP, kerneltest.InUserspace, kerneltest.NodePort(30080), oneFamily),
			map[string][]string{"KPROXY-USER-NP-TCP-4": {"30080"}, "KPROXY-LOCAL-NP-TCP-4": {"30080"}}},
		{"SCTP", kerneltest.Service("s", service.SCTP, kerneltest.Cluster("10.96.0.1:7"), kerneltest.NodePort(30007)), nil},
		{"rejected", kerneltest.Service("s", service.UDP, kerneltest.InUserspace, kerneltest.Cluster("10.96.0.1:53", verdict(plan.Reject)), kerneltest.NodePort(30053, verdict(plan.Reject))),
			map[string][]string{"KPROXY-REJECT-4": {"10.96.0.1,udp:53"}, "KPROXY-REJECT-NP-UDP-4": {"30053"}, "KPROXY-REJECT-NP-UDP-6": {"30053"}}},
		{"dropped", kerneltest.Service("s", service.TCP, kerneltest.InUserspace, kerneltest.Cluster("[fd00::1]:80", verdict(plan.Drop)), kerneltest.NodePort(30080, verdict(plan.Drop))),
			map[string][]string{"KPROXY-DROP-6": {"fd00::1,tcp:80"}, "KPROXY-DROP-NP-TCP-4": {"30080"}, "KPROXY-DROP-NP-TCP-6": {"30080"}}},
		{"dropped but for pods and this node", kerneltest.Service("s", service.TCP, kerneltest.InUserspace,
			kerneltest.External("192.0.2.1:80", shortCircuit), kerneltest.NodePort(30080, shortCircuit), kerneltest.Endpoints("10.1.0.1:80")),
			map[string][]string{"KPROXY-DROP-4": {"192.0.2.1,tcp:80"}, "KPROXY-DROP-NP-TCP-4": {"30080"}, "KPROXY-DROP-NP-TCP-6": {"30080"}, "KPROXY-LOCAL-NP-TCP-4": {"30080"}}},
		{"source ranges", kerneltest.Service("s", service.TCP, kerneltest.LoadBalancer("192.0.2.1:80", ranges("198.51.100.0/24", "203.0.113.1/32", "2001:db8::/32")),
			kerneltest.LoadBalancer("[2001:db8::1]:80", ranges("198.51.100.0/24", "2001:db8:1::/48"))),
			map[string][]string{
				"KPROXY-RANGED-4": {"192.0.2.1,tcp:80"}, "KPROXY-ALLOW-4": {"192.0.2.1,tcp:80,198.51.100.0/24", "192.0.2.1,tcp:80,203.0.113.1"},
				"KPROXY-RANGED-6": {"2001:db8::1,tcp:80"}, "KPROXY-ALLOW-6": {"2001:db8::1,tcp:80,2001:db8:1::/48"},
			}},
		{"endpoints that get no new connection", kerneltest.Service("s", service.TCP, kerneltest.Cluster("10.96.0.1:80"), kerneltest.Endpoints("10.1.0.1:80"),
			kerneltest.Unusable("10.1.0.2:80", true), kerneltest.Unusable("[fd01::2]:80", false)),
			map[string][]string{"KPROXY-LEAVING-4": {"10.1.0.2,tcp:80"}, "KPROXY-LEAVING-6": {"fd01::2,tcp:80"}}},
		{"asked for health", kerneltest.Service("s", service.UDP, kerneltest.Cluster("10.96.0.1:53"), func(s *plan.Service) { s.Port.HealthCheckNodePort = 32000 }),
			map[string][]string{"KPROXY-HEALTH-NP-TCP-4": {"32000"}, "KPROXY-HEALTH-NP-TCP-6": {"32000"}}},
		{"a range of everything", kerneltest.Service("s", service.TCP, kerneltest.LoadBalancer("192.0.2.1:80", ranges("198.51.100.0/24", "0.0.0.0/0"))), nil},
		{"ranges of the other family only", kerneltest.Service("s", service.TCP, kerneltest.LoadBalancer("192.0.2.1:80", ranges("2001:db8::/32"))),
			map[string][]string{"KPROXY-RANGED-4": {"192.0.2.1,tcp:80"}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := kerneltest.Plan(plan.ModeIPTables, tt.service)
			sets, specs := steering.Sets(p), steering.EmptySetsOf(p)
			var got map[string][]string
			for i, s := range sets {
				if s.Name != specs[i].Name || s.Type != specs[i].Type {
					t.Errorf("set %d is %s, %s", i, s.Name, s.Type)
				}
				if len(s.Entries) > 0 {
					if got == nil {
						got = map[string][]string{}
					}
					got[s.Name] = s.Entries
				}
				for _, e := range s.Entries {
					if err := kerneltest.CheckEntry(s, e); err != nil {
						t.Errorf("%s: %v", s.Name, err)
					}
				}
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("Sets (-want +got):\n%s", diff)
			}
		})
	}
}

// TestSetsOfIPVS: who is redirected although everybody else isn't, as without
// anything beneath, and how node ports are refused before IPVS sees them.
func TestSetsOfIPVS(t *testing.T) {
	local := func(v plan.Verdict) func(*plan.Frontend) {
		return func(f *plan.Frontend) { f.Verdict, f.Local, f.ShortCircuit = v, true, true }
	}
	rejectIPv6 := func(f *plan.Frontend) {
		if f.Family == service.IPv6 {
			f.Verdict = plan.Reject
		}
	}
	tests := []struct {
		name    string
		service *plan.Service
		want    map[string][]string // sets that aren't empty
	}{
		{"short circuit", kerneltest.Service("s", service.TCP, kerneltest.Kernel(plan.IPVS), kerneltest.External("192.0.2.1:80", local(plan.Forward)), kerneltest.NodePort(30080, local(plan.Forward)),
			kerneltest.Endpoint("10.1.0.1:80", 1, true), kerneltest.Endpoint("[fd01::1]:80", 1, true)),
			map[string][]string{"KPROXY-SHORT-4": {"192.0.2.1,tcp:80"}, "KPROXY-SHORT-NP-TCP-4": {"30080"}, "KPROXY-SHORT-NP-TCP-6": {"30080"}, "KPROXY-LOCAL-NP-TCP-4": {"30080"}, "KPROXY-LOCAL-NP-TCP-6": {"30080"}}},
		{"short circuit, nobody else", kerneltest.Service("s", service.UDP, kerneltest.Kernel(plan.IPVS), kerneltest.InUserspace, kerneltest.External("192.0.2.1:80", local(plan.Drop)), kerneltest.Endpoints("10.1.0.1:80")),
			map[string][]string{"KPROXY-DROP-4": {"192.0.2.1,udp:80"}, "KPROXY-SHORT-4": {"192.0.2.1,udp:80"}}},
		{"short circuit, nobody else, and nothing beneath", kerneltest.Service("s", service.TCP, kerneltest.Kernel(plan.None), kerneltest.InUserspace, kerneltest.External("192.0.2.1:80", local(plan.Drop)), kerneltest.Endpoints("10.1.0.1:80")),
			map[string][]string{"KPROXY-DROP-4": {"192.0.2.1,tcp:80"}, "KPROXY-SHORT-4": {"192.0.2.1,tcp:80"}}},
		{"iptables tells clients apart itself", kerneltest.Service("s", service.TCP, kerneltest.External("192.0.2.1:80", local(plan.Forward)), kerneltest.Endpoint("10.1.0.1:80", 1, true)), nil},
		{"nobody in userspace serves SCTP", kerneltest.Service("s", service.SCTP, kerneltest.Kernel(plan.IPVS), kerneltest.External("192.0.2.1:80", local(plan.Forward)), kerneltest.Endpoint("10.1.0.1:80", 1, true)), nil},
		{"a node port without endpoints of one family", kerneltest.Service("s", service.TCP, kerneltest.Kernel(plan.IPVS), kerneltest.NodePort(30080, rejectIPv6), kerneltest.Endpoints("10.1.0.1:80")),
			map[string][]string{"KPROXY-REJECT-NP-TCP-6": {"30080"}, "KPROXY-LOCAL-NP-TCP-4": {"30080"}}},
		{"a node port of SCTP without endpoints", kerneltest.Service("s", service.SCTP, kerneltest.Kernel(plan.IPVS), kerneltest.NodePort(30007, rejectIPv6)),
			map[string][]string{"KPROXY-REJECT-6": {"2001:db8::1,sctp:30007"}}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := kerneltest.Plan(plan.ModeAuto, tt.service)
			p.Policy.NodeAddresses = []netip.Addr{netip.MustParseAddr("192.168.0.1"), netip.MustParseAddr("2001:db8::1")}
			var got map[string][]string
			for i, s := range steering.Sets(p) {
				if s.Name != steering.EmptySetsOf(p)[i].Name {
					t.Errorf("set %d is %s", i, s.Name)
				}
				if len(s.Entries) == 0 {
					continue
				}
				if got == nil {
					got = map[string][]string{}
				}
				got[s.Name] = s.Entries
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("Sets (-want +got):\n%s", diff)
			}
		})
	}
}

// TestAllowBeforeRanged: an address is never limited before its clients are
// allowed, and its limit is gone before they are.
func TestAllowBeforeRanged(t *testing.T) {
	p := kerneltest.Plan(plan.ModeIPTables, kerneltest.Service("s", service.TCP, kerneltest.LoadBalancer("192.0.2.1:80",
		func(f *plan.Frontend) { f.SourceRanges = []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")} })))
	empty, full := steering.Sets(kerneltest.Plan(plan.ModeIPTables)), steering.Sets(p)
	names := func(in []kernel.SetEntries) (out []string) {
		for _, e := range in {
			out = append(out, e.Set.Name)
		}
		return out
	}
	if diff := cmp.Diff([]string{"KPROXY-ALLOW-4", "KPROXY-RANGED-4"}, names(kernel.DiffSets(empty, full).Add)); diff != "" {
		t.Errorf("order of additions:\n%s", diff)
	}
	if diff := cmp.Diff([]string{"KPROXY-RANGED-4", "KPROXY-ALLOW-4"}, names(kernel.DiffSets(full, empty).Del)); diff != "" {
		t.Errorf("order of deletions:\n%s", diff)
	}
}

func TestPodNetworks(t *testing.T) {
	p := &plan.Plan{Policy: plan.Policy{PodCIDRs: []netip.Prefix{
		netip.MustParsePrefix("10.244.1.7/16"), netip.MustParsePrefix("::/0"), netip.MustParsePrefix("10.244.0.0/16"),
	}}}
	if diff := cmp.Diff([]string{"10.244.0.0/16"}, steering.PodNetworks(p, service.IPv4).Entries); diff != "" {
		t.Errorf("IPv4:\n%s", diff)
	}
	if diff := cmp.Diff([]string{"8000::/1", "::/1"}, steering.PodNetworks(p, service.IPv6).Entries); diff != "" {
		t.Errorf("IPv6:\n%s", diff)
	}
}
