package lb

import (
	"math/rand/v2"
	"slices"
	"testing"
)

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
