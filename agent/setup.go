package agent

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/agent/flows"
	"kproxy.dev/kproxy/agent/node"
	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/health/probe"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace"
)

// startBound is how long clients of services that only userspace serves are not
// refused while this process starts: the longest start of a node with 10,000 services
// took six seconds.
const startBound = 15 * time.Second

// setUp finds out what this host can do and opens everything that work needs. What
// may be refused, because of the configuration or the host, comes before anything that
// changes the host. Nothing is programmed yet, except that redirecting is stopped where no kproxy is
// taken over from: the one before is gone, and until this process serves, new connections belong to
// the kernel's rules.
func (a *Agent) setUp(ctx context.Context) error {
	mode := a.policy.Mode
	ds := node.DriversOf(a.cfg)
	host, err := ds.Probe(ctx, mode, &a.cfg, false)
	if err == nil {
		err = cmp.Or(host.Missing, node.Missing(host.Driver, mode))
	}
	if err == nil && mode == plan.ModeAuto {
		err = ds.MayRemove(ctx, host.Driver)
	}
	if err != nil {
		return err
	}
	driver := host.Driver
	a.driver, a.caps = driver, plan.Caps{All: host.Capabilities, Planes: driver.Abilities(nil, time.Time{}), PassedOver: host.PassedOver}
	for _, p := range a.caps.Planes {
		if mode.Allows(p.Plane) {
			a.log.Info("data plane of the kernel", "name", p.Title, "possible", p.Host.Supported, "reason", p.Host.Reason)
		}
	}
	if mode == plan.ModeAuto && host.PassedOver != "" {
		a.log.Info("mode auto prefers another data plane", "reason", host.PassedOver)
	}
	a.networks.Host = host.Facts
	if _, err := a.networks.Read(a.log); err != nil {
		return fmt.Errorf("look up this node's addresses: %w", err)
	}
	if a.conntrack, err = conntrack.Dial(); err != nil {
		return &kernel.Missing{What: "conntrack", How: "a kernel with CONFIG_NF_CT_NETLINK", Err: err}
	}
	if err := a.openUserspace(); err != nil {
		return err
	}
	settings := node.SettingsOf(&a.cfg)
	settings.TCPPort, settings.UDPPort = a.userspace.Ports()
	settings.Log, settings.Failed = a.log, func(f service.Family) { a.figures.restores[f].Add(1) }
	if a.steering, err = driver.Steering(settings); err != nil {
		return err
	}
	if a.from == nil && a.remains == nil { // else clients wait in the listeners
		if err := a.steering.Dead(); err != nil {
			return fmt.Errorf("stop redirecting: %w", err)
		}
		if err := a.steering.Starting(startBound); err != nil {
			return fmt.Errorf("have clients try again: %w", err)
		}
	}
	select {
	case <-ctx.Done():
	case <-time.After(a.options.Pause):
	}
	return a.openKernel(settings)
}

// ensureSysctls makes the kernel's settings what kproxy depends on, and says
// which weren't so.
func (a *Agent) ensureSysctls(settings []kernel.Sysctl) error {
	reports, err := kernel.EnsureSysctls(settings)
	for _, r := range reports {
		if r.Err != nil {
			a.lack("sysctl "+r.Name, r.String())
		} else {
			a.log.Warn("sysctl", "report", r.String())
		}
	}
	return err
}

// lack says in log and status what this process may not change.
func (a *Agent) lack(name, reason string) {
	a.log.Warn("not permitted", "what", name, "report", reason)
	a.caps.All = append(a.caps.All, plan.Capability{Name: name, Reason: reason})
}

// probesAtOnce bounds the health checks under way where there are descriptors for them.
const probesAtOnce = 1024

// openUserspace opens the shared listeners and the prober.
func (a *Agent) openUserspace() error {
	var c userspace.Config
	c.Logger, c.Origin, c.Mark = a.log, a.conntrack, a.marks().Own()
	c.TCPPort, c.UDPPort = uint16(a.cfg.ListenTCPPort), uint16(a.cfg.ListenUDPPort)
	c.OnFirst, c.OnEnd, c.OnServing, c.Recorded = a.carried.first, a.recents.UserspaceEnded, func() { a.serves() }, a.options.Recorded
	c.OnAnswered, c.OnFailed, c.TimeExceeded = a.passive.userspaceAnswered, a.passive.userspaceFailed, kernel.TimeExceeded
	a.userspace = userspace.New(c)
	a.carried.enough, a.carried.traffic, a.carried.kick = a.policy.OffloadMinConnections, a.userspace.Traffic, a.kick
	a.accounting = conntrack.NewAccounting(a.local)
	a.accounting.OnEnd = a.recents.KernelEnded
	listen := a.userspace.Listen
	switch {
	case a.from != nil:
		listen = a.inherit
	case a.remains != nil:
		listen = func() error { return a.userspace.Inherit(a.remains.Listeners()) }
	}
	if err := listen(); errors.Is(err, unix.EADDRINUSE) {
		return fmt.Errorf("%w; stop what has it (ss -lntup shows which), or choose another with --listen-tcp-port and --listen-udp-port", err)
	} else if err != nil {
		return err
	}
	if a.from == nil {
		a.userspace.Confirm()
	}
	share, err := userspace.Reserve()
	if err != nil {
		return err
	}
	a.prober = probe.New(probe.Config{
		Defaults: a.health, Workers: min(probesAtOnce, share.Probes), Rate: float64(a.cfg.Health.MaxRate),
		Prober: probe.Network{Mark: a.marks().Own()}, Logger: a.log,
	})
	return nil
}

// openKernel makes what programs the kernel.
func (a *Agent) openKernel(settings kernel.Settings) error {
	if err := a.ensureSysctls(kernel.Sysctls()); err != nil {
		return err
	}
	lacking, err := a.ensureConntrack()
	if err != nil {
		return err
	}
	a.caps.All = append(a.caps.All, lacking...)
	if err := a.ensureSysctls(a.driver.Sysctls()); err != nil {
		return err
	}
	plane, err := a.driver.Plane(settings) // after the settings of the kernel, by one of which rules go
	if err != nil {
		return err
	}
	if k, ok := plane.(kernel.AffinityKeeper); ok {
		a.affinity = flows.NewAffinity(a.log, k, a.userspace.Affinity)
	}
	a.openPassive()
	a.staleFlows = flows.NewStaleCleanup(flows.Config{
		Log: a.log, Conntrack: a.conntrack, Userspace: a.userspace, Local: a.local, Plan: a.current.Load, Deleted: a.figures.forgot, Cleaned: a.options.Observer.Swept,
	})
	a.programmer = newProgrammer(plane, a.log, a.kick, a.staleFlows.Written)
	a.programmer.atomic = !slices.ContainsFunc(a.caps.Planes, func(p plan.Abilities) bool { return !p.Atomic })
	a.programmer.figures, a.programmer.displace, a.programmer.ruled = &a.figures, a.displace, a.userspace.Ruled
	a.arrivals.every = min(arrivalsEvery, 10*a.cfg.AliveTimeout)
	a.heart = heartbeat{timeout: a.cfg.AliveTimeout, start: a.programmer.steered, retired: make(chan struct{}), expired: make(chan struct{}),
		probe: a.userspace.Probe, refresh: a.steering.Alive, expire: a.expire, log: a.log, revived: a.revived}
	return nil
}

// expire leads new connections to the kernel's rules, unless another kproxy serves them.
func (a *Agent) expire() error {
	if a.relieved.Load() {
		return nil
	}
	return a.steering.Dead()
}

// revived is called when new connections are redirected to userspace. Flows that began before may have gone
// astray.
func (a *Agent) revived() {
	if err := a.steering.Started(); err != nil {
		a.log.Warn("clients of services that nothing serves aren't refused for some seconds", "error", err)
	}
	a.staleFlows.All()
}

// local reports whether packets to an address are delivered on this node.
func (a *Agent) local(at netip.Addr) bool {
	return a.steering.Local(at) || a.userspace.Local(at)
}

func (a *Agent) marks() kernel.Marks {
	return kernel.Marks{Masquerade: a.cfg.MasqueradeMark(), Transparent: a.cfg.TransparentMark()}
}

// adopt finds out what an earlier kproxy left in the kernel, so that services
// that were offloaded stay so, and returns the first plan.
func (a *Agent) adopt(ctx context.Context) (*plan.Plan, error) {
	var err error
	if a.adopted, err = a.programmer.plane.Adopt(ctx, a.source.Latest()); err != nil {
		return nil, err
	}
	// What is programmed is found by comparing, and a plan says with what.
	first, _ := plan.Compute(nil, a.inputs(time.Now(), nil, a.source.Latest()))
	a.programmer.adopt(first)
	if n := len(a.adopted); n > 0 {
		a.log.Info("adopted what an earlier kproxy programmed", "offloaded", n)
	}
	return first, nil
}

// Prepare does what takes more than CAP_NET_ADMIN and CAP_NET_RAW, and nothing
// else: it has the kernel load what data planes of the mode may use, and changes
// settings below /proc/sys. A kproxy in a container that isn't privileged, where
// these are read-only, finds them as it needs them afterwards. Nothing is
// programmed, and a kproxy that runs on this node isn't disturbed.
func (a *Agent) Prepare(ctx context.Context) error {
	mode := a.policy.Mode
	if err := loadConntrack(); err != nil {
		return &kernel.Missing{What: "conntrack", How: "a kernel with CONFIG_NF_CT_NETLINK", Err: err}
	}
	if err := a.ensureSysctls(kernel.Sysctls()); err != nil {
		return err
	}
	if _, err := a.ensureConntrack(); err != nil { // what isn't possible here isn't necessary either
		return err
	}
	var prepared []any
	for _, d := range node.DriversOf(a.cfg).Of(mode) {
		loaded, err := d.Load(ctx, mode)
		for _, c := range loaded {
			prepared = append(prepared, c.Name, c.Supported)
			if mode.Needs(plan.DataPlane(c.Name)) {
				err = errors.Join(err, node.Missing(d, mode))
			}
		}
		if err != nil {
			return err
		}
		if err := a.ensureSysctls(d.Sysctls()); err != nil {
			return err
		}
	}
	return a.unprepared(prepared)
}

// loadConntrack has the kernel load connection tracking, without which its
// settings aren't there. The question does so, whatever the answer (nfnetlink_rcv_msg).
func loadConntrack() error {
	table, err := conntrack.Dial()
	if err != nil {
		return err
	}
	defer table.Close()
	nowhere := netip.AddrPortFrom(netip.IPv4Unspecified(), 0)
	if _, err := table.GetByReply(service.TCP, nowhere, nowhere); err != nil && !errors.Is(err, conntrack.ErrNotFound) {
		return err
	}
	return nil
}

// unprepared returns an error with what could not be changed after all. If nothing is left,
// it logs what was prepared and returns nil.
func (a *Agent) unprepared(prepared []any) error {
	var errs []error
	for _, c := range a.caps.All {
		if !c.Supported {
			errs = append(errs, fmt.Errorf("%s: %s", c.Name, c.Reason))
		}
	}
	if len(errs) == 0 {
		a.log.Info("this node is prepared", prepared...)
		return nil
	}
	return &kernel.Missing{What: "permission to change kernel settings", How: "run this as root, in a privileged container if in one", Err: errors.Join(errs...)}
}

// onlineCPUs lists the machine's CPUs.
const onlineCPUs = "/sys/devices/system/cpu/online"

// ensureConntrack sets what is configured of the kernel's connection tracking,
// says what wasn't so, and returns what can't be set: services work without.
func (a *Agent) ensureConntrack() (lacking []plan.Capability, err error) {
	cpus, err := kernel.OnlineCPUs(onlineCPUs)
	if err != nil {
		cpus = runtime.NumCPU()
		a.log.Warn("taking this process's CPUs for the machine's", "cpus", cpus, "error", err)
	}
	reports, err := kernel.EnsureConntrack(kernel.Conntrack(a.cfg.Conntrack), cpus)
	for _, r := range reports {
		if r.Err != nil {
			lacking = append(lacking, plan.Capability{Name: "conntrack " + r.Name, Reason: r.String()})
		}
		a.log.Warn("conntrack", "report", r.String())
	}
	return lacking, err
}
