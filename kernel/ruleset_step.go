package kernel

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"

	"kproxy.dev/kproxy/service"
)

// Step leads from one ruleset of a renderer to its next, and says what may differ
// between them: a change among ten thousand services costs what it changes.
type Step struct {
	// From and To number the rulesets; 0 stands for one that isn't known.
	From, To uint64
	// Sets has the entries that may differ, by set; nil where all may.
	Sets      map[string][]string
	Chains    [2][]Chain // their tables and names count
	Virtuals  []Virtual  // their addresses and protocols count
	Addresses []netip.Addr
}

var lastStep atomic.Uint64

// Next returns a step that leads on from s, and changes nothing yet.
func (s *Step) Next() Step {
	return Step{From: s.To, To: lastStep.Add(1), Sets: map[string][]string{}}
}

// Same reports whether r and o are one ruleset of a renderer.
func (r *Ruleset) Same(o *Ruleset) bool { return r.Step.To != 0 && r.Step.To == o.Step.To }

// mergeSteps returns the step of what is merged of two rulesets.
func mergeSteps(a, b *Step) Step {
	var out Step
	if a.To != 0 && b.To != 0 {
		out.To = a.To<<32 | b.To
	}
	if a.From == 0 || b.From == 0 {
		return out
	}
	out.From, out.Sets = a.From<<32|b.From, maps.Clone(a.Sets)
	for name, entries := range b.Sets {
		if have, ok := out.Sets[name]; ok && (have == nil || entries == nil) {
			out.Sets[name] = nil
		} else {
			out.Sets[name] = slices.Concat(have, entries)
		}
	}
	for f := range out.Chains {
		out.Chains[f] = slices.Concat(a.Chains[f], b.Chains[f])
	}
	out.Virtuals, out.Addresses = slices.Concat(a.Virtuals, b.Virtuals), slices.Concat(a.Addresses, b.Addresses)
	return out
}

// only is what r has of that which s may have changed, and the jumps.
func (r *Ruleset) only(s *Step) Ruleset {
	out := Ruleset{
		Jumps:     r.Jumps,
		Virtuals:  pick(r.Virtuals, s.Virtuals, CompareVirtuals),
		Addresses: pick(r.Addresses, s.Addresses, netip.Addr.Compare),
	}
	for f := range service.Families {
		out.Chains[f] = pick(r.Chains[f], s.Chains[f], CompareChains)
	}
	named := make([]Set, 0, len(s.Sets))
	for name := range s.Sets {
		named = append(named, Set{Name: name})
	}
	out.Sets = pick(r.Sets, named, func(a, b Set) int { return strings.Compare(a.Name, b.Name) })
	for i := range out.Sets {
		if entries := s.Sets[out.Sets[i].Name]; entries != nil {
			out.Sets[i].Entries = pick(out.Sets[i].Entries, entries, strings.Compare)
		}
	}
	return out
}

// pick returns those elements of a sorted list that are among some, in order.
func pick[T any](list, some []T, compare func(T, T) int) []T {
	some = slices.SortedFunc(slices.Values(some), compare)
	var out []T
	for i, x := range some {
		if i > 0 && compare(some[i-1], x) == 0 {
			continue
		}
		if at, found := slices.BinarySearchFunc(list, x, compare); found {
			out = append(out, list[at])
		}
	}
	return out
}
