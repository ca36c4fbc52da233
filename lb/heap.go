package lb

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
