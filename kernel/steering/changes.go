package steering

import (
	"cmp"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// PortalChanges returns what leads from the membership of old to that of p, between
// which lies d. It looks only at the services in d: an offload among ten thousand
// services costs what that one service costs. An entry that one service gives up
// and another takes over is left in place.
func PortalChanges(old, p *plan.Plan, d plan.Delta) kernel.SetOps {
	before, now := newPortal(cmp.Or(old, p)), newPortal(p)
	changed := make(map[service.Key]bool, len(d.Changes))
	for _, c := range d.Changes {
		before.addService(c.Was)
		now.addService(c.Is)
		before.leave(c.Was, everyEntry)
		now.leave(c.Is, everyEntry)
		changed[c.Key()] = true
	}
	if !d.SameHealthPorts() { // the ports of a Service share one, so the others count as well
		before.addHealthPorts(cmp.Or(old, p))
		now.addHealthPorts(p)
	}
	leaveToo(before, now, p, changed)
	return kernel.DiffSets(before.sets(), now.sets())
}

// addService adds a service's entries; those of nil are none.
func (b *portal) addService(s *plan.Service) {
	if s == nil {
		return
	}
	for i := range s.Frontends {
		b.add(s, &s.Frontends[i])
	}
}
