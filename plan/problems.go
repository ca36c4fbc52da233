package plan

import (
	"fmt"
	"net/netip"
	"slices"

	"kproxy.dev/kproxy/service"
)

// problems says what is wrong with p's specification, or isn't what its
// author may believe.
func (c *computation) problems(p *service.Port, eps []service.Endpoint) []string {
	out := slices.Clone(p.Problems)
	out = append(out, c.contests.sentences(p)...)
	has := families(p)
	for _, addrs := range [][]netip.Addr{p.ExternalIPs, p.LoadBalancerIPs} {
		for _, a := range addrs {
			if f := service.FamilyOf(a); !has[f] {
				out = append(out, fmt.Sprintf("%s is not served: the service has no %s cluster address", a, familyText(f)))
			}
		}
	}
	for _, f := range service.Families {
		if unrestricted(p, f) {
			out = append(out, fmt.Sprintf("its source ranges don't restrict %s clients: none of them is %s", familyText(f), familyText(f)))
		}
	}
	if p.Algorithm == service.RoundRobin && weighted(eps) {
		out = append(out, "its weights have no effect: the algorithm is round-robin, not weighted-round-robin")
	}
	return out
}

// unrestricted reports whether p restricts its clients, but not those of
// family f, although it has a load balancer address there. kube-proxy admits
// these too (SEMANTICS note g).
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
