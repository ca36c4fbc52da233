package plan

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"kproxy.dev/kproxy/service"
)

// families returns the families a service port is served in: those of its
// cluster addresses, as kube-proxy does; a service without any is served in
// those of its other addresses, and one with only a node port in both.
func families(p *service.Port) (has [2]bool) {
	for _, addrs := range [][]netip.Addr{p.ClusterIPs, p.ExternalIPs, p.LoadBalancerIPs} {
		for _, a := range addrs {
			has[service.FamilyOf(a)] = true
		}
		if len(p.ClusterIPs) > 0 {
			return has
		}
	}
	if !has[service.IPv4] && !has[service.IPv6] {
		return [2]bool{true, true}
	}
	return has
}

// Binding names an address at which a service port wants to answer. Two service
// ports can't have the same.
type Binding struct {
	Family   service.Family
	Protocol service.Protocol
	Address  netip.AddrPort // the zero Addr for a node port
}

// Binding returns where f answers.
func (f *Frontend) Binding() Binding { return Binding{f.Family, f.Protocol, f.Address} }

// eachBinding calls f for every binding that p wants, in order of kind, then address.
// An address that p names twice counts once: as its cluster address if it is
// one, and rather as load balancer address than as external, because source
// ranges apply to those.
func eachBinding(p *service.Port, f func(Kind, Binding)) {
	has := families(p)
	each := func(k Kind, addrs []netip.Addr, but ...[]netip.Addr) {
		for _, a := range addrs {
			fam := service.FamilyOf(a)
			if !has[fam] || slices.ContainsFunc(but, func(o []netip.Addr) bool { return slices.Contains(o, a) }) {
				continue
			}
			f(k, Binding{fam, p.Protocol, netip.AddrPortFrom(a, p.Number)})
		}
	}
	each(ClusterIP, p.ClusterIPs)
	each(ExternalIP, p.ExternalIPs, p.ClusterIPs, p.LoadBalancerIPs)
	each(LoadBalancer, p.LoadBalancerIPs, p.ClusterIPs)
	if p.NodePort == 0 {
		return
	}
	for _, fam := range service.Families {
		if has[fam] {
			f(NodePort, Binding{fam, p.Protocol, netip.AddrPortFrom(netip.Addr{}, p.NodePort)})
		}
	}
}

// frontends returns p's frontends without their verdicts. Bindings that other
// service ports have are left out, and those in excluded families.
func (c *computation) frontends(p *service.Port, excluded [2]bool) []Frontend {
	lost := c.conflicts.lost[p.Key]
	n := len(p.ClusterIPs) + len(p.ExternalIPs) + len(p.LoadBalancerIPs)
	if p.NodePort != 0 {
		n += len(service.Families)
	}
	out := make([]Frontend, 0, n)
	eachBinding(p, func(k Kind, at Binding) {
		if _, gone := lost[at]; gone || excluded[at.Family] {
			return
		}
		f := Frontend{Kind: k, Family: at.Family, Protocol: at.Protocol, Address: at.Address}
		if k == ClusterIP {
			f.Local = p.InternalLocal
		} else {
			f.Local, f.ShortCircuit = p.ExternalLocal, p.ExternalLocal
		}
		f.Masquerade = c.masquerade(&f)
		if k == LoadBalancer {
			f.SourceRanges = c.sourceRanges(p, at.Family)
		}
		out = append(out, f)
	})
	return out
}

// masquerade returns f's rule. Traffic from outside comes
// back through this node only if the node's address replaces the client's,
// except where the endpoint is on this node.
func (c *computation) masquerade(f *Frontend) Masquerade {
	switch {
	case f.Kind != ClusterIP && f.Local:
		return MasqueradeNodeLocal
	case f.Kind != ClusterIP, c.in.Policy.MasqueradeAll:
		return MasqueradeAlways
	case c.detects[f.Family]:
		return MasqueradeUnlessPod
	}
	return MasqueradeNever
}

// sourceRanges returns the clients that p's load balancer addresses of one
// family admit: the ranges of that family, none if one of
// them holds every address. If they admit this node, they admit the load
// balancer addresses too: a node that has such an address (it was routed there,
// or is on kproxy's link) uses it as its source when it connects to it.
// This node is what its Node object says; its other addresses, such as the one
// that pods see it by, count where there is none.
func (c *computation) sourceRanges(p *service.Port, f service.Family) []netip.Prefix {
	var out []netip.Prefix
	for _, r := range p.SourceRanges {
		if service.FamilyOf(r.Addr()) != f {
			continue
		}
		if r.Bits() == 0 {
			return nil
		}
		out = append(out, r)
	}
	own := c.node.Addresses
	if len(own) == 0 && c.localAddresses {
		own = c.in.Policy.NodeAddresses
	}
	if !slices.ContainsFunc(own, func(a netip.Addr) bool { return contains(out, a) }) {
		return out
	}
	for _, a := range p.LoadBalancerIPs {
		if service.FamilyOf(a) == f && !contains(out, a) {
			out = append(out, netip.PrefixFrom(a, a.BitLen()))
		}
	}
	slices.SortFunc(out, netip.Prefix.Compare)
	return out
}

// verdict returns what happens to a client that isn't short-circuited.
// somewhere says that endpoints that take connections exist, on any node.
func verdict(f *Frontend, g *Groups, somewhere bool) Verdict {
	switch {
	case f.Local && takesConnections(g.Local), !f.Local && takesConnections(g.Cluster):
		return Forward
	case f.Local && somewhere:
		return Drop
	}
	return Reject
}

// conflicts are the bindings that several service ports want.
// It is immutable.
type conflicts struct {
	lost map[service.Key]map[Binding]*service.Port // loser, binding, winner
}

// findConflicts decides which service port gets which binding. The older service
// keeps it; of equally old ones the first in key order.
func (c *computation) findConflicts() *conflicts {
	n := c.snapshot.Len()
	winners := make(map[Binding]*service.Port, 2*n)
	found := false
	for i := range n {
		p, _, _ := c.snapshot.At(i)
		eachBinding(p, func(_ Kind, at Binding) {
			w := winners[at]
			if w == nil || p.Created.Before(w.Created) { // key order: w comes first
				winners[at] = p
			}
			found = found || w != nil
		})
	}
	out := &conflicts{}
	if !found {
		return out
	}
	out.lost = map[service.Key]map[Binding]*service.Port{}
	for i := range n {
		p, _, _ := c.snapshot.At(i)
		eachBinding(p, func(_ Kind, at Binding) {
			if w := winners[at]; w != p {
				if out.lost[p.Key] == nil {
					out.lost[p.Key] = map[Binding]*service.Port{}
				}
				out.lost[p.Key][at] = w
			}
		})
	}
	return out
}

// sameBindings reports whether two specifications want the same bindings.
func sameBindings(a, b *service.Port) bool {
	return a.Created.Equal(b.Created) && a.Number == b.Number && a.NodePort == b.NodePort &&
		slices.Equal(a.ClusterIPs, b.ClusterIPs) &&
		slices.Equal(a.ExternalIPs, b.ExternalIPs) &&
		slices.Equal(a.LoadBalancerIPs, b.LoadBalancerIPs)
}

// sentences says which bindings p lost, and to which service port, in order.
func (c *conflicts) sentences(p *service.Port) []string {
	lost := c.lost[p.Key]
	if len(lost) == 0 {
		return nil
	}
	var out []string
	eachBinding(p, func(k Kind, at Binding) {
		w := lost[at]
		if w == nil {
			return
		}
		why := "which comes first by name"
		if w.Created.Before(p.Created) {
			why = "which is older"
		}
		s := fmt.Sprintf("%s belongs to %s, %s", at, w.Key, why)
		if !slices.Contains(out, s) { // a node port of both families
			out = append(out, s)
		}
	})
	return out
}

// String returns "10.96.0.10:80 (TCP)" or "node port 30080 (TCP)".
func (at Binding) String() string {
	proto := strings.ToUpper(at.Protocol.String())
	if !at.Address.Addr().IsValid() {
		return fmt.Sprintf("node port %d (%s)", at.Address.Port(), proto)
	}
	return fmt.Sprintf("%s (%s)", at.Address, proto)
}
