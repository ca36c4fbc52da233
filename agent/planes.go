package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// planesOf is the table of the kernel's data planes, one row each: the first is the one
// that mode auto prefers, and each builds on those after it. This file is the only place
// of package agent that names one.
func planesOf(c config.Config) planes {
	v := c.IPVS
	return planes{
		{plan.IPVS, ipvs.NewDriver(ipvs.Settings{
			Scheduler: v.Scheduler, StrictARP: v.StrictARP, DrainTimeout: c.DrainTimeout,
			Timeouts: func(established time.Duration) ipvs.Timeouts {
				return ipvs.Timeouts{TCP: v.TCPTimeoutOf(established), TCPFin: v.TCPFinTimeout, UDP: v.UDPTimeout}
			},
		}), "get it, or choose --mode iptables, or auto, which does without"},
		{plan.IPTables, iptables.NewDriver(), "get what it says, or choose --mode userspace"},
	}
}

// modes are the modes of which there is one; those but the first two are named for the
// data plane that they can't do without.
var modes = []plan.Mode{plan.ModeAuto, plan.ModeUserspace, plan.ModeIPTables, plan.ModeIPVS}

// ErrNoMode is the end of an Agent whose mode isn't one.
var ErrNoMode = errors.New("is no mode")

// checkMode reports whether m is a mode.
func checkMode(m plan.Mode) error {
	if !slices.Contains(modes, m) {
		return fmt.Errorf("--mode %s %w; use auto, userspace, iptables or ipvs", m, ErrNoMode)
	}
	return nil
}

// planes are the rows of the table. One goroutine uses them.
type planes []planeRow

type planeRow struct {
	name plan.DataPlane
	driver
	how string // to come by it, or do without
}

// driver is a data plane before there is a plan to carry out. It may also have methods
// Sysctls, Show, and those of [kernel.Explainer].
type driver interface {
	prober
	opener
	remover
}

type prober interface {
	// Assume takes the host to be as c says, without a look.
	Assume(c plan.Capability)
	// Probe finds out what the host has, of which h is known; with load, it may have the
	// kernel load modules. The error is only about ctx.
	Probe(ctx context.Context, h *kernel.Host, load bool) error
	// Abilities returns what the host can do for the services of a snapshot; nil for none.
	Abilities(s *service.Snapshot, now time.Time) plan.Abilities
}

type opener interface {
	Way() steering.Waymaker
	// Renderer renders what plans want of this data plane and of what is below.
	Renderer(e *steering.Env, below kernel.Renderer) kernel.Renderer
	// Open opens it for a mode that may use it, and for one that finds things of an
	// earlier kproxy, which are to go; it returns below where there is neither.
	Open(e *steering.Env, below kernel.Layer, use bool) (kernel.Layer, error)
}

type remover interface {
	// Preview says what Remove would remove, a line each.
	Preview(ctx context.Context, e *steering.Env) ([]string, error)
	// Remove removes all of kproxy's, then what is below.
	Remove(ctx context.Context, e *steering.Env, below func(context.Context) error) error
}

// in reports whether mode m may use the data plane.
func (r *planeRow) in(m plan.Mode) bool { return m == plan.ModeAuto || r.neededBy(m) }

// neededBy reports whether mode m can't do without the data plane.
func (r *planeRow) neededBy(m plan.Mode) bool { return string(m) == string(r.name) }

// missing says what mode m lacks; nil if nothing.
func (r *planeRow) missing(m plan.Mode) error {
	a := r.Abilities(nil, time.Time{})
	if !r.neededBy(m) || a.Host.Supported {
		return nil
	}
	return &kernel.Missing{What: a.Title, How: r.how, Err: errors.New(a.Host.Reason)}
}

// missing says what mode m lacks; nil if nothing.
func (ps planes) missing(m plan.Mode) error {
	for i := range ps {
		if err := ps[i].missing(m); err != nil {
			return err
		}
	}
	return nil
}

// probe finds out what the host has of the data planes that mode m may use.
func (ps planes) probe(ctx context.Context, h *kernel.Host, m plan.Mode) error {
	for i := range ps {
		r := &ps[i]
		if !r.in(m) {
			r.Assume(plan.Capability{Name: string(r.name), Reason: fmt.Sprintf("not looked for in mode %s", m)})
		} else if err := r.Probe(ctx, h, true); err != nil {
			return err
		}
	}
	return nil
}

// assume takes the host to have every data plane.
func (ps planes) assume() planes {
	for i := range ps {
		ps[i].Assume(plan.Capability{Supported: true})
	}
	return ps
}

func (ps planes) abilities(s *service.Snapshot, now time.Time) []plan.Abilities {
	out := make([]plan.Abilities, len(ps))
	for i := range ps {
		out[i] = ps[i].Abilities(s, now)
	}
	return out
}

// probes are the data planes among the probes of the host, those of all named already
// aside.
func (ps planes) probes(all []plan.Capability) []plan.Capability {
	for _, a := range ps.abilities(nil, time.Time{}) {
		if !slices.ContainsFunc(all, func(c plan.Capability) bool { return c.Name == string(a.Plane) }) {
			all = append(all, a.Host)
		}
	}
	return all
}

// ways are the ways of every data plane.
func (ps planes) ways() []steering.Waymaker {
	var out []steering.Waymaker
	for i := range slices.Backward(ps) {
		out = append(out, ps[i].Way())
	}
	return out
}

// renderer renders what plans want of every data plane.
func (ps planes) renderer(e *steering.Env) kernel.Renderer {
	var r kernel.Renderer
	for i := range slices.Backward(ps) {
		r = ps[i].Renderer(e, r)
	}
	return r
}

// open opens the data planes that mode m may use, or that an earlier kproxy used, and
// returns those that keep clients besides.
func (ps planes) open(e *steering.Env, m plan.Mode) (kernel.Layer, map[plan.DataPlane]kernel.AffinityKeeper, error) {
	var top kernel.Layer
	keepers := map[plan.DataPlane]kernel.AffinityKeeper{}
	for i := range slices.Backward(ps) {
		r := &ps[i]
		l, err := r.Open(e, top, r.in(m))
		if err != nil {
			return nil, nil, err
		}
		if k, ok := l.(kernel.AffinityKeeper); ok && l != top {
			keepers[r.name] = k
		}
		top = l
	}
	return top, keepers, nil
}

// sysctls are the kernel settings that the data plane is to have.
func (r *planeRow) sysctls() ([]kernel.Sysctl, error) {
	if s, ok := r.driver.(interface {
		Sysctls() ([]kernel.Sysctl, error)
	}); ok {
		return s.Sysctls()
	}
	return nil, nil
}

// Explainers are those of the data planes that have one.
func Explainers() []kernel.Explainer {
	var out []kernel.Explainer
	for _, r := range planesOf(config.Default()) {
		if e, ok := r.driver.(kernel.Explainer); ok {
			out = append(out, e)
		}
	}
	return out
}
