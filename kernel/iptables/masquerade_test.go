package iptables_test

import (
	"slices"
	"strings"
	"testing"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// TestMasqueradeRandomly: source ports are chosen at random, so that two connections
// that begin at once don't ask for the same one, but only where the host can.
func TestMasqueradeRandomly(t *testing.T) {
	t.Parallel()
	for _, random := range []bool{false, true} {
		o := options()
		o.RandomFully = random
		r := iptables.Render(kerneltest.Plan(plan.ModeIPTables), o)
		for _, f := range service.Families {
			i := slices.IndexFunc(r.Chains[f], func(c kernel.Chain) bool { return c.Table == "nat" && c.Name == "KPROXY-POSTROUTING" })
			if i < 0 {
				t.Fatalf("%s: nothing masquerades", f)
			}
			rules := r.Chains[f][i].Rules
			if last := rules[len(rules)-1]; !strings.HasPrefix(last, "-j MASQUERADE") || strings.Contains(last, "--random-fully") != random {
				t.Errorf("%s, random-fully %v: the last rule is %q", f, random, last)
			}
		}
	}
}
