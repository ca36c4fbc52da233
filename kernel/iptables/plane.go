package iptables

import (
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
)

// Plane is the [steering.RulesetPlane] of iptables: the rules that all services share, and those
// of the services that iptables carries.
type Plane struct {
	*Backend
	*Watch
	*Renderer
}

var _ steering.RulesetPlane = (*Plane)(nil)

// NewPlane returns the layer. It opens the sockets of a [Watch].
func NewPlane(e *steering.Env) (*Plane, error) {
	b := New(e)
	w, err := NewWatch(b)
	if err != nil {
		return nil, err
	}
	return &Plane{b, w, NewRenderer(e.Options)}, nil
}

// Fresh is [Render].
func (r *Renderer) Fresh(p *plan.Plan) kernel.Ruleset { return Render(p, r.options) }
