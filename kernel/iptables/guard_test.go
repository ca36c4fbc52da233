package iptables_test

import (
	"testing"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

func countRules(r kernel.Ruleset, f service.Family) (rules, longest int) {
	for _, c := range r.Chains[f] {
		rules += len(c.Rules)
		if c.Owner == (service.Key{}) && c.Table == "nat" {
			longest = max(longest, len(c.Rules))
		}
	}
	return rules, longest
}

// TestRulesPerService guards the size of what is programmed: every rule costs
// memory and time at every restore.
func TestRulesPerService(t *testing.T) {
	t.Parallel()
	const limit = 11.5 // ten endpoints, the rule that leads there, and its share of the tree
	for _, n := range []int{100, 1000, 10000} {
		p := kerneltest.Plan(plan.ModeIPTables, kerneltest.Many(n, endpointsEach)...)
		empty, _ := countRules(iptables.Render(kerneltest.Plan(plan.ModeIPTables), options()), service.IPv4)
		rules, longest := countRules(iptables.Render(p, options()), service.IPv4)
		if each := float64(rules-empty) / float64(n); each > limit {
			t.Errorf("%d services: %.2f rules each, want at most %.1f", n, each, limit)
		}
		if longest > 8 {
			t.Errorf("%d services: a shared chain has %d rules, want at most 8", n, longest)
		}
	}
}
