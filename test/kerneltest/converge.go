package kerneltest

import (
	"context"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	gocmp "github.com/google/go-cmp/cmp"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
)

// walk applies one plan after the other while calls fail, and goes on as the
// agent does: it looks again after a failure, and starts anew where kproxy was
// killed. Meanwhile clients come and go. When calls stop failing, the kernel
// must come to hold what it holds where the last plan was the first.
func (m Mode) walk(t *testing.T, seed uint64) {
	faults := NewFaults(seed, 0.1)
	j := newRun(t, m, faults, seed)
	if seed%4 == 0 {
		j.system.take(t, true)
		j.foreign = j.system.Foreign(t)
	}
	w := NewWalk(seed, m.Mode, m.Plane, 12)
	var want kernel.Ruleset
	for range m.Steps {
		p := w.Next()
		want = m.Render(p)
		j.nodeAddresses(p)
		j.step(want)
		j.addForeign()
		if s := j.system; s.Restart != nil && j.rng.IntN(8) == 0 {
			j.system, j.known = s.restarted(t), false
		}
	}
	if m.Steps > 10 && faults.Count() == 0 {
		t.Error("no fault was injected")
	}
	j.arrive(want)
}

// everyCall lets one call after the other fail on the way from one plan to
// another: on a model in every way, on a kernel in one.
func (m Mode) everyCall(t *testing.T) {
	model := m.Open(t, &Faults{}).Host != nil
	w := NewWalk(11, m.Mode, m.Plane, 6)
	w.Next()
	first, second := w.Next(), w.Next()
	from, to := m.Render(first), m.Render(second)
	way := func(t *testing.T, faults *Faults) (before, after int) {
		j := newRun(t, m, faults, 11)
		m.bring(t, j.system, from)
		j.nodeAddresses(second)
		before = faults.Calls()
		j.step(to)
		after = faults.Calls()
		j.arrive(to)
		return before, after
	}
	before, after := way(t, &Faults{})
	for range 10 { // some plans differ in little
		if after-before >= 5 {
			break
		}
		first, second = second, w.Next()
		from, to = m.Render(first), m.Render(second)
		before, after = way(t, &Faults{})
	}
	if after-before < 5 {
		t.Fatalf("the way from one plan to the other takes %d calls", after-before)
	}
	for kind := range faultKinds {
		for n := before + 1; n <= after; n++ {
			if !model && FaultKind(n)%faultKinds != kind {
				continue
			}
			t.Run(fmt.Sprintf("%s %d", kind, n-before), func(t *testing.T) {
				faults := FaultAt(n, kind)
				way(t, faults)
				if faults.Count() != 1 && model { // a kernel may make a call wait, which is then another
					t.Errorf("%d faults were injected", faults.Count())
				}
			})
		}
	}
}

// run is a system that is brought from one plan to the next.
type run struct {
	t       *testing.T
	mode    Mode
	system  System
	faults  *Faults
	rng     *rand.Rand // of clients and foreign real servers
	foreign string
	have    kernel.Ruleset
	known   bool
}

func newRun(t *testing.T, m Mode, faults *Faults, seed uint64) *run {
	s := m.Open(t, faults)
	return &run{t: t, mode: m, system: s, faults: faults, rng: rand.New(rand.NewPCG(seed, 2)), foreign: s.Foreign(t)}
}

// nodeAddresses gives a model the addresses that a plan takes for the node's.
func (j *run) nodeAddresses(p *plan.Plan) {
	if h := j.system.Host; h != nil {
		h.SetNodeAddresses(p.Policy.NodeAddresses)
	}
}

// step does what the agent does for one plan.
func (j *run) step(want kernel.Ruleset) {
	j.t.Helper()
	ctx, s := context.Background(), j.system
	var err error
	if !j.known {
		j.have, err = s.Backend.Observe(ctx)
	}
	if err == nil {
		var applied kernel.Applied
		applied, err = s.Backend.Apply(ctx, kernel.Diff(j.have, want))
		j.have, j.known = want, err == nil && len(applied.Failed) == 0
	}
	if s.Drain != nil {
		_, _ = s.Drain(ctx) // the agent tries again in a second
	}
	if j.faults.Died() {
		j.system, j.known = s.restarted(j.t), false
	}
	if s.Host == nil {
		return
	}
	j.check()
	s.Host.Connect(j.rng)
	s.Host.Disconnect(j.rng)
}

// check compares what must never change, not for a moment either.
func (j *run) check() {
	j.t.Helper()
	if diff := gocmp.Diff(j.foreign, j.system.Foreign(j.t)); diff != "" {
		j.t.Fatalf("foreign state after %d faults (-before +after):\n%s", j.faults.Count(), diff)
	}
	if j.system.Host != nil {
		if cut := j.system.Host.Cut(); len(cut) > 0 {
			j.t.Fatalf("connections were cut off after %d faults: %s", j.faults.Count(), strings.Join(cut, "; "))
		}
	}
}

// addForeign puts, now and then, a foreign real server into one of the virtual
// servers.
func (j *run) addForeign() {
	if j.system.AddForeign == nil || !j.known || len(j.have.Virtuals) == 0 || j.rng.IntN(4) > 0 {
		return
	}
	j.system.AddForeign(j.t, j.have.Virtuals[j.rng.IntN(len(j.have.Virtuals))])
	j.foreign = j.system.Foreign(j.t)
}

// arrive brings the system to want, without faults, and compares.
func (j *run) arrive(want kernel.Ruleset) {
	j.t.Helper()
	j.faults.Stop()
	j.mode.bring(j.t, j.system, want)
	j.check()
	if j.system.taken {
		j.system.take(j.t, false)
		j.mode.bring(j.t, j.system, want)
	}
	if j.system.RemoveForeign != nil {
		j.system.RemoveForeign(j.t)
	}
	j.system.settle(j.t)
	j.mode.same(j.t, j.system, want)
}
