package lb

import (
	"math/bits"
	"net/netip"
	"sync/atomic"
)

// random draws each target with a probability proportional to its weight.
type random struct {
	loads
	table alias
	state atomic.Uint64
}

func newRandom(targets []Target, seed uint64) *random {
	p := &random{loads: loadsOf(targets), table: newAlias(targets)}
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
	table alias
}

func newSourceHash(targets []Target) *sourceHash {
	return &sourceHash{loads: loadsOf(targets), slots: Slots(weightsOf(targets), SlotLimit), table: newAlias(targets)}
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

// alias draws from a discrete distribution in O(1) (Vose: A linear algorithm
// for generating random numbers with a given distribution, IEEE TSE 1991).
// Each column holds a target, and with what remains of its width another one.
type alias struct {
	ids     []int32
	weight  []uint32
	columns []column
}

type column struct {
	own, other int32
	width      uint64 // of own, as a fraction of 2^64
}

func newAlias(targets []Target) alias {
	t := alias{ids: eligible(targets), weight: weightsOf(targets)}
	n, sum := uint64(len(t.ids)), uint64(0)
	for _, w := range t.weight {
		sum += uint64(w)
	}
	// A column is sum wide, and all columns together have room for n times
	// each weight: whole numbers, so nothing is rounded until the very end.
	rest := make([]uint64, n)
	var small, large []int
	for i, id := range t.ids {
		rest[i] = n * uint64(t.weight[id])
		if rest[i] < sum {
			small = append(small, i)
		} else {
			large = append(large, i)
		}
	}
	t.columns = make([]column, n)
	for len(small) > 0 {
		s, l := small[len(small)-1], large[len(large)-1]
		small = small[:len(small)-1]
		width, _ := bits.Div64(rest[s], 0, sum)
		t.columns[s] = column{t.ids[s], t.ids[l], width}
		if rest[l] -= sum - rest[s]; rest[l] < sum {
			large = large[:len(large)-1]
			small = append(small, l)
		}
	}
	for _, l := range large {
		t.columns[l] = column{t.ids[l], t.ids[l], 0}
	}
	return t
}

// redraws is how often an excluded target leads to another draw before the
// targets that are left are counted. Either way the proportions among them are
// those of their weights.
const redraws = 16

// draw maps x to a target, and x's successors in splitmix64's sequence to the
// choices after it.
func (t *alias) draw(x uint64, skip Skip) int {
	n := uint64(len(t.columns))
	if n == 0 {
		return -1
	}
	for range redraws {
		r := mix(x)
		i, fraction := bits.Mul64(r, n)
		c := &t.columns[i]
		id := c.own
		if fraction >= c.width {
			id = c.other
		}
		if !excluded(skip, id) {
			return int(id)
		}
		x = mix(x + golden)
	}
	return t.drawLeft(x, skip)
}

// drawLeft draws among the targets that skip leaves, in O(n).
func (t *alias) drawLeft(x uint64, skip Skip) int {
	var sum uint64
	for _, id := range t.ids {
		if !excluded(skip, id) {
			sum += uint64(t.weight[id])
		}
	}
	at, _ := bits.Mul64(mix(x), sum)
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
