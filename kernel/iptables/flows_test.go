package iptables_test

import (
	"testing"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/kernel/kerneltest"
	"kproxy.dev/kproxy/plan"
)

// TestFlows: packets go where the table of all modes says.
func TestFlows(t *testing.T) {
	for _, v := range variants {
		t.Run(v.Name, func(t *testing.T) {
			kerneltest.Flows(t, kerneltest.Packets{
				Mode: kerneltest.Mode{
					Mode: plan.ModeIPTables, Plane: plan.IPTables,
					Render: func(p *plan.Plan) kernel.Ruleset { return iptables.Render(p, options()) },
				},
				OnKernel: func(t *testing.T) (kernel.Backend, kernel.SetStore) {
					b, sets := newBackend(t, v)
					return b, sets
				},
				Firewall:  v.Program,
				Listeners: [2]uint16{options().TCPPort, options().UDPPort},
			})
		})
	}
}
