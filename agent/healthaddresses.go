package agent

import (
	"net/netip"
	"slices"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// healthPortFailed keeps the event that load balancers get no answer, where its
// Service's users look: kube-proxy's reason and action.
func (a *Agent) healthPortFailed(h plan.HealthPort, why string) {
	if a.record != nil {
		a.record.Event(h.Namespace, h.Name, true, "FailedToStartServiceHealthcheck", "Listen", "node "+a.node+": "+why)
	}
}

// healthAddresses are those of this node at which health-check node ports answer,
// the same as node ports do; nil in a family for all there are.
func healthAddresses(p *plan.Policy) (out [2][]netip.Addr) {
	for _, f := range service.Families {
		if within, limited := p.NodePortsWithin(f); limited {
			out[f] = append([]netip.Addr{}, p.NodePortAddresses(f)...)
			// Loopback isn't among the node's addresses, which are those others know.
			for _, lo := range []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()} {
				if slices.ContainsFunc(within, func(n netip.Prefix) bool { return n.Contains(lo) }) {
					out[f] = append(out[f], lo)
				}
			}
		}
	}
	return out
}
