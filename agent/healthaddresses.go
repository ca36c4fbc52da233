package agent

import (
	"net/netip"
	"slices"

	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/plan"
)

// healthPortFailed keeps the event that load balancers get no answer, where its
// Service's users look: kube-proxy's reason and action.
func (a *Agent) healthPortFailed(h plan.HealthPort, why string) {
	if a.record != nil {
		a.record.Event(h.Namespace, h.Name, true, "FailedToStartServiceHealthcheck", "Listen", "node "+a.node+": "+why)
	}
}

// healthAddresses are those of this node at which health-check node ports answer,
// the same as node ports do; nil for all there are.
func (a *Agent) healthAddresses(p *plan.Plan) []netip.Addr {
	in := a.cfg.NodePortAddresses
	switch {
	case len(in) == 0:
		return nil
	case len(in) == 1 && in[0] == config.PrimaryAddresses:
		return append([]netip.Addr{}, p.Node.Addresses...)
	}
	var networks []netip.Prefix
	for _, s := range in {
		if n, err := netip.ParsePrefix(s); err == nil {
			networks = append(networks, n)
		}
	}
	out := []netip.Addr{}
	for _, at := range p.Policy.NodeAddresses {
		if slices.ContainsFunc(networks, func(n netip.Prefix) bool { return n.Contains(at) }) {
			out = append(out, at)
		}
	}
	return out
}
