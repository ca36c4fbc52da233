package plan

import (
	"fmt"
	"slices"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service"
)

// rows returns every endpoint with what is known of its health, and the times
// at which their health changed.
func (c *computation) rows(p *service.Port, eps []service.Endpoint) ([]Endpoint, []flap) {
	rows := make([]Endpoint, len(eps))
	var probed []Probed
	var flaps []flap
	for i := range eps {
		st := c.in.Health.Of(p, eps[i].Address)
		rows[i] = Endpoint{
			Endpoint: &eps[i], Probed: &unprobed, Local: isLocal(&eps[i], c.node), Excluded: c.in.Policy.excluded(eps[i].Address.Addr()),
		}
		if p := (Probed{Health: st.Status.String(), Since: st.Since, Error: st.LastError}); p != unprobed {
			if probed == nil {
				probed = make([]Probed, len(eps))
			}
			probed[i] = p
			rows[i].Probed = &probed[i]
		}
		for _, t := range st.Flaps {
			flaps = append(flaps, flap{at: t, row: i})
		}
	}
	return rows, flaps
}

var (
	downText = health.Down.String()
	unprobed = Probed{Health: health.Unknown.String()}
)

// down reports whether e failed its health check. What isn't known is used.
func (e *Endpoint) down() bool { return e.Probed != nil && e.Health == downText }

// Keeps reports whether e keeps the UDP flows it has: one that gets new ones
// does, and one that drains (weight 0, or on its way out), but not one whose
// health check found it down, unless all are and are used nevertheless, nor one
// that has become another proxy's.
func (e *Endpoint) Keeps() bool {
	return !e.Excluded && (e.Serving || e.Ready) && (e.Usable || !e.down())
}

// Leaves reports whether e gets no new connection, and may have got some before:
// it terminates, drains, or isn't ready or up any more. In good health and passed over
// all the same are those for other zones and nodes, the most of a big cluster's.
// Another proxy's endpoints get none of kproxy's.
func (e *Endpoint) Leaves() bool {
	takes := e.Ready && !e.Terminating && e.Weight > 0 && !e.down()
	return !e.Usable && !e.Excluded && !takes
}

// Leaves reports whether any endpoint of s does, which Compute has found out.
func (s *Service) Leaves() bool {
	switch s.leaves {
	case noneLeaves:
		return false
	case someLeave:
		return true
	}
	return slices.ContainsFunc(s.Endpoints, func(e Endpoint) bool { return e.Leaves() })
}

// leaving is what is known of whether endpoints leave.
type leaving uint8

const (
	leavingUnknown leaving = iota // not Compute's making
	noneLeaves
	someLeave
)

// group makes the backends of the endpoints chosen. Those that are down are
// left out, unless all are; then they are served as if they were up, and the
// sentence returned says so. Endpoints of weight 0 stay in the group for the sake of
// connections they have; they count neither as up nor as down.
func (c *computation) group(s *Service, chosen []int, a *Abilities) ([]Backend, string) {
	if len(chosen) == 0 {
		return nil, ""
	}
	rows, weightless := s.Endpoints, a.weightless(s)
	total, up := 0, 0
	for _, i := range chosen {
		if rows[i].Weight == 0 {
			continue
		}
		total++
		if !rows[i].down() {
			up++
		}
	}
	panicking := total > 0 && up == 0
	out := make([]Backend, 0, len(chosen))
	for _, i := range chosen {
		e := &rows[i]
		if e.down() && !panicking {
			continue
		}
		w := uint32(e.Weight)
		if weightless {
			w = min(w, 1)
		}
		e.Usable = e.Usable || w > 0
		out = append(out, Backend{Address: e.Address, Weight: w, Local: e.Local})
	}
	if panicking {
		return out, panicText(total)
	}
	return out, ""
}

// takesConnections reports whether a new connection has somewhere to go.
func takesConnections(group []Backend) bool {
	for i := range group {
		if group[i].Weight > 0 {
			return true
		}
	}
	return false
}

func panicText(total int) string {
	if total == 1 {
		return "its only endpoint is down: serving as if it were up"
	}
	return fmt.Sprintf("all %d endpoints are down: serving as if all were up", total)
}
