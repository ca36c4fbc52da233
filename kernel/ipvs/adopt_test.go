package ipvs_test

import (
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

func TestProgrammed(t *testing.T) {
	web := func() []*plan.Service {
		return []*plan.Service{
			kerneltest.Service("web", service.TCP, kerneltest.Cluster("10.96.0.1:80"), kerneltest.Cluster("[fd00:96::1]:80"), kerneltest.External("192.0.2.1:80"), kerneltest.NodePort(30080),
				kerneltest.Endpoints("10.1.0.1:80", "10.1.0.2:80", "[fd01::1]:80"), onIPVS),
			kerneltest.Service("other", service.TCP, kerneltest.Cluster("10.96.0.2:80"), kerneltest.Endpoints("10.1.0.3:80"), onIPVS),
			kerneltest.Service("random", service.TCP, kerneltest.Cluster("10.96.0.3:80"), kerneltest.Endpoints("10.1.0.1:80")),
		}
	}
	virtual := func(r *kernel.Ruleset, address string) *kernel.Virtual {
		i := slices.IndexFunc(r.Virtuals, func(v kernel.Virtual) bool { return v.Address.String() == address })
		r.Virtuals[i].Reals = slices.Clone(r.Virtuals[i].Reals)
		return &r.Virtuals[i]
	}
	chain := func(r *kernel.Ruleset, table, name string) *kernel.Chain {
		i := slices.IndexFunc(r.Chains[0], func(c kernel.Chain) bool { return c.Table == table && c.Name == name })
		return &r.Chains[0][i]
	}
	without := func(r *kernel.Ruleset, set, entry string) {
		i := slices.IndexFunc(r.Sets, func(s kernel.Set) bool { return s.Name == set })
		r.Sets[i].Entries = slices.DeleteFunc(slices.Clone(r.Sets[i].Entries), func(e string) bool { return e == entry })
	}
	all := []string{"other", "web"}
	tests := []struct {
		name   string
		damage func(r *kernel.Ruleset)
		lost   []string // services that aren't programmed any more
	}{
		{"as wanted", func(*kernel.Ruleset) {}, nil},
		{"a virtual server is gone", func(r *kernel.Ruleset) {
			r.Virtuals = slices.DeleteFunc(r.Virtuals, func(v kernel.Virtual) bool { return v.Address.String() == "192.0.2.1:80" })
		}, []string{"web"}},
		{"only that of a node port in IPv6", func(r *kernel.Ruleset) {
			r.Virtuals = slices.DeleteFunc(r.Virtuals, func(v kernel.Virtual) bool { return v.Address.String() == "[fd00:ffff::10]:30080" })
		}, []string{"web"}},
		{"a real server is gone", func(r *kernel.Ruleset) { v := virtual(r, "10.96.0.1:80"); v.Reals = v.Reals[:1] }, []string{"web"}},
		{"one too many", func(r *kernel.Ruleset) {
			v := virtual(r, "10.96.0.1:80")
			v.Reals = append(v.Reals, kernel.Real{Address: netip.MustParseAddrPort("10.1.0.9:80"), Weight: 1})
		}, []string{"web"}},
		{"another weight", func(r *kernel.Ruleset) { virtual(r, "10.96.0.2:80").Reals[0].Weight = 0 }, []string{"other"}},
		{"another scheduler", func(r *kernel.Ruleset) { virtual(r, "10.96.0.2:80").Scheduler = "wrr" }, []string{"other"}},
		{"another persistence", func(r *kernel.Ruleset) { virtual(r, "10.96.0.2:80").Persistence = 1 }, []string{"other"}},
		{"an address isn't on the link", func(r *kernel.Ruleset) { r.Addresses = r.Addresses[1:] }, []string{"web"}},
		{"nobody would be masqueraded", func(r *kernel.Ruleset) { without(r, "KPROXY-MASQ-ALL-4", "192.0.2.1,tcp:80") }, []string{"web"}},
		{"nor at the node port", func(r *kernel.Ruleset) { without(r, "KPROXY-MASQ-ALL-NP-TCP-4", "30080") }, []string{"web"}},
		{"an endpoint isn't recorded", func(r *kernel.Ruleset) { without(r, "KPROXY-ENDPOINT-4", "10.1.0.3,tcp:80,10.1.0.3") }, []string{"other"}},
		{"the way there is gone", func(r *kernel.Ruleset) { chain(r, "nat", "KPROXY-SERVICES").Rules = nil }, all},
		{"connections aren't marked", func(r *kernel.Ruleset) { chain(r, "nat", "KPROXY-VIRTUAL").Rules = nil }, all},
		{"nothing is let through", func(r *kernel.Ruleset) { chain(r, "filter", "KPROXY-VIRTUAL").Rules = nil }, all},
		{"nothing is masqueraded", func(r *kernel.Ruleset) { chain(r, "nat", "KPROXY-POSTROUTING").Rules = nil }, all},
		{"a jump is gone", func(r *kernel.Ruleset) { r.Jumps[1] = r.Jumps[1][1:] }, all},
		{"the portal differs", func(r *kernel.Ruleset) { chain(r, "nat", "KPROXY-PORTAL").Rules = nil }, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := kerneltest.Plan(plan.ModeAuto, web()...)
			p.Policy.NodeAddresses = planOf().Policy.NodeAddresses
			want, have := render(p), render(p)
			tt.damage(&have)
			got := ipvs.Programmed(have, want, p)
			var lost []string
			for _, s := range p.Services {
				h, ok := got[s.Port.Key]
				switch {
				case s.Kernel != plan.IPVS && ok:
					t.Errorf("%s isn't on IPVS", s.Port.Key)
				case s.Kernel == plan.IPVS && !ok:
					lost = append(lost, s.Port.Name)
				case ok && h != s.KernelHash:
					t.Errorf("%s has hash %d, want %d", s.Port.Key, h, s.KernelHash)
				}
			}
			if diff := cmp.Diff(tt.lost, lost); diff != "" {
				t.Errorf("not programmed (-want +got):\n%s", diff)
			}
			if got := ipvs.Programmed(want, want, p); len(got) != 2 {
				t.Errorf("Programmed of what is wanted = %v", got)
			}
		})
	}
}

func TestAdopted(t *testing.T) {
	// kproxy that ran before: "offloaded" and "ported" in the kernel, "user" and
	// "both" in userspace, the latter by its node port; "iptables" elsewhere.
	services := []*plan.Service{
		kerneltest.Service("offloaded", service.TCP, kerneltest.Cluster("10.96.0.1:80"), kerneltest.Endpoints("10.1.0.1:80"), onIPVS),
		kerneltest.Service("ported", service.TCP, kerneltest.NodePort(30080), kerneltest.Endpoints("10.1.0.1:80"), onIPVS),
		kerneltest.Service("user", service.TCP, kerneltest.Cluster("10.96.0.2:80"), kerneltest.Endpoints("10.1.0.1:80"), onIPVS, kerneltest.InUserspace),
		kerneltest.Service("both", service.TCP, kerneltest.Cluster("10.96.0.3:80"), kerneltest.NodePort(30081), kerneltest.Endpoints("10.1.0.1:80"), onIPVS, kerneltest.InUserspace),
		kerneltest.Service("iptables", service.TCP, kerneltest.Cluster("10.96.0.4:80"), kerneltest.Endpoints("10.1.0.1:80")),
	}
	p := planOf(services...)
	have := render(p)
	have.Sets = steering.Sets(p) // what Observe finds
	var b service.Builder
	for _, s := range services {
		port := *s.Port
		for _, f := range s.Frontends {
			if f.Kind == plan.NodePort {
				port.NodePort = f.Address.Port()
			} else {
				port.ClusterIPs, port.Number = append(port.ClusterIPs, f.Address.Addr()), f.Address.Port()
			}
		}
		if err := b.AddPort(port); err != nil {
			t.Fatal(err)
		}
	}
	// A node port that has the number of a service's own port.
	other := service.Port{Key: service.Key{Namespace: "default", Name: "another", Protocol: service.TCP}, NodePort: 80}
	if err := b.AddPort(other); err != nil {
		t.Fatal(err)
	}
	var names []string
	for k := range ipvs.Adopted(have, b.Build()) {
		names = append(names, k.Name)
	}
	slices.SortFunc(names, strings.Compare)
	if diff := cmp.Diff([]string{"offloaded", "ported"}, names); diff != "" {
		t.Errorf("adopted (-want +got):\n%s", diff)
	}
	have.Sets = nil
	if got := ipvs.Adopted(have, b.Build()); len(got) > 0 {
		t.Errorf("without a portal nobody knows who served them: %v", got)
	}
}
