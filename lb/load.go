package lb

import (
	"slices"
	"sync/atomic"
	"weak"
)

// maxWatchers bounds how many Pickers follow a Load: the newest ones do. A
// service port has at most two that share an endpoint (one for each traffic
// policy); while one is replaced by the next, twice as many.
const maxWatchers = 4

// Load counts the connections that an endpoint carries now. It belongs to the
// caller and survives rebuilds of Pickers. The zero value is ready; it must
// not be copied. It is safe for concurrent use.
type Load struct {
	active   atomic.Int64
	watchers atomic.Pointer[[]watcher]
}

// watcher is a least-connections Picker that ranks target by this Load. The
// pointer is weak because Pickers aren't closed: a replaced one just goes.
type watcher struct {
	picker weak.Pointer[leastConnections]
	target int32
}

// Acquire counts one more connection.
func (l *Load) Acquire() {
	l.active.Add(1)
	l.tell(nil)
}

// Release counts one connection less; call it once for each Acquire.
func (l *Load) Release() {
	l.active.Add(-1)
	l.tell(nil)
}

// Active returns the number of connections.
func (l *Load) Active() int64 { return l.active.Load() }

// tell has the Pickers that follow the Load rank its target anew, except one
// that did so already.
func (l *Load) tell(except *leastConnections) {
	ws := l.watchers.Load()
	if ws == nil {
		return
	}
	for i := range *ws {
		if p := (*ws)[i].picker.Value(); p != nil && p != except {
			p.changed((*ws)[i].target)
		}
	}
}

// watch makes p follow the Load for its target from now on, and forgets
// Pickers that are gone or too old.
func (l *Load) watch(p *leastConnections, target int32) {
	for {
		old := l.watchers.Load()
		ws := make([]watcher, 0, maxWatchers)
		if old != nil {
			ws = slices.AppendSeq(ws, slices.Values(*old))
			ws = slices.DeleteFunc(ws, func(w watcher) bool { return w.picker.Value() == nil })
			ws = ws[max(0, len(ws)-maxWatchers+1):]
		}
		ws = append(ws, watcher{weak.Make(p), target})
		if l.watchers.CompareAndSwap(old, &ws) {
			return
		}
	}
}
