// Package node has what the loops take of the node that they run on, and the commands that need no loops as well: the drivers of its
// kernel, its lock, its networks, and the files in --state-dir, with what users ask of it.
package node

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/kernel/nftables"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/source/kube"
)

// DriversOf returns the table of the kernel's data planes, by driver, in mode auto's order of
// preference, see [Drivers.Probe]; of a driver's data planes it prefers the first. Data planes of
// two drivers aren't used together: IPVS's rules are iptables'. This file is the only place below
// agent/ that names a data plane.
func DriversOf(c config.Config) Drivers {
	v := c.IPVS
	return Drivers{
		nftables.NewDriver(" (--mode ipvs may)", c.NFTables.Flowtable),
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
	plan.NFTables: "get what it says, or choose --mode iptables or userspace",
}

// Drivers are in order of preference. One goroutine uses them.
type Drivers []kernel.Driver

// Of returns the drivers that mode m may use: those of the data plane that it needs, or all.
// Mode userspace, which gains nothing by nftables, prefers those that firewalls don't keep
// from their work.
func (ds Drivers) Of(m plan.Mode) Drivers {
	out := slices.DeleteFunc(slices.Clone(ds), func(d kernel.Driver) bool {
		return !slices.ContainsFunc(d.Planes(), m.Needs)
	})
	if len(out) == 0 {
		out = slices.Clone(ds)
	}
	if m == plan.ModeUserspace {
		slices.Reverse(out)
	}
	return out
}

// Found holds what [Drivers.Probe] found.
type Found struct {
	Driver kernel.Driver
	kernel.Facts
	PassedOver string // why mode auto doesn't use the drivers that it prefers; empty if it does
}

// Probe finds the driver that mode m uses, as Choose does, by what the drivers' probes find of this host.
func (ds Drivers) Probe(ctx context.Context, m plan.Mode, c *config.Config, trial bool) (*Found, error) {
	return ds.Choose(m, c.IPVS.Scheduler, func(d kernel.Driver) (kernel.Facts, error) { return d.Probe(ctx, m, trial) })
}

// Choose finds the driver that mode m uses, given what a look finds of each: the first whose steering works, in mode
// auto one that is fit before those that aren't. Why none works is in what was found of the first. One
// that this process lacks the permission for isn't passed over: it couldn't remove there what
// an earlier process left.
func (ds Drivers) Choose(m plan.Mode, scheduler string, look func(kernel.Driver) (kernel.Facts, error)) (*Found, error) {
	var unfit, missing *Found
	var passed []plan.Capability
	for _, d := range ds.Of(m) {
		facts, err := look(d)
		f := &Found{Driver: d, Facts: facts}
		for _, c := range passed {
			if m != plan.ModeAuto {
				break
			}
			f.PassedOver = strings.TrimPrefix(f.PassedOver+"; "+c.Name+" isn't used: "+c.Reason, "; ")
		}
		f.Capabilities = append(f.Capabilities, passed...)
		why := unfitFor(f, m, scheduler)
		if len(facts.Dropping) > 0 {
			scheduler = "" // which counts for less
		}
		switch {
		case err != nil, errors.Is(facts.Missing, kernel.ErrPermission), facts.Missing == nil && why == "":
			return f, err
		case facts.Missing == nil && unfit == nil:
			unfit = f
		case missing == nil:
			missing = f
		default:
			missing.Missing = errors.Join(missing.Missing, facts.Missing)
		}
		if facts.Missing != nil {
			why = facts.Missing.Error()
		}
		for _, plane := range d.Planes() {
			passed = append(passed, plan.Capability{Name: string(plane), Reason: why})
		}
	}
	if unfit == nil {
		return missing, nil
	}
	unfit.PassedOver = ""
	return unfit, nil
}

// unfitFor says why mode auto passes over a driver that works where another does too; empty if it
// doesn't.
func unfitFor(f *Found, m plan.Mode, scheduler string) string {
	switch {
	case m != plan.ModeAuto:
	case len(f.Dropping) > 0:
		why := f.Dropping[0]
		if n := len(f.Dropping) - 1; n > 0 {
			why += fmt.Sprintf(", and %d more", n)
		}
		return why
	case scheduler != "" && !slices.ContainsFunc(f.Driver.Abilities(nil, time.Time{}), func(a plan.Abilities) bool { return a.Schedulers && a.Host.Supported }):
		return "it has no scheduler " + scheduler + ", which --ipvs-scheduler names"
	}
	return ""
}

// MayRemove returns an error where drivers but the one given left what only a process with
// CAP_NET_RAW removes, and this one isn't.
func (ds Drivers) MayRemove(ctx context.Context, but kernel.Driver) error {
	if kernel.RawSockets() {
		return nil
	}
	for _, d := range ds {
		if d == but {
			continue
		}
		if lines, err := d.Preview(ctx, NoRoutes); len(lines) > 0 || errors.Is(err, kernel.ErrPermission) {
			return kernel.NoPermission(fmt.Errorf("%w: CAP_NET_RAW, to remove what a kproxy of another mode programmed", kernel.ErrPermission))
		}
	}
	return nil
}

// Assume returns the driver that mode m uses on a host that has everything; dropping are rules
// of others there.
func (ds Drivers) Assume(m plan.Mode, c *config.Config, dropping ...string) kernel.Driver {
	of := ds.Of(m)
	for _, d := range of {
		d.Assume()
		if unfitFor(&Found{Driver: d, Facts: kernel.Facts{Dropping: dropping}}, m, c.IPVS.Scheduler) == "" {
			return d
		}
		dropping = nil // the others'
	}
	return of[0]
}

// Missing says what mode m lacks of the data plane that it needs; nil if nothing.
func Missing(d kernel.Driver, m plan.Mode) error {
	for _, a := range d.Abilities(nil, time.Time{}) {
		if m.Needs(a.Plane) && !a.Host.Supported {
			return &kernel.Missing{What: a.Title, How: howTo[a.Plane], Err: errors.New(a.Host.Reason)}
		}
	}
	return nil
}

// NoRoutes has a driver leave routes and routing rules alone.
const NoRoutes = 0

// SettingsOf returns the settings of drivers that c has, and userspace hasn't.
func SettingsOf(c *config.Config) kernel.Settings {
	return kernel.Settings{
		Marks: kernel.Marks{Masquerade: c.MasqueradeMark(), Transparent: c.TransparentMark()}, RouteTable: c.RouteTable, PassiveHealth: c.PassiveHealth,
	}
}

// Explainers returns the explainers of the data planes that have one.
func Explainers() []kernel.Explainer {
	var out []kernel.Explainer
	for _, d := range DriversOf(config.Default()) {
		out = append(out, d.Explainers()...)
	}
	return out
}

// KubeConfig says how the Kubernetes API is reached.
func KubeConfig(c *config.Config, node, userAgent string, log *slog.Logger) kube.Config {
	return kube.Config{
		Kubeconfig: c.Kubeconfig, Master: c.Master, Node: node, NodeAddresses: c.NodeAddresses(),
		QPS: float32(c.Client.QPS), Burst: c.Client.Burst, ContentType: c.Client.ContentType, UserAgent: userAgent, Logger: log,
	}
}
