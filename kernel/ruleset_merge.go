package kernel

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"kproxy.dev/kproxy/service"
)

// Merge returns what two renderers want of the kernel together. They may share sets, which
// have the entries of both. Every other object is of one of them, and jumps from a built-in
// chain stay in order, a's first. What is only in one is shared with the result, not copied.
func Merge(a, b Ruleset) Ruleset {
	out := Ruleset{
		Sets:      MergeSorted(a.Sets, b.Sets, CompareSets, mergeSet),
		Virtuals:  MergeSorted(a.Virtuals, b.Virtuals, CompareVirtuals, First[Virtual]),
		Addresses: MergeSorted(a.Addresses, b.Addresses, netip.Addr.Compare, First[netip.Addr]),
	}
	for f := range service.Families {
		out.Chains[f] = MergeSorted(a.Chains[f], b.Chains[f], CompareChains, First[Chain])
		out.Jumps[f] = slices.Concat(a.Jumps[f], b.Jumps[f])
		slices.SortStableFunc(out.Jumps[f], compareJumps)
	}
	return out
}

func mergeSet(x, y Set) Set {
	x.Entries = MergeSorted(x.Entries, y.Entries, strings.Compare, First[string])
	return x
}

// compareJumps orders jumps by the built-in chain that they are in.
func compareJumps(a, b Jump) int {
	return cmp.Or(strings.Compare(a.Table, b.Table), strings.Compare(a.From, b.From))
}

// MergeSorted merges two sorted lists; both makes one of two equal elements. Where one is
// empty it returns the other.
func MergeSorted[T any](a, b []T, compare func(T, T) int, both func(T, T) T) []T {
	switch {
	case len(a) == 0:
		return b
	case len(b) == 0:
		return a
	}
	out := make([]T, 0, len(a)+len(b))
	for i, j := range service.Merge(len(a), len(b), func(i, j int) int { return compare(a[i], b[j]) }) {
		switch {
		case j < 0:
			out = append(out, a[i])
		case i < 0:
			out = append(out, b[j])
		default:
			out = append(out, both(a[i], b[j]))
		}
	}
	return out
}

func First[T any](x, _ T) T { return x }

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
	for i, j := range service.Merge(len(gone), len(come), func(i, j int) int { return compare(gone[i], come[j]) }) {
		var next T
		if j >= 0 {
			next = come[j]
		} else {
			next = gone[i]
		}
		at, found := slices.BinarySearchFunc(list, next, compare)
		out = append(out, list[:at]...)
		if list = list[at:]; found {
			list = list[1:]
		}
		if j >= 0 {
			out = append(out, next)
		}
	}
	if out = append(out, list...); len(out) == 0 {
		return nil // as where there never was anything
	}
	return out
}
