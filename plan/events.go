package plan

import (
	"fmt"
	"net/netip"
)

// Events returns what a person would want to see of the way from old to new,
// in key order: services that came, went or moved between data planes, and
// endpoints whose health changed. A nil old is a plan without services.
func Events(old, new *Plan) []Event {
	var out []Event
	add := func(kind string, s *Service, format string, args ...any) {
		out = append(out, Event{Time: new.Time, Kind: kind, Service: s.Port.Key.String(), Message: fmt.Sprintf(format, args...)})
	}
	Changes(old, new, func(was, is *Service) bool {
		switch {
		case is == nil:
			add("dataplane", was, "removed")
			return true
		case was == nil:
			add("dataplane", is, "added, %s: %s", is.DataPlane, is.Reason)
			return true
		}
		if was.DataPlane != is.DataPlane || was.State != is.State && (was.State == StateRecalled || is.State == StateRecalled) {
			add("dataplane", is, "%s: %s", moveText(was, is), is.Reason)
			out[len(out)-1].Move = MoveOf(was, is)
		}
		for _, m := range healthChanges(was, is) {
			add("health", is, "%s", m)
		}
		return true
	})
	return out
}

// moveText returns "userspace to iptables", or the state where the data plane
// stays the same.
func moveText(a, b *Service) string {
	if a.DataPlane == b.DataPlane {
		return string(b.State)
	}
	return fmt.Sprintf("%s to %s", a.DataPlane, b.DataPlane)
}

// healthChanges returns a sentence for every endpoint of both whose health
// changed, in address order.
func healthChanges(a, b *Service) []string {
	was := map[netip.AddrPort]string{}
	for i := range a.Endpoints {
		was[a.Endpoints[i].Address] = a.Endpoints[i].Health
	}
	var out []string
	for i := range b.Endpoints {
		e := &b.Endpoints[i]
		before, known := was[e.Address]
		if !known || before == e.Health {
			continue
		}
		text := fmt.Sprintf("%s is %s", e.Address, e.Health)
		if e.down() && e.Error != "" {
			text += ": " + e.Error
		}
		out = append(out, text)
	}
	return out
}
