package agent

import (
	"context"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/trace"
)

// Trace follows a packet through the kernel as it is now, and through userspace
// as the plan in force has it. It changes nothing; a request may ask it to send
// one probe.
func (a *Agent) Trace(ctx context.Context, req trace.Request) (trace.Result, error) {
	p := a.current.Load()
	if p == nil {
		return trace.Result{}, errStarting
	}
	proxy := &trace.Proxy{
		Plan: p, Alive: a.heart.alive.Load(), Marks: a.marks(), Variant: a.variant,
		Forecast: a.userspace.Forecast, Connections: a.userspace.Connections,
		Missing: a.routing.Missing, Explainers: Explainers(),
	}
	if r, ok := a.programmer.plane.(kernel.Renderer); ok {
		proxy.Render = r.Fresh
	}
	return trace.Run(ctx, req, proxy)
}
