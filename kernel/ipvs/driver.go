package ipvs

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Settings holds what users set of IPVS.
type Settings struct {
	// Scheduler is for services that ask for none, nor for an algorithm; empty for that
	// of the default algorithm.
	Scheduler string
	StrictARP bool
	// DrainTimeout is how long a real server that isn't wanted any more keeps its
	// connections; see [MaxDrainTimeout].
	DrainTimeout time.Duration
	// Timeouts are those of IPVS, given conntrack's of idle TCP connections.
	Timeouts func(established time.Duration) Timeouts
}

// Driver is IPVS on a host. One goroutine uses it.
type Driver struct {
	Settings
	Explainer
	host       plan.Capability
	schedulers schedulerProbes
}

// NewDriver returns the driver of a host of which nothing is known yet.
func NewDriver(s Settings) *Driver { return &Driver{Settings: s} }

// Assume takes the host to be as c says, without a look.
func (d *Driver) Assume(c plan.Capability) {
	c.Name = string(plan.IPVS)
	d.host = c
}

// Probe finds out whether the host has IPVS. With load it has the kernel load its module,
// and tries the schedulers of algorithms. The error is only about ctx.
func (d *Driver) Probe(ctx context.Context, _ *steering.Host, load bool) (err error) {
	if !load {
		d.host = Look(ctx)
		return ctx.Err()
	}
	d.schedulers.always = Schedulers(d.Scheduler)
	d.host, d.schedulers.known, err = Probe(ctx, d.schedulers.always)
	return err
}

// Abilities returns what the host can do, with the schedulers that services of a snapshot
// ask for tried.
func (d *Driver) Abilities(s *service.Snapshot, now time.Time) plan.Abilities {
	return Abilities(d.host, d.Scheduler, d.schedulers.of(s, now))
}

// Sysctls are the kernel settings that IPVS is to have.
func (d *Driver) Sysctls() []kernel.Sysctl {
	release, _ := kernel.Release() // uname(2) fails for a wrong address alone
	return Sysctls(release, d.StrictARP)
}

// InSteering returns what steering knows of IPVS.
func (d *Driver) InSteering() steering.Plane { return InSteering }

// Renderer renders what plans want of IPVS, and of the data plane below.
func (d *Driver) Renderer(e *steering.Env, below kernel.Renderer) kernel.Renderer {
	return &over{below, NewRenderer(e.Options)}
}

// Open opens IPVS where it may be used, and where there are virtual servers of an earlier
// kproxy, which are to go. It returns below where there is neither.
func (d *Driver) Open(e *steering.Env, below steering.RulesetPlane, use bool) (steering.RulesetPlane, error) {
	if e.ReadOnly {
		if !Loaded() {
			return below, nil
		}
	} else if use = use && d.host.Supported; !use {
		left, err := leftBehind(e.Sets)
		if err != nil || !left {
			return below, err
		}
	}
	table, err := OpenTable()
	if err != nil {
		return nil, err
	}
	link, err := OpenLink()
	if err != nil {
		return nil, err
	}
	if use && !e.ReadOnly {
		if err := d.prepare(e, table); err != nil {
			return nil, err
		}
	}
	c := Config{Sets: e.Sets, Table: table, Link: link, DrainTimeout: min(d.DrainTimeout, MaxDrainTimeout)}
	return NewPlane(c, e.Options, below), nil
}

// prepare sets the time-outs, and has services' schedulers tried from now on.
func (d *Driver) prepare(e *steering.Env, table *Netlink) error {
	established, ok := kernel.ReadSysctl("net", "netfilter", "nf_conntrack_tcp_timeout_established")
	if !ok {
		return errors.New("conntrack's time-out of idle TCP connections can't be read")
	}
	now, err := table.SetTimeouts(d.Timeouts(time.Duration(established) * time.Second))
	if err != nil {
		return err
	}
	e.Log.Info("time-outs of IPVS", "tcp", now.TCP, "tcp after fin", now.TCPFin, "udp", now.UDP)
	d.schedulers.log = e.Log
	d.schedulers.try = func(name string) error {
		found, err := ProbeSchedulers(context.Background(), table, []string{name})
		if why := found[name]; err == nil && why != "" {
			err = errors.New(why)
		}
		return err
	}
	return nil
}

// leftBehind reports whether there is a record of kproxy's virtual servers, and IPVS is
// still in the kernel.
func leftBehind(sets kernel.SetStore) (bool, error) {
	if !Loaded() {
		return false, nil
	}
	states, err := sets.List(isRecordName)
	if err != nil {
		return false, fmt.Errorf("look for virtual servers of an earlier kproxy: %w", err)
	}
	return slices.ContainsFunc(states, func(s kernel.SetState) bool { return isRecordName(s.Name) }), nil
}

// Show returns the sets of a ruleset that IPVS fills itself, with what it puts there, and
// the virtual servers as text.
func (d *Driver) Show(want kernel.Ruleset) ([]kernel.Set, string) {
	return Record(want), cmp.Or(Text(want), "# no virtual servers\n")
}

// Preview says what Remove would remove, a line each.
func (d *Driver) Preview(_ context.Context, e *steering.Env) ([]string, error) {
	return Preview(e.Sets)
}

// Remove is [Cleanup].
func (d *Driver) Remove(ctx context.Context, e *steering.Env, below func(context.Context) error) error {
	return Cleanup(ctx, e.Sets, below)
}

// Retire is Remove, but connections go on: it returns what is to be drained before Remove. The
// record of it stays, for a kproxy that comes after this one.
func (d *Driver) Retire(ctx context.Context, e *steering.Env, below func(context.Context) error) (kernel.Drainer, error) {
	left, err := leftBehind(e.Sets)
	if err != nil {
		return nil, err
	} else if !left || d.DrainTimeout == 0 {
		return nil, Cleanup(ctx, e.Sets, below)
	}
	r, err := newRetired(min(d.DrainTimeout, MaxDrainTimeout))
	if err != nil {
		return nil, err
	}
	have, err := r.Observe(ctx)
	if err == nil {
		_, err = r.Apply(ctx, kernel.Diff(have, kernel.Ruleset{})) // what fails is tried again
	}
	if err != nil {
		r.close()
		return nil, err
	}
	e.Sets = unrecorded{e.Sets}
	return r, below(ctx)
}

// retired are virtual servers on a host where nothing else of the driver is left.
type retired struct {
	*Backend
	close func()
}

func newRetired(drain time.Duration) (*retired, error) {
	sets, err := kernel.OpenIPSets()
	if err != nil {
		return nil, err
	}
	table, err := OpenTable()
	if err != nil {
		sets.Close()
		return nil, err
	}
	link, err := OpenLink()
	if err != nil {
		sets.Close()
		table.Close()
		return nil, err
	}
	b := New(Config{Rules: noRules{}, Sets: sets, Table: table, Link: link, DrainTimeout: drain})
	return &retired{b, func() { sets.Close(); table.Close(); link.Close() }}, nil
}

// Drain implements [kernel.Drainer].
func (r *retired) Drain(ctx context.Context) (left int, err error) {
	if left, err = r.Backend.Drain(ctx); left == 0 && err == nil {
		r.close()
	}
	return left, err
}

// noRules is the Backend of rules and sets where there are none.
type noRules struct{}

func (noRules) Observe(context.Context) (kernel.Ruleset, error) { return kernel.Ruleset{}, nil }
func (noRules) Apply(context.Context, kernel.Ops) (kernel.Applied, error) {
	return kernel.Applied{}, nil
}

// unrecorded are sets without the record.
type unrecorded struct{ kernel.SetStore }

func (u unrecorded) List(entries func(string) bool) ([]kernel.SetState, error) {
	all, err := u.SetStore.List(entries)
	return slices.DeleteFunc(all, func(s kernel.SetState) bool { return isRecordName(s.Name) }), err
}
