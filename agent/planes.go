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
)

// driversOf is the table of the kernel's data planes, by driver: mode auto prefers the first
// driver whose steering the host can do, and of that the first data plane. Data planes of two
// drivers aren't used together. This file is the only place of package agent that names a
// data plane.
func driversOf(c config.Config) drivers {
	v := c.IPVS
	return drivers{
		steering.NewDriver(
			ipvs.NewDriver(ipvs.Settings{
				Scheduler: v.Scheduler, StrictARP: v.StrictARP, DrainTimeout: c.DrainTimeout,
				Timeouts: func(established time.Duration) ipvs.Timeouts {
					return ipvs.Timeouts{TCP: v.TCPTimeoutOf(established), TCPFin: v.TCPFinTimeout, UDP: v.UDPTimeout}
				},
			}),
			iptables.NewDriver(),
		),
	}
}

// howTo is how to come by a data plane, or do without.
var howTo = map[plan.DataPlane]string{
	plan.IPVS:     "get it, or choose --mode iptables, or auto, which does without",
	plan.IPTables: "get what it says, or choose --mode userspace",
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

// drivers are in order of preference. One goroutine uses them.
type drivers []kernel.Driver

// of are the drivers that mode m may use: all, or those of the data plane that it needs.
func (ds drivers) of(m plan.Mode) drivers {
	out := slices.DeleteFunc(slices.Clone(ds), func(d kernel.Driver) bool {
		return !slices.ContainsFunc(d.Abilities(nil, time.Time{}), func(a plan.Abilities) bool { return m.Needs(a.Plane) })
	})
	if len(out) == 0 {
		return ds
	}
	return out
}

// probe returns the driver that mode m uses on this host, the first whose steering works,
// and what was found of it.
func (ds drivers) probe(ctx context.Context, m plan.Mode, trial bool) (d kernel.Driver, facts kernel.Facts, err error) {
	for _, d = range ds.of(m) {
		if facts, err = d.Probe(ctx, m, trial); err != nil || facts.Missing == nil {
			break
		}
	}
	return d, facts, err
}

// assume returns the driver that mode m uses on a host that has everything.
func (ds drivers) assume(m plan.Mode) kernel.Driver {
	d := ds.of(m)[0]
	d.Assume()
	return d
}

// missing says what mode m lacks of the data plane that it needs; nil if nothing.
func missing(d kernel.Driver, m plan.Mode) error {
	for _, a := range d.Abilities(nil, time.Time{}) {
		if m.Needs(a.Plane) && !a.Host.Supported {
			return &kernel.Missing{What: a.Title, How: howTo[a.Plane], Err: errors.New(a.Host.Reason)}
		}
	}
	return nil
}

// settingsOf are the settings of drivers that c has, and userspace hasn't.
func settingsOf(c *config.Config) kernel.Settings {
	return kernel.Settings{
		Marks: kernel.Marks{Masquerade: c.MasqueradeMark(), Transparent: c.TransparentMark()}, RouteTable: c.RouteTable,
	}
}

// Explainers are those of the data planes that have one.
func Explainers() []kernel.Explainer {
	var out []kernel.Explainer
	for _, d := range driversOf(config.Default()) {
		out = append(out, d.Explainers()...)
	}
	return out
}
