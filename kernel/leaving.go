package kernel

import (
	"slices"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// addLeaving adds the endpoints that get no new connection, but may still have
// some: those that terminate, are down, or drain. The rules against packets that
// the kernel can't place have to know them, besides those in [SetEndpoint].
func (b *portal) addLeaving(p *plan.Plan) {
	for _, s := range p.Services {
		if s.Beneath == plan.None {
			continue
		}
		for i := range s.Endpoints {
			if e := &s.Endpoints[i]; e.Leaves() {
				name := FamilySet(SetLeaving, service.FamilyOf(e.Address.Addr()))
				b.entries[name] = append(b.entries[name], AddressEntry(s.Port.Protocol, e.Address))
			}
		}
	}
}

// hasLeaving reports whether addLeaving adds an endpoint of s, which other
// services may have as well.
func hasLeaving(s *plan.Service) bool {
	return s != nil && s.Beneath != plan.None && slices.ContainsFunc(s.Endpoints, func(e plan.Endpoint) bool { return e.Leaves() })
}
