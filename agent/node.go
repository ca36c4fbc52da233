package agent

import (
	"maps"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// NodeFigures returns what there is to say about this node as of now. It reads
// two small files and lists sets without their entries; it runs no program.
func (a *Agent) NodeFigures() plan.NodeFigures {
	out := plan.NodeFigures{Kernel: kernelRelease(), Syncs: a.sync.recent(), Rules: map[string]map[string]int{}}
	if count, limit, err := conntrack.Use(); err == nil { // else there is none, and 0 is true
		out.Conntrack = plan.Usage{Count: count, Max: limit}
	}
	f := &a.figures
	if a.current.Load() != nil { // else Run may still be setting up
		sets, err := f.sets.count(a.sets.List)
		if err != nil {
			a.log.Warn("kproxy's sets can't be counted", "error", err)
		}
		out.Sets = len(sets)
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, fam := range service.Families {
		out.Virtuals += f.holds.Virtuals[fam]
		if f.holds.Rules[fam] != nil {
			out.Rules[fam.String()] = maps.Clone(f.holds.Rules[fam])
		}
	}
	return out
}

func kernelRelease() string {
	var u unix.Utsname
	if unix.Uname(&u) != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}

// SubscribeDeep is Subscribe for whoever keeps events for others: it also keeps
// up with the thousands that a start or a recall of everything makes at once.
func (a *Agent) SubscribeDeep() (<-chan plan.Event, func()) {
	return a.events.subscribeWith(deepEventBuffer)
}
