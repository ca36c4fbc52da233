package agent

import (
	"net/netip"
	"sync"
	"time"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/service"
)

// refusals are the endpoints that refused a connection of the kernel data plane
// a moment ago, as the ends of flows tell. Safe for concurrent use.
type refusals struct {
	kick func()

	mu    sync.Mutex // events come while plans are made
	until map[netip.AddrPort]time.Time
}

// A refusal is remembered for as long as the first back-off lasts: after that,
// health checks have found out, or the next refusal counts again.
const (
	refusalMemory = 10 * time.Second
	refusalsMost  = 10_000 // endpoints; far more than refuse at one time
)

// ended looks at a flow that has ended.
func (r *refusals) ended(f conntrack.Flow) {
	if !refused(&f) {
		return
	}
	r.mu.Lock()
	if r.until == nil {
		r.until = map[netip.AddrPort]time.Time{}
	}
	now := time.Now()
	_, known := r.until[f.ReplySrc]
	if known || len(r.until) < refusalsMost {
		r.until[f.ReplySrc] = now.Add(refusalMemory)
	}
	r.mu.Unlock()
	if !known {
		r.kick()
	}
}

// refused reports whether f was a connection that its endpoint answered with a
// reset to the first SYN: one packet each way, and conntrack forgets it at once.
func refused(f *conntrack.Flow) bool {
	return f.Protocol == service.TCP && f.Rewritten() && f.OrigPackets == 1 && f.ReplyPackets == 1
}

// now returns the endpoints that refused lately; nil for none.
func (r *refusals) now(t time.Time) map[netip.AddrPort]bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.until) == 0 {
		return nil
	}
	out := map[netip.AddrPort]bool{}
	for e, until := range r.until {
		if t.After(until) {
			delete(r.until, e)
		} else {
			out[e] = true
		}
	}
	return out
}
