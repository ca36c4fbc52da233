package iptables_test

import (
	"testing"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/kernel/kerneltest"
	"kproxy.dev/kproxy/plan"
)

func TestRulesDoWhatThePlanSays(t *testing.T) {
	t.Parallel()
	kerneltest.RulesMatchPlan(t, kerneltest.Mode{
		Mode: plan.ModeIPTables, Plane: plan.IPTables, Seeds: 40,
		Render: func(p *plan.Plan) kernel.Ruleset { return iptables.Render(p, options()) },
	})
}
