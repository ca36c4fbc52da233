package health

import (
	"cmp"
	"fmt"
	"iter"
	"maps"
	"net/netip"
	"time"

	"kproxy.dev/kproxy/service"
)

// Status is the verdict on one endpoint.
type Status uint8

// Unknown is the verdict before Rise or Fall results are in, and of endpoints
// that are not probed. Unknown endpoints are used like those that are up.
const (
	Unknown Status = iota
	Up
	Down
)

// String returns "unknown", "up" or "down".
func (s Status) String() string {
	switch s {
	case Up:
		return "up"
	case Down:
		return "down"
	}
	return "unknown"
}

// Target identifies a probe: an endpoint's address and how it is probed.
// Services that probe an endpoint alike share one.
type Target struct {
	Protocol service.Protocol
	Address  netip.AddrPort
	Check    service.HealthCheck // with the defaults filled in
}

// Wanted is a Target that a Service in Namespace asks for. Namespaces share the
// probes that a node makes.
type Wanted struct {
	Target
	Namespace string
}

// State holds what is known of a Target.
type State struct {
	Status Status
	Since  time.Time // of Status
	// LastError is the error of the last failed probe; empty if the last one
	// succeeded. Silence leaves it alone while the endpoint is down.
	LastError string
	// Flaps are the times of the last changes between up and down, oldest
	// first, at most 16 of them.
	Flaps []time.Time
}

// View is the health of every Target at one moment. It is immutable and safe
// for concurrent use; the nil View knows nothing.
type View struct {
	// Revision identifies the View among those of one prober, which sets it.
	Revision uint64
	states   map[Target]State
	defaults Defaults
}

// Defaults fills what a service's HealthCheck leaves open, and bounds what it asks
// for (flags --health-*).
type Defaults struct {
	Kind     service.Check
	Interval time.Duration
	Timeout  time.Duration
	Rise     int
	Fall     int
	// MinInterval is the least that a service may ask for, unless Interval is less.
	MinInterval time.Duration
	// Only: what services ask for is of no effect, but to be left alone.
	Only bool
}

// Fill returns c with its zero fields set from d. A UDP port is not probed
// with TCP: the default kind applies to TCP ports only, others get CheckOff.
func (d Defaults) Fill(c service.HealthCheck, p service.Protocol) service.HealthCheck {
	if d.Only && c.Kind != service.CheckOff {
		c = service.HealthCheck{}
	}
	if c.Kind == service.CheckDefault {
		c.Kind = d.Kind
		if p != service.TCP || c.Kind == service.CheckDefault {
			c.Kind = service.CheckOff
		}
	}
	if c.Kind == service.CheckOff {
		return service.HealthCheck{Kind: service.CheckOff}
	}
	c.Interval = max(cmp.Or(c.Interval, d.Interval), d.floor())
	c.Timeout = cmp.Or(c.Timeout, d.Timeout)
	c.Rise, c.Fall = cmp.Or(c.Rise, d.Rise), cmp.Or(c.Fall, d.Fall)
	return c
}

func (d Defaults) floor() time.Duration { return min(d.MinInterval, d.Interval) }

// Refused says what of c isn't done, a sentence each.
func (d Defaults) Refused(c service.HealthCheck) []string {
	switch {
	case c.Kind == service.CheckOff || c == service.HealthCheck{}:
	case d.Only:
		return []string{"its annotations on health checks have no effect: this node ignores them (--health-annotations)"}
	case c.Interval != 0 && c.Interval < d.floor():
		return []string{fmt.Sprintf("its health checks are %s apart, not %s as it asks: that is the least on this node (--health-min-interval)", d.floor(), c.Interval)}
	}
	return nil
}

// NewView returns a View of states, which it takes over.
func NewView(d Defaults, states map[Target]State) *View {
	return &View{states: states, defaults: d}
}

// Defaults returns what the View's Targets were filled from.
func (v *View) Defaults() Defaults {
	if v == nil {
		return Defaults{}
	}
	return v.defaults
}

// States returns what is known of every Target.
func (v *View) States() iter.Seq2[Target, State] { return maps.All(v.states) }

// Of returns what is known of port p's endpoint at address.
func (v *View) Of(p *service.Port, address netip.AddrPort) State {
	if v == nil {
		return State{}
	}
	return v.states[v.Target(p, address)]
}

// Target returns the Target under which p's endpoint at address is probed.
func (v *View) Target(p *service.Port, address netip.AddrPort) Target {
	if v == nil {
		v = &View{}
	}
	return Target{Protocol: p.Protocol, Address: address, Check: v.defaults.Fill(p.Health, p.Protocol)}
}
