package lb

import (
	"net/netip"
	"sync/atomic"
)

// roundRobin gives every target its turn. Each value of the counter is drawn by
// exactly one pick, so the split is exact however many pick at once.
type roundRobin struct {
	loads
	ids  []int32
	next atomic.Uint64
}

func newRoundRobin(targets []Target, seed uint64) *roundRobin {
	p := &roundRobin{loads: loadsOf(targets), ids: eligible(targets)}
	if n := uint64(len(p.ids)); n > 0 {
		p.next.Store(seed % n)
	}
	return p
}

// Pick draws turns until one belongs to a target that isn't excluded. An
// excluded target's turn is lost, not handed to its successor, which would
// otherwise carry twice the others' share for as long as its neighbour is
// ejected.
func (p *roundRobin) Pick(_ netip.Addr, skip Skip) int {
	n := uint64(len(p.ids))
	if n == 0 {
		return -1
	}
	var turn uint64
	for range n {
		turn = p.next.Add(1) - 1
		if id := p.ids[turn%n]; !excluded(skip, id) {
			return int(id)
		}
	}
	// Others may have drawn all the turns of the targets that are left.
	return firstLeft(p.ids, turn+1, skip)
}

func (p *roundRobin) Acquire(c netip.Addr, skip Skip) int { return p.acquire(p.Pick(c, skip)) }
