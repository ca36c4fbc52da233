package kernel

import (
	"cmp"

	"kproxy.dev/kproxy/plan"
)

// PortalChanges returns what leads from the membership of old to that of p. It
// looks only at services that differ, which plans don't share: an offload among
// ten thousand services costs what that one service costs. An entry that one
// service gives up and another takes over is left in place.
func PortalChanges(old, p *plan.Plan) SetOps {
	before, now := newPortal(cmp.Or(old, p)), newPortal(p)
	health := false
	changed := map[*plan.Service]bool{}
	plan.Changes(old, p, func(was, is *plan.Service) bool {
		before.addService(was)
		now.addService(is)
		health = health || asksForHealth(was) || asksForHealth(is)
		before.leave(was, everyEntry)
		now.leave(is, everyEntry)
		changed[is] = true
		return true
	})
	if health { // the ports of a Service share one, so the others count as well
		before.addHealthPorts(cmp.Or(old, p))
		now.addHealthPorts(p)
	}
	leaveToo(before, now, p, changed)
	return DiffSets(before.sets(), now.sets())
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

// asksForHealth reports whether s may have a health-check node port, or a node
// port that takes it away from another Service.
func asksForHealth(s *plan.Service) bool {
	return s != nil && (s.Port.HealthCheckNodePort != 0 || s.Port.NodePort != 0)
}
