package agent

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// TestProgrammerWalk: whatever plans come while others are being written, and whatever
// fails, no service counts as programmed whose rules aren't in the kernel, the fast loop is
// told of every service that counts otherwise than before, and in the end the kernel holds
// what the last plan wants.
func TestProgrammerWalk(t *testing.T) {
	for seed := range uint64(4) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			w := newProgrammerWalk(t, seed)
			for step := range 60 {
				w.step(fmt.Sprint("step ", step))
			}
			w.end()
		})
	}
}

// programmerWalk is a programmer's backend that fails at random, and while which
// works plans come.
type programmerWalk struct {
	*testing.T
	*rand.Rand
	*modelHost
	kernel.Backend
	plans  *kerneltest.Walk
	given  []*plan.Plan
	counts map[service.Key]bool // as programmed, as the fast loop was told
	calm   bool
}

func newProgrammerWalk(t *testing.T, seed uint64) *programmerWalk {
	m := newModelHost(t)
	withModelIPVS(t, m, m.host.Table())
	w := &programmerWalk{
		T: t, Rand: rand.New(rand.NewPCG(seed, 1)), modelHost: m, Backend: m.layer,
		plans: kerneltest.NewWalk(seed, plan.ModeAuto, plan.IPVS, 10), counts: map[service.Key]bool{},
	}
	m.stack(&over{RulesetPlane: m.layer, backend: w, Watch: m.watch})
	return w
}

// Apply implements [kernel.Backend].
func (w *programmerWalk) Apply(ctx context.Context, ops kernel.Ops) (kernel.Applied, error) {
	if !w.calm {
		for range w.IntN(3) {
			w.hand()
		}
		if w.IntN(4) == 0 {
			return kernel.Applied{}, errors.New("another program holds the lock")
		}
	}
	return w.Backend.Apply(ctx, ops)
}

// Observe implements [kernel.Backend].
func (w *programmerWalk) Observe(ctx context.Context) (kernel.Ruleset, error) {
	if !w.calm && w.IntN(4) == 0 {
		return kernel.Ruleset{}, errors.New("it can't be read")
	}
	return w.Backend.Observe(ctx)
}

func (w *programmerWalk) latest() *plan.Plan {
	if len(w.given) == 0 {
		return &plan.Plan{}
	}
	return w.given[len(w.given)-1]
}

// hand hands over the next plan, or once more the one before the last.
func (w *programmerWalk) hand() {
	p := w.plans.Next()
	if n := len(w.given); n > 1 && w.IntN(3) == 0 {
		p = w.given[n-2]
	}
	for _, s := range steering.EmptySetsOf(p) { // which the fast loop makes
		if err := w.host.Sets().Create(s); err != nil {
			w.Fatal(err)
		}
	}
	w.told("before a plan")
	d := changes(w.latest(), p)
	if d.Full = len(w.given) == 0; !d.Full {
		d.Changes = slices.DeleteFunc(d.Changes, func(c plan.Change) bool { return !c.Rules() && w.IntN(20) > 0 })
	}
	programmed, _ := w.observed(map[service.Key]bool{})
	w.given, w.counts = append(w.given, p), map[service.Key]bool{}
	for _, s := range p.Services {
		w.counts[s.Port.Key] = counts(programmed, s)
	}
	w.programmer.program(p, d, &kernel.Result{})
}

func counts(programmed map[service.Key]uint64, s *plan.Service) bool {
	return s.KernelHash != 0 && programmed[s.Port.Key] == s.KernelHash
}

// told takes in what the fast loop is told.
func (w *programmerWalk) told(when string) map[service.Key]uint64 {
	dirty := map[service.Key]bool{}
	programmed, _ := w.observed(dirty)
	for _, s := range w.latest().Services {
		k, is := s.Port.Key, counts(programmed, s)
		if is != w.counts[k] && !dirty[k] {
			w.Fatalf("%s: %v counts as programmed: %t, and the fast loop hasn't been told", when, k, is)
		}
		w.counts[k] = is
	}
	for k := range programmed {
		if w.latest().Find(k) == nil {
			w.Fatalf("%s: %v is gone and remembered", when, k)
		}
	}
	return programmed
}

func (w *programmerWalk) step(when string) {
	if w.IntN(2) == 0 {
		w.hand()
	}
	if w.IntN(5) == 0 {
		w.damage(w.T)
	}
	w.backend.refuses = service.Key{Name: "nobody"}
	if all := w.latest().Services; len(all) > 0 && w.IntN(4) == 0 {
		w.backend.refuses = all[w.IntN(len(all))].Port.Key
	}
	if known, _ := w.render(); !known {
		return
	}
	_, _ = w.programmer.pass(w.Context())
	programmed, p := w.told(when), w.latest()
	want := w.layer.Fresh(p)
	have, err := w.Backend.Observe(w.Context())
	if err != nil {
		w.Fatal(err)
	}
	ops := kernel.Diff(have, want)
	if len(ops.Chains[service.IPv4])+len(ops.Chains[service.IPv6]) > 0 {
		return // shared rules may lag behind a policy
	}
	there := w.layer.Programmed(have, want, p)
	for _, s := range p.Services {
		if counts(programmed, s) && !counts(there, s) {
			w.Fatalf("%s: %v counts as programmed, and isn't", when, s.Port.Key)
		}
	}
}

// end lets everything succeed.
func (w *programmerWalk) end() {
	w.calm, w.backend.refuses = true, service.Key{Name: "nobody"}
	for range 2 {
		w.render()
		if _, err := w.programmer.pass(w.Context()); err != nil {
			w.Fatal(err)
		}
	}
	programmed, p := w.told("at the end"), w.latest()
	for _, s := range p.Services {
		if s.KernelHash != 0 && !counts(programmed, s) {
			w.Errorf("at the end %v doesn't count as programmed", s.Port.Key)
		}
	}
	have, err := w.Backend.Observe(w.Context())
	if ops := kernel.Diff(have, w.layer.Fresh(p)); err != nil || !ops.Empty() {
		w.Errorf("at the end the kernel lacks %+v (%v)", ops, err)
	}
}
