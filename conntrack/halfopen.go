package conntrack

import (
	"net/netip"
	"slices"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// HalfOpen returns those of the flows that wait for an answer of an endpoint
// which p doesn't use any more: one that hangs, or whose host is gone; and those
// to a service's address that nothing rewrote, because they began while the rules
// weren't there. There is no connection yet, only a client that goes on sending
// SYNs for a minute or two, each of which keeps the entry as it is. When the entry
// is deleted, its next SYN is a new connection and finds an endpoint that answers.
// IPVS, where it has a service, needn't rewrite. local reports whether an address
// is this node's. HalfOpen is pure; the result is in the order of flows.
func HalfOpen(flows []Flow, p *plan.Plan, local func(netip.Addr) bool) []Flow {
	var x *index
	var out []Flow
	for i := range flows {
		f := &flows[i]
		if f.Protocol != service.TCP || f.TCPState != tcpSynSent || f.Answered() {
			continue
		}
		if x == nil {
			x = newIndex(p, service.TCP, local) // costs more than a look at few flows
		}
		at, ok := x.find(f)
		if !ok {
			continue
		}
		gone := false
		if e := at.service.EndpointAt(f.ReplySrc); e != nil { // at the service's own address, it may be
			gone = !e.Usable
		} else if f.Rewritten() {
			gone = !local(f.ReplySrc.Addr()) // or it is the forwarder's listener
		} else {
			gone = at.frontend.Verdict == plan.Forward && translates(at.service)
		}
		if gone {
			out = append(out, *f)
		}
	}
	return out
}

// translates reports whether DNAT leads to s's endpoints. IPVS does so itself, and sets no status of NAT (ip_vs_nfct.c).
func translates(s *plan.Service) bool { return s.DataPlane != plan.IPVS }

// MayBeHalfOpen returns the endpoints that d stops using, to which DNAT may have led some, and reports whether
// there may be others, so that the table needs to be listed: a data plane without DNAT stops using one, or d
// serves an address that no service had before. A client that asked too early has left this node by a route;
// its further SYNs would follow the first for two minutes.
func MayBeHalfOpen(d plan.Delta) (unused []netip.AddrPort, others bool) {
	for i := range d.Changes {
		was, is := d.Changes[i].Was, d.Changes[i].Is
		if is == nil || is.Port.Protocol != service.TCP {
			continue
		}
		others = others || slices.ContainsFunc(is.Frontends, func(f plan.Frontend) bool {
			return f.Verdict == plan.Forward && (was == nil || !slices.ContainsFunc(was.Frontends, func(w plan.Frontend) bool { return w.Binding() == f.Binding() }))
		})
		if was == nil {
			continue
		}
		for _, e := range was.Endpoints {
			if now := is.EndpointAt(e.Address); e.Usable && (now == nil || !now.Usable) {
				unused, others = append(unused, e.Address), others || !translates(was)
			}
		}
	}
	return unused, others
}
