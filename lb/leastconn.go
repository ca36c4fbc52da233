package lb

import (
	"net/netip"
	"sync"
)

// leastConnections picks the target with the fewest connections for its
// weight. A heap ranks the targets; Loads report every change, so each pick is
// exact and costs O(log n).
//
// Ties, the rule among idle endpoints, are broken as start-time fair queueing
// does (Goyal, Vin, Cheng, SIGCOMM 1996): each target's share of ties follows
// its weight, and one that was busy for long gets no burst to make up for it.
type leastConnections struct {
	loads
	mu     sync.Mutex
	weight []uint32
	active []int64  // as of the last report of each Load
	finish []uint64 // virtual time at which a target's last turn is used up
	now    uint64   // virtual time at which the last turn began
	offset int32    // the target that comes first when nothing else tells them apart
	heap   *heap
}

// turnLength is how much virtual time a turn of a target with weight 1 takes.
// It leaves 2^44 turns before the time wraps around, which comparing
// differences makes harmless besides.
const turnLength = 1 << 20

func newLeastConnections(targets []Target, seed uint64) *leastConnections {
	n := len(targets)
	p := &leastConnections{
		loads: loadsOf(targets), weight: make([]uint32, n),
		active: make([]int64, n), finish: make([]uint64, n),
	}
	if n > 0 {
		p.offset = int32(seed % uint64(n))
	}
	// Loads that change while the heap is built wait for the lock, then report.
	p.mu.Lock()
	defer p.mu.Unlock()
	ids := eligible(targets)
	for _, id := range ids {
		p.weight[id] = targets[id].Weight
		if l := p.loads[id]; l != nil {
			l.watch(p, id)
			p.active[id] = max(0, l.Active())
		}
	}
	p.heap = newHeap(n, ids, p.before)
	return p
}

func (p *leastConnections) Pick(_ netip.Addr, skip Skip) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return int(p.take(skip))
}

// Acquire counts the connection while it holds the lock, so that the next pick
// sees it.
func (p *leastConnections) Acquire(_ netip.Addr, skip Skip) int {
	p.mu.Lock()
	id := p.take(skip)
	if id < 0 || p.loads[id] == nil {
		p.mu.Unlock()
		return int(id)
	}
	l := p.loads[id]
	l.active.Add(1)
	p.rank(id)
	p.mu.Unlock()
	l.tell(p)
	return int(id)
}

// take chooses a target and gives it a turn.
func (p *leastConnections) take(skip Skip) int32 {
	id := p.heap.first(skip)
	if id >= 0 {
		if int64(p.finish[id]-p.now) > 0 {
			p.now = p.finish[id]
		}
		p.finish[id] = p.now + max(1, turnLength/uint64(p.weight[id]))
		p.heap.fix(id)
	}
	p.heap.restore()
	return id
}

// changed is told by the Load of target id that it isn't what it was.
func (p *leastConnections) changed(id int32) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rank(id)
}

// rank reads the Load under the lock: of several reports that arrive in any
// order, the last one to get the lock reads the newest value.
func (p *leastConnections) rank(id int32) {
	p.active[id] = max(0, p.loads[id].Active())
	p.heap.fix(id)
}

func (p *leastConnections) before(a, b int32) bool {
	al, bl := uint64(p.active[a])*uint64(p.weight[b]), uint64(p.active[b])*uint64(p.weight[a])
	if al != bl {
		return al < bl
	}
	if d := int64(p.finish[a] - p.finish[b]); d != 0 {
		return d < 0
	}
	if first := p.offset; (a >= first) != (b >= first) {
		return a >= first
	}
	return a < b
}

// heap is a binary min-heap of target indices that knows where each one is,
// so that a target whose rank changed is moved in O(log n). It allocates only
// when it is made. Its owner's mutex guards it.
type heap struct {
	less  func(a, b int32) bool
	order []int32
	pos   []int32 // by target index: place in order, -1 if not in it
	aside []int32 // excluded targets, taken out during one pick
}

// newHeap returns a heap of ids, which are below n.
func newHeap(n int, ids []int32, less func(a, b int32) bool) *heap {
	h := &heap{less: less, order: make([]int32, 0, len(ids)), pos: make([]int32, n), aside: make([]int32, 0, len(ids))}
	for i := range h.pos {
		h.pos[i] = -1
	}
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
		h.pop()
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
	h.order = append(h.order, id)
	h.pos[id] = int32(len(h.order) - 1)
	h.up(len(h.order) - 1)
}

func (h *heap) pop() {
	last := len(h.order) - 1
	h.swap(0, last)
	h.pos[h.order[last]] = -1
	h.order = h.order[:last]
	h.down(0)
}

// fix moves a target whose rank changed to its place.
func (h *heap) fix(id int32) {
	if i := h.pos[id]; i >= 0 && !h.down(int(i)) {
		h.up(int(i))
	}
}

func (h *heap) up(i int) {
	for i > 0 {
		parent := (i - 1) / 2
		if !h.less(h.order[i], h.order[parent]) {
			return
		}
		h.swap(i, parent)
		i = parent
	}
}

// down reports whether it moved anything.
func (h *heap) down(i int) bool {
	start := i
	for {
		child := 2*i + 1
		if child >= len(h.order) {
			break
		}
		if r := child + 1; r < len(h.order) && h.less(h.order[r], h.order[child]) {
			child = r
		}
		if !h.less(h.order[child], h.order[i]) {
			break
		}
		h.swap(i, child)
		i = child
	}
	return i > start
}

func (h *heap) swap(i, j int) {
	h.order[i], h.order[j] = h.order[j], h.order[i]
	h.pos[h.order[i]], h.pos[h.order[j]] = int32(i), int32(j)
}
