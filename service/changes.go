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
// changed, and with other's node. What other has of further Services is left
// out. It costs two binary searches for each Service that changed and one copy of
// the list of entries; everything else is shared with s and other. What other has
// just like s is s's.
func (s *Snapshot) With(other *Snapshot, changed []Name) *Snapshot {
	changed = slices.Compact(slices.SortedFunc(slices.Values(changed), Name.Compare))
	out := &Snapshot{node: other.node, sum: s.sum, entries: make([]entry, 0, len(s.entries)+len(other.entries))}
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
	out.follow(s, changed)
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
	var changed []Name
	for i, j := range Pairs(old, s) {
		switch {
		case i < 0:
			changed = append(changed, s.entries[j].name())
		case j < 0 || old.entries[i].hash != s.entries[j].hash:
			changed = append(changed, old.entries[i].name())
		default:
			out.entries[j] = old.entries[i]
		}
	}
	out.follow(old, slices.Compact(changed))
	return &out
}

// step is a change that a Snapshot was made by: the one before it, known by the sum of
// its hashes, and the Services in which the two may differ.
type step struct {
	before uint64
	names  []Name // sorted
}

// How many steps a Snapshot remembers at most, and names in all of them. Snapshots that
// lie further apart are compared in full.
const (
	maxSteps = 64
	maxNames = 1024
)

// follow records that s differs from old in the named Services at most.
func (s *Snapshot) follow(old *Snapshot, names []Name) {
	s.steps = nil
	n, first := len(names), len(old.steps)
	if n > maxNames {
		return
	}
	for first > 0 && len(old.steps)-first < maxSteps-1 && n+len(old.steps[first-1].names) <= maxNames {
		first--
		n += len(old.steps[first].names)
	}
	s.steps = append(slices.Clone(old.steps[first:]), step{old.sum, names})
}

// since returns the Services, sorted, in which s may differ from old, and whether that
// is known.
func (s *Snapshot) since(old *Snapshot) (names []Name, known bool) {
	if s.sum == old.sum && len(s.entries) == len(old.entries) {
		return nil, true
	}
	for _, st := range slices.Backward(s.steps) {
		names = append(names, st.names...)
		if st.before == old.sum {
			slices.SortFunc(names, Name.Compare)
			return slices.Compact(names), true
		}
	}
	return nil, false
}

// Pairs iterates over the service ports of two Snapshots in key order: their indexes in
// old and in now, -1 for one that isn't there.
func Pairs(old, now *Snapshot) iter.Seq2[int, int] { return pairs(old.entries, now.entries) }

func pairs(a, b []entry) iter.Seq2[int, int] {
	return Merge(len(a), len(b), func(i, j int) int {
		if a[i].hash == b[j].hash {
			return 0
		}
		return a[i].port.Key.Compare(b[j].port.Key)
	})
}

// Changes iterates like [Pairs] over the service ports in which two Snapshots differ.
// If now was made of old in a few steps of [Snapshot.With] and [Snapshot.Sharing], it
// compares the Services that those named, else all.
func Changes(old, now *Snapshot) iter.Seq2[int, int] {
	return func(yield func(int, int) bool) {
		names, known := now.since(old)
		if !known {
			changesWithin(old.entries, now.entries, 0, 0, yield)
			return
		}
		for _, n := range names {
			a, b := old.portsOf(n)
			c, d := now.portsOf(n)
			if !changesWithin(old.entries[a:b], now.entries[c:d], a, c, yield) {
				return
			}
		}
	}
}

// changesWithin yields where was and is differ, which begin at the indexes oldFrom and
// nowFrom. It reports whether the caller wants more.
func changesWithin(was, is []entry, oldFrom, nowFrom int, yield func(int, int) bool) bool {
	for i, j := range pairs(was, is) {
		if i >= 0 && j >= 0 && was[i].hash == is[j].hash {
			continue
		}
		if i >= 0 {
			i += oldFrom
		}
		if j >= 0 {
			j += nowFrom
		}
		if !yield(i, j) {
			return false
		}
	}
	return true
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
