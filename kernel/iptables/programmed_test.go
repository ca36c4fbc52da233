package iptables_test

import (
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

func TestProgrammed(t *testing.T) {
	t.Parallel()
	services := func() []*plan.Service {
		return append(kerneltest.Many(30, 2),
			kerneltest.Service("web", service.TCP, kerneltest.Cluster("10.96.0.1:80"), kerneltest.Cluster("[fd00:96::1]:80"), kerneltest.NodePort(30080), kerneltest.Endpoints("10.1.0.1:80", "[fd01::1]:80")),
			kerneltest.Service("empty", service.TCP, kerneltest.Cluster("10.96.0.2:80", func(f *plan.Frontend) { f.Verdict = plan.Reject })))
	}
	tests := []struct {
		name   string
		damage func(r *kernel.Ruleset)
		lost   []string // services that aren't programmed any more
	}{
		{"as wanted", func(*kernel.Ruleset) {}, nil},
		{"a rule of the service's chain is gone", func(r *kernel.Ruleset) { edit(r, service.IPv4, "KPROXY-SVC-", "web", nil) }, []string{"web"}},
		{"only its IPv6 chain differs", func(r *kernel.Ruleset) { edit(r, service.IPv6, "KPROXY-SVC-", "web", []string{"-j RETURN"}) }, []string{"web"}},
		{"the rule that leads there is gone", func(r *kernel.Ruleset) {
			for i, c := range r.Chains[0] {
				if strings.Contains(strings.Join(c.Rules, "\n"), "-d 10.96.0.1/32") {
					r.Chains[0][i].Rules = slices.DeleteFunc(slices.Clone(c.Rules), func(s string) bool { return strings.Contains(s, "10.96.0.1/32") })
				}
			}
		}, []string{"web"}},
		{"its chain is still there though it has no endpoint now", func(r *kernel.Ruleset) {
			r.Chains[0] = append(r.Chains[0], kernel.Chain{Table: "nat", Name: kernel.ChainName("SVC", service.Key{Namespace: "default", Name: "empty", Protocol: service.TCP}), Rules: []string{"-j RETURN"}})
			slices.SortFunc(r.Chains[0], kernel.CompareChains)
		}, []string{"empty"}},
		{"node ports are cut off", func(r *kernel.Ruleset) {
			for i, c := range r.Chains[0] {
				if c.Name == "KPROXY-SERVICES" {
					r.Chains[0][i].Rules = c.Rules[:len(c.Rules)-1]
				}
			}
		}, []string{"web"}},
		{"the jump is gone", func(r *kernel.Ruleset) { r.Jumps[0] = r.Jumps[0][:len(r.Jumps[0])-2] }, []string{"*"}},
		{"a filter chain differs", func(r *kernel.Ruleset) {
			for i, c := range r.Chains[0] {
				if c.Table == "filter" {
					r.Chains[0][i].Rules = nil
				}
			}
		}, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			p := kerneltest.Plan(plan.ModeIPTables, services()...)
			want, have := iptables.Render(p, options()), iptables.Render(p, options())
			tt.damage(&have)
			got := new(iptables.Renderer).Programmed(have, want, p)
			var lost []string
			for _, s := range p.Services {
				if h, ok := got[s.Port.Key]; !ok {
					lost = append(lost, s.Port.Name)
				} else if h != s.KernelHash {
					t.Errorf("%s has hash %d, want %d", s.Port.Key, h, s.KernelHash)
				}
			}
			if len(lost) == len(p.Services) {
				lost = []string{"*"}
			}
			if diff := cmp.Diff(tt.lost, lost); diff != "" {
				t.Errorf("not programmed (-want +got):\n%s", diff)
			}
		})
	}
}

// edit replaces the rules of a service's chain.
func edit(r *kernel.Ruleset, f service.Family, prefix, name string, rules []string) {
	for i, c := range r.Chains[f] {
		if strings.HasPrefix(c.Name, prefix) && c.Owner.Name == name {
			r.Chains[f][i].Rules = rules
		}
	}
}

func TestAdopted(t *testing.T) {
	t.Parallel()
	// kproxy that ran before: "offloaded" in the kernel, "user" in userspace,
	// "ported" in userspace by its node port.
	offloaded := kerneltest.Service("offloaded", service.TCP, kerneltest.Cluster("10.96.0.1:80"), kerneltest.Endpoints("10.1.0.1:80"))
	user := kerneltest.Service("user", service.TCP, kerneltest.Cluster("10.96.0.2:80"), kerneltest.Endpoints("10.1.0.1:80"), kerneltest.InUserspace)
	ported := kerneltest.Service("ported", service.TCP, kerneltest.NodePort(30080), kerneltest.Endpoints("10.1.0.1:80"), kerneltest.InUserspace)
	p := kerneltest.Plan(plan.ModeIPTables, offloaded, user, ported)
	have := iptables.Render(p, options())
	have.Sets = steering.Sets(p) // what Observe finds

	var b service.Builder
	add := func(s *plan.Service, number, nodePort uint16, cluster ...string) {
		port := *s.Port
		port.Number, port.NodePort = number, nodePort
		for _, f := range s.Frontends {
			if f.Kind == plan.ClusterIP {
				port.ClusterIPs = append(port.ClusterIPs, f.Address.Addr())
			}
		}
		if err := b.AddPort(port); err != nil {
			t.Fatal(err)
		}
	}
	add(offloaded, 80, 0)
	add(user, 80, 0)
	add(ported, 80, 30080)
	add(kerneltest.Service("new", service.TCP, kerneltest.Cluster("10.96.0.9:80")), 80, 0)

	got := new(iptables.Renderer).Adopted(have, b.Build())
	if diff := cmp.Diff([]service.Key{offloaded.Port.Key}, slices.Collect(maps.Keys(got))); diff != "" {
		t.Errorf("Adopted (-want +got):\n%s", diff)
	}
	have.Sets = nil
	if got := new(iptables.Renderer).Adopted(have, b.Build()); len(got) > 0 {
		t.Errorf("without redirect sets %v are adopted", got)
	}
}

// TestRendererRemembers: a Renderer that has seen other plans gives what one
// that has seen none gives.
func TestRendererRemembers(t *testing.T) {
	t.Parallel()
	for seed := range uint64(10) {
		w := kerneltest.NewWalk(seed, plan.ModeIPTables, plan.IPTables, 12)
		r := iptables.NewRenderer(options())
		var last *plan.Plan
		for range 10 {
			p := w.Next()
			if diff := cmp.Diff(iptables.Render(p, options()), text(r.Render(p, plan.Between(last, p)))); diff != "" {
				t.Fatalf("seed %d (-from scratch +remembered):\n%s", seed, diff)
			}
			last = p
		}
	}
}
