package service

import (
	"cmp"
	"iter"
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
// changed, and with other's node and networks. What other has of further Services is left
// out. It costs two binary searches for each Service that changed and one copy of
// the list of entries; everything else is shared with s and other. What other has
// just like s is s's.
func (s *Snapshot) With(other *Snapshot, changed []Name) *Snapshot {
	changed = slices.Compact(slices.SortedFunc(slices.Values(changed), Name.Compare))
	out := &Snapshot{node: other.node, cidrs: other.cidrs, sum: s.sum, entries: make([]entry, 0, len(s.entries)+len(other.entries))}
	done := 0
	for _, n := range changed {
		from, to := s.portsOf(n)
		mine := s.entries[from:to]
		out.entries = append(out.entries, s.entries[done:from]...)
		done = to
		out.count(mine, -1)
		from, to = other.portsOf(n)
		for _, e := range other.entries[from:to] {
			if at, there := find(mine, e.port.Key); there && mine[at].hash == e.hash {
				e = mine[at]
			}
			out.entries = append(out.entries, e)
		}
		out.count(other.entries[from:to], 1)
	}
	out.entries = append(out.entries, s.entries[done:]...)
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
	for i, j := range Pairs(old, s) {
		if i >= 0 && j >= 0 && old.entries[i].hash == s.entries[j].hash {
			out.entries[j] = old.entries[i]
		}
	}
	return &out
}

// Pairs iterates over the service ports of two Snapshots in key order: their indexes in
// old and in now, -1 for one that isn't there.
func Pairs(old, now *Snapshot) iter.Seq2[int, int] {
	a, b := old.entries, now.entries
	return Merge(len(a), len(b), func(i, j int) int {
		if a[i].hash == b[j].hash {
			return 0
		}
		return a[i].port.Key.Compare(b[j].port.Key)
	})
}

// Changes iterates like [Pairs] over the service ports in which two Snapshots differ.
func Changes(old, now *Snapshot) iter.Seq2[int, int] {
	return func(yield func(int, int) bool) {
		if old.sum == now.sum {
			return // the hash of the whole says so
		}
		for i, j := range Pairs(old, now) {
			if same := i >= 0 && j >= 0 && old.entries[i].hash == now.entries[j].hash; !same && !yield(i, j) {
				return
			}
		}
	}
}

// CountChanges returns how many Services of two snapshots differ, and how many
// have endpoints that do. Where a Service was read doesn't count.
func CountChanges(old, now *Snapshot) (services, endpoints int) {
	if old == nil {
		old = &Snapshot{}
	}
	if now == nil {
		return 0, 0
	}
	changed, moved := map[Name]bool{}, map[Name]bool{}
	for i, j := range Changes(old, now) {
		var was, is entry
		if i >= 0 {
			was = old.entries[i]
		}
		if j >= 0 {
			is = now.entries[j]
		}
		p := cmp.Or(is.port, was.port)
		n := Name{p.Namespace, p.Name}
		if was.port == nil || is.port == nil || hashPort(was.port) != hashPort(is.port) {
			changed[n] = true
		}
		if hashEndpoints(was.endpoints) != hashEndpoints(is.endpoints) {
			moved[n] = true
		}
	}
	return len(changed), len(moved)
}

// portsOf returns where the ports of a Service begin in s, and where they end.
func (s *Snapshot) portsOf(n Name) (from, to int) {
	from, _ = slices.BinarySearchFunc(s.entries, n, func(e entry, n Name) int { return e.name().Compare(n) })
	for to = from; to < len(s.entries) && s.entries[to].name() == n; to++ {
	}
	return from, to
}

func (e *entry) name() Name { return Name{e.port.Namespace, e.port.Name} }
