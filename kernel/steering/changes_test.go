package steering_test

import (
	"testing"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/kerneltest"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
)

// TestSetChangesLeadWhereTheWholeDoes: applied one after the other on a
// random walk, the changes give the same membership as each plan by itself.
func TestSetChangesLeadWhereTheWholeDoes(t *testing.T) {
	planes := map[plan.Mode]plan.DataPlane{plan.ModeIPTables: plan.IPTables, plan.ModeIPVS: plan.IPVS, plan.ModeAuto: plan.IPVS}
	for mode, plane := range planes {
		t.Run(string(mode), func(t *testing.T) { leadWhereTheWholeDoes(t, kerneltest.NewWalk(7, mode, plane, 20)) })
	}
}

func leadWhereTheWholeDoes(t *testing.T, walk *kerneltest.Walk) {
	t.Helper()
	host := kerneltest.NewHost()
	store := host.Sets()
	var old *plan.Plan
	for step := range 200 {
		p := walk.Next()
		ops := steering.SetChanges(old, p, plan.Between(old, p))
		if old == nil {
			ops = kernel.DiffSets(nil, steering.Sets(p))
		}
		if _, err := kernel.ApplySets(t.Context(), store, ops); err != nil {
			t.Fatalf("step %d: %v", step, err)
		}
		states, err := store.List(kerneltest.AllEntries)
		if err != nil {
			t.Fatal(err)
		}
		var have []kernel.Set
		for _, s := range states {
			have = append(have, s.Set)
		}
		if left := kernel.DiffSets(have, steering.Sets(p)); !left.Empty() {
			t.Fatalf("step %d: the changes left a difference: %+v", step, left)
		}
		if again := steering.SetChanges(p, p, plan.Delta{}); !again.Empty() {
			t.Fatalf("step %d: going nowhere changes something: %+v", step, again)
		}
		old = p
	}
}

// BenchmarkSetChanges moves one service among ten thousand.
func BenchmarkSetChanges(b *testing.B) {
	services := kerneltest.Many(10_000, 10)
	old := kerneltest.Plan(plan.ModeIPTables, services...)
	moved := *old
	moved.Services = append([]*plan.Service(nil), old.Services...)
	one := *moved.Services[5000]
	one.DataPlane = plan.Userspace
	moved.Services[5000] = &one
	d := plan.Delta{Changes: []plan.Change{{Was: old.Services[5000], Is: &one}}}
	b.ReportAllocs()
	for b.Loop() {
		if ops := steering.SetChanges(old, &moved, d); ops.Empty() {
			b.Fatal("nothing to do")
		}
	}
}
