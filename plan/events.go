package plan

import (
	"fmt"
	"net/netip"
	"time"
)

// Events returns what a person would want to see of a change at a moment, in key
// order: services that came, went or moved between data planes, and endpoints
// whose health changed.
func (d Delta) Events(at time.Time) []Event {
	var out []Event
	add := func(kind string, s *Service, format string, args ...any) {
		out = append(out, Event{Time: at, Kind: kind, Service: s.Port.Key.String(), Message: fmt.Sprintf(format, args...)})
	}
	for _, c := range d.Changes {
		was, is := c.Was, c.Is
		switch {
		case is == nil:
			add("dataplane", was, "removed")
			continue
		case was == nil:
			add("dataplane", is, "added, %s: %s", is.DataPlane, is.Reason)
			continue
		}
		if was.DataPlane != is.DataPlane || was.State != is.State && (was.State == StateRecalled || is.State == StateRecalled) {
			add("dataplane", is, "%s: %s", moveText(was, is), is.Reason)
			out[len(out)-1].Move = c.Move()
		}
		for _, m := range healthChanges(was, is) {
			add("health", is, "%s", m)
		}
	}
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
