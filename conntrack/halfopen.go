package conntrack

import (
	"net/netip"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// tcpSynSent is TCP_CONNTRACK_SYN_SENT of linux/netfilter/nf_conntrack_tcp.h.
const tcpSynSent = 1

// HalfOpen returns those of the flows that wait for an answer of an endpoint
// which p doesn't use any more: one that hangs, or whose host is gone. There is
// no connection yet, only a client that goes on sending SYNs for a minute or
// two. When the entry is deleted, its next SYN is a new connection and finds an
// endpoint that answers. local reports whether an address is this node's.
// HalfOpen is pure; the result is in the order of flows.
func HalfOpen(flows []Flow, p *plan.Plan, local func(netip.Addr) bool) []Flow {
	var x *index
	var out []Flow
	for i := range flows {
		f := &flows[i]
		if f.Protocol != service.TCP || f.TCPState != tcpSynSent || f.Answered() || !f.Rewritten() {
			continue
		}
		if x == nil {
			x = newIndex(p, service.TCP, local) // costs more than a look at few flows
		}
		at, ok := x.find(f)
		if !ok {
			continue
		}
		// What isn't an endpoint but is local is the forwarder's listener.
		if e := endpoint(at.service, f.ReplySrc); e != nil && !e.Usable || e == nil && !local(f.ReplySrc.Addr()) {
			out = append(out, *f)
		}
	}
	return out
}

// HalfOpenIn returns the families in which going from old to p stops using an
// endpoint, so that the table needs to be listed.
func HalfOpenIn(old, p *plan.Plan) (in [2]bool) {
	if old == nil {
		return in
	}
	plan.Changes(old, p, func(was, is *plan.Service) bool {
		if was != nil && is != nil && is.Port.Protocol == service.TCP {
			for i := range was.Endpoints {
				e := &was.Endpoints[i]
				if now := endpoint(is, e.Address); e.Usable && (now == nil || !now.Usable) {
					in[service.FamilyOf(e.Address.Addr())] = true
				}
			}
		}
		return true
	})
	return in
}
