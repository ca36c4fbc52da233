package steering_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
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

// TestLeavingEndpointOfTwoServices: an endpoint that two services let go of, and that one of them drops, is still one that
// leaves.
func TestLeavingEndpointOfTwoServices(t *testing.T) {
	port := func(name string, options ...func(*plan.Service)) *plan.Service {
		return kerneltest.Service(name, service.TCP, append(options, kerneltest.Endpoints("10.1.0.1:80"))...)
	}
	leaving := kerneltest.Unusable("10.1.0.2:80", false)
	old := kerneltest.Plan(plan.ModeIPTables, port("a", leaving), port("b", leaving))
	p := kerneltest.Plan(plan.ModeIPTables, port("a"), old.Services[1])
	d := plan.Delta{Changes: []plan.Change{{Was: old.Services[0], Is: p.Services[0]}}}
	if ops := steering.SetChanges(old, p, d); !ops.Empty() {
		t.Errorf("one of the two drops it: %+v", ops)
	}
	last := kerneltest.Plan(plan.ModeIPTables, p.Services[0], port("b"))
	d = plan.Delta{Changes: []plan.Change{{Was: p.Services[1], Is: last.Services[1]}}}
	if ops, want := steering.SetChanges(p, last, d), kernel.DiffSets(steering.Sets(p), steering.Sets(last)); want.Empty() || !cmp.Equal(ops, want) {
		t.Errorf("both have dropped it: %+v, want %+v", ops, want)
	}
}

// lifetimes notes how long entries are to stay, in seconds.
type lifetimes struct {
	kernel.SetStore
	added []uint32
}

func (l *lifetimes) Add(s kernel.Set, seconds uint32, entries ...string) error {
	l.added = append(l.added, seconds)
	return l.SetStore.Add(s, seconds, entries...)
}

// TestLifetimesAreRoundedUp: to ipset, 0 s is for ever, and with a lifetime that is cut short kproxy seems dead.
func TestLifetimesAreRoundedUp(t *testing.T) {
	for d, want := range map[time.Duration]uint32{time.Millisecond: 1, time.Second: 1, 2100 * time.Millisecond: 3} {
		store := &lifetimes{SetStore: kerneltest.NewHost().Sets()}
		r := steering.Redirects{Store: store}
		if err := r.Starting(d); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff([]uint32{want, want}, store.added); diff != "" {
			t.Errorf("Starting(%s), seconds in each family (-want +got):\n%s", d, diff)
		}
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
