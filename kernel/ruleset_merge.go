package kernel

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"

	"kproxy.dev/kproxy/service"
)

// Merge returns what two renderers want of the kernel together. Objects of the
// same name are the same thing: a set has the entries of both, and so has a
// chain the rules, first a's and then those of b that a's doesn't have. What is
// only in one of them is shared with the result, not copied.
func Merge(a, b Ruleset) Ruleset {
	out := Ruleset{
		Sets:      MergeSorted(a.Sets, b.Sets, CompareSets, mergeSet),
		Virtuals:  MergeSorted(a.Virtuals, b.Virtuals, CompareVirtuals, mergeVirtual),
		Addresses: MergeSorted(a.Addresses, b.Addresses, netip.Addr.Compare, First[netip.Addr]),
	}
	for f := range service.Families {
		out.Chains[f] = MergeSorted(a.Chains[f], b.Chains[f], CompareChains, mergeChain)
		out.Jumps[f] = mergeJumps(a.Jumps[f], b.Jumps[f])
	}
	return out
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

// owner returns the owner of an object that both want: nobody in particular, unless
// they agree.
func owner(x, y service.Key) service.Key {
	if x == y {
		return x
	}
	return service.Key{}
}

func mergeSet(x, y Set) Set {
	x.Entries = MergeSorted(x.Entries, y.Entries, strings.Compare, First[string])
	x.Dynamic = x.Dynamic && y.Dynamic
	x.Owner = owner(x.Owner, y.Owner)
	return x
}

func mergeChain(x, y Chain) Chain {
	x.Owner = owner(x.Owner, y.Owner)
	if x.SameText(&y) {
		return x
	}
	own := x.Text()
	rules := slices.Clip(own)
	for _, r := range y.Text() {
		if !slices.ContainsFunc(own, func(have string) bool { return SameRule(have, r) }) {
			rules = append(rules, r)
		}
	}
	x.Rules, x.Maker = rules, nil
	return x
}

// mergeVirtual takes a's settings; no two services have one address.
func mergeVirtual(x, y Virtual) Virtual {
	x.Reals = MergeSorted(x.Reals, y.Reals, func(a, b Real) int { return a.Address.Compare(b.Address) }, First[Real])
	return x
}

func mergeJumps(a, b []Jump) []Jump {
	out := slices.Clone(a)
	for _, j := range b {
		if !HasJump(a, j) {
			out = append(out, j)
		}
	}
	slices.SortFunc(out, compareJumps)
	return out
}

// compareJumps puts a chain's last ones last, as the kernel has them.
func compareJumps(a, b Jump) int {
	if c := cmp.Or(strings.Compare(a.Table, b.Table), strings.Compare(a.From, b.From)); c != 0 {
		return c
	}
	if a.Last != b.Last {
		if a.Last {
			return 1
		}
		return -1
	}
	return strings.Compare(a.Rule, b.Rule)
}

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
