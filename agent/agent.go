// Package agent wires the stages together and runs them.
//
// Two loops share the work. The fast loop turns every change into a plan and
// carries it out where that takes microseconds: the userspace forwarder, the
// membership of the redirect sets, conntrack. The slow loop (the programmer)
// brings the data planes of the kernel to the latest plan, however long
// the tables take, and reports what is programmed back to the fast loop. While
// it works, the services it changes are served in userspace.
//
// The heartbeat keeps the alive sets filled for as long as the
// forwarder proves that it serves.
package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/health/probe"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace"
)

// DefaultStateDir is where pins are kept unless --state-dir says otherwise.
var DefaultStateDir = config.Default().StateDir

// Options is what an Agent is made from.
type Options struct {
	Config  config.Config // valid
	Version string
	Log     *slog.Logger
	Reread  <-chan os.Signal // asks to read manifests again (SIGHUP); may be nil

	Observer Observer // of how long things take; may be nil

	// HealthPort answers load balancers at Services' health-check node ports; nil
	// leaves these closed.
	HealthPort ServeHealthPort
}

// Agent runs kproxy on this node. Its exported methods are safe for concurrent
// use once Run has begun to serve.
type Agent struct {
	cfg     config.Config
	version string
	log     *slog.Logger
	reread  <-chan os.Signal
	started time.Time
	node    string
	policy  plan.Policy
	health  health.Defaults

	// Set up by Run before anything else runs; isSetUp says that it was.
	isSetUp    atomic.Bool
	caps       plan.Caps
	driver     kernel.Driver
	adopted    map[service.Key]bool
	pins       *pins
	steering   kernel.Steering
	networks   networks
	programmer *programmer
	userspace  *userspace.Server
	conntrack  *conntrack.Client
	accounting *conntrack.Accounting
	source     objects
	prober     *probe.Scheduler
	unprobed   []netip.Prefix // networks that the prober leaves out; the fast loop's own
	// dirty are the service ports of which something else is known than for the current
	// plan, which was made of a View of health of that revision. Both are the fast loop's.
	dirty          map[service.Key]bool
	healthRevision uint64
	uncommitted    bool   // a pass failed after userspace had prepared its plan
	repairing      bool   // the redirect sets were damaged or half followed a plan, and aren't mended yet; the fast loop's own
	announced      string // the last sync's error, as events told it; the fast loop's own
	heart          heartbeat
	arrivals       arrivals
	carried        carried
	refusals       refusals
	repair         *conntrackRepair
	staleFlows     *staleCleanup
	affinity       *affinityMover // nil where the kernel keeps no clients
	healthPort     ServeHealthPort
	healths        *healthPorts
	left           atomic.Pointer[[]plan.CapStatus] // of kube-proxy's; nil until looked for

	trigger chan struct{} // 1 slot: triggers coalesce
	current atomic.Pointer[plan.Plan]
	coming  atomic.Pointer[plan.Plan] // that the fast loop carries out, or last tried to
	// counting is held by who reads counters for current, and by the fast loop while
	// it gives them a new plan: they forget what that doesn't have.
	counting sync.RWMutex
	ended    *conntrack.Listener // under counting; nil before anything can end
	skipped  uint16              // port whose closed connections it doesn't tell of; likewise
	sync     syncState
	figures  figures
	events   events
	record   recorder // nil without Kubernetes

	wasReady atomic.Bool // since the start, once
	eligible func() bool // whether this node may be sent connections; nil says yes
}

// New returns an Agent that does nothing before Run.
func New(o Options) *Agent {
	node := o.Config.HostnameOverride
	if node == "" {
		node, _ = os.Hostname()
	}
	a := &Agent{
		dirty: map[service.Key]bool{},
		cfg:   o.Config, version: o.Version, log: o.Log, reread: o.Reread, started: time.Now(),
		node: strings.ToLower(node), policy: policyOf(o.Config), health: healthOf(o.Config),
		trigger: make(chan struct{}, 1), healthPort: o.HealthPort,
	}
	a.figures.observer = o.Observer
	return a
}

// policyOf returns the part of the configuration that decisions depend on.
func policyOf(c config.Config) plan.Policy {
	p := plan.DefaultPolicy()
	p.Mode = plan.Mode(c.Mode)
	p.OffloadAfter = c.OffloadAfter
	p.OffloadMinConnections = uint64(c.OffloadMinConnections)
	p.MasqueradeAll = c.MasqueradeAll
	switch c.DetectLocalMode {
	case "NodeCIDR":
		p.NodePodCIDRs = true
	case "BridgeInterface":
		p.PodBridge = c.PodBridge
	case "InterfaceNamePrefix":
		p.PodInterfacePrefix = c.PodInterfacePrefix
	default: // ClusterCIDR
		p.PodCIDRs = c.PodNetworks()
	}
	p.NodePortNetworks, p.PrimaryNodePorts = c.NodePortNetworks()
	p.NoLocalhostNodePorts = !c.LocalhostNodePorts
	p.ExcludeCIDRs = c.ExcludedNetworks()
	return p
}

func healthOf(c config.Config) health.Defaults {
	return health.Defaults{
		Kind: c.HealthCheck(), Interval: c.Health.Interval, Timeout: c.Health.Timeout,
		Rise: c.Health.Rise, Fall: c.Health.Fall,
		MinInterval: c.Health.MinInterval, Only: !c.Health.Annotations,
	}
}

// Run serves until ctx is done, then lets the kernel take new connections,
// drains what userspace carries, and returns nil. The kernel rules stay: traffic
// goes on, and the next kproxy adopts them. An error of type *kernel.Missing
// says what this host lacks.
func (a *Agent) Run(ctx context.Context) error {
	if err := a.openSource(); err != nil {
		return err
	}
	release, err := lockNode()
	if err != nil {
		return err
	}
	defer release()
	if a.pins, err = openPins(a.cfg.StateDir); err != nil {
		return err
	}
	if a.pins.problem != "" {
		a.log.Error("pins are lost", "problem", a.pins.problem)
	}
	if err := a.setUp(ctx); ctx.Err() != nil {
		return nil // stopped before there was anything to serve; whatever failed, that is why
	} else if err != nil {
		return err
	}
	a.repair = newConntrackRepair(a.log, a.conntrack, a.steering, a.userspace, a.current.Load)
	a.healths = newHealthPorts(a.healthPort, a.log, a.healthPortFailed)
	a.isSetUp.Store(true)
	defer a.conntrack.Close()

	err = a.work(ctx)
	err = errors.Join(err, a.drain())
	a.events.close()
	return err
}

// work runs every loop until ctx is done or one fails.
func (a *Agent) work(ctx context.Context) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return a.source.Run(ctx) })
	if a.waitForSource(ctx) != nil {
		return g.Wait() // stopped before there was anything to serve
	}
	if err := a.adopt(ctx); err != nil {
		if ctx.Err() != nil {
			err = nil // stopped meanwhile, or the source says why
		}
		stop()
		return errors.Join(err, g.Wait())
	}
	ended, err := conntrack.Subscribe()
	if err != nil {
		stop()
		return errors.Join(err, g.Wait())
	}
	defer ended.Close()
	a.hear(ended)
	damaged := make(chan error, 1)
	g.Go(func() error { return ended.Run(ctx, a.flowEnded) })
	g.Go(func() error { return a.repair.run(ctx) })
	g.Go(func() error { return a.staleFlows.run(ctx) })
	g.Go(func() error { return a.keepSmall(ctx) })
	if a.affinity != nil {
		g.Go(func() error { return a.affinity.run(ctx) })
	}
	g.Go(func() error { return a.userspace.Run(ctx) })
	g.Go(func() error { return a.prober.Run(ctx) })
	g.Go(func() error { return a.fast(ctx) })
	g.Go(func() error { return a.healths.run(ctx) })
	g.Go(func() error { a.reportLeftovers(ctx); return nil }) // beside the rest: on a big node it takes seconds
	g.Go(func() error { return a.programmer.run(ctx, damaged) })
	g.Go(func() error { return a.watch(ctx, damaged, ended.Overflows) })
	g.Go(func() error { return a.heart.run(ctx) })
	g.Go(func() error { return a.watchArrivals(ctx) })
	g.Go(func() error { return a.rereadOnSignal(ctx) })
	return g.Wait()
}

// hear makes l the one that tells of the ends of flows.
func (a *Agent) hear(l *conntrack.Listener) {
	a.counting.Lock()
	defer a.counting.Unlock()
	a.ended = l
	a.skipOwnEnds()
}

// skipOwnEnds spares the work of hearing of connections that userspace has carried
// to their end: most of all that end. An endpoint at the listener's port would have
// connections that look alike, and are to be counted. The caller
// has counting locked.
func (a *Agent) skipOwnEnds() {
	port, _ := a.userspace.Ports()
	if port != 0 && a.accounting.HadEndpointAt(port) {
		port = 0
	}
	if a.ended == nil || port == a.skipped {
		return
	}
	if err := a.ended.SkipClosed(port); err != nil {
		a.log.Warn("the kernel's filter of connections that end can't be changed", "error", err)
		return
	}
	a.skipped = port
}

// flowEnded takes every flow that ends in the kernel.
func (a *Agent) flowEnded(f conntrack.Flow) {
	a.accounting.Ended(f)
	a.refusals.ended(f)
	a.repair.ended(f)
}

// drain ends what userspace carries, in good order and within --drain-timeout.
// The heartbeat has emptied the alive sets, so nothing new arrives.
func (a *Agent) drain() error {
	ctx, cancel := context.WithTimeout(context.Background(), a.cfg.DrainTimeout)
	defer cancel()
	a.repair.redirectAll(nil, a.cfg.DrainTimeout)
	if n := len(a.userspace.Connections()); n > 0 {
		a.log.Info("draining", "connections", n, "within", a.cfg.DrainTimeout)
	}
	if err := a.userspace.Drain(ctx); err != nil {
		a.log.Warn("connections were cut short", "error", err)
	}
	return a.forgetListener()
}

// forgetListener deletes the UDP entries that lead to this process, which is
// about to end: the next datagram of each client goes to the kernel's rules.
func (a *Agent) forgetListener() error {
	p := a.current.Load()
	if p == nil {
		return nil
	}
	flows, err := a.conntrack.List(service.UDP)
	if err != nil {
		return fmt.Errorf("list UDP flows: %w", err)
	}
	return a.deleteFlows(conntrack.Stale(flows, nil, p, conntrack.StaleConfig{Local: a.local}))
}
