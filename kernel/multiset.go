package kernel

import "slices"

// Multiset is a sorted list of values, each as often as it was put in. A change replaces the
// list, which is never written to. The zero value is empty.
type Multiset[T comparable] struct {
	Unique []T       // each once
	more   map[T]int // how often each was put in after the first time; those that were put in once aren't there
}

// Change takes values away and adds others, one for one. Both may be in any order.
func (m *Multiset[T]) Change(gone, come []T, compare func(T, T) int) {
	slices.SortFunc(come, compare)
	var first, last []T // of their kind
	for i, x := range come {
		if _, there := slices.BinarySearchFunc(m.Unique, x, compare); !there && (i == 0 || come[i-1] != x) {
			first = append(first, x)
			continue
		}
		if m.more == nil {
			m.more = map[T]int{}
		}
		m.more[x]++
	}
	for _, x := range gone {
		if m.more[x] == 0 {
			last = append(last, x)
		} else if m.more[x]--; m.more[x] == 0 {
			delete(m.more, x)
		}
	}
	m.Unique = Patch(m.Unique, last, first, compare)
}
