package lb

import (
	"container/heap"
	"math/bits"
	"net/netip"
	"sync"
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

// weighted is smooth weighted round robin. Like nginx's it spreads each
// target's turns evenly (5:1:1 never gives five in a row), but where nginx
// compares all targets at each pick, here the k-th turn of a target with
// weight w is due at time (2k+1)/w, and a heap holds the targets by their next
// turn. Times are compared as fractions, so any sum(w)/gcd(w) picks in a row
// give every target exactly its share.
type weighted struct {
	loads
	mu sync.Mutex
	schedule
}

// schedule is the sequence of turns, not safe for concurrent use. It is the [heap.Interface]
// of order.
type schedule struct {
	weight []uint32
	turn   []uint64 // by target: k of its next turn
	order  []int32  // a heap of targets by their next turn
}

func newWeighted(targets []Target, seed uint64) *weighted {
	p := &weighted{loads: loadsOf(targets)}
	p.init(weightsOf(targets), eligible(targets), seed)
	return p
}

// init starts the schedule of ids at a turn that seed chooses; seed 0 is the
// very beginning.
func (s *schedule) init(weights []uint32, ids []int32, seed uint64) {
	s.weight, s.turn = weights, make([]uint64, len(weights))
	if len(ids) > 0 && seed != 0 {
		at := ids[seed%uint64(len(ids))]
		s.turn[at] = seed >> 32 % uint64(weights[at])
		for _, id := range ids {
			if id != at {
				s.pass(id, at)
			}
		}
	}
	s.order = ids
	heap.Init(s)
}

// Pick takes the next turn of a target that isn't excluded. Turns of excluded
// targets that were due before are lost, so they don't come back with a burst.
func (p *weighted) Pick(_ netip.Addr, skip Skip) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return int(p.next(skip))
}

func (p *weighted) Acquire(c netip.Addr, skip Skip) int { return p.acquire(p.Pick(c, skip)) }

func (s *schedule) next(skip Skip) int32 {
	id := s.first(skip)
	switch {
	case id < 0:
	case id == s.order[0]:
		s.turn[id]++
		heap.Fix(s, 0)
	default:
		for _, other := range s.order {
			if other != id && s.before(other, id) { // it is excluded
				s.pass(other, id)
			}
		}
		s.turn[id]++
		heap.Init(s)
	}
	return id
}

// first returns the target that skip doesn't exclude whose turn comes first, or -1.
func (s *schedule) first(skip Skip) int32 {
	first := int32(-1)
	for i, id := range s.order {
		if (first < 0 || s.before(id, first)) && !excluded(skip, id) {
			if first = id; i == 0 {
				break
			}
		}
	}
	return first
}

// before reports whether a's next turn comes before b's; of turns at the same
// time the earlier target's comes first.
func (s *schedule) before(a, b int32) bool {
	ah, al := bits.Mul64(2*s.turn[a]+1, uint64(s.weight[b]))
	bh, bl := bits.Mul64(2*s.turn[b]+1, uint64(s.weight[a]))
	if ah != bh {
		return ah < bh
	}
	if al != bl {
		return al < bl
	}
	return a < b
}

// pass moves id's next turn behind the next turn of at: it becomes the first
// one with (2k+1)/weight[id] > (2*turn[at]+1)/weight[at], or the one at the
// same time if that comes later by order of targets.
func (s *schedule) pass(id, at int32) {
	hi, lo := bits.Mul64(2*s.turn[at]+1, uint64(s.weight[id]))
	w := uint64(s.weight[at])
	q, rest := bits.Div64(hi%w, lo, w) // times stay below 2^64 turns
	k := (q + 1) / 2
	if rest == 0 && q%2 == 1 && id > at {
		k--
	}
	s.turn[id] = max(s.turn[id], k)
}

func (s *schedule) Len() int           { return len(s.order) }
func (s *schedule) Less(i, j int) bool { return s.before(s.order[i], s.order[j]) }
func (s *schedule) Swap(i, j int)      { s.order[i], s.order[j] = s.order[j], s.order[i] }

// Push and Pop are never called: the targets stay the same.
func (*schedule) Push(any) {}
func (*schedule) Pop() any { return nil }
