package conntrack

import (
	"net/netip"
	"slices"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// StaleConfig holds what Stale needs to know besides the plans.
type StaleConfig struct {
	// Listeners are the ports of the userspace forwarder's UDP listeners now.
	Listeners []uint16
	// Local reports whether an address is one of this node's, loopback included.
	Local func(netip.Addr) bool
	// HasSession reports whether the userspace forwarder has a session for a
	// flow that is redirected to it. Nil means that it has none.
	HasSession func(Flow) bool
}

// Stale returns those of the flows whose entries must be deleted for their
// next datagram to go where plan p wants it, old being the plan before (nil at
// start). A UDP entry lives as long as datagrams keep coming, so without this a
// client would talk to a gone endpoint for ever.
//
// Stale are, of the UDP flows to a frontend of p:
//   - those rewritten to what is neither a serving endpoint of its service nor
//     the forwarder's listener: a gone endpoint, or the listener of an earlier
//     kproxy on this node;
//   - those redirected to the listener when the service's data plane is another
//     one and the forwarder has no session for them. One that has never been
//     answered is left: its first datagram may be waiting for its session to be
//     made, and would be lost;
//   - those that aren't rewritten although the frontend forwards: they began
//     before its rules.
//
// And of the UDP flows to a frontend that only old has: those rewritten to one
// of its endpoints or to a listener. All other flows are left alone: TCP, flows
// to other addresses, flows in conntrack zones. Stale is pure; the result is in
// the order of flows.
func Stale(flows []Flow, old, p *plan.Plan, c StaleConfig) []Flow {
	now, before := newIndex(p, service.UDP, c.Local), newIndex(old, service.UDP, c.Local)
	var out []Flow
	for i := range flows {
		f := &flows[i]
		if f.Protocol != service.UDP {
			continue
		}
		if at, ok := now.find(f); ok {
			if c.misdirected(f, at) {
				out = append(out, *f)
			}
		} else if at, ok := before.find(f); ok && c.orphaned(f, at.service) {
			out = append(out, *f)
		}
	}
	return out
}

// misdirected reports whether f, sent to a frontend of the plan, goes elsewhere than
// the plan says.
func (c *StaleConfig) misdirected(f *Flow, at front) bool {
	if e := at.service.EndpointAt(f.ReplySrc); e != nil && e.Keeps() {
		// Also where the endpoint has the frontend's own address (a node port
		// that equals the target port of a host-network endpoint).
		return false
	}
	switch {
	case !f.Rewritten():
		return at.frontend.Verdict == plan.Forward
	case c.redirected(f):
		return !servedInUserspace(f, at) && !c.hasSession(f) && (f.Answered() || at.frontend.Verdict != plan.Forward)
	}
	return true
}

// servedInUserspace reports whether the next datagram of f is the forwarder's
// to carry. Node ports on loopback addresses always are: the kernel doesn't
// forward what comes from one (CVE-2020-8558).
func servedInUserspace(f *Flow, at front) bool {
	if at.frontend.Verdict != plan.Forward {
		return false
	}
	return at.service.DataPlane == plan.Userspace ||
		at.frontend.Kind == plan.NodePort && f.OrigDst.Addr().IsLoopback()
}

// orphaned reports whether f, sent to a frontend that is gone, was s's.
func (c *StaleConfig) orphaned(f *Flow, s *plan.Service) bool {
	return f.Rewritten() && (s.EndpointAt(f.ReplySrc) != nil || c.Local(f.ReplySrc.Addr()))
}

// redirected reports whether f goes to the forwarder's listener. A REDIRECT
// goes to an address of the interface on which the packet came in.
func (c *StaleConfig) redirected(f *Flow) bool {
	return slices.Contains(c.Listeners, f.ReplySrc.Port()) && c.Local(f.ReplySrc.Addr())
}

func (c *StaleConfig) hasSession(f *Flow) bool { return c.HasSession != nil && c.HasSession(*f) }

// MayBeStale reports whether d can make any entry stale, so that the table needs
// to be listed. It is much cheaper than a list.
func MayBeStale(d plan.Delta) bool {
	return d.Full || slices.ContainsFunc(d.Changes, func(c plan.Change) bool {
		return c.Key().Protocol == service.UDP && (c.Was == nil || c.Is == nil || moved(c.Was, c.Is))
	})
}

// moved reports whether anything that Stale depends on differs.
func moved(a, b *plan.Service) bool {
	return a.DataPlane != b.DataPlane ||
		!slices.EqualFunc(a.Frontends, b.Frontends, func(x, y plan.Frontend) bool {
			return x.Kind == y.Kind && x.Family == y.Family && x.Address == y.Address && x.Verdict == y.Verdict
		}) ||
		!slices.EqualFunc(a.Endpoints, b.Endpoints, func(x, y plan.Endpoint) bool {
			return x.Address == y.Address && x.Keeps() == y.Keeps()
		})
}
