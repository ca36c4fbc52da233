package kerneltest

import (
	"cmp"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// RulesMatchPlan follows connections of every kind of client to every frontend of
// random plans through what is rendered of them, and compares what becomes of
// them with what the plan says itself.
func RulesMatchPlan(t *testing.T, m Mode) {
	for seed := range uint64(m.Seeds) {
		w := NewWalk(seed, m.Mode, m.Plane, 12)
		w.Next()
		p := w.Next()
		rules, sets := m.Render(p), steering.Sets(p)
		for _, f := range service.Families {
			sim := simulate(t, p, rules, sets, f)
			sim.alive = seed%4 != 0
			compareClosed(t, sim)
			for _, s := range p.Services {
				if s.Excluded[f] {
					compareExcluded(t, sim, p, s, f)
				}
				for i := range s.Frontends {
					if s.Frontends[i].Family == f {
						compareFrontend(t, sim, p, s, &s.Frontends[i])
					}
				}
			}
		}
	}
}

func compareFrontend(t *testing.T, sim *simulation, p *plan.Plan, s *plan.Service, f *plan.Frontend) {
	t.Helper()
	pick := func(v4, v6 string) netip.Addr {
		if f.Family == service.IPv6 {
			v4 = v6
		}
		return netip.MustParseAddr(v4)
	}
	node := nodeAddress(p, f.Family)
	clients := map[string]plan.Client{
		"outsider": {Address: pick("203.0.113.9", "2001:db8:9::9")},
		"in range": {Address: pick("198.51.100.7", "2001:db8:1::7")},
		"pod":      {Address: pick("10.244.200.200", "fd00:244::ffff:1"), Interface: cmp.Or(p.Policy.PodBridge, p.Policy.PodInterfacePrefix+"1")},
		"node":     {Address: node, Node: true},
	}
	if g := s.Groups[f.Family].Cluster; len(g) > 0 {
		clients["endpoint"] = plan.Client{Address: g[0].Address.Addr()}
	}
	_, onLink := slices.BinarySearchFunc(sim.rules.Addresses, f.Address.Addr(), netip.Addr.Compare)
	if onLink {
		clients["node, from the service's address"] = plan.Client{Address: f.Address.Addr(), Node: true}
	}
	for who, c := range clients {
		dst := f.Address.Addr()
		if f.Kind == plan.NodePort {
			dst = node
		}
		pkt := first(f.Protocol, c, netip.AddrPortFrom(dst, f.Address.Port()))
		want := sim.wanted(s, f, c)
		if turnedAway(f, c, want, onLink && (sim.alive || !s.ShortCircuits(f))) && sim.schedule(pkt) != nil {
			want = []Fate{{To: "REJECT"}}
		}
		if diff := gocmp.Diff(want, sim.connect(pkt)); diff != "" {
			t.Errorf("%s to %s %s %v of %s, %s beneath %s, %+v (-plan +rules):\n%s", who, f.Kind, f.Protocol, f.Address, s.Port.Key, s.Kernel, s.DataPlane, f, diff)
		}
	}
}

// compareExcluded: no rule or set entry touches connections to the addresses of a
// service that another proxy serves, unless they are another service's as well.
func compareExcluded(t *testing.T, sim *simulation, p *plan.Plan, s *plan.Service, f service.Family) {
	t.Helper()
	var places []netip.AddrPort
	for _, addresses := range [][]netip.Addr{s.Port.ClusterIPs, s.Port.ExternalIPs, s.Port.LoadBalancerIPs} {
		for _, a := range addresses {
			places = append(places, netip.AddrPortFrom(a, s.Port.Number))
		}
	}
	if s.Port.NodePort != 0 {
		places = append(places, netip.AddrPortFrom(nodeAddress(p, f), s.Port.NodePort))
	}
	source := netip.MustParseAddr([2]string{"203.0.113.9", "2001:db8:9::9"}[f])
	for _, at := range places {
		if service.FamilyOf(at.Addr()) != f || sim.others(p, s, at) {
			continue
		}
		for _, local := range []bool{false, true} {
			pkt := first(s.Port.Protocol, plan.Client{Address: source, Node: local}, at)
			if diff := gocmp.Diff(none, sim.connect(pkt)); diff != "" {
				t.Errorf("%v of %s, which is another proxy's (-want +rules):\n%s", at, s.Port.Key, diff)
			}
		}
	}
}

// compareClosed: what is to a cluster IP by a port that no service has there is refused, and what is to an address of the
// ServiceCIDRs that no service has is dropped, but where pods are.
func compareClosed(t *testing.T, sim *simulation) {
	t.Helper()
	p, f := sim.plan, sim.family
	want := map[netip.Addr][]Fate{}
	for _, s := range p.Services {
		for _, a := range s.Port.ClusterIPs {
			switch {
			case service.FamilyOf(a) != f:
			case p.Policy.CloseClusterIPs, sim.onLink(a): // where the node's own ports would be reached
				want[a] = []Fate{{To: "REJECT"}}
			default:
				want[a] = none
			}
		}
	}
	for at, pods := range map[string]bool{
		"10.96.15.1": false, "10.96.16.1": false, "10.245.0.1": false, "10.244.15.200": true, "10.244.16.200": true, "10.244.200.200": true,
		"fd00:96::ffff": false, "fd00:96::1:1": false, "fd00:245::1": false, "fd00:244::fe": true, "fd00:244:0:1::1": true, "fd00:244::ffff:1": true,
	} {
		a := netip.MustParseAddr(at)
		if service.FamilyOf(a) != f {
			continue
		}
		in := func(list []netip.Prefix) bool {
			return slices.ContainsFunc(list, func(n netip.Prefix) bool { return n.Contains(a) })
		}
		want[a] = none
		if p.Policy.CloseClusterIPs && in(p.Policy.ServiceCIDRs) && !(pods && in(slices.Concat(p.Policy.PodCIDRs, p.Policy.Links, p.Policy.BridgedLinks))) {
			want[a] = []Fate{{To: "DROP"}}
		}
	}
	source := netip.MustParseAddr([2]string{"203.0.113.9", "2001:db8:9::9"}[f])
	for a, want := range want {
		for _, local := range []bool{false, true} {
			for _, protocol := range []service.Protocol{service.TCP, service.UDP, service.SCTP} {
				pkt := first(protocol, plan.Client{Address: source, Node: local}, netip.AddrPortFrom(a, 82))
				if diff := gocmp.Diff(want, sim.connect(pkt)); diff != "" {
					t.Errorf("%s %s, from the node itself: %v, closed %v, %v (-want +rules):\n%s", protocol, a, local, p.Policy.CloseClusterIPs, p.Policy.ServiceCIDRs, diff)
				}
			}
		}
	}
}

// others reports whether another service answers at a place, or has the address
// on kproxy's link, where nothing else is to be reached.
func (sim *simulation) others(p *plan.Plan, s *plan.Service, at netip.AddrPort) bool {
	_, onLink := slices.BinarySearchFunc(sim.rules.Addresses, at.Addr(), netip.Addr.Compare)
	return onLink || slices.ContainsFunc(p.Services, func(o *plan.Service) bool {
		return o != s && slices.ContainsFunc(o.Frontends, func(f plan.Frontend) bool {
			return f.Protocol == s.Port.Protocol && (f.Address == at || f.Kind == plan.NodePort && f.Address.Port() == at.Port() && slices.Contains(p.Policy.NodeAddresses, at.Addr()))
		})
	})
}

// nodeAddress is one of the node's.
func nodeAddress(p *plan.Plan, f service.Family) netip.Addr {
	return p.Policy.NodeAddresses[slices.IndexFunc(p.Policy.NodeAddresses, func(a netip.Addr) bool { return service.FamilyOf(a) == f })]
}

// turnedAway reports whether IPVS is the one to turn c away, if it keeps
// connections at f: it comes before filter OUTPUT, and where nobody else does. What
// goes to an address on kproxy's link is dropped before, unless live userspace would serve some.
func turnedAway(f *plan.Frontend, c plan.Client, fates []Fate, onLink bool) bool {
	if len(fates) != 1 || !f.Allows(c) {
		return false
	}
	return fates[0].To == "none" || c.Node && fates[0].To == "DROP" && !onLink
}

// wanted returns what the plan says about a connection.
func (sim *simulation) wanted(s *plan.Service, f *plan.Frontend, c plan.Client) []Fate {
	p := sim.plan
	if f.Kind == plan.NodePort && !slices.Contains(p.Policy.NodePortAddresses(f.Family), nodeAddress(p, f.Family)) {
		return none
	}
	shortCircuited := s.ShortCircuits(f) && (c.Node || p.Policy.IsPod(c))
	if shortCircuited && !sim.alive {
		// Without userspace, which tells those who may use endpoints of every node
		// from others, the traffic policy is for all alike.
		alike := *f
		alike.ShortCircuit, f = false, &alike
	}
	verdict := s.VerdictFor(f, c, &p.Policy)
	switch {
	case verdict == plan.Drop:
		return []Fate{{To: "DROP"}}
	case verdict == plan.Reject:
		return []Fate{{To: "REJECT"}}
	case sim.alive && (shortCircuited || s.DataPlane == plan.Userspace && f.Verdict == plan.Forward && f.Protocol != service.SCTP):
		return []Fate{{To: "userspace"}}
	}
	seen := map[Fate]bool{}
	for _, b := range s.Backends(f, c, &p.Policy) {
		if b.Weight > 0 {
			seen[Fate{b.Address.String(), f.Masquerades(c, b.Address.Addr(), &p.Policy)}] = true
		}
	}
	return sortedFates(seen)
}

func sortedFates(set map[Fate]bool) []Fate {
	return slices.SortedFunc(maps.Keys(set), func(a, b Fate) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
}
