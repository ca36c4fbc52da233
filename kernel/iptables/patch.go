package iptables

import "slices"

// patchRepeated returns a sorted list without some of its elements and with
// others, one for one: the list may have an element several times. It says how
// many more elements are repeated than were. Gone and come are sorted, too. What is
// no different is the list itself.
func patchRepeated[T any](list, gone, come []T, compare func(T, T) int) (out []T, repeated int) {
	if slices.EqualFunc(gone, come, func(a, b T) bool { return compare(a, b) == 0 }) {
		return list, 0
	}
	out = make([]T, 0, max(0, len(list)+len(come)-len(gone)))
	// around reports whether x is at the end of out, or the next in list.
	around := func(x T) bool {
		return len(list) > 0 && compare(list[0], x) == 0 || len(out) > 0 && compare(out[len(out)-1], x) == 0
	}
	upTo := func(x T) {
		at, _ := slices.BinarySearchFunc(list, x, compare)
		out = append(out, list[:at]...)
		list = list[at:]
	}
	for len(gone)+len(come) > 0 {
		if len(come) == 0 || len(gone) > 0 && compare(gone[0], come[0]) <= 0 {
			if upTo(gone[0]); len(list) > 0 && compare(list[0], gone[0]) == 0 {
				if list = list[1:]; around(gone[0]) {
					repeated--
				}
			}
			gone = gone[1:]
			continue
		}
		if upTo(come[0]); around(come[0]) {
			repeated++
		}
		out = append(out, come[0])
		come = come[1:]
	}
	if out = append(out, list...); len(out) == 0 {
		return nil, repeated // as where there never was anything
	}
	return out, repeated
}
