package plan

import (
	"fmt"
	"net/netip"
	"slices"

	"kproxy.dev/kproxy/service"
)

// problems says what is wrong with p's specification, or isn't what its
// author may believe.
func (c *computation) problems(s *Service, eps []service.Endpoint, a *Abilities) []string {
	p := s.Port
	out := slices.Concat(p.Problems, c.in.Health.Defaults().Refused(p.Health))
	out = append(out, c.contests.sentences(p)...)
	has := families(p)
	for _, addrs := range [][]netip.Addr{p.ExternalIPs, p.LoadBalancerIPs} {
		for _, a := range addrs {
			if f := service.FamilyOf(a); !has[f] {
				out = append(out, fmt.Sprintf("%s is not served: the service has no %s cluster address", a, familyText(f)))
			}
		}
	}
	out = append(out, c.leftToOthers(s)...)
	out = append(out, c.nowhere(s)...)
	out = append(out, c.ownAddresses(s, a)...)
	for _, f := range service.Families {
		if unrestricted(p, f) {
			out = append(out, fmt.Sprintf("its source ranges don't restrict %s clients: none of them is %s", familyText(f), familyText(f)))
		}
	}
	if p.Algorithm == service.RoundRobin && weighted(eps) {
		text := "its weights have no effect"
		if !a.weightless(s) {
			text += " in userspace"
		}
		out = append(out, text+": the algorithm is round-robin, not weighted-round-robin")
	}
	return out
}

// ownAddresses says which addresses of s are this node's already, where its data
// plane answers on them. Other service addresses are on a link that is only kproxy's,
// and nothing but services can be reached there.
func (c *computation) ownAddresses(s *Service, a *Abilities) []string {
	if !a.LocalAddresses {
		return nil
	}
	var out []string
	for i := range s.Frontends {
		f := &s.Frontends[i]
		if f.Kind != NodePort && c.in.Policy.ownAddress(f.Address.Addr()) {
			out = append(out, fmt.Sprintf("%s is this node's own address: the service answers there on port %d, the node's own ports stay reachable there, and the address is left where it is",
				f.Address.Addr(), f.Address.Port()))
		}
	}
	return out
}

// unrestricted reports whether p restricts its clients, but not those of
// family f, although it has a load balancer address there. kube-proxy admits
// these too.
func unrestricted(p *service.Port, f service.Family) bool {
	inFamily := func(a netip.Addr) bool { return service.FamilyOf(a) == f }
	return len(p.SourceRanges) > 0 && families(p)[f] &&
		slices.ContainsFunc(p.LoadBalancerIPs, inFamily) &&
		!slices.ContainsFunc(p.SourceRanges, func(r netip.Prefix) bool { return inFamily(r.Addr()) })
}

// weighted reports whether two endpoints that take connections differ in weight.
func weighted(eps []service.Endpoint) bool {
	var first uint16
	for i := range eps {
		w := eps[i].Weight
		if first == 0 {
			first = w
		}
		if w != 0 && w != first {
			return true
		}
	}
	return false
}

func familyText(f service.Family) string {
	if f == service.IPv6 {
		return "IPv6"
	}
	return "IPv4"
}
