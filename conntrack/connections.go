package conntrack

import (
	"cmp"
	"slices"
)

// Connections returns the open connections that the kernel carried at the last
// Refresh and that haven't ended since, in order of service port, then client.
func (a *Accounting) Connections() []Connection {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := make([]Connection, 0, len(a.live))
	find := a.finder()
	for _, e := range a.live {
		if e.flow.Open() && find(e.key) != nil {
			out = append(out, Connection{Service: e.key, Flow: e.flow})
		}
	}
	slices.SortFunc(out, func(x, y Connection) int {
		return cmp.Or(
			x.Service.Compare(y.Service),
			x.Flow.OrigSrc.Compare(y.Flow.OrigSrc),
			x.Flow.OrigDst.Compare(y.Flow.OrigDst),
			cmp.Compare(x.Flow.ID, y.Flow.ID),
		)
	})
	return out
}
