package service

import (
	"cmp"
	"slices"
	"strings"
	"weak"
)

// Name names a Service, which may have several ports.
type Name struct{ Namespace, Name string }

// Compare orders names as keys are.
func (n Name) Compare(o Name) int {
	return cmp.Or(strings.Compare(n.Namespace, o.Namespace), strings.Compare(n.Name, o.Name))
}

// With returns s with other's ports in place of its own for the Services that
// changed, and with other's node. What other has of further Services is left
// out. It costs a look for each Service that changed and one copy of the list of
// entries; everything else is shared with s and other. What other has just like s
// is s's.
func (s *Snapshot) With(other *Snapshot, changed []Name) *Snapshot {
	changed = slices.SortedFunc(slices.Values(changed), Name.Compare)
	out := &Snapshot{node: other.node, sum: s.sum, entries: make([]entry, 0, len(s.entries)+len(other.entries)), from: weak.Make(s)}
	rest := s.entries
	for _, n := range slices.Compact(changed) {
		before, mine, after := around(rest, n)
		_, theirs, _ := around(other.entries, n)
		out.entries = append(out.entries, before...)
		if !sameKeys(mine, theirs) {
			out.from = weak.Pointer[Snapshot]{}
		}
		for i := range theirs {
			e := theirs[i]
			if at, there := find(mine, e.port.Key); there && mine[at].same(&e) {
				e = mine[at]
			} else {
				out.differ = append(out.differ, len(out.entries))
			}
			out.entries = append(out.entries, e)
			out.sum += mixed(e.hash)
		}
		for i := range mine {
			out.sum -= mixed(mine[i].hash)
		}
		rest = after
	}
	out.entries = append(out.entries, rest...)
	out.rehash()
	return out
}

// Differ returns the places, in order, at which s and old have another service
// port or other endpoints, if that is known without a look at all of them: because
// s was made of old, and has the same keys. Their nodes may differ.
func (s *Snapshot) Differ(old *Snapshot) (places []int, known bool) {
	switch {
	case s == nil || old == nil:
		return nil, false
	case s == old:
		return nil, true
	}
	return s.differ, s.from.Value() == old
}

func sameKeys(a, b []entry) bool {
	return slices.EqualFunc(a, b, func(x, y entry) bool { return x.port.Key == y.port.Key })
}

// Sharing returns s with what it has just like old taken from there: whoever knows
// old sees at once that nothing is new about it, and one of the two is in memory.
func (s *Snapshot) Sharing(old *Snapshot) *Snapshot {
	if old == nil {
		return s
	}
	out := *s
	out.from, out.differ = weak.Pointer[Snapshot]{}, nil
	out.entries = slices.Clone(s.entries)
	theirs := old.entries
	for i := range out.entries {
		e := &out.entries[i]
		for len(theirs) > 0 && theirs[0].port.Key.Compare(e.port.Key) < 0 {
			theirs = theirs[1:]
		}
		if len(theirs) > 0 && theirs[0].same(e) {
			*e = theirs[0]
		}
	}
	return &out
}

// same reports whether both say the same of one service port. The hash doesn't
// cover where it was read.
func (e *entry) same(o *entry) bool {
	return e.hash == o.hash && e.port.Key == o.port.Key && e.port.Source == o.port.Source
}

// around returns the entries of a Service, and those before and after it.
func around(list []entry, n Name) (before, of, after []entry) {
	compare := func(e entry, n Name) int {
		return Name{e.port.Key.Namespace, e.port.Key.Name}.Compare(n)
	}
	lo, _ := slices.BinarySearchFunc(list, n, compare)
	hi := lo
	for hi < len(list) && compare(list[hi], n) == 0 {
		hi++
	}
	return list[:lo], list[lo:hi], list[hi:]
}
