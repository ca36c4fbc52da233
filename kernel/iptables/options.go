package iptables

import (
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
)

// DefaultOptions returns options for a host that has everything. The
// listener's ports are the caller's to fill in.
func DefaultOptions() steering.Options {
	o := steering.DefaultOptions()
	o.Planes = []steering.Plane{InSteering}
	return o
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
