package kerneltest

import (
	"testing"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Plans that say the same have the same hashes, as those of plan.Compute do: else
// no test would see that something is taken over from an earlier plan.
func TestEqualPlansHashAlike(t *testing.T) {
	hashOf := func(endpoint string) uint64 {
		one := Service("one", service.TCP, Cluster("10.96.0.1:80"), Endpoints(endpoint))
		return Plan(plan.ModeIPTables, one).Services[0].KernelHash
	}
	if a, b := hashOf("10.1.0.1:80"), hashOf("10.1.0.1:80"); a != b {
		t.Errorf("hashes of equal plans: %x, %x", a, b)
	}
	if a, b := hashOf("10.1.0.1:80"), hashOf("10.1.0.2:80"); a == b {
		t.Errorf("plans with another endpoint have the same hash: %x", a)
	}
}
