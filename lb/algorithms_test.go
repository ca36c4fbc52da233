package lb

import (
	"container/heap"
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/service"
)

func TestWeightedIsSmooth(t *testing.T) {
	tests := map[string]struct {
		weights []uint32
		want    []int // one period from the beginning
	}{
		"nginx's example": {[]uint32{5, 1, 1}, []int{0, 0, 0, 1, 2, 0, 0}},
		"two to one":      {[]uint32{2, 1}, []int{0, 1, 0}},
		"drained":         {[]uint32{3, 0, 1}, []int{0, 0, 2, 0}},
		"common divisor":  {[]uint32{200, 100}, []int{0, 1, 0}},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			p := newWeighted(targetsOf(tt.weights...), 0)
			for round := range 3 {
				var got []int
				for range tt.want {
					got = append(got, p.Pick(netip.Addr{}, nil))
				}
				if diff := cmp.Diff(tt.want, got); diff != "" {
					t.Errorf("round %d (-want +got):\n%s", round, diff)
				}
			}
		})
	}
}

// Any window of one period is exact, whatever the seed, also when 64 pick at once.
func TestWeightedIsExact(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		weights := make([]uint32, 2+rng.IntN(8))
		period := 0
		for i := range weights {
			weights[i] = uint32(rng.IntN(30))
			period += int(weights[i])
		}
		if period == 0 {
			continue
		}
		p := newWeighted(targetsOf(weights...), rng.Uint64())
		for round := range 3 {
			got := make([]uint32, len(weights))
			for range period {
				got[p.Pick(netip.Addr{}, nil)]++
			}
			if diff := cmp.Diff(weights, got); diff != "" {
				t.Fatalf("weights %v, round %d (-want +got):\n%s", weights, round, diff)
			}
		}
	}
	counts := countParallel(New(service.WeightedRoundRobin, targetsOf(5, 0, 2, 1), 7), 4, 80, nil)
	if diff := cmp.Diff([]int{3200, 0, 1280, 640}, counts); diff != "" {
		t.Errorf("64 at once (-want +got):\n%s", diff)
	}
}

// While a target is excluded the others keep their proportions, and afterwards
// it doesn't make up for the turns it lost.
func TestWeightedSkipsExactly(t *testing.T) {
	p := newWeighted(targetsOf(4, 2, 1), 0)
	skip := &except{0: true}
	got := make([]int, 3)
	for range 300 {
		got[p.Pick(netip.Addr{}, skip)]++
	}
	if diff := cmp.Diff([]int{0, 200, 100}, got); diff != "" {
		t.Errorf("without the first (-want +got):\n%s", diff)
	}
	got = make([]int, 3)
	for range 70 {
		got[p.Pick(netip.Addr{}, nil)]++
	}
	for i, want := range []int{40, 20, 10} {
		if got[i] < want-1 || got[i] > want+1 {
			t.Errorf("afterwards: %v", got)
		}
	}
}

func TestWeightedWithExtremeWeights(t *testing.T) {
	p := newWeighted(targetsOf(1<<32-1, 1<<32-1, 1), 0)
	p.turn[0], p.turn[1] = 1<<60, 1<<60 // after centuries
	p.turn[2] = 1 << 28
	heap.Init(p)
	got := make([]int, 3)
	for range 1000 {
		got[p.Pick(netip.Addr{}, nil)]++
	}
	if got[0] < 499 || got[1] < 499 {
		t.Errorf("counts %v, want about 500 500 0", got)
	}
}

func TestLeastConnectionsPicksTheLeast(t *testing.T) {
	targets := targetsOf(1, 1, 2)
	for range 3 {
		targets[0].Load.Acquire()
	}
	targets[1].Load.Acquire()
	p := New(service.LeastConnections, targets, 0)
	// Active 3, 1, 0 at weights 1, 1, 2: first the idle one up to a tie.
	if i := p.Acquire(netip.Addr{}, nil); i != 2 {
		t.Fatalf("picked %d, want the idle one", i)
	}
	if i := p.Acquire(netip.Addr{}, nil); i != 2 {
		t.Fatalf("picked %d, want the one with half a connection per weight", i)
	}
	targets[0].Load.Release()
	targets[0].Load.Release()
	targets[0].Load.Release()
	if i := p.Acquire(netip.Addr{}, nil); i != 0 {
		t.Fatalf("picked %d, want the one that has become idle", i)
	}
	if i := p.Pick(netip.Addr{}, &except{0: true, 1: true}); i != 2 {
		t.Fatalf("picked %d, want the one that's left", i)
	}
}

// Against a model that looks at every target, through a random walk of
// connections that begin and end, with rebuilds in between.
func TestLeastConnectionsMatchesModel(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	targets := targetsOf(1, 2, 3, 1, 0, 5, 1)
	p := New(service.LeastConnections, targets, 0)
	var open []int
	for step := range 20000 {
		switch {
		case step%500 == 499:
			p = New(service.LeastConnections, targets, rng.Uint64())
		case len(open) > 0 && rng.IntN(100) < 48:
			k := rng.IntN(len(open))
			targets[open[k]].Load.Release()
			open = slices.Delete(open, k, k+1)
		default:
			skip := &except{rng.IntN(7): true}
			least := -1.0
			for i, target := range targets {
				if per := float64(target.Load.Active()) / float64(target.Weight); target.Weight > 0 && !skip.Skip(i) && (least < 0 || per < least) {
					least = per
				}
			}
			i := p.Acquire(netip.Addr{}, skip)
			if got := float64(targets[i].Load.Active()-1) / float64(targets[i].Weight); got != least {
				t.Fatalf("step %d: picked %d with %v per weight, least is %v", step, i, got, least)
			}
			open = append(open, i)
		}
	}
}

// 64 goroutines that connect at once never see a stale count, also after much
// coming and going: loads differ by one at most.
func TestLeastConnectionsIsExactInParallel(t *testing.T) {
	targets := targetsOf(uniform(7)...)
	p := New(service.LeastConnections, targets, 0)
	parallel := func(f func()) {
		var wg sync.WaitGroup
		for range 64 {
			wg.Go(f)
		}
		wg.Wait()
	}
	parallel(func() {
		for range 200 {
			targets[p.Acquire(netip.Addr{}, nil)].Load.Release()
		}
	})
	parallel(func() {
		for range 100 {
			p.Acquire(netip.Addr{}, nil)
		}
	})
	got := make([]int64, len(targets))
	var total int64
	for i, target := range targets {
		got[i] = target.Load.Active()
		total += got[i]
	}
	if total != 6400 || slices.Max(got)-slices.Min(got) > 1 {
		t.Errorf("loads %v, %d in all; want 6400 in all and a difference of 1 at most", got, total)
	}
}

// Connections so short that every endpoint is idle again: ties follow weights.
func TestLeastConnectionsBreaksTiesFairly(t *testing.T) {
	for _, tt := range []struct {
		weights []uint32
		want    []int
	}{
		{[]uint32{1, 1, 1}, []int{100, 100, 100}},
		{[]uint32{3, 1, 2}, []int{150, 50, 100}},
	} {
		targets := targetsOf(tt.weights...)
		p := New(service.LeastConnections, targets, 9)
		got := make([]int, 3)
		for range 300 {
			i := p.Acquire(netip.Addr{}, nil)
			targets[i].Load.Release()
			got[i]++
		}
		for i := range got {
			if got[i] < tt.want[i]-1 || got[i] > tt.want[i]+1 {
				t.Errorf("weights %v: counts %v, want %v", tt.weights, got, tt.want)
			}
		}
	}
}

// One that was busy while the others had many turns takes its share again, not
// all ties until it has caught up.
func TestLeastConnectionsDoesNotCatchUp(t *testing.T) {
	targets := targetsOf(1, 1)
	p := New(service.LeastConnections, targets, 0)
	targets[0].Load.Acquire()
	for range 100 {
		targets[p.Acquire(netip.Addr{}, nil)].Load.Release()
	}
	targets[0].Load.Release()
	got := make([]int, 2)
	for range 20 {
		i := p.Acquire(netip.Addr{}, nil)
		targets[i].Load.Release()
		got[i]++
	}
	if got[0] < 9 || got[0] > 11 {
		t.Errorf("counts %v, want 10 10", got)
	}
}

func TestLoadSharedByPickers(t *testing.T) {
	targets := targetsOf(1, 1)
	cluster := New(service.LeastConnections, targets, 0)
	local := New(service.LeastConnections, targets[:1], 0)
	local.Acquire(netip.Addr{}, nil)
	if i := cluster.Pick(netip.Addr{}, nil); i != 1 {
		t.Errorf("picked %d, which the other picker has loaded", i)
	}
}

func TestRandomFitsWeights(t *testing.T) {
	for _, weights := range [][]uint32{{1}, {1, 1, 1}, {5, 0, 1, 3}, {1000, 1, 1}, uniform(100)} {
		p := New(service.Random, targetsOf(weights...), 42)
		counts := make([]int, len(weights))
		for range 100_000 {
			counts[p.Pick(netip.Addr{}, nil)]++
		}
		checkFit(t, counts, weights)
		checkFit(t, countParallel(p, len(weights), 1000, nil), weights)
	}
}

func TestRandomIsReproducible(t *testing.T) {
	sequence := func(seed uint64) (s []int) {
		p := New(service.Random, targetsOf(uniform(10)...), seed)
		for range 50 {
			s = append(s, p.Pick(netip.Addr{}, nil))
		}
		return s
	}
	if diff := cmp.Diff(sequence(7), sequence(7)); diff != "" {
		t.Error(diff)
	}
	if slices.Equal(sequence(7), sequence(8)) {
		t.Error("another seed gives the same sequence")
	}
}

// Proportions hold among what is left, by redrawing and by counting.
func TestHashAndRandomSkipProportionally(t *testing.T) {
	for _, a := range []service.Algorithm{service.Random, service.SourceHash, service.Maglev} {
		for _, tt := range []struct {
			weights []uint32
			skip    except
		}{
			{[]uint32{1, 2, 3, 4}, except{3: true}},
			{[]uint32{1000, 1, 3}, except{0: true}},
		} {
			if a == service.Maglev && tt.weights[0] == 1000 {
				continue // falls back to equal shares when nearly all of the table is excluded
			}
			left := slices.Clone(tt.weights)
			for i := range tt.skip {
				left[i] = 0
			}
			p := New(a, targetsOf(tt.weights...), 1)
			counts := make([]int, len(left))
			for k := range 20_000 {
				counts[p.Pick(clientOf(k), &tt.skip)]++
			}
			t.Run(fmt.Sprint(a, tt.weights), func(t *testing.T) { checkFit(t, counts, left) })
		}
	}
}

func TestHashesSpreadByWeight(t *testing.T) {
	for _, a := range []service.Algorithm{service.SourceHash, service.Maglev} {
		for _, weights := range [][]uint32{uniform(3), uniform(50), {5, 1, 0, 2}} {
			p := New(a, targetsOf(weights...), 1)
			counts := make([]int, len(weights))
			for k := range 50_000 {
				counts[p.Pick(clientOf(k), nil)]++
			}
			t.Run(fmt.Sprint(a, len(weights)), func(t *testing.T) { checkFit(t, counts, weights) })
		}
	}
}

// A client keeps its target: over time, over rebuilds and seeds, and while
// another target is excluded; and a retry goes to the same second choice.
func TestHashesAreSticky(t *testing.T) {
	for _, a := range []service.Algorithm{service.SourceHash, service.Maglev} {
		one, two := New(a, targetsOf(uniform(9)...), 1), New(a, targetsOf(uniform(9)...), 2)
		skip := &except{4: true}
		spread := map[int]int{}
		for k := range 5000 {
			c := clientOf(k)
			i := one.Pick(c, nil)
			if j := two.Pick(c, nil); j != i {
				t.Fatalf("%s: client %s goes to %d, after a rebuild to %d", a, c, i, j)
			}
			j := one.Pick(c, skip)
			if i != 4 && j != i {
				t.Fatalf("%s: client %s moves from %d to %d because 4 is excluded", a, c, i, j)
			}
			if j != two.Pick(c, skip) {
				t.Fatalf("%s: client %s has no constant second choice", a, c)
			}
			if i == 4 {
				spread[j]++
			}
		}
		if len(spread) != 8 {
			t.Errorf("%s: the clients of an excluded target go to %d others, want all 8", a, len(spread))
		}
	}
}

func TestMappedAddressesAreOneClient(t *testing.T) {
	four := netip.MustParseAddr("192.0.2.7")
	mapped := netip.AddrFrom16(four.As16())
	for _, a := range []service.Algorithm{service.SourceHash, service.Maglev} {
		p := New(a, targetsOf(uniform(100)...), 1)
		if p.Pick(four, nil) != p.Pick(mapped, nil) {
			t.Errorf("%s tells %s from %s", a, four, mapped)
		}
	}
}

func TestMaglevTableIsBalanced(t *testing.T) {
	for _, n := range []int{1, 3, 10, 100, 600} {
		counts := make([]int, n)
		for _, id := range maglevTable(targetsOf(uniform(n)...)) {
			counts[id]++
		}
		// Turns are strictly by turn, so shares differ by one slot.
		if d := slices.Max(counts) - slices.Min(counts); d > 1 {
			t.Errorf("%d targets: shares differ by %d slots", n, d)
		}
	}
	counts := make([]int, 3)
	for _, id := range maglevTable(targetsOf(3, 0, 1)) {
		counts[id]++
	}
	if counts[0] < 49152 || counts[0] > 49154 || counts[1] != 0 {
		t.Errorf("weights 3, 0, 1 have %v slots", counts)
	}
}

func TestMaglevTableIgnoresOrder(t *testing.T) {
	targets := targetsOf(1, 2, 3, 4, 5)
	shuffled := slices.Clone(targets)
	rand.New(rand.NewPCG(1, 1)).Shuffle(len(shuffled), func(i, j int) { shuffled[i], shuffled[j] = shuffled[j], shuffled[i] })
	a, b := maglevTable(targets), maglevTable(shuffled)
	for slot := range a {
		if targets[a[slot]].Address != shuffled[b[slot]].Address {
			t.Fatalf("slot %d differs", slot)
		}
	}
}

// TestMaglevDisruption measures how many slots change hands although their
// target is still there; an ideal consistent hash has none, and hashing modulo
// the number of targets would move nearly all.
func TestMaglevDisruption(t *testing.T) {
	const limit = 0.02
	for _, n := range []int{3, 10, 100, 500} {
		targets := targetsOf(uniform(n)...)
		before := maglevTable(targets)
		gone := n / 2
		after := maglevTable(slices.Delete(slices.Clone(targets), gone, gone+1))
		lost, moved := 0, 0
		for slot, id := range before {
			now := after[slot]
			if int(now) >= gone {
				now++
			}
			switch {
			case int(id) == gone:
				lost++
			case now != id:
				moved++
			}
		}
		share := float64(moved) / maglevSize
		t.Logf("1 of %d targets removed: its %d slots moved, and %.2f%% of the table besides", n, lost, 100*share)
		if share > limit {
			t.Errorf("1 of %d targets removed: %.2f%% of the table moved besides, limit %.0f%%", n, 100*share, 100*limit)
		}
	}
}
