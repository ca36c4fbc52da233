package kernel

import (
	"cmp"
	"slices"
)

// Patch returns a sorted list without some of its elements and with others, and
// the list itself where that makes no difference. Both may be in any order, and
// what is in both stays.
func Patch[T any](list, gone, come []T, compare func(T, T) int) []T {
	if len(gone)+len(come) == 0 {
		return list
	}
	slices.SortFunc(gone, compare)
	slices.SortFunc(come, compare)
	out := make([]T, 0, max(0, len(list)+len(come)-len(gone)))
	for len(gone)+len(come) > 0 {
		next, removed := step(&gone, &come, compare)
		at, found := slices.BinarySearchFunc(list, next, compare)
		out = append(out, list[:at]...)
		if list = list[at:]; found {
			list = list[1:]
		}
		if !removed {
			out = append(out, next)
		}
	}
	if out = append(out, list...); len(out) == 0 {
		return nil // as where there never was anything
	}
	return out
}

// step takes the next element from gone or come, from both if both have it, and
// says whether it is only to be removed.
func step[T any](gone, come *[]T, compare func(T, T) int) (next T, removed bool) {
	order := -1
	switch {
	case len(*gone) == 0:
		order = 1
	case len(*come) > 0:
		order = cmp.Compare(compare((*gone)[0], (*come)[0]), 0)
	}
	if order <= 0 {
		next, removed = (*gone)[0], order < 0
		*gone = (*gone)[1:]
	}
	if order >= 0 {
		next = (*come)[0]
		*come = (*come)[1:]
	}
	return next, removed
}
