package service

import (
	"cmp"
	"slices"
	"strings"
)

// Name names a Service, which may have several ports.
type Name struct{ Namespace, Name string }

// Compare orders names as keys are.
func (n Name) Compare(o Name) int {
	return cmp.Or(strings.Compare(n.Namespace, o.Namespace), strings.Compare(n.Name, o.Name))
}

// With returns s with other's ports in place of its own for the Services that
// changed, and with other's node. What other has of further Services is left
// out. It costs two binary searches for each Service that changed and one copy of
// the list of entries; everything else is shared with s and other. What other has
// just like s is s's.
func (s *Snapshot) With(other *Snapshot, changed []Name) *Snapshot {
	changed = slices.SortedFunc(slices.Values(changed), Name.Compare)
	out := &Snapshot{node: other.node, sum: s.sum, entries: make([]entry, 0, len(s.entries)+len(other.entries))}
	rest := s.entries
	for _, n := range slices.Compact(changed) {
		before, mine, after := around(rest, n)
		_, theirs, _ := around(other.entries, n)
		out.entries = append(out.entries, before...)
		for i := range theirs {
			e := theirs[i]
			if at, there := find(mine, e.port.Key); there && mine[at].hash == e.hash {
				e = mine[at]
			}
			out.entries = append(out.entries, e)
			out.sum += mixed(e.content)
		}
		for i := range mine {
			out.sum -= mixed(mine[i].content)
		}
		rest = after
	}
	out.entries = append(out.entries, rest...)
	out.rehash()
	return out
}

// Sharing returns s with what it has just like old taken from there, so that one of
// the two is in memory.
func (s *Snapshot) Sharing(old *Snapshot) *Snapshot {
	if old == nil {
		return s
	}
	out := *s
	out.entries = slices.Clone(s.entries)
	for i, j := range Merge(len(old.entries), len(s.entries), func(i, j int) int { return CompareAt(old, i, s, j) }) {
		if i >= 0 && j >= 0 && old.entries[i].hash == s.entries[j].hash {
			out.entries[j] = old.entries[i]
		}
	}
	return &out
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
