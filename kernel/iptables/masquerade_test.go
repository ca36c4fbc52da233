package iptables_test

import (
	"slices"
	"testing"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// TestMasqueradeRandomly: source ports are chosen at random, so that two connections
// that begin at once don't ask for the same one.
func TestMasqueradeRandomly(t *testing.T) {
	t.Parallel()
	r := iptables.Render(kerneltest.Plan(plan.ModeIPTables), options())
	for _, f := range service.Families {
		i := slices.IndexFunc(r.Chains[f], func(c kernel.Chain) bool { return c.Table == "nat" && c.Name == "KPROXY-POSTROUTING" })
		if i < 0 {
			t.Fatalf("%s: nothing masquerades", f)
		}
		rules := r.Chains[f][i].Rules
		if last := rules[len(rules)-1]; last != "-j MASQUERADE --random-fully" {
			t.Errorf("%s: the last rule is %q", f, last)
		}
	}
}
