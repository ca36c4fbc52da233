package plan

import (
	"fmt"
	"net/netip"
	"slices"
	"time"

	"kproxy.dev/kproxy/service"
)

// Delta says which service ports a plan changes. [Compute] returns it with the
// plan; consumers carry it out instead of comparing plans themselves. It leads
// from one plan to the next, so a consumer that skips plans joins their Deltas
// with [Delta.Then].
type Delta struct {
	// Full: what has changed isn't known, as with the first plan. Changes then holds
	// every service port of both plans, and a consumer drops what it remembers of
	// service ports that the plan doesn't have.
	Full    bool
	Changes []Change // in key order
}

// Change is a service port that a plan changes: Was is nil for a new one, Is for
// one that is gone. Neither is modified.
type Change struct{ Was, Is *Service }

// Key names the service port.
func (c Change) Key() service.Key {
	if c.Is != nil {
		return c.Is.Port.Key
	}
	return c.Was.Port.Key
}

// Rules reports whether the service port needs other rules of the kernel than before.
func (c Change) Rules() bool {
	return c.Was == nil || c.Is == nil || c.Was.KernelHash != c.Is.KernelHash
}

// Between returns the Delta from old, nil for none, to p where what p was computed
// from isn't known: it is Full.
func Between(old, p *Plan) Delta {
	was, is := old.services(), p.services()
	d := Delta{Full: true, Changes: make([]Change, 0, len(is))}
	for i, j := range service.Merge(len(was), len(is), func(i, j int) int { return was[i].Port.Compare(is[j].Port.Key) }) {
		d.Changes = append(d.Changes, Change{at(was, i), at(is, j)})
	}
	return d
}

// Then returns the Delta from where d begins to where next ends.
func (d Delta) Then(next Delta) Delta {
	a, b := d.Changes, next.Changes
	out := Delta{Full: d.Full || next.Full}
	for i, j := range service.Merge(len(a), len(b), func(i, j int) int { return a[i].Key().Compare(b[j].Key()) }) {
		c := Change{}
		switch {
		case j < 0:
			c = a[i]
		case i < 0:
			c = b[j]
		default:
			c = Change{a[i].Was, b[j].Is}
		}
		if c.Was != nil || c.Is != nil { // else it came and went
			out.Changes = append(out.Changes, c)
		}
	}
	return out
}

// at returns the i-th service, nil for a negative i.
func at(list []*Service, i int) *Service {
	if i < 0 {
		return nil
	}
	return list[i]
}

// Move says what happens to a service port between two plans.
type Move string

// The moves between userspace and the kernel. A service that is refused, or is
// served again, is not moved.
const (
	NoMove  Move = ""
	Offload Move = "offload"
	Recall  Move = "recall"
	// CatchUp: userspace takes over for the moment that the kernel's rules need to
	// follow a change, or stops doing so.
	CatchUp Move = "catch-up"
)

// Move tells how the service port moves.
func (c Change) Move() Move {
	was, is := c.Was, c.Is
	if was == nil || is == nil || was.DataPlane == is.DataPlane {
		return NoMove
	}
	switch {
	case was.InKernel() && is.DataPlane == Userspace:
		if is.Cause == CauseUpdating {
			return CatchUp
		}
		return Recall
	case was.DataPlane == Userspace && is.InKernel():
		if was.Cause == CauseUpdating {
			return CatchUp
		}
		return Offload
	}
	return NoMove
}

// InKernel reports whether a kernel data plane carries new connections.
func (s *Service) InKernel() bool { return s.DataPlane != Userspace && s.DataPlane != None }

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
		for _, m := range healthChanges(at, was, is) {
			add("health", is, "%s", m)
		}
	}
	return out
}

// Ejections returns the endpoints that c ejects, and those that it takes back.
func (c Change) Ejections() (ejected, back []*Endpoint) {
	if c.Was == nil || c.Is == nil || c.Was == c.Is {
		return nil, nil
	}
	was := map[netip.AddrPort]bool{}
	for i := range c.Was.Endpoints {
		if e := &c.Was.Endpoints[i]; e.IsEjected() {
			was[e.Address] = true
		}
	}
	for i := range c.Is.Endpoints {
		switch e := &c.Is.Endpoints[i]; {
		case e.IsEjected() && !was[e.Address]:
			ejected = append(ejected, e)
		case !e.IsEjected() && was[e.Address]:
			back = append(back, e)
		}
	}
	return ejected, back
}

// Ejects reports whether d ejects an endpoint.
func (d Delta) Ejects() bool {
	return slices.ContainsFunc(d.Changes, func(c Change) bool { ejected, _ := c.Ejections(); return len(ejected) > 0 })
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
// changed, or that was ejected or is back, in address order.
func healthChanges(at time.Time, a, b *Service) []string {
	was := map[netip.AddrPort]*Endpoint{}
	for i := range a.Endpoints {
		was[a.Endpoints[i].Address] = &a.Endpoints[i]
	}
	var out []string
	for i := range b.Endpoints {
		e := &b.Endpoints[i]
		before := was[e.Address]
		if before == nil {
			continue
		}
		if before.Health != e.Health {
			text := fmt.Sprintf("%s is %s", e.Address, e.Health)
			if e.Health == downText && e.Error != "" {
				text += ": " + e.Error
			}
			out = append(out, text)
		}
		switch old := before.Ejected; {
		case old == nil && e.Ejected != nil:
			out = append(out, fmt.Sprintf("%s is down: %s", e.Address, e.Ejected.Text(at)))
		case old != nil && e.Ejected == nil:
			out = append(out, fmt.Sprintf("%s is up: ejected no longer, after %s", e.Address, at.Sub(old.Since).Round(100*time.Millisecond)))
		}
	}
	return out
}
