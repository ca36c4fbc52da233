package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"kproxy.dev/kproxy/agent/node"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/service/wake"
)

// programmer is the slow loop: it brings the kernel's rules to the
// latest plan and says which services' rules are in the kernel. Plans that
// arrive while it works replace each other; only the last is programmed.
type programmer struct {
	plane   kernel.Plane
	log     *slog.Logger
	changed func() // tells the fast loop that Programmed or Failed changed
	// applied tells it that rules were written: until then flows may have begun
	// without them, or by those of an earlier plan, nil if that isn't known. Where it
	// is certain that they began by all of was's rules, d says what the rules that
	// were written change, else it is Full.
	applied func(was *plan.Plan, d plan.Delta)
	figures *figures
	// displace is called once, when the kernel holds a plan for the first time; may be nil. What
	// it returns is to drain.
	displace func(context.Context) []retired
	// ruled is told by which policy the kernel's rules are, nil for not known; may be nil.
	ruled func(*plan.Policy)

	passing turn          // of what changes the kernel; also the fast loop's where the plane is atomic
	atomic  bool          // see plan.Abilities: Follow does what is to be done, while in step
	inStep  bool          // the kernel holds the plan's rules but those that failed; under passing
	wake    chan struct{} // 1 slot: triggers coalesce
	steered chan struct{} // closed once the rules that lead to userspace are in the kernel

	// Owned by run.
	plan *plan.Plan // that the plane was given last
	// was is the last plan whose rules were written as a whole, and unwritten leads
	// from it to plan; exact says that nothing has been written since, also not in part.
	was       *plan.Plan
	unwritten plan.Delta
	exact     bool
	drains    draining

	mu      sync.Mutex // guards what follows, which both loops use
	latest  *plan.Plan // that was handed over last
	pending plan.Delta // from plan to latest
	done    []written  // that the fast loop hasn't taken in
	result  programResult

	// Owned by the fast loop: the KernelHash of the rules that the kernel holds, by
	// service port, without those that may be changing.
	programmed map[service.Key]uint64
	failed     map[service.Key]plan.Failure // that it took last
	dirty      map[service.Key]bool         // of which programmed says something else than it took
}

// written says what a pass has done to the rules of services.
type written struct {
	// all are the rules that the kernel holds, by service port; nil if those of services
	// that aren't in changes are as they were.
	all     map[service.Key]uint64
	changes []plan.Change
}

// programResult holds what the programmer reports. Its map is never modified.
type programResult struct {
	failed  map[service.Key]plan.Failure
	written bool // a pass has written the rules of every service, but for those that failed by name
	lastOK  time.Time
	lastErr error
}

func newProgrammer(plane kernel.Plane, log *slog.Logger, changed func(), applied func(was *plan.Plan, d plan.Delta)) *programmer {
	g := &programmer{figures: &figures{}, plane: plane, log: log, changed: changed, applied: applied, passing: make(turn, 1), wake: make(chan struct{}, 1), steered: make(chan struct{}), programmed: map[service.Key]uint64{}, dirty: map[service.Key]bool{}}
	_, g.drains.active = plane.(kernel.Drainer)
	return g
}

// adopt starts from what an earlier kproxy left in the kernel, which the plane has read.
// Call it before run.
func (g *programmer) adopt(p *plan.Plan) {
	g.plane.Want(p, plan.Between(nil, p))
	g.programmed = g.plane.Programmed()
}

// program hands over a plan, to which d leads from the one before, and what following it did. The fast loop
// calls it after the redirect sets follow the plan, so no service uses rules that are
// about to change. Unless they were written with the sets, from now on until a pass has ended that wrote what the last plan
// wants, those rules don't count as there: a service that changes there and back
// meanwhile would else be led to them while they are another plan's.
func (g *programmer) program(p *plan.Plan, d plan.Delta, followed *kernel.Result) {
	g.mu.Lock()
	g.takeDone()
	g.latest, g.pending = p, g.pending.Then(d)
	if followed.Holds != nil {
		g.plan, g.was, g.pending = p, p, plan.Delta{}
	}
	g.mu.Unlock()
	for _, c := range d.Changes {
		if c.Rules() && c.Is != nil && c.Is.KernelHash != 0 && followed.Holds != nil {
			g.programmed[c.Key()] = c.Is.KernelHash
		} else if c.Is == nil || g.programmed[c.Key()] != c.Is.KernelHash {
			delete(g.programmed, c.Key())
		}
	}
	if followed.Holds == nil {
		g.kick()
	} else if g.ruled != nil {
		g.ruled(&p.Policy)
	}
}

// stumbled notes that a plan, to which d leads, wasn't followed, and reports whether one may be that needs
// no rules at once.
func (g *programmer) stumbled(d plan.Delta) bool {
	if !g.atomic { // what follows is the slow loop's
		return false
	}
	was := g.inStep
	g.inStep, g.exact = false, false
	for _, c := range d.Changes {
		if was && c.Rules() {
			delete(g.programmed, c.Key())
			g.dirty[c.Key()] = true
		}
	}
	return was
}

// did tells what was done to the kernel since a moment.
func (g *programmer) did(r *kernel.Result, since time.Time) {
	took := time.Since(since)
	g.figures.synced(r, took)
	if r.OK() && r.Tried {
		g.log.Debug("programmed the kernel", "chains", r.Applied.Chains, "rules", r.Applied.Rules, "entries", r.Applied.Entries, "virtual servers", r.Applied.Virtuals, "took", took)
	}
}

// observed returns the KernelHash of the rules that the kernel holds, by service
// port, and what could not be programmed. It marks the service ports of which either
// says something new. It is the fast loop's.
func (g *programmer) observed(dirty map[service.Key]bool) (map[service.Key]uint64, map[service.Key]plan.Failure) {
	g.mu.Lock()
	g.takeDone()
	failed := g.result.failed
	g.mu.Unlock()
	markDiffering(dirty, g.failed, failed)
	g.failed = failed
	maps.Copy(dirty, g.dirty)
	g.dirty = map[service.Key]bool{} // cleared, it would stay as large as it was when all services changed
	return g.programmed, failed
}

// takeDone takes in what passes have done. The caller holds mu.
func (g *programmer) takeDone() {
	for _, w := range g.done {
		if w.all != nil {
			markDiffering(g.dirty, g.programmed, w.all)
			g.programmed = w.all
		}
		for _, c := range w.changes {
			g.dirty[c.Key()] = true
			if c.Is != nil && c.Is.KernelHash != 0 {
				g.programmed[c.Key()] = c.Is.KernelHash
			}
		}
	}
	g.done = nil
}

// markDiffering marks the keys of what was and is don't have alike.
func markDiffering[V comparable](dirty map[service.Key]bool, was, is map[service.Key]V) {
	for k, v := range is {
		if old, known := was[k]; !known || old != v {
			dirty[k] = true
		}
	}
	for k := range was {
		if _, known := is[k]; !known {
			dirty[k] = true
		}
	}
}

func (g *programmer) kick() { wake.Up(g.wake) }

// report returns the last result. Safe for concurrent use.
func (g *programmer) report() programResult {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.result
}

// Retries of a failed pass: soon, because a held lock is let go within
// seconds, then rarer.
const (
	retryFirst = 500 * time.Millisecond
	retryMax   = 30 * time.Second
)

// A pass that took longer than cheap is followed by a pause of the same length, so
// that changes which go on and on take half a processor at most: a table that is
// replaced as a whole, or looked through at every commit, takes long where there
// are many services. What changes meanwhile is served in userspace, and one pass
// brings all of it. A pass that writes everything, as the first does, tells nothing of
// what a change takes: it is followed by no pause.
const (
	cheap    = 100 * time.Millisecond
	pauseMax = time.Second
)

// pauseAfter returns how long plans wait after a pass that took so long.
func pauseAfter(took time.Duration) time.Duration {
	if took <= cheap {
		return 0
	}
	return min(took, pauseMax)
}

// run programs until ctx is done. damaged delivers when others changed
// kproxy's rules; then they are read back and repaired.
func (g *programmer) run(ctx context.Context, damaged <-chan error) error {
	retry := time.NewTimer(time.Hour)
	retry.Stop()
	defer retry.Stop()
	var due time.Time // when it ends; zero while it doesn't run
	wait := retryFirst
	pause := time.NewTimer(0)
	defer pause.Stop()
	wake := g.wake // nil during a pause
	for {
		repair, retrying := false, false
		select {
		case <-ctx.Done():
			return nil
		case <-g.drains.due():
			if g.passing.enter(ctx) {
				g.drain(ctx)
				g.passing.leave()
			}
			continue
		case why := <-damaged:
			g.log.Warn("kproxy's rules were changed by somebody else; repairing", "found", why)
			g.figures.ruleRepairs.Add(1)
			repair = true
		case <-wake:
		case <-pause.C:
			wake = g.wake
			continue
		case <-retry.C:
			due, retrying = time.Time{}, true
		}
		if !g.passing.enter(ctx) {
			return nil
		}
		// A retry is for what was wanted, and plans come after it, or it would never come where they come all the time: what
		// was refused is sure to be tried again only where nothing else is wanted (see [kernel.Plane]).
		if !retrying || g.atomic {
			if known, changed := g.render(); !known || !changed && !repair && !retrying {
				g.passing.leave()
				continue // no plan brings the retry forward that wants nothing else than what failed
			}
		}
		start := time.Now()
		full, err := g.pass(ctx)
		g.passing.leave()
		if d := pauseAfter(time.Since(start)); d > 0 && !full {
			wake = nil
			pause.Reset(d)
		}
		if err != nil && ctx.Err() == nil {
			if due.IsZero() { // no plan that fails as well puts it off
				due = time.Now().Add(wait)
				retry.Reset(wait)
				wait = min(2*wait, retryMax)
			}
			g.log.Error("programming the kernel failed; services whose rules aren't there are served in userspace meanwhile", "error", err, "retry", time.Until(due).Round(time.Millisecond))
			continue
		}
		retry.Stop()
		due, wait = time.Time{}, retryFirst
	}
}

// render gives the plane the latest plan. It reports whether there is one, and whether
// that wants anything but what failed.
func (g *programmer) render() (known, changed bool) {
	g.mu.Lock()
	p, d := g.latest, g.pending
	g.pending = plan.Delta{}
	g.mu.Unlock()
	if p == nil {
		return false, false
	}
	g.plan, g.unwritten = p, g.unwritten.Then(d)
	return true, g.plane.Want(p, d)
}

// pass brings the kernel to the plan that the plane was given last. Full says that what
// was there had to be read.
func (g *programmer) pass(ctx context.Context) (full bool, err error) {
	start := time.Now()
	r := g.plane.Sync(ctx, g.steeringReady)
	g.did(&r, start)
	if g.atomic {
		g.inStep = r.Err == nil
	}
	g.exact = g.exact && !r.Steered
	if r.Tried {
		g.drains.soon()
	}
	switch {
	case g.ruled == nil:
	case r.Err == nil: // also where some services failed: all rules that they share are there
		g.ruled(&g.plan.Policy)
	case r.Tried || r.Steered:
		g.ruled(nil)
	}
	switch {
	case r.OK():
		if g.displace != nil {
			if g.drains.retired = g.displace(ctx); len(g.drains.retired) > 0 {
				g.drains.soon()
			}
			g.displace = nil
		}
		was, d := g.was, g.unwritten
		d.Full = d.Full || r.Full || !g.exact
		if r.Tried {
			defer g.applied(was, d)
		}
		return r.Full, g.finish(g.wroteAll(), nil, nil)
	case !r.Tried:
		return r.Full, g.finish(nil, nil, r.Err)
	}
	defer g.applied(g.was, plan.Delta{Full: true})
	g.exact = false
	failed := map[service.Key]plan.Failure{}
	for k, why := range r.Failed {
		if s := g.plan.Find(k); s != nil {
			failed[k] = g.failure(k, plan.Failure{Since: start, Reason: why.Error(), Hash: s.KernelHash})
		}
	}
	if r.Err == nil {
		r.Err = servicesFailed(len(failed))
	}
	return r.Full, g.finish(&written{all: g.plane.Programmed()}, failed, r.Err)
}

// wroteAll notes that the kernel holds all that plan wants, and returns what that
// changes.
func (g *programmer) wroteAll() *written {
	w := &written{changes: g.unwritten.Changes}
	if !g.exact || g.unwritten.Full {
		w = &written{all: make(map[service.Key]uint64, len(g.plan.Services))}
		for _, s := range g.plan.Services {
			if s.KernelHash != 0 {
				w.all[s.Port.Key] = s.KernelHash
			}
		}
	}
	g.was, g.unwritten, g.exact = g.plan, plan.Delta{}, true
	return w
}

// without is w less the services whose rules d changes.
func (w *written) without(d plan.Delta) {
	rules := map[service.Key]bool{}
	for _, c := range d.Changes {
		if c.Rules() {
			rules[c.Key()] = true
			delete(w.all, c.Key())
		}
	}
	if len(rules) > 0 {
		w.changes = slices.DeleteFunc(slices.Clone(w.changes), func(c plan.Change) bool { return rules[c.Key()] })
	}
}

// servicesFailed is the error of a pass that wrote all rules but those of so many services.
type servicesFailed int

func (n servicesFailed) Error() string {
	return fmt.Sprintf("program %d services: see each one's reason", int(n))
}

// steeringReady lets the heartbeat begin.
func (g *programmer) steeringReady() {
	select {
	case <-g.steered:
	default:
		close(g.steered)
	}
}

// failure returns f, since when it is known: a retry that fails in the same way
// is no other failure.
func (g *programmer) failure(k service.Key, f plan.Failure) plan.Failure {
	if was, ok := g.report().failed[k]; ok && was.Hash == f.Hash && was.Reason == f.Reason {
		return was
	}
	return f
}

// finish publishes the outcome of a pass; nil for what was written leaves the last.
func (g *programmer) finish(now *written, failed map[service.Key]plan.Failure, err error) error {
	if err != nil {
		g.figures.ruleFailures.Add(1)
	}
	g.mu.Lock()
	old := g.result
	changed := false
	if now != nil {
		now.without(g.pending) // of later plans
		changed = now.all != nil || len(now.changes) > 0
		g.done = append(g.done, *now)
	}
	var some servicesFailed
	r := programResult{
		failed: failed, lastOK: old.lastOK, lastErr: err,
		written: old.written || err == nil || errors.As(err, &some),
	}
	if err == nil {
		r.lastOK = time.Now()
		g.steeringReady()
	}
	g.result = r
	g.mu.Unlock()
	if changed || !maps.Equal(old.failed, r.failed) || (old.lastErr == nil) != (err == nil) {
		g.changed()
	}
	return err
}

// drainEvery is how often real servers that drain are looked at: the bound on
// how long one stays when its last connection has gone.
const drainEvery = time.Second

// draining says when the programmer checks again what drains. By the zero value it
// never does.
type draining struct {
	active  bool // there may be something that drains, an earlier kproxy's too
	timer   <-chan time.Time
	retired []retired
	left    int
	trouble string // the last error, said once
}

// due delivers when it is time to check.
func (d *draining) due() <-chan time.Time {
	if d.active && d.timer == nil {
		d.timer = time.After(0)
	}
	return d.timer
}

// soon schedules a check of what drains in one second, unless one is pending.
func (d *draining) soon() {
	if d.timer == nil {
		d.timer = time.After(drainEvery)
	}
}

// drain lets the backend remove what has drained, and checks again in a moment
// while something is left.
func (g *programmer) drain(ctx context.Context) {
	d := &g.drains
	d.active, d.timer = false, nil
	left, err := 0, error(nil)
	if drainer, ok := g.plane.(kernel.Drainer); ok {
		left, err = drainer.Drain(ctx)
	}
	d.retired = slices.DeleteFunc(d.retired, func(r retired) bool {
		n, errOne := r.Drain(ctx)
		drained := n == 0 && errOne == nil
		if drained {
			errOne = r.driver.Remove(ctx, node.NoRoutes)
		}
		left, err = left+n, errors.Join(err, errOne)
		return drained
	})
	if ctx.Err() != nil {
		return
	}
	if err != nil && err.Error() != d.trouble {
		g.log.Warn("what drains can't be looked at", "error", err, "retry", drainEvery)
	}
	d.trouble = ""
	if err != nil {
		d.trouble = err.Error()
	}
	switch {
	case left > 0 && d.left == 0:
		g.log.Info("draining real servers that are still in use", "real servers", left)
	case left == 0 && d.left > 0 && err == nil:
		g.log.Info("every real server has drained")
	}
	d.left = left
	g.figures.draining.Store(int64(left))
	if left > 0 || err != nil {
		d.soon()
	}
}
