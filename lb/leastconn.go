package lb

import (
	"net/netip"
	"slices"
	"sync"
)

// leastConnections picks the target with the fewest connections for its weight. It
// compares the targets' Loads at each pick, so each pick is exact.
// That takes some nanoseconds a target, 4 µs for a thousand. Keeping them ranked instead
// costs every connection that begins or ends more, where there are few targets.
//
// Ties, the rule among idle endpoints, are broken as start-time fair queueing
// does (Goyal, Vin, Cheng, SIGCOMM 1996): each target's share of ties follows
// its weight, and one that was busy for long gets no burst to make up for it.
type leastConnections struct {
	loads
	ids    []int32 // in the order that breaks the last ties
	weight []uint32

	mu     sync.Mutex
	finish []uint64 // virtual time at which a target's last turn is used up
	now    uint64   // virtual time at which the last turn began
}

// turnLength is how much virtual time a turn of a target with weight 1 takes.
// It leaves 2^44 turns before the time wraps around, which comparing
// differences makes harmless besides.
const turnLength = 1 << 20

func newLeastConnections(targets []Target, seed uint64) *leastConnections {
	p := &leastConnections{loads: loadsOf(targets), weight: weightsOf(targets), ids: eligible(targets), finish: make([]uint64, len(targets))}
	if n := len(p.ids); n > 0 {
		first := int(seed % uint64(n))
		p.ids = slices.Concat(p.ids[first:], p.ids[:first])
	}
	return p
}

func (p *leastConnections) Pick(_ netip.Addr, skip Skip) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.take(skip)
}

// Acquire counts the connection while it holds the lock, so that the next pick
// sees it.
func (p *leastConnections) Acquire(_ netip.Addr, skip Skip) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.acquire(p.take(skip))
}

// take chooses a target and gives it a turn.
func (p *leastConnections) take(skip Skip) int {
	id := p.least(skip)
	if id >= 0 {
		if int64(p.finish[id]-p.now) > 0 {
			p.now = p.finish[id]
		}
		p.finish[id] = p.now + max(1, turnLength/uint64(p.weight[id]))
	}
	return id
}

// least returns the target that comes first, -1 if none is left.
func (p *leastConnections) least(skip Skip) int {
	best, fewest := int32(-1), uint64(0)
	for _, id := range p.ids {
		active := p.active(id)
		if (best < 0 || p.before(id, active, best, fewest)) && !excluded(skip, id) {
			best, fewest = id, active
		}
	}
	return int(best)
}

func (p *leastConnections) active(id int32) uint64 {
	if l := p.loads[id]; l != nil {
		return uint64(max(0, l.Active()))
	}
	return 0
}

func (p *leastConnections) before(a int32, active uint64, b int32, fewest uint64) bool {
	if x, y := active*uint64(p.weight[b]), fewest*uint64(p.weight[a]); x != y {
		return x < y
	}
	return int64(p.finish[a]-p.finish[b]) < 0
}
