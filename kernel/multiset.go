package kernel

import "slices"

// Multiset is a sorted list of values, each as often as it was put in. A change replaces its
// lists, which are never written to. The zero value is empty.
type Multiset[T comparable] struct {
	Unique   []T // each once
	all      []T
	repeated int // how many of all stand behind their equal
}

// Change takes values away and adds others, one for one. Both may be in any order.
func (m *Multiset[T]) Change(gone, come []T, compare func(T, T) int) {
	slices.SortFunc(gone, compare)
	slices.SortFunc(come, compare)
	if slices.Equal(gone, come) {
		return
	}
	list, out := m.all, make([]T, 0, max(0, len(m.all)+len(come)-len(gone)))
	// around reports whether x is at the end of out, or the next in list.
	around := func(x T) bool {
		return len(list) > 0 && list[0] == x || len(out) > 0 && out[len(out)-1] == x
	}
	for len(gone)+len(come) > 0 {
		remove := len(come) == 0 || len(gone) > 0 && compare(gone[0], come[0]) <= 0
		next := &come
		if remove {
			next = &gone
		}
		x := (*next)[0]
		*next = (*next)[1:]
		at, there := slices.BinarySearchFunc(list, x, compare)
		out, list = append(out, list[:at]...), list[at:]
		switch {
		case !remove:
			if around(x) {
				m.repeated++
			}
			out = append(out, x)
		case there:
			if list = list[1:]; around(x) {
				m.repeated--
			}
		}
	}
	if m.all = append(out, list...); len(m.all) == 0 {
		m.all = nil // as where there never was anything
	}
	if m.Unique = m.all; m.repeated > 0 {
		m.Unique = slices.Compact(slices.Clone(m.all))
	}
}
