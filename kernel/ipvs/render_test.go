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
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
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
// number of another's node port; as in the rules of iptables, the address wins. None is where
// one of its endpoints is, or what is on its way there would come back.
func TestContestedPlace(t *testing.T) {
	r := onlyRender(
		kerneltest.Service("a", service.TCP, kerneltest.NodePort(30080), kerneltest.Endpoints("10.1.0.1:80"), kerneltest.Affinity(90*time.Minute+time.Millisecond), onIPVS),
		kerneltest.Service("b", service.TCP, kerneltest.External("192.168.7.10:30080"), kerneltest.Endpoints("10.1.0.2:80"), onIPVS),
		kerneltest.Service("c", service.TCP, kerneltest.NodePort(30081), kerneltest.Endpoints("192.168.0.10:30081", "10.1.0.1:80"), onIPVS))
	var got []string
	for _, v := range r.Virtuals {
		got = append(got, fmt.Sprint(v.Owner.Name, " ", v.Address, " persistent ", v.Persistence))
	}
	want := []string{"a 192.168.0.10:30080 persistent 5401", "b 192.168.7.10:30080 persistent 0", "c 192.168.7.10:30081 persistent 0"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("virtual servers (-want +got):\n%s", diff)
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
