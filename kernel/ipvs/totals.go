package ipvs

import (
	"net/netip"
	"strings"

	"kproxy.dev/kproxy/kernel"
)

// totals are all fragments together, in order. Slices in it are never written
// to: a change makes new ones of those that it concerns, and leaves the others
// for who compares to find unchanged.
type totals struct {
	entries   map[string]*multiset[string] // by set
	addresses *multiset[netip.Addr]
	// candidates are all virtual servers, winners those that have their place.
	candidates []candidate
	winners    []kernel.Virtual
}

func newTotals() totals {
	return totals{entries: map[string]*multiset[string]{}, addresses: newMultiset(netip.Addr.Compare)}
}

// change takes fragments away and adds others.
func (t *totals) change(gone, come []*fragment) {
	if len(gone)+len(come) == 0 {
		return
	}
	var less, more []candidate
	for _, fr := range gone {
		for _, e := range fr.entries {
			t.entries[e.Set].put(e.Entry, -1)
		}
		for _, a := range fr.addresses {
			t.addresses.put(a, -1)
		}
		less = append(less, fr.candidates()...)
	}
	for _, fr := range come {
		for _, e := range fr.entries {
			if t.entries[e.Set] == nil {
				t.entries[e.Set] = newMultiset(strings.Compare)
			}
			t.entries[e.Set].put(e.Entry, 1)
		}
		for _, a := range fr.addresses {
			t.addresses.put(a, 1)
		}
		more = append(more, fr.candidates()...)
	}
	for _, c := range t.entries {
		c.settle()
	}
	t.addresses.settle()
	t.candidates = kernel.Patch(t.candidates, less, more, compareCandidates)
	t.winners = winners(t.candidates)
}

// candidate is a virtual server that wants a place.
type candidate struct {
	kernel.Virtual
	nodePort bool
}

func (fr *fragment) candidates() []candidate {
	out := make([]candidate, 0, len(fr.virtuals)+len(fr.nodePorts))
	for _, v := range fr.virtuals {
		out = append(out, candidate{v, false})
	}
	for _, v := range fr.nodePorts {
		out = append(out, candidate{v, true})
	}
	return out
}

// compareCandidates orders by place. Of several at one, a service's address comes
// before a node port, and the first service before others, as rules of iptables
// would have it.
func compareCandidates(a, b candidate) int {
	order := kernel.CompareVirtuals(a.Virtual, b.Virtual)
	switch {
	case order != 0:
		return order
	case a.nodePort == b.nodePort:
		return a.Owner.Compare(b.Owner)
	case b.nodePort:
		return -1
	}
	return 1
}

// winners are the first of each place.
func winners(candidates []candidate) []kernel.Virtual {
	if len(candidates) == 0 {
		return nil
	}
	out := make([]kernel.Virtual, 0, len(candidates))
	for i := range candidates {
		if i == 0 || kernel.CompareVirtuals(candidates[i-1].Virtual, candidates[i].Virtual) != 0 {
			out = append(out, candidates[i].Virtual)
		}
	}
	return out
}

// multiset is a sorted list of what is wanted by somebody, and by how many.
type multiset[T comparable] struct {
	compare func(T, T) int
	sorted  []T
	count   map[T]int
	before  map[T]int // counts that have changed since sorted was made
}

func newMultiset[T comparable](compare func(T, T) int) *multiset[T] {
	return &multiset[T]{compare: compare, count: map[T]int{}, before: map[T]int{}}
}

func (c *multiset[T]) put(x T, by int) {
	n := c.count[x]
	if _, ok := c.before[x]; !ok {
		c.before[x] = n
	}
	if n+by == 0 {
		delete(c.count, x)
	} else {
		c.count[x] = n + by
	}
}

// settle makes sorted what the counts say.
func (c *multiset[T]) settle() {
	var gone, come []T
	for x, before := range c.before {
		switch now := c.count[x]; {
		case before > 0 && now == 0:
			gone = append(gone, x)
		case before == 0 && now > 0:
			come = append(come, x)
		}
	}
	clear(c.before)
	c.sorted = kernel.Patch(c.sorted, gone, come, c.compare)
}
