package plan

import (
	"fmt"
	"net/netip"
	"slices"

	"kproxy.dev/kproxy/service"
)

// A node may have several pod networks, each with a proxy of its own. Services
// whose endpoints are in an excluded network are left to its proxy, per family
// and as a whole: with all endpoints there, a service port has no frontend in
// that family, so that nothing of kproxy's touches its packets. With only some
// there it is served with the others. One without endpoints is nobody else's
// for certain, and is refused like every other.

// excluded reports whether another proxy serves endpoints at a.
func (p *Policy) excluded(a netip.Addr) bool { return contains(p.ExcludeCIDRs, a) }

// exclude returns the families in which p is left to another proxy.
func (c *computation) exclude(p *service.Port, eps []service.Endpoint) (out [2]bool) {
	if len(c.in.Policy.ExcludeCIDRs) == 0 {
		return out
	}
	has := families(p)
	var all, theirs [2]int
	for i := range eps {
		f := service.FamilyOf(eps[i].Address.Addr())
		all[f]++
		if c.in.Policy.excluded(eps[i].Address.Addr()) {
			theirs[f]++
		}
	}
	for _, f := range service.Families {
		out[f] = has[f] && all[f] > 0 && theirs[f] == all[f]
	}
	return out
}

// ours returns eps with those that another proxy serves as if they weren't ready,
// which nothing chooses and no topology counts.
func (c *computation) ours(eps []service.Endpoint) []service.Endpoint {
	excluded := func(e service.Endpoint) bool { return c.in.Policy.excluded(e.Address.Addr()) }
	if !slices.ContainsFunc(eps, excluded) {
		return eps
	}
	out := slices.Clone(eps)
	for i := range out {
		if excluded(out[i]) {
			out[i].Ready, out[i].Serving, out[i].Terminating = false, false, false
		}
	}
	return out
}

// leave makes s one that is wholly left to another proxy, and returns why.
func (c *computation) leave(s *Service) string {
	s.Beneath = None
	return "left to another proxy: all its endpoints are in " + joinedText(c.theirNetworks(s, service.IPv4, service.IPv6))
}

// theirNetworks are the excluded networks that endpoints of s in the given
// families are in.
func (c *computation) theirNetworks(s *Service, fams ...service.Family) []netip.Prefix {
	var out []netip.Prefix
	for _, n := range c.in.Policy.ExcludeCIDRs {
		if slices.ContainsFunc(s.Endpoints, func(e Endpoint) bool {
			return slices.Contains(fams, service.FamilyOf(e.Address.Addr())) && n.Contains(e.Address.Addr())
		}) {
			out = append(out, n)
		}
	}
	return out
}

// leftToOthers says what of s another proxy serves, where kproxy serves the rest.
func (c *computation) leftToOthers(s *Service) []string {
	if len(s.Frontends) == 0 {
		return nil
	}
	var out []string
	for _, f := range service.Families {
		theirs, all := 0, 0
		for i := range s.Endpoints {
			if e := &s.Endpoints[i]; service.FamilyOf(e.Address.Addr()) == f {
				all++
				if e.Excluded {
					theirs++
				}
			}
		}
		switch networks := joinedText(c.theirNetworks(s, f)); {
		case s.Excluded[f]:
			out = append(out, fmt.Sprintf("%s is left to another proxy: all its %s endpoints are in %s", familyText(f), familyText(f), networks))
		case theirs > 0:
			out = append(out, fmt.Sprintf("%d of its %d %s endpoints are another proxy's, in %s: it is served with the others only", theirs, all, familyText(f), networks))
		}
	}
	return out
}
