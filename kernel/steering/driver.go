package steering

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Driver is the [kernel.Driver] of iptables and ipset: steering by redirect sets, and the
// data planes whose rules are in the same tables.
type Driver struct {
	layers []RulesetDriver // in order of preference; each builds on those after it

	// Found by Probe.
	mode plan.Mode
	host *Host
	sets kernel.SetStore // nil after a trial
}

var _ kernel.Driver = (*Driver)(nil)

// NewDriver returns the driver of data planes in order of preference. Each builds on
// those after it.
func NewDriver(layers ...RulesetDriver) *Driver { return &Driver{layers: layers} }

// RulesetDriver is a data plane of a [Stack] before there is a plan to carry out. It may
// also have methods Sysctls, Show, and those of [kernel.Explainer].
type RulesetDriver interface {
	// Assume takes the host to be as c says, without a look.
	Assume(c plan.Capability)
	// Probe finds out what the host has, of which h is known; with load, it may have the
	// kernel load modules. The error is only about ctx.
	Probe(ctx context.Context, h *Host, load bool) error
	// Abilities returns what the host can do for the services of a snapshot; nil for none.
	Abilities(s *service.Snapshot, now time.Time) plan.Abilities

	// InSteering is what steering's rules are to know of it.
	InSteering() Plane
	// Renderer renders what plans want of this data plane and of what is below.
	Renderer(e *Env, below kernel.Renderer) kernel.Renderer
	// Open opens it for a mode that may use it, and for one that finds things of an
	// earlier kproxy, which are to go; it returns below where there is neither.
	Open(e *Env, below RulesetPlane, use bool) (RulesetPlane, error)

	// Preview says what Remove would remove, a line each.
	Preview(ctx context.Context, e *Env) ([]string, error)
	// Remove removes all that kproxy made, then what is below.
	Remove(ctx context.Context, e *Env, below func(context.Context) error) error
}

// loaded is a RulesetDriver that needs modules and settings of the kernel besides those of
// iptables.
type loaded interface {
	Sysctls() []kernel.Sysctl
}

// retiree is a RulesetDriver whose connections need more than conntrack.
type retiree interface {
	// Retire is Remove, but for what drains then.
	Retire(ctx context.Context, e *Env, below func(context.Context) error) (kernel.Drainer, error)
}

// shower is a RulesetDriver that has more than rules and sets.
type shower interface {
	// Show returns the sets of a ruleset that the data plane fills itself, with what it puts
	// there, and the rest as text.
	Show(kernel.Ruleset) ([]kernel.Set, string)
}

func planeOf(l RulesetDriver) plan.DataPlane { return l.InSteering().Name }

// Planes implements [kernel.Driver].
func (d *Driver) Planes() (out []plan.DataPlane) {
	for _, l := range d.layers {
		out = append(out, planeOf(l))
	}
	return out
}

// Assume implements [kernel.Driver].
func (d *Driver) Assume() {
	for _, l := range d.layers {
		l.Assume(plan.Capability{Supported: true})
	}
}

// Probe implements [kernel.Driver].
func (d *Driver) Probe(ctx context.Context, m plan.Mode, trial bool) (facts kernel.Facts, err error) {
	d.mode = m
	if trial {
		prober := NewProber(nil)
		variant, found := prober.FindVariant(ctx) // by the host's own rules
		prober.Find = func(context.Context) (kernel.Variant, plan.Capability) { return variant, found }
		prober.OpenSets = func() (kernel.SetStore, error) { return kernel.OpenIPSets() }
		err = kernel.Apart(func() error { return d.probe(ctx, prober, false) })
	} else {
		if d.sets, err = kernel.OpenIPSets(); err != nil {
			return kernel.Facts{Missing: noSets(err)}, nil
		}
		err = d.probe(ctx, NewProber(d.sets), true)
	}
	if err != nil {
		return facts, err
	}
	facts = kernel.Facts{Missing: d.host.Missing(), Capabilities: d.host.Caps.All, WithoutNetmap: !d.host.Netmap}
	for _, a := range d.Abilities(nil, time.Time{}) {
		if !slices.ContainsFunc(facts.Capabilities, func(c plan.Capability) bool { return c.Name == string(a.Plane) }) {
			facts.Capabilities = append(facts.Capabilities, a.Host)
		}
	}
	return facts, nil
}

func (d *Driver) probe(ctx context.Context, prober *Prober, load bool) (err error) {
	if d.host, err = prober.Probe(ctx); err != nil {
		return err
	}
	for _, l := range d.layers {
		if plane := planeOf(l); !d.mode.Allows(plane) {
			l.Assume(plan.Capability{Name: string(plane), Reason: fmt.Sprintf("not looked for in mode %s", d.mode)})
		} else if err := l.Probe(ctx, d.host, load); err != nil {
			return err
		}
	}
	return nil
}

func noSets(err error) error {
	return &kernel.Missing{What: "ipset", How: "run kproxy as root, on a kernel with CONFIG_IP_SET", Err: err}
}

// Load implements [kernel.Driver].
func (d *Driver) Load(ctx context.Context, m plan.Mode) (out []plan.Capability, _ error) {
	d.mode = m
	for _, l := range d.layers {
		if _, ok := l.(loaded); !ok {
			continue
		}
		c := plan.Capability{Name: string(planeOf(l))}
		if m.Allows(planeOf(l)) {
			if err := l.Probe(ctx, &Host{}, true); err != nil {
				return nil, err
			}
			c = l.Abilities(nil, time.Time{}).Host
		}
		out = append(out, c)
	}
	return out, nil
}

// Abilities implements [kernel.Driver].
func (d *Driver) Abilities(s *service.Snapshot, now time.Time) []plan.Abilities {
	out := make([]plan.Abilities, len(d.layers))
	for i, l := range d.layers {
		out[i] = l.Abilities(s, now)
	}
	return out
}

// Sysctls implements [kernel.Driver].
func (d *Driver) Sysctls() (out []kernel.Sysctl) {
	for _, l := range d.layers {
		x, ok := l.(loaded)
		if a := l.Abilities(nil, time.Time{}); ok && d.mode.Allows(a.Plane) && a.Host.Supported {
			out = append(out, x.Sysctls()...)
		}
	}
	return out
}

// Variant is the variant of iptables that is programmed.
func (d *Driver) Variant() kernel.Variant { return d.host.Variant }

// Steering implements [kernel.Driver].
func (d *Driver) Steering(s kernel.Settings) (kernel.Steering, error) {
	return &Redirects{Store: d.sets, Routes: d.env(s).Routing}, nil
}

// Plane implements [kernel.Driver].
func (d *Driver) Plane(s kernel.Settings) (kernel.Plane, error) {
	e := d.env(s)
	top, err := d.open(e)
	if err != nil {
		return nil, err
	}
	return NewStack(top, &e.Routing), nil
}

func (d *Driver) open(e *Env) (top RulesetPlane, err error) {
	for _, l := range slices.Backward(d.layers) {
		if top, err = l.Open(e, top, d.mode.Allows(planeOf(l))); err != nil {
			return nil, err
		}
	}
	return top, nil
}

// env returns what the layers work with on the host that was probed; if none was, on one
// that has everything.
func (d *Driver) env(s kernel.Settings) *Env {
	e := DefaultEnv(d.sets)
	if h := d.host; h != nil {
		e.Variant = h.Variant
		e.RandomFully, e.SocketMatch, e.CatchRefusals, e.LogRefusals = h.RandomFully, h.SocketMatch, h.CatchRefusals, h.LogRefusals
		e.SkipIPv6, e.DropInvalid, e.Routing.SkipIPv6 = !h.IPv6, !kernel.LiberalConntrack(), !h.IPv6
	}
	e.PassiveHealth, e.CatchRefusals = s.PassiveHealth, e.CatchRefusals && s.PassiveHealth // else the client would find no other endpoint
	e.Marks, e.TCPPort, e.UDPPort, e.Log = s.Marks, s.TCPPort, s.UDPPort, s.Log
	e.Routing.Marks, e.Routing.Table = s.Marks, s.RouteTable
	for _, l := range slices.Backward(d.layers) {
		e.Planes = append(e.Planes, l.InSteering())
	}
	if s.Failed != nil {
		e.Runner = countingRunner{e.Runner, s.Failed}
	}
	return e
}

// renderer renders what plans want of every layer.
func (d *Driver) renderer(e *Env) (r kernel.Renderer) {
	for _, l := range slices.Backward(d.layers) {
		r = l.Renderer(e, r)
	}
	return r
}

// Render implements [kernel.Driver].
func (d *Driver) Render(p *plan.Plan, s kernel.Settings) []kernel.Section {
	want := d.renderer(d.env(s)).Fresh(p)
	sets := Sets(p)
	var own []kernel.Section
	for _, l := range d.layers {
		x, ok := l.(shower)
		if !ok {
			continue
		}
		more, text := x.Show(want)
		sets = append(sets, more...)
		if plane := planeOf(l); p.Uses(plane) {
			own = append(own, kernel.Section{Name: string(plane), Text: text})
		}
	}
	out := []kernel.Section{{Name: "sets", Text: setsText(sets, want.Sets)}}
	for _, f := range service.Families {
		out = append(out, kernel.Section{Name: "iptables-" + f.String(), Text: rulesText(want.Chains[f], want.Jumps[f])})
	}
	return append(out, own...)
}

// Diff implements [kernel.Driver]. Sets that a running kproxy fills as it goes aren't
// compared.
func (d *Driver) Diff(ctx context.Context, p *plan.Plan, s kernel.Settings) (string, error) {
	sets, err := kernel.OpenIPSets()
	if err != nil {
		return "", err
	}
	defer sets.Close()
	e := d.env(s)
	e.Sets, e.ReadOnly = kernel.Unchanged{SetStore: sets}, true
	top, err := d.open(e)
	if err != nil {
		return "", err
	}
	have, err := top.Observe(ctx)
	if err != nil {
		return "", err
	}
	return diffText(have, kernel.Diff(have, d.renderer(e).Fresh(p))), nil
}

// Explainers implements [kernel.Driver].
func (d *Driver) Explainers() (out []kernel.Explainer) {
	for _, l := range d.layers {
		if x, ok := l.(kernel.Explainer); ok {
			out = append(out, x)
		}
	}
	return out
}

// Preview implements [kernel.Driver].
func (d *Driver) Preview(ctx context.Context, routeTable int) (out []string, err error) {
	err = d.inKernel(routeTable, func(e *Env) error {
		for _, l := range d.layers {
			lines, err := l.Preview(ctx, e)
			if out = append(out, lines...); err != nil {
				return err
			}
		}
		return nil
	})
	return out, err
}

// Remove implements [kernel.Driver].
func (d *Driver) Remove(ctx context.Context, routeTable int) error {
	_, err := d.remove(ctx, routeTable, false)
	return err
}

// Retire implements [kernel.Driver].
func (d *Driver) Retire(ctx context.Context) (kernel.Drainer, error) { return d.remove(ctx, 0, true) }

func (d *Driver) remove(ctx context.Context, routeTable int, retire bool) (drainer kernel.Drainer, err error) {
	err = d.inKernel(routeTable, func(e *Env) error {
		remove := func(context.Context) error { return nil }
		for _, l := range slices.Backward(d.layers) {
			below := remove
			remove = func(ctx context.Context) error { return l.Remove(ctx, e, below) }
			if r, ok := l.(retiree); ok && retire {
				remove = func(ctx context.Context) (err error) {
					drainer, err = r.Retire(ctx, e, below)
					return err
				}
			}
		}
		return remove(ctx)
	})
	return drainer, err
}

// inKernel calls f with what kproxy's things in the kernel are reached by.
func (d *Driver) inKernel(routeTable int, f func(*Env) error) error {
	sets, err := kernel.OpenIPSets()
	if err != nil {
		return noSets(err)
	}
	defer sets.Close()
	e := DefaultEnv(sets)
	e.Routing.Table = routeTable
	if err = f(e); errors.Is(err, kernel.ErrPermission) {
		return kernel.NoPermission(kernel.ErrPermission)
	}
	return err
}
