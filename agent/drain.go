package agent

import (
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Drain has load balancers leave this node out, and moves new connections of all services that the kernel can serve
// to it, or ends that. Connections that there are go on, and what only userspace serves is served.
func (a *Agent) Drain(on bool) error {
	if a.current.Load() == nil {
		return errStarting
	}
	if err := a.orders.Take(func() error { return a.orders.Drained.Set(on) }); err != nil {
		return err
	}
	a.log.Info("drained by kproxy drain", "on", on)
	a.kick()
	return nil
}

// Drained reports whether it is.
func (a *Agent) Drained() bool { return a.isSetUp.Load() && a.orders.Drained.Since.Load() != nil }

// drainStatus is nil if the node isn't drained; p is the current plan.
func (a *Agent) drainStatus(p *plan.Plan) *plan.Drain {
	since := a.orders.Drained.Since.Load()
	if since == nil {
		return nil
	}
	out := &plan.Drain{Since: *since}
	kept := map[service.Key]bool{}
	for _, s := range p.Services {
		if s.DataPlane == plan.Userspace {
			kept[s.Port.Key] = true
			out.Kept = append(out.Kept, s.Port.Key.String())
		}
	}
	for _, c := range a.userspace.Connections() {
		if c.Protocol == service.TCP && (c.Started.Before(*since) || !kept[c.Service]) {
			out.Left++
		}
	}
	return out
}
