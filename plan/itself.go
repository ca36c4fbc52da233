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

// heedItself keeps s in userspace where its data plane answers on local addresses
// and one of its endpoints is such an address. The data plane would get the
// connections that are on their way to the endpoint, from its other services and
// from userspace alike, and share them out again. So it doesn't answer there, and
// a connection to that address without a live kproxy reaches that endpoint.
func (c *computation) heedItself(s *Service, f *facts, a *Abilities) {
	if !a.LocalAddresses {
		return
	}
	at, ok := s.AnswersAt(&c.in.Policy)
	if !ok {
		return
	}
	if f.inexpressible == "" {
		f.inexpressible = string(a.Plane) + " can't lead connections to endpoint " + at.String() + ", where the service itself answers"
	}
	if s.Degraded != "" {
		s.Degraded += "; "
	}
	s.Degraded += "connections to " + at.String() + " reach only the endpoint there" + meanwhile(s.Port)
}
