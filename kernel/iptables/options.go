package iptables

import (
	"errors"
	"fmt"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
)

// Options is what rules depend on besides the plan.
type Options struct {
	steering.Options
	// SlotLimit bounds the rules of a weighted service's chain. Weights that
	// need more are rounded to the closest split.
	SlotLimit int
}

// DefaultOptions returns options for a host that has everything. The
// listener's ports are the caller's to fill in.
func DefaultOptions() Options {
	o := Options{Options: steering.DefaultOptions(), SlotLimit: 64}
	o.Planes = []steering.Plane{InSteering}
	return o
}

// Validate reports every problem.
func (o Options) Validate() error {
	err := o.Options.Validate()
	if o.SlotLimit < 1 {
		err = errors.Join(err, fmt.Errorf("check slot limit: %d isn't positive", o.SlotLimit))
	}
	return err
}

// The chains at which the trees begin that lead to services.
const (
	chainDispatch  = kernel.Prefix + "DISPATCH"
	chainNodePorts = kernel.Prefix + "NODEPORTS"
)

// InSteering is what steering knows of connections that the chains of services rewrite.
var InSteering = steering.Plane{Name: plan.IPTables, Rules: func(steering.Rules) steering.PlaneRules {
	return steering.PlaneRules{NAT: true, Dispatch: chainDispatch, NodePorts: chainNodePorts, AcceptIn: []string{"FORWARD"}}
}}
