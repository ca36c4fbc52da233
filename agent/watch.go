package agent

import (
	"context"
	"errors"
	"strings"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
)

// watchEvery is how often kproxy checks whether others changed its rules;
// with the time a repair takes, damage lasts less than five seconds.
const watchEvery = 2 * time.Second

// watch tells the programmer of damage to rules and routes, and asks for a new plan when
// the host begins or ceases to forward.
func (a *Agent) watch(ctx context.Context, damaged chan<- error, overflows func() uint64) error {
	if c, ok := a.programmer.plane.(interface{ Close() }); ok {
		defer c.Close()
	}
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	lost := uint64(0)
	var events kernel.RouteEvents
	defer events.Close()
	var forwarding [2]plan.Capability
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if n := overflows(); n != lost {
			a.log.Warn("flows ended faster than they could be counted; the figures of the kernel's connections are too low", "overflows", n)
			lost = n
			a.figures.overflows.Store(n)
		}
		_ = events.Look(func() error {
			forwarding = kernel.Forwarding()
			return nil
		})
		a.watchForwarding(forwarding)
		if changed, _ := a.networks.Read(a.log); changed { // what fails was logged
			a.kick()
		}
		select {
		case a.programmer.passing <- struct{}{}:
		default: // a pass is under way, or a successor reads the kernel
			continue
		}
		found, err := a.programmer.plane.Check(ctx)
		a.programmer.passing.leave()
		if err != nil {
			if ctx.Err() != nil {
				continue
			}
			a.log.Warn("kproxy's rules can't all be watched", "error", err)
		}
		if len(found) == 0 {
			continue
		}
		select {
		case damaged <- errors.New(strings.Join(found, "; ")):
		default: // it knows already
		}
	}
}

// watchForwarding asks for a pass unless the plan in force takes the host to
// forward what it does forward. It asks until a pass has succeeded.
func (a *Agent) watchForwarding(now [2]plan.Capability) {
	p := a.current.Load()
	if p == nil {
		return
	}
	changed := false
	for i, c := range now {
		was := p.Forwarding[i]
		if c == was {
			continue
		}
		changed = true
		a.log.Warn("somebody changed what this node forwards", "what", c.Name, "works", c.Supported, "worked", was.Supported, "detail", c.Reason)
	}
	if changed {
		a.kick()
	}
}

// capsNow returns what this host can do: forwarding as of this moment, and the
// schedulers that services ask for now.
func (a *Agent) capsNow(now time.Time) plan.Caps {
	c := a.caps
	c.Forwarding = kernel.Forwarding()
	c.Planes = a.driver.Abilities(a.source.Latest(), now)
	return c
}

// policyNow is the policy with the host's networks as they were last seen.
func (a *Agent) policyNow() plan.Policy {
	p := a.policy
	a.networks.Fill(&p)
	switch {
	case a.yielded.Load() != nil:
		p.DrainedBy = "the stop of kproxy"
	case a.orders.Drained.Since.Load() != nil:
		p.DrainedBy = "kproxy drain"
	}
	return p
}

// logDetector logs how pods are told from other clients, when that changes.
func (a *Agent) logDetector(old, p *plan.Plan) {
	if old != nil && old.Policy.SameDetector(&p.Policy) {
		return
	}
	if d := p.Policy.Detector(); d.Supported {
		a.log.Info(d.Name, "pods", d.Reason)
	} else {
		a.log.Warn("no "+d.Name, "reason", d.Reason)
	}
}
