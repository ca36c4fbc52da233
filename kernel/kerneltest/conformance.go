package kerneltest

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Mode is a kernel mode under test.
type Mode struct {
	Mode   plan.Mode
	Plane  plan.DataPlane
	Render func(*plan.Plan) kernel.Ruleset
	// Open returns a backend on a host of its own, which holds foreign state
	// and nothing of kproxy's. Calls of the backend to the host may fail
	// as faults say.
	Open func(t *testing.T, faults *Faults) System
	// Seeds is how many random walks to take; Steps how long each is.
	Seeds, Steps int
}

// System is a backend and the host it works on.
type System struct {
	Backend kernel.Backend
	// Foreign prints everything on the host that isn't kproxy's.
	Foreign func(t *testing.T) string
}

// Conformance is what every mode's backend must pass.
func Conformance(t *testing.T, m Mode) {
	t.Run("apply is idempotent", m.idempotent)
	t.Run("clean-up leaves nothing", m.cleanUp)
	for seed := range m.Seeds {
		t.Run(fmt.Sprintf("walk %d with faults converges", seed), func(t *testing.T) { m.walk(t, uint64(seed)) })
	}
}

func (m Mode) idempotent(t *testing.T) {
	s := m.Open(t, &Faults{})
	w := NewWalk(7, m.Mode, m.Plane, 12)
	for range 5 {
		want := m.Render(w.Next())
		m.bring(t, s, want)
		have := observe(t, s)
		if diff := gocmp.Diff(kernel.Ops{}, kernel.Diff(have, want)); diff != "" {
			t.Fatalf("second Diff (-want +got):\n%s", diff)
		}
		applied, err := s.Backend.Apply(context.Background(), kernel.Diff(have, want))
		if err != nil || applied.Chains+applied.Rules+applied.Entries > 0 || len(applied.Failed) > 0 {
			t.Errorf("empty Apply = %+v, %v", applied, err)
		}
	}
}

func (m Mode) cleanUp(t *testing.T) {
	s := m.Open(t, &Faults{})
	foreign := s.Foreign(t)
	w := NewWalk(8, m.Mode, m.Plane, 12)
	w.Next()
	m.bring(t, s, m.Render(w.Next()))
	if diff := gocmp.Diff(foreign, s.Foreign(t)); diff != "" {
		t.Errorf("foreign state after Apply (-before +after):\n%s", diff)
	}
	m.bring(t, s, kernel.Ruleset{})
	if diff := gocmp.Diff(kernel.Ruleset{}, observe(t, s)); diff != "" {
		t.Errorf("left after clean-up:\n%s", diff)
	}
	if diff := gocmp.Diff(foreign, s.Foreign(t)); diff != "" {
		t.Errorf("foreign state after clean-up (-before +after):\n%s", diff)
	}
}

// walk applies one plan after the other while calls fail, and goes on as the
// agent does: it looks again after a failure. When calls stop failing, the
// kernel must come to hold what it holds where the last plan was the first.
func (m Mode) walk(t *testing.T, seed uint64) {
	faults := NewFaults(seed, 0.1)
	s := m.Open(t, faults)
	foreign := s.Foreign(t)
	ctx := context.Background()
	w := NewWalk(seed, m.Mode, m.Plane, 12)
	var have, want kernel.Ruleset
	known := false
	for range m.Steps {
		want = m.Render(w.Next())
		if !known {
			var err error
			if have, err = s.Backend.Observe(ctx); err != nil {
				continue
			}
		}
		applied, err := s.Backend.Apply(ctx, kernel.Diff(have, want))
		have, known = want, err == nil && len(applied.Failed) == 0
	}
	if m.Steps > 10 && faults.Count() == 0 {
		t.Error("no fault was injected")
	}
	faults.Stop()
	m.bring(t, s, want)
	got := observe(t, s)
	if diff := gocmp.Diff(foreign, s.Foreign(t)); diff != "" {
		t.Errorf("foreign state (-before +after):\n%s", diff)
	}

	// From here on the test is on another host.
	fresh := m.Open(t, &Faults{})
	m.bring(t, fresh, want)
	if diff := gocmp.Diff(observe(t, fresh), got, cmpopts.IgnoreFields(kernel.Set{}, "Owner")); diff != "" {
		t.Errorf("after %d faults (-from scratch +got):\n%s", faults.Count(), diff)
	}
}

// bring applies want to what there is. Nothing may fail.
func (m Mode) bring(t *testing.T, s System, want kernel.Ruleset) {
	t.Helper()
	applied, err := s.Backend.Apply(context.Background(), kernel.Diff(observe(t, s), want))
	if err != nil {
		t.Fatalf("Apply: %v", err)
	}
	if len(applied.Failed) > 0 {
		t.Fatalf("Apply failed for %v", applied.Failed)
	}
}

func observe(t *testing.T, s System) kernel.Ruleset {
	t.Helper()
	r, err := s.Backend.Observe(context.Background())
	if err != nil {
		t.Fatalf("Observe: %v", err)
	}
	// The order of jumps tells in which order they were added, which nothing depends on.
	for f := range service.Families {
		slices.SortFunc(r.Jumps[f], func(a, b kernel.Jump) int {
			return cmp.Or(strings.Compare(a.Table, b.Table), strings.Compare(a.From, b.From), strings.Compare(a.Rule, b.Rule))
		})
	}
	return r
}
