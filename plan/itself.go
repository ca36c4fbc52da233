package plan

import (
	"net/netip"
	"slices"

	"kproxy.dev/kproxy/service"
)

// AnswersAt returns an endpoint of s that is an address at which s itself answers:
// a process in the node's own network that listens on the service's node port,
// or on one of its external addresses.
func (s *Service) AnswersAt(p *Policy) (netip.AddrPort, bool) {
	for i := range s.Endpoints {
		a := s.Endpoints[i].Address
		for j := range s.Frontends {
			f := &s.Frontends[j]
			if f.Address == a || f.Kind == NodePort && f.Address.Port() == a.Port() && f.Family == service.FamilyOf(a.Addr()) &&
				slices.Contains(p.NodePortAddresses(f.Family), a.Addr()) {
				return a, true
			}
		}
	}
	return netip.AddrPort{}, false
}

// heedItself keeps s in userspace where IPVS lies beneath and s answers at an
// endpoint of its own. A virtual server there would get the connections that are
// on their way to the endpoint, those of other virtual servers and of userspace
// alike, and share them out again. So there is none, and who connects there
// without a live kproxy reaches that endpoint.
func (c *computation) heedItself(s *Service, f *facts) {
	if s.Beneath != IPVS {
		return
	}
	a, ok := s.AnswersAt(&c.in.Policy)
	if !ok {
		return
	}
	if f.inexpressible == "" {
		f.inexpressible = "ipvs can't lead connections to endpoint " + a.String() + ", where the service itself answers"
	}
	if s.Degraded != "" {
		s.Degraded += "; "
	}
	s.Degraded += "connections to " + a.String() + " reach only the endpoint there" + meanwhile(s.Port)
}
