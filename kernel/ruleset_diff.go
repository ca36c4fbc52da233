package kernel

import (
	"net/netip"
	"slices"
	"strings"

	"kproxy.dev/kproxy/service"
)

// SetOps leads from one collection of sets to another. Apply it in the order of
// its fields: adding before deleting keeps a service reachable on its way from
// one set to another.
type SetOps struct {
	Create  []Set // without entries
	Add     []SetEntries
	Del     []SetEntries
	Destroy []string
}

// Empty reports whether there is nothing to do.
func (o SetOps) Empty() bool {
	return len(o.Create)+len(o.Add)+len(o.Del)+len(o.Destroy) == 0
}

// Empty reports whether there is nothing to do.
func (o Ops) Empty() bool {
	n := len(o.CreateSets) + len(o.AddEntries) + len(o.DelEntries) + len(o.DestroySets) +
		len(o.Virtuals) + len(o.AddAddresses) + len(o.DelAddresses)
	for f := range service.Families {
		n += len(o.Chains[f]) + len(o.AddJumps[f]) + len(o.DelJumps[f]) + len(o.DelChains[f])
	}
	return n == 0
}

// Diff returns what leads from have to want. It compares what the kernel holds:
// owners don't matter, nor do entries of sets that want calls dynamic. What both share is
// passed over at little cost.
func Diff(have, want Ruleset) Ops {
	sets := DiffSets(have.Sets, want.Sets)
	ops := Ops{CreateSets: sets.Create, AddEntries: sets.Add, DelEntries: sets.Del, DestroySets: sets.Destroy}
	ops.Virtuals = diffVirtuals(have.Virtuals, want.Virtuals)
	ops.AddAddresses = lacking(want.Addresses, have.Addresses, netip.Addr.Compare)
	ops.DelAddresses = lacking(have.Addresses, want.Addresses, netip.Addr.Compare)
	for f := range service.Families {
		ops.Chains[f], ops.DelChains[f] = diffChains(have.Chains[f], want.Chains[f])
		ops.AddJumps[f] = without(want.Jumps[f], have.Jumps[f])
		ops.DelJumps[f] = append(without(have.Jumps[f], want.Jumps[f]), surplus(have.Jumps[f], want.Jumps[f])...)
	}
	return ops
}

// DiffSets returns what leads from have to want. Adds come in want's order and
// deletions in the reverse of have's, so a set that others lean on is filled
// first and emptied last (KPROXY-ALLOW before KPROXY-RANGED).
func DiffSets(have, want []Set) SetOps {
	var ops SetOps
	present := make(map[string]*Set, len(have))
	for i := range have {
		present[have[i].Name] = &have[i]
	}
	wanted := make(map[string]*Set, len(want))
	for i := range want {
		w := &want[i]
		wanted[w.Name] = w
		h, ok := present[w.Name]
		if !ok {
			ops.Create = append(ops.Create, header(*w))
			h = &Set{}
		}
		if w.Dynamic {
			continue
		}
		if add := lacking(w.Entries, h.Entries, strings.Compare); len(add) > 0 {
			ops.Add = append(ops.Add, SetEntries{Set: header(*w), Entries: add})
		}
	}
	for i := len(have) - 1; i >= 0; i-- {
		h := &have[i]
		w, ok := wanted[h.Name]
		switch {
		case !ok:
			ops.Destroy = append(ops.Destroy, h.Name)
		case !w.Dynamic:
			if del := lacking(h.Entries, w.Entries, strings.Compare); len(del) > 0 {
				ops.Del = append(ops.Del, SetEntries{Set: header(*w), Entries: del})
			}
		}
	}
	return ops
}

func header(s Set) Set {
	s.Entries = nil
	return s
}

// lacking returns the elements of a that b lacks; both are sorted.
func lacking[T comparable](a, b []T, compare func(T, T) int) (out []T) {
	a, b = differing(a, b)
	for i, j := range service.Merge(len(a), len(b), func(i, j int) int { return compare(a[i], b[j]) }) {
		if j < 0 {
			out = append(out, a[i])
		}
	}
	return out
}

// differing leaves out the elements at both ends that a and b share, as lists do
// one of which was made from the other.
func differing[T comparable](a, b []T) ([]T, []T) {
	for len(a) > 0 && len(b) > 0 && a[0] == b[0] {
		a, b = a[1:], b[1:]
	}
	for len(a) > 0 && len(b) > 0 && a[len(a)-1] == b[len(b)-1] {
		a, b = a[:len(a)-1], b[:len(b)-1]
	}
	return a, b
}

// diffChains compares two lists that are sorted by table and name.
func diffChains(have, want []Chain) (changed, gone []Chain) {
	for i, j := range service.Merge(len(have), len(want), func(i, j int) int { return CompareChains(have[i], want[j]) }) {
		switch {
		case j < 0:
			gone = append(gone, Chain{Table: have[i].Table, Name: have[i].Name})
		case i < 0 || !have[i].SameText(&want[j]):
			changed = append(changed, want[j])
		}
	}
	return changed, gone
}

// CompareChains orders chains by table, then name.
func CompareChains(a, b Chain) int {
	if order := strings.Compare(a.Table, b.Table); order != 0 {
		return order
	}
	return strings.Compare(a.Name, b.Name)
}

// CompareSets orders sets by name.
func CompareSets(a, b Set) int { return strings.Compare(a.Name, b.Name) }

// HasJump reports whether one of jumps is j.
func HasJump(jumps []Jump, j Jump) bool {
	return slices.ContainsFunc(jumps, func(o Jump) bool {
		return o.Table == j.Table && o.From == j.From && o.Last == j.Last && SameRule(o.Rule, j.Rule)
	})
}

func without(a, b []Jump) []Jump {
	var out []Jump
	for _, j := range a {
		if !HasJump(b, j) {
			out = append(out, j)
		}
	}
	return out
}

// surplus are the jumps of have that are there more than once, as where two programs have added one at a time, and that want has.
func surplus(have, want []Jump) []Jump {
	var out []Jump
	for i, j := range have {
		if HasJump(have[:i], j) && HasJump(want, j) {
			out = append(out, j)
		}
	}
	return out
}
