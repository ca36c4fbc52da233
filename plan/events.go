package plan

import (
	"fmt"
	"net/netip"
)

// Events returns what a person would want to see of the way from old to new,
// in key order: services that came, went or moved between data planes, and
// endpoints whose health changed. A nil old is a plan without services.
func Events(old, new *Plan) []Event {
	if old == nil {
		old = &Plan{}
	}
	var out []Event
	add := func(kind string, s *Service, format string, args ...any) {
		out = append(out, Event{Time: new.Time, Kind: kind, Service: s.Port.Key.String(), Message: fmt.Sprintf(format, args...)})
	}
	i, j := 0, 0
	for i < len(old.Services) || j < len(new.Services) {
		switch c := compareAt(old, new, i, j); {
		case c < 0:
			add("dataplane", old.Services[i], "removed")
			i++
		case c > 0:
			s := new.Services[j]
			add("dataplane", s, "added, %s: %s", s.DataPlane, s.Reason)
			j++
		default:
			a, b := old.Services[i], new.Services[j]
			i, j = i+1, j+1
			if a == b {
				continue
			}
			if a.DataPlane != b.DataPlane || a.State != b.State && (a.State == StateRecalled || b.State == StateRecalled) {
				add("dataplane", b, "%s: %s", moveText(a, b), b.Reason)
				out[len(out)-1].Move = MoveOf(a, b)
			}
			for _, m := range healthChanges(a, b) {
				add("health", b, "%s", m)
			}
		}
	}
	return out
}

// compareAt compares the keys at i and j; a list that is at its end comes last.
func compareAt(old, new *Plan, i, j int) int {
	switch {
	case i == len(old.Services):
		return 1
	case j == len(new.Services):
		return -1
	}
	return old.Services[i].Port.Key.Compare(new.Services[j].Port.Key)
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
