package lb

import (
	"math/bits"
	"net/netip"
	"slices"
	"sync/atomic"

	"kproxy.dev/kproxy/service"
)

// random draws each target with a probability proportional to its weight.
type random struct {
	loads
	table draws
	state atomic.Uint64
}

func newRandom(targets []Target, seed uint64) *random {
	p := &random{loads: loadsOf(targets), table: newDraws(targets)}
	p.state.Store(seed)
	return p
}

// Pick takes its random numbers from splitmix64, whose state is a counter: one
// atomic addition makes it safe for concurrent use.
func (p *random) Pick(_ netip.Addr, skip Skip) int {
	return p.table.draw(p.state.Add(golden), skip)
}

func (p *random) Acquire(c netip.Addr, skip Skip) int { return p.acquire(p.Pick(c, skip)) }

// sourceHash sends a client always to the same target: its address decides. When the targets
// change, most clients move; Maglev is for where that matters.
type sourceHash struct {
	loads
	slots []int // as kernel rules have them
	table draws
}

func newSourceHash(targets []Target) *sourceHash {
	return &sourceHash{loads: loadsOf(targets), slots: Slots(weightsOf(targets), SlotLimit), table: newDraws(targets)}
}

// Pick draws where the client's own target is excluded; the draws are the client's own as
// well, so that the clients of an ejected endpoint spread over all others, and come back when
// it does.
func (p *sourceHash) Pick(c netip.Addr, skip Skip) int {
	if len(p.slots) == 0 {
		return -1
	}
	if own := p.slots[SourceSlot(c, len(p.slots))]; !excluded(skip, int32(own)) {
		return own
	}
	return p.table.draw(hashAddr(c), skip)
}

func (p *sourceHash) Acquire(c netip.Addr, skip Skip) int { return p.acquire(p.Pick(c, skip)) }

// draws draws targets with probabilities proportional to their weights.
type draws struct {
	ids    []int32
	weight []uint32
	sums   []uint64 // of the weights of ids, each with those before it
}

func newDraws(targets []Target) draws {
	d, sum := draws{ids: eligible(targets), weight: weightsOf(targets)}, uint64(0)
	for _, id := range d.ids {
		sum += uint64(d.weight[id])
		d.sums = append(d.sums, sum)
	}
	return d
}

// redraws is how often an excluded target leads to another draw before the
// targets that are left are counted. Either way the proportions among them are
// those of their weights.
const redraws = 16

// draw maps x to a target, and x's successors in splitmix64's sequence to the
// choices after it.
func (t *draws) draw(x uint64, skip Skip) int {
	if len(t.ids) == 0 {
		return -1
	}
	for range redraws {
		at, _ := bits.Mul64(service.Mix(x), t.sums[len(t.sums)-1])
		i, _ := slices.BinarySearch(t.sums, at+1)
		if !excluded(skip, t.ids[i]) {
			return int(t.ids[i])
		}
		x = service.Mix(x + golden)
	}
	return t.drawLeft(x, skip)
}

// drawLeft draws among the targets that skip leaves, in O(n).
func (t *draws) drawLeft(x uint64, skip Skip) int {
	var sum uint64
	for _, id := range t.ids {
		if !excluded(skip, id) {
			sum += uint64(t.weight[id])
		}
	}
	at, _ := bits.Mul64(service.Mix(x), sum)
	last := int32(-1)
	for _, id := range t.ids {
		if excluded(skip, id) {
			continue
		}
		last = id
		w := uint64(t.weight[id])
		if at < w {
			break
		}
		at -= w
	}
	return int(last) // skip may have changed its mind in between
}
