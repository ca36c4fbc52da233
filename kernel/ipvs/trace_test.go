package ipvs_test

import (
	"testing"

	"kproxy.dev/kproxy/kernel/kerneltest"
	"kproxy.dev/kproxy/plan"
)

func TestRulesDoWhatThePlanSays(t *testing.T) {
	for _, mode := range conformingModes {
		t.Run(string(mode), func(t *testing.T) {
			kerneltest.RulesMatchPlan(t, kerneltest.Mode{Mode: mode, Plane: plan.IPVS, Seeds: 60, Render: render})
		})
	}
}
