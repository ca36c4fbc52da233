package service

import "slices"

// With returns s with other's ports in place of its own for the Services that
// changed names, and with other's node. What other has of further Services is
// left out. It costs what comparing and copying one small entry per service
// port costs: everything else is shared with s and other.
func (s *Snapshot) With(other *Snapshot, changed func(namespace, name string) bool) *Snapshot {
	out := &Snapshot{node: other.node, entries: make([]entry, 0, len(s.entries)+len(other.entries))}
	of := func(e *entry) bool { return changed(e.port.Key.Namespace, e.port.Key.Name) }
	theirs := other.entries
	for i := range s.entries {
		mine := &s.entries[i]
		for len(theirs) > 0 && theirs[0].port.Key.Compare(mine.port.Key) <= 0 {
			if of(&theirs[0]) {
				out.entries = append(out.entries, theirs[0])
			}
			theirs = theirs[1:]
		}
		if !of(mine) {
			out.entries = append(out.entries, *mine)
		}
	}
	for i := range theirs {
		if of(&theirs[i]) {
			out.entries = append(out.entries, theirs[i])
		}
	}
	out.entries = slices.Clip(out.entries)
	out.rehash()
	return out
}
