package agent

import (
	"slices"
	"time"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
)

// When clients are challenged whose connections conntrack has forgotten: more than once, as packets are lost, IPVS drops
// the first one of a connection whose real server is gone, and Linux answers twice a second at most.
var challenges = []time.Duration{0, 700 * time.Millisecond, 1500 * time.Millisecond, 3 * time.Second}

// resetConnections ends the TCP connections to an endpoint that is gone. In the kernel, they are forgotten: the client's next
// packet goes to an endpoint that knows nothing of the connection and resets it, or is refused where there is none. So
// that clients needn't wait for the next time they would send, minutes later perhaps, they are challenged.
func (a *Agent) resetConnections(at health.Endpoint) {
	if a.hasEndpoint(at) { // for a service that is to be left alone
		return
	}
	n := a.userspace.Reset(at.Address)
	flows, err := a.conntrack.ListTo(at.Protocol, at.Address)
	var forgotten []conntrack.Flow
	if severer, ok := a.programmer.plane.(kernel.Severer); ok {
		severer.Sever(at.Protocol, at.Address)
	}
	for _, f := range flows {
		if f.Rewritten() && f.Open() && err == nil {
			err = a.conntrack.Delete(f)
			a.figures.forgot(&f)
			forgotten = append(forgotten, f)
		}
	}
	if err != nil {
		a.log.Warn("connections to an endpoint that is gone can't be ended", "endpoint", at.Address, "error", err)
	}
	a.passive.mu.Lock()
	a.passive.resets += uint64(n + len(forgotten))
	a.passive.mu.Unlock()
	for _, after := range challenges {
		time.AfterFunc(after, func() {
			for _, f := range forgotten {
				if err := kernel.Challenge(f.OrigDst, f.OrigSrc); err != nil {
					a.log.Debug("a client isn't told that its endpoint is gone before it sends", "error", err)
					return
				}
			}
		})
	}
}

// hasEndpoint reports whether a service of the plan has an endpoint that is ready, or drains.
func (a *Agent) hasEndpoint(at health.Endpoint) bool {
	for _, s := range a.current.Load().Services {
		if s.Port.Protocol == at.Protocol && slices.ContainsFunc(s.Endpoints, func(e plan.Endpoint) bool { return e.Address == at.Address && (e.Ready || e.Serving) }) {
			return true
		}
	}
	return false
}
