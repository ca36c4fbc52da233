package ipvs

import (
	"net/netip"
	"slices"
	"testing"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// TestVirtualsOfMoving: a service that moves has virtual servers at every address of it, by
// the policy of the plan in which IPVS has it.
func TestVirtualsOfMoving(t *testing.T) {
	s := &plan.Service{Port: &service.Port{Key: service.Key{Name: "web", Protocol: service.TCP}, Number: 80}, DataPlane: plan.IPVS, Scheduler: "rr"}
	s.Frontends = []plan.Frontend{
		{Kind: plan.ClusterIP, Protocol: service.TCP, Verdict: plan.Forward, Address: netip.MustParseAddrPort("10.96.0.10:80")},
		{Kind: plan.NodePort, Protocol: service.TCP, Verdict: plan.Forward, Address: netip.AddrPortFrom(netip.Addr{}, 30080)},
	}
	a := netip.MustParseAddrPort("10.2.0.2:8080")
	s.Endpoints = []plan.Endpoint{{Endpoint: &service.Endpoint{Address: a, Weight: 1}, Usable: true}}
	s.Groups[service.IPv4].Cluster = []plan.Backend{{Address: a, Weight: 1}}
	p := &Plane{over: &over{own: NewRenderer(steering.DefaultOptions())}}
	for _, node := range []string{"192.0.2.1", "192.0.2.2"} {
		policy := &plan.Policy{NodeAddresses: []netip.Addr{netip.MustParseAddr(node)}}
		var got []string
		other := *s
		other.DataPlane = plan.IPTables // another layer's
		for _, v := range p.virtuals([]kernel.Moving{{Service: s, Policy: policy}, {Service: &other, Policy: policy}}) {
			got = append(got, v.Address.String())
		}
		if want := []string{"10.96.0.10:80", node + ":30080"}; !slices.Equal(got, want) {
			t.Errorf("on %s: virtual servers %v, want %v", node, got, want)
		}
	}
}
