package lb

import (
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

// schedule is the sequence of turns, not safe for concurrent use.
type schedule struct {
	weight []uint32
	turn   []uint64 // by target: k of its next turn
	heap   *heap
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
	s.heap = newHeap(ids, s.before)
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
	id := s.heap.first(skip)
	if id >= 0 {
		for _, other := range s.heap.aside {
			s.pass(other, id)
		}
		s.turn[id]++
		s.heap.down()
	}
	s.heap.restore()
	return id
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

// heap is a binary min-heap of targets. It allocates only when it is made. Its owner's
// mutex guards it.
type heap struct {
	less  func(a, b int32) bool
	order []int32
	aside []int32 // excluded targets, taken out during one pick
}

func newHeap(ids []int32, less func(a, b int32) bool) *heap {
	h := &heap{less: less, order: make([]int32, 0, len(ids)), aside: make([]int32, 0, len(ids))}
	for _, id := range ids {
		h.push(id)
	}
	return h
}

// first returns the least target that skip doesn't exclude, or -1. The
// excluded ones before it are in aside until restore puts them back.
func (h *heap) first(skip Skip) int32 {
	for len(h.order) > 0 {
		id := h.order[0]
		if !excluded(skip, id) {
			return id
		}
		last := len(h.order) - 1
		h.order[0], h.order = h.order[last], h.order[:last]
		h.down()
		h.aside = append(h.aside, id)
	}
	return -1
}

// restore puts the targets that first took out back in.
func (h *heap) restore() {
	for _, id := range h.aside {
		h.push(id)
	}
	h.aside = h.aside[:0]
}

func (h *heap) push(id int32) {
	i := len(h.order)
	for h.order = append(h.order, id); i > 0; {
		parent := (i - 1) / 2
		if !h.less(id, h.order[parent]) {
			break
		}
		h.order[i], i = h.order[parent], parent
	}
	h.order[i] = id
}

// down moves the first target to where it belongs.
func (h *heap) down() {
	for i := 0; ; {
		child := 2*i + 1
		if child >= len(h.order) {
			return
		}
		if r := child + 1; r < len(h.order) && h.less(h.order[r], h.order[child]) {
			child = r
		}
		if !h.less(h.order[child], h.order[i]) {
			return
		}
		h.order[i], h.order[child], i = h.order[child], h.order[i], child
	}
}
