// Package agent wires the stages together and runs them.
//
// Two loops share the work. The fast loop turns every change into a plan and
// carries it out where that takes microseconds: the userspace forwarder, the
// membership of the redirect sets, conntrack. The slow loop (the programmer)
// brings the data planes of the kernel to the latest plan, however long
// the tables take, and reports what is programmed back to the fast loop. While
// it works, the services it changes are served in userspace. Where the kernel changes both in one transaction, the fast
// loop does so, and the slow one has the first rules to write, and what was damaged or refused.
//
// The heartbeat keeps the alive sets filled for as long as the
// forwarder proves that it serves.
//
// An Agent can take over from another process's and hand over to another
// one (takeover.go): userspace/handover/message.go has the steps.
package agent

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"kproxy.dev/kproxy/agent/flows"
	"kproxy.dev/kproxy/agent/node"
	"kproxy.dev/kproxy/agent/nodehealth"
	"kproxy.dev/kproxy/agent/takeover"
	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/health/probe"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/service/lockfile"
	"kproxy.dev/kproxy/userspace"
	"kproxy.dev/kproxy/userspace/handover"
)

// Options holds what an Agent is made from.
type Options struct {
	Config  config.Config // valid
	Version string
	Log     *slog.Logger
	Reread  <-chan os.Signal // asks to read manifests again (SIGHUP); may be nil

	Observer Observer // of how long things take

	// Predecessor is the kproxy to take over from; nil for none. TookOver is called when this one has.
	Predecessor *takeover.Predecessor
	TookOver    func()

	// Remains are what a kproxy of this node has left that crashed; nil without one. Recorded gets
	// what Salvage needs to know of this one; nil where nothing outlives it.
	Remains  *userspace.Remains
	Recorded func(memory int)
	// Pause is how long new connections go to the kernel's rules before this one serves.
	Pause time.Duration

	// HealthPort answers load balancers at Services' health-check node ports.
	HealthPort nodehealth.Serve
}

// Agent runs kproxy on this node. Its exported methods are safe for concurrent
// use once Run has begun to serve.
type Agent struct {
	options Options // that it was made from
	cfg     config.Config
	log     *slog.Logger
	started time.Time
	node    string
	policy  plan.Policy
	health  health.Defaults

	// Set up by Run before anything else runs; isSetUp says that it was.
	isSetUp    atomic.Bool
	caps       plan.Caps
	driver     kernel.Driver
	adopted    map[service.Key]bool
	steering   kernel.Steering
	networks   node.Networks
	programmer *programmer
	userspace  *userspace.Server
	conntrack  *conntrack.Client
	accounting *conntrack.Accounting
	source     objects
	prober     *probe.Scheduler
	// dirty are the service ports of which something else is known than for the current
	// plan, which was made of a View of health of that revision. Both are the fast loop's.
	dirty          map[service.Key]bool
	healthRevision uint64
	began          bool   // the first plan is there, and what other processes have left is taken over
	uncommitted    bool   // a pass failed after userspace had prepared its plan
	repairing      bool   // the redirect sets were damaged or half followed a plan, and aren't mended yet; the fast loop's own
	announced      string // the last sync's error, as events told it; the fast loop's own
	heart          heartbeat
	arrivals       arrivals
	carried        carried
	passive        passiveHealth
	recents        flows.Recents
	repair         *flows.Repair
	staleFlows     *flows.StaleCleanup
	affinity       *flows.Affinity    // nil where the kernel keeps no clients
	remains        *userspace.Remains // until userspace has recovered them
	healths        *nodehealth.Ports
	left           atomic.Pointer[[]plan.Capability] // of kube-proxy's, as looked at last; nil while that isn't known

	from      *takeover.Predecessor // nil if there is none to take over from
	serves    func()                // called when userspace does
	lock      *os.File              // the node's
	end       context.CancelFunc
	passing   turn // of the fast loop's passes
	orders    node.Orders
	handing   turn        // of the kproxy that is taking over, or of this one's end
	relieved  atomic.Bool // and has
	successor atomic.Pointer[handover.Conn]

	trigger  chan struct{} // 1 slot: triggers coalesce
	current  atomic.Pointer[plan.Plan]
	hearing  sync.Mutex
	ended    *conntrack.Listener // under hearing; nil before anything can end
	skipped  uint16              // port whose closed connections it doesn't tell of; likewise
	sync     syncState
	figures  figures
	meters   meters
	warnings cached[[]string] // of the plane
	events   events
	record   recorder // nil without Kubernetes

	wasReady atomic.Bool               // since the start, once
	stopping atomic.Pointer[time.Time] // since when; nil before
	yielded  atomic.Pointer[plan.Plan] // in force when all that the kernel can serve was to go there, because of a stop; nil before
	eligible func() bool               // whether this node may be sent connections; nil says yes
	triggers func() [2][]time.Time     // when what led to Latest happened in the cluster, once and by family; nil if the source doesn't know
}

// New returns an Agent that does nothing before Run.
func New(o Options) *Agent {
	name := o.Config.HostnameOverride
	if name == "" {
		name, _ = os.Hostname()
	}
	a := &Agent{
		options: o, cfg: o.Config, log: o.Log, started: time.Now(), dirty: map[service.Key]bool{},
		node: strings.ToLower(name), policy: node.PolicyOf(o.Config), health: healthOf(o.Config),
		trigger: make(chan struct{}, 1), passing: make(turn, 1), handing: make(turn, 1), remains: o.Remains, from: o.Predecessor, serves: func() {},
	}
	a.figures.observer, a.healths = o.Observer, nodehealth.New(o.HealthPort, o.Log, a.healthPortFailed)
	return a
}

func healthOf(c config.Config) health.Defaults {
	return health.Defaults{
		Kind: c.HealthCheck(), Interval: c.Health.Interval, Timeout: c.Health.Timeout,
		Rise: c.Health.Rise, Fall: c.Health.Fall,
		MinInterval: c.Health.MinInterval, Only: !c.Health.Annotations,
	}
}

// Run takes over from the kproxy that runs, if there is one, and serves until ctx is done, then lets the kernel take new connections,
// drains what userspace carries, and returns nil. In mode userspace, where no other data
// plane takes new connections, it serves them until those that it had have ended. The kernel rules stay: traffic
// goes on, and the next kproxy adopts them; but where kube-proxy has come meanwhile, they go. An error of type *kernel.Missing
// says what this host lacks. After another kproxy has taken over, Run serves what that couldn't
// take to its end, and returns nil.
func (a *Agent) Run(ctx context.Context) error {
	if err := a.openSource(); err != nil {
		return err
	}
	ctx, a.end = context.WithCancel(ctx)
	defer a.end()
	var err error
	if a.from != nil {
		defer a.from.Close()
		defer context.AfterFunc(ctx, a.from.Interrupt)()
		a.lock, err = a.from.NodeLock()
	} else {
		a.lock, err = node.Lock()
	}
	if err != nil {
		return err
	}
	defer a.unlock()
	if err = a.orders.Open(a.cfg.StateDir); err != nil {
		return err
	}
	if a.orders.Pins.Problem != "" {
		a.log.Error("pins are lost", "problem", a.orders.Pins.Problem)
	}
	if err := a.setUp(ctx); ctx.Err() != nil {
		return a.leave(nil) // stopped before there was anything to serve; whatever failed, that is why
	} else if err != nil {
		return a.leave(err)
	}
	a.repair = flows.NewRepair(a.log, a.conntrack, a.steering, a.userspace, a.current.Load)
	a.isSetUp.Store(true)
	defer a.conntrack.Close()

	serving, stop := a.untilDrained(ctx)
	defer stop()
	err = a.work(serving)
	if a.from.Pending() {
		return a.leave(err)
	}
	err = errors.Join(err, a.drain())
	a.giveWay()
	a.events.close()
	return err
}

// unlock releases the node's lock, unless another kproxy has it as well.
func (a *Agent) unlock() {
	if a.from.Pending() || a.Relieved() {
		_ = a.lock.Close()
		return
	}
	_ = lockfile.Release(a.lock)
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
	ended, err := a.begin(ctx)
	if err != nil {
		if ctx.Err() != nil {
			err = nil // stopped meanwhile, or the source says why
		}
		stop()
		return errors.Join(err, g.Wait())
	}
	defer ended.Close()
	damaged := make(chan error, 1)
	serves, serving := a.serves, make(chan struct{})
	begun := sync.OnceFunc(func() { close(serving) })
	a.serves = func() { serves(); begun() }
	g.Go(func() error { defer begun(); return a.userspace.Run(ctx) })
	<-serving // connections may be at rest, and what follows would take processors from the loops
	g.Go(func() error { return ended.Run(ctx, a.flowEnded) })
	g.Go(func() error { return flows.ReadRefusals(ctx, a.log, a.passive.lack, a.kernelRefused) })
	g.Go(func() error { return a.repair.Run(ctx) })
	g.Go(func() error { return a.staleFlows.Run(ctx) })
	g.Go(func() error { return a.keepSmall(ctx) })
	if a.affinity != nil {
		g.Go(func() error { return a.affinity.Run(ctx) })
	}
	g.Go(func() error { return a.prober.Run(ctx) })
	if a.passive.Detector != nil {
		g.Go(func() error { return a.passive.run(ctx, a.log, a.current.Load) })
	}
	g.Go(func() error { return a.fast(ctx) })
	g.Go(func() error { return a.healths.Run(ctx) })
	g.Go(func() error { a.followLeftovers(ctx); return nil }) // beside the rest: on a big node it takes seconds
	g.Go(func() error { return a.programmer.run(ctx, damaged) })
	g.Go(func() error { return a.watch(ctx, damaged, ended.Overflows) })
	g.Go(func() error { return a.heart.run(ctx) })
	g.Go(func() error { return a.watchArrivals(ctx) })
	g.Go(func() error { return a.rereadOnSignal(ctx) })
	return g.Wait()
}

// begin does what comes between the first snapshot and the first pass. From its end on this process serves.
func (a *Agent) begin(ctx context.Context) (ended *conntrack.Listener, err error) {
	if a.from != nil {
		if err := a.pausePredecessor(); err != nil {
			return nil, err
		}
	}
	first, err := a.adopt(ctx)
	if err != nil {
		return nil, err
	}
	if ended, err = conntrack.Subscribe(); err != nil {
		return nil, err
	}
	a.hear(ended)
	switch {
	case a.from != nil:
		if err = a.takeOver(first); err == nil {
			a.dropRemains()
		}
	case a.remains != nil:
		a.recover(first)
	default:
		a.recallFlows(first)
	}
	if a.began = err == nil; !a.began {
		ended.Close()
	}
	return ended, err
}

// hear makes l the one that tells of the ends of flows.
func (a *Agent) hear(l *conntrack.Listener) {
	a.hearing.Lock()
	defer a.hearing.Unlock()
	a.ended = l
	a.skipOwnEnds()
}

// skipOwnEnds spares the work of hearing of connections that userspace has carried
// to their end: most of all that end. An endpoint at the listener's port would have
// connections that look alike, and are to be counted. The caller
// has hearing locked.
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
	a.passive.flowEnded(&f)
	a.repair.Ended(f)
}

// untilDrained returns a context that ends some time after ctx: when the TCP connections that there were have ended, or all but
// a tenth of --drain-timeout has passed. Until then everything goes on, and another kproxy may take over; but where the kernel has rules of
// its own, they take new connections.
func (a *Agent) untilDrained(ctx context.Context) (context.Context, context.CancelFunc) {
	serving, stop := context.WithCancel(context.WithoutCancel(ctx))
	go func() {
		defer stop()
		select {
		case <-serving.Done(): // it failed
			return
		case <-ctx.Done():
		}
		if a.relieved.Load() {
			return
		}
		began := time.Now()
		a.stopping.Store(&began)
		p := a.current.Load()
		if p == nil {
			return
		}
		what := "stopping; new connections are served until those that there were have ended"
		if p.Offloads() {
			what = "stopping; new connections go to the kernel's rules, and those that there were go on"
			if a.heart.alive.Load() && a.kernelLacks(serving) {
				what = "stopping; new connections go to the kernel's rules, but for services that it can't serve, and those that there were go on"
				a.yielded.Store(p)
				a.kick()
			} else {
				a.heart.retire(serving)
			}
			a.repair.RedirectAll(nil, a.cfg.DrainTimeout)
		}
		// One that is taking over gets what is left, sessions above all. Once this one ends none can begin to.
		bounded, cancel := context.WithDeadline(serving, began.Add(a.cfg.DrainTimeout*9/10))
		defer cancel()
		defer a.handing.enter(bounded)
		tick := time.NewTicker(drainTick)
		defer tick.Stop()
		var said time.Time
		for {
			left := a.begunBefore(began)
			if left == 0 {
				return
			}
			if time.Since(said) >= drainReport {
				a.log.Info(what, "left", left, "within", time.Until(began.Add(a.cfg.DrainTimeout)).Round(time.Second))
				said = time.Now()
			}
			select {
			case <-bounded.Done():
				return
			case <-tick.C:
			}
		}
	}()
	return serving, stop
}

// kernelLacks reports whether userspace serves a service that the kernel can't, or hasn't the rules for. Where no pass ends for
// a while, it isn't known, and false.
func (a *Agent) kernelLacks(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, a.cfg.AliveTimeout)
	defer cancel()
	if !a.passing.enter(ctx) { // what is programmed is the fast loop's
		return false
	}
	defer a.passing.leave()
	return slices.ContainsFunc(a.current.Load().Services, func(s *plan.Service) bool {
		return s.DataPlane == plan.Userspace && (s.Kernel == plan.None || s.Cause == plan.CauseInexpressible || a.programmer.programmed[s.Port.Key] != s.KernelHash)
	})
}

const (
	drainTick   = 100 * time.Millisecond // between two looks at what is left
	drainReport = 5 * time.Second        // between two lines of the log
)

// ledBack returns p with those services in userspace that were there in an earlier plan, and what leads from p there:
// where steering and rules are one transaction, the rules are to stay p's.
func ledBack(p, was *plan.Plan) (*plan.Plan, plan.Delta) {
	back := *p
	back.Services = slices.Clone(p.Services)
	for i, s := range back.Services {
		if w := was.Find(s.Port.Key); w != nil && w.DataPlane == plan.Userspace && s.InKernel() {
			moved := *s
			moved.DataPlane = plan.Userspace
			back.Services[i] = &moved
		}
	}
	return &back, plan.Between(p, &back)
}

// begunBefore counts the TCP connections that userspace carries and that began before a time. UDP sessions aren't
// waited for: a client's next datagram begins another one, wherever it arrives.
func (a *Agent) begunBefore(before time.Time) (n int) {
	for _, c := range a.userspace.Connections() {
		if c.Protocol == service.TCP && c.Started.Before(before) {
			n++
		}
	}
	return n
}

// drain ends what userspace carries, in good order and within --drain-timeout.
// The heartbeat has emptied the alive sets, so nothing new arrives.
func (a *Agent) drain() error {
	end := time.Now().Add(a.cfg.DrainTimeout)
	if began := a.stopping.Load(); began != nil {
		end = began.Add(a.cfg.DrainTimeout)
	}
	ctx, cancel := context.WithDeadline(context.Background(), end)
	defer cancel()
	if !a.relieved.Load() {
		if a.began { // else the last one's file still counts
			a.rememberFlows()
		}
		a.repair.RedirectAll(nil, a.cfg.DrainTimeout)
		if was := a.yielded.Load(); was != nil { // what the next kproxy finds in the kernel it leaves there
			back, d := ledBack(a.current.Load(), was)
			if err := a.steering.Follow(ctx, back, d).Err; err != nil {
				a.log.Warn("the next kproxy takes services for offloaded that aren't", "error", err)
			}
		}
	}
	if n := len(a.userspace.Connections()); n > 0 {
		a.log.Info("draining", "connections", n, "within", time.Until(end).Round(time.Second))
	}
	if err := a.userspace.Drain(ctx); err != nil {
		a.log.Warn("connections were cut short", "error", err)
	}
	if a.relieved.Load() {
		return nil
	}
	return a.staleFlows.ForgetListener()
}
