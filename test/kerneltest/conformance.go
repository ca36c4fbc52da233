package kerneltest

import (
	"cmp"
	"context"
	"fmt"
	"net/netip"
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
	// and nothing that kproxy made. Calls of the backend to the host may fail
	// as faults say.
	Open func(t *testing.T, faults *Faults) System
	// Seeds is how many random walks to take; Steps how long each is.
	Seeds, Steps int
	EveryCall    bool // fails once by itself, which takes a kernel long
}

// System is a backend and the host it works on.
type System struct {
	Backend kernel.Backend
	// Foreign prints everything on the host that isn't kproxy's.
	Foreign func(t *testing.T) string
	// State prints what Observe leaves out: what drains, and the backend's own
	// records. Nil where there is nothing of that kind.
	State func(t *testing.T) string
	// Drain goes on with what drains and returns how much is left; nil for a
	// mode in which nothing drains.
	Drain func(context.Context) (left int, err error)
	// Restart returns the system with a backend that knows nothing yet.
	Restart func(t *testing.T) System
	// AddForeign puts a foreign real server into a virtual server, and RemoveForeign
	// removes all of those; nil for a mode without virtual servers.
	AddForeign    func(t *testing.T, v kernel.Virtual)
	RemoveForeign func(t *testing.T)
	// Take makes [Taken], a foreign virtual server, or removes it; nil as well.
	Take func(t *testing.T, there bool)
	// Host is the host if it is a model, which can do more than a kernel.
	Host *Host

	taken bool // Taken is there
}

// restarted is the system with a backend that knows nothing yet.
func (s System) restarted(t *testing.T) System {
	t.Helper()
	next := s.Restart(t)
	next.taken = s.taken
	return next
}

// take makes Taken, or removes it.
func (s *System) take(t *testing.T, there bool) {
	t.Helper()
	if s.Take != nil && s.taken != there {
		s.Take(t, there)
		s.taken = there
	}
}

// Conformance runs the tests that every mode's backend must pass, in parallel, as each opens a system of its own.
func Conformance(t *testing.T, m Mode) {
	run := func(name string, test func(*testing.T)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t)
		})
	}
	run("apply is idempotent", m.idempotent)
	run("clean-up leaves nothing", m.cleanUp)
	for seed := range m.Seeds {
		run(fmt.Sprintf("walk %d with faults converges", seed), func(t *testing.T) { m.walk(t, uint64(seed)) })
	}
	if m.EveryCall {
		run("a fault at any call is made up for", m.everyCall)
	}
}

func (m Mode) idempotent(t *testing.T) {
	s := m.Open(t, &Faults{})
	w := NewWalk(7, m.Mode, m.Plane, 12)
	for range 5 {
		want := m.Render(w.Next())
		m.bring(t, s, want)
		have, state := observe(t, s), s.state(t)
		if diff := gocmp.Diff(kernel.Ops{}, kernel.Diff(have, want), byValue); diff != "" {
			t.Fatalf("second Diff (-want +got):\n%s", diff)
		}
		applied, err := s.Backend.Apply(context.Background(), kernel.Diff(have, want))
		if err != nil || applied.Chains+applied.Rules+applied.Entries+applied.Virtuals > 0 {
			t.Errorf("empty Apply = %+v, %v", applied, err)
		}
		if diff := gocmp.Diff(state, s.state(t)); diff != "" {
			t.Errorf("after an empty Apply (-before +after):\n%s", diff)
		}
	}
	if s.Host != nil {
		if early := s.Host.Early(); len(early) > 0 {
			t.Errorf("reachable before all was there that they need: %v", early)
		}
	}
}

func (m Mode) cleanUp(t *testing.T) {
	s := m.Open(t, &Faults{})
	foreign, state := s.Foreign(t), s.state(t)
	w := NewWalk(8, m.Mode, m.Plane, 12)
	w.Next()
	m.bring(t, s, m.Render(w.Next()))
	if diff := gocmp.Diff(foreign, s.Foreign(t)); diff != "" {
		t.Errorf("foreign state after Apply (-before +after):\n%s", diff)
	}
	m.bring(t, s, kernel.Ruleset{})
	s.settle(t)
	if diff := gocmp.Diff(kernel.Ruleset{}, observe(t, s), byValue); diff != "" {
		t.Errorf("left after clean-up:\n%s", diff)
	}
	if diff := gocmp.Diff(state, s.state(t)); diff != "" {
		t.Errorf("state after clean-up (-before +after):\n%s", diff)
	}
	if diff := gocmp.Diff(foreign, s.Foreign(t)); diff != "" {
		t.Errorf("foreign state after clean-up (-before +after):\n%s", diff)
	}
}

// bring applies want to what there is. Nothing may fail but the service whose
// address a foreigner has.
func (m Mode) bring(t *testing.T, s System, want kernel.Ruleset) {
	t.Helper()
	applied, err := s.Backend.Apply(context.Background(), kernel.Diff(observe(t, s), want))
	if err != nil {
		t.Fatalf("Apply: %v", err)
	}
	taken, contested := want.Virtual(Taken().Protocol, Taken().Address)
	contested = contested && s.taken
	if _, failed := applied.Failed[taken.Owner]; contested && !failed {
		t.Errorf("Apply didn't fail for %s, whose address %s a foreigner has", taken.Owner, taken.Address)
	}
	for k, err := range applied.Failed {
		if !contested || k != taken.Owner {
			t.Fatalf("Apply failed for %s: %v", k, err)
		}
	}
	s.recorded(t)
}

// recorded: the records are right by themselves, not only when Observe has
// mended them.
func (s System) recorded(t *testing.T) {
	t.Helper()
	if s.Host == nil {
		return
	}
	before := s.state(t)
	observe(t, s)
	if diff := gocmp.Diff(before, s.state(t)); diff != "" {
		t.Errorf("Observe changed (-before +after):\n%s", diff)
	}
}

// byValue are types that compare by themselves.
var byValue = cmpopts.EquateComparable(netip.Addr{}, netip.AddrPort{})

// same compares the system with one that was brought from nothing to want. Both
// must have come to rest.
func (m Mode) same(t *testing.T, s System, want kernel.Ruleset) {
	t.Helper()
	got, state := observe(t, s), s.state(t)
	// From here on the test is on another host.
	fresh := m.Open(t, &Faults{})
	m.bring(t, fresh, want)
	if diff := gocmp.Diff(observe(t, fresh), got, byValue, cmpopts.IgnoreFields(kernel.Set{}, "Owner")); diff != "" {
		t.Errorf("observed (-from scratch +got):\n%s", diff)
	}
	if diff := gocmp.Diff(fresh.state(t), state); diff != "" {
		t.Errorf("state (-from scratch +got):\n%s", diff)
	}
}

// settle lets what drains come to its end.
func (s System) settle(t *testing.T) {
	t.Helper()
	if s.Drain == nil {
		return
	}
	if s.Host != nil {
		s.Host.Disconnect(nil)
	}
	for range 3 {
		left, err := s.Drain(context.Background())
		if err != nil {
			t.Fatalf("Drain: %v", err)
		}
		if left == 0 {
			s.recorded(t)
			return
		}
	}
	t.Errorf("without connections the drain doesn't end; state:\n%s", s.state(t))
}

func (s System) state(t *testing.T) string {
	t.Helper()
	if s.State == nil {
		return ""
	}
	return s.State(t)
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
