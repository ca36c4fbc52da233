package iptables

import (
	"context"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Driver is iptables on a host. Its tables hold steering's rules in every mode, so it is
// below every other data plane.
type Driver struct{ host plan.Capability }

// NewDriver returns the driver of a host of which nothing is known yet.
func NewDriver() *Driver { return &Driver{} }

// Assume takes the host to be as c says, without a look.
func (d *Driver) Assume(c plan.Capability) { d.host = c }

// Probe takes what was found of h.
func (d *Driver) Probe(_ context.Context, h *steering.Host, _ bool) error {
	d.host = h.Rules
	return nil
}

// Abilities returns what the host can do.
func (d *Driver) Abilities(*service.Snapshot, time.Time) plan.Abilities { return Abilities(d.host) }

// InSteering returns what steering knows of iptables.
func (d *Driver) InSteering() steering.Plane { return InSteering }

// Renderer renders what plans want of iptables and of steering.
func (d *Driver) Renderer(e *steering.Env, _ kernel.Renderer) kernel.Renderer {
	return NewRenderer(e.Options)
}

// Open opens the tables.
func (d *Driver) Open(e *steering.Env, _ steering.RulesetPlane, _ bool) (steering.RulesetPlane, error) {
	if e.ReadOnly {
		return &Plane{Backend: New(e), Renderer: NewRenderer(e.Options)}, nil
	}
	return NewPlane(e)
}

// The chains at which the trees begin that lead to services.
const (
	chainDispatch  = kernel.Prefix + "DISPATCH"
	chainNodePorts = kernel.Prefix + "NODEPORTS"
)

// InSteering tells steering of connections that the chains of services rewrite.
var InSteering = steering.Plane{Name: plan.IPTables, Rules: func(steering.Rules) steering.PlaneRules {
	return steering.PlaneRules{NAT: true, Dispatch: chainDispatch, NodePorts: chainNodePorts, AcceptIn: []string{"FORWARD"}}
}}
