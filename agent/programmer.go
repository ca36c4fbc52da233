package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"sync"
	"sync/atomic"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// programmer is the slow loop: it brings the rules beneath the portal to the
// latest plan and says which services' rules are in the kernel. Plans that
// arrive while it works replace each other; only the last is programmed.
type programmer struct {
	rules   rules
	log     *slog.Logger
	changed func() // tells the fast loop that Programmed or Failed changed
	// applied tells it that rules were written: until then flows may have begun
	// without them, or by those of an earlier plan, nil if that isn't known. Where it
	// is certain that they began by all of was's rules, now is the plan whose rules
	// were written, else nil.
	applied func(was, now *plan.Plan)
	figures *figures

	latest atomic.Pointer[plan.Plan]
	wake   chan struct{} // 1 slot: triggers coalesce
	portal chan struct{} // closed once the rules that lead to userspace are in the kernel

	// Owned by run.
	have  kernel.Ruleset
	known bool // have is what the kernel holds
	// was is the last plan whose rules were written as a whole; exact says that
	// nothing has been written since, also not in part.
	was   *plan.Plan
	exact bool
	// failing is what the last pass wanted, if it failed.
	failing *kernel.Ruleset
	drains  draining

	mu     sync.Mutex // guards result, which the fast loop reads
	result programResult
}

// programResult is what the programmer reports. Its maps are never modified.
type programResult struct {
	held
	failed  map[service.Key]plan.Failure
	passes  uint64
	written bool // a pass has written the rules of every service, but for those that failed by name
	lastOK  time.Time
	lastErr error
	took    time.Duration
}

// held says which services' rules the kernel holds: those of all services of a plan,
// or those that programmed names with their KernelHash.
type held struct {
	all        []*plan.Service
	programmed map[service.Key]uint64
}

// same reports whether h and o say the same of every service.
func (h held) same(o held) bool {
	if h.all == nil || o.all == nil {
		return h.all == nil && o.all == nil && maps.Equal(h.programmed, o.programmed)
	}
	return plan.SameHashes(h.all, o.all)
}

// without is h less the services whose rules p changes.
func (h held) without(p *plan.Plan) held {
	if p == nil {
		return h
	}
	if h.all != nil {
		return held{all: plan.Alike(h.all, p.Services)}
	}
	alike := make(map[service.Key]uint64, len(h.programmed))
	for _, s := range p.Services {
		if hash, ok := h.programmed[s.Port.Key]; ok && hash == s.KernelHash {
			alike[s.Port.Key] = hash
		}
	}
	if len(alike) == len(h.programmed) {
		return h
	}
	return held{programmed: alike}
}

func newProgrammer(r rules, log *slog.Logger, changed func(), applied func(was, now *plan.Plan)) *programmer {
	g := &programmer{figures: &figures{}, rules: r, log: log, changed: changed, applied: applied, wake: make(chan struct{}, 1), portal: make(chan struct{})}
	g.drains.active = r.drain != nil
	return g
}

// adopt starts from what an earlier kproxy left in the kernel. Call it before run.
func (g *programmer) adopt(have kernel.Ruleset, p *plan.Plan) {
	g.have, g.known = have, true
	g.result.programmed = g.rules.programmed(have, g.rules.render(p), p)
}

// program hands over a plan. The fast loop calls it after the portal follows
// the plan, so no service uses rules that are about to change. From now on until a
// pass has ended that wrote what the last plan wants, those rules don't count as there:
// a service that changes there and back meanwhile would else be led to them while they
// are another plan's.
func (g *programmer) program(p *plan.Plan) {
	g.mu.Lock()
	g.latest.Store(p)
	g.result.held = g.result.without(p)
	g.mu.Unlock()
	g.kick()
}

func (g *programmer) kick() {
	select {
	case g.wake <- struct{}{}:
	default:
	}
}

// report returns the last result.
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

// A pass that took longer than cheap is followed by a rest of the same length, so
// that changes which go on and on take half a processor at most: a table that is
// replaced as a whole, or looked through at every commit, takes long where there
// are many services. What changes meanwhile is served in userspace, and one pass
// brings all of it. A pass that writes everything, as the first does, tells nothing of
// what a change takes: it is followed by no rest.
const (
	cheap   = 100 * time.Millisecond
	restMax = time.Second
)

// rest is how long plans wait after a pass that took so long.
func rest(took time.Duration) time.Duration {
	if took <= cheap {
		return 0
	}
	return min(took, restMax)
}

// run programs until ctx is done. damaged delivers when somebody else changed
// kproxy's rules; then they are read back and repaired.
func (g *programmer) run(ctx context.Context, damaged <-chan error) error {
	retry := time.NewTimer(time.Hour)
	defer retry.Stop()
	wait := retryFirst
	resting := time.NewTimer(0)
	defer resting.Stop()
	wake := g.wake // nil while resting
	for {
		again := false // although the last pass failed for the same rules
		select {
		case <-ctx.Done():
			return nil
		case <-g.drains.due():
			g.drain(ctx)
			continue
		case why := <-damaged:
			g.log.Warn("kproxy's rules were changed by somebody else; repairing", "found", why)
			g.figures.ruleRepairs.Add(1)
			g.known, again = false, true
		case <-wake:
		case <-resting.C:
			wake = g.wake
			continue
		case <-retry.C:
			again = true
		}
		p := g.latest.Load()
		if p == nil || !again && g.failedFor(p) {
			continue
		}
		start, full := time.Now(), !g.known
		err := g.pass(ctx, p)
		if d := rest(time.Since(start)); d > 0 && !full {
			wake = nil
			resting.Reset(d)
		}
		if err != nil && ctx.Err() == nil {
			g.log.Error("programming the kernel failed; services whose rules aren't there are served in userspace meanwhile", "error", err, "retry", wait)
			retry.Reset(wait)
			wait = min(2*wait, retryMax)
			continue
		}
		retry.Stop()
		wait = retryFirst
	}
}

// failedFor reports whether the last pass failed, and p wants nothing else than
// its plan did: then it is the retry's turn, and no plan brings it forward.
func (g *programmer) failedFor(p *plan.Plan) bool {
	return g.failing != nil && kernel.Diff(*g.failing, g.rules.render(p)).Empty()
}

// pass brings the kernel to p.
func (g *programmer) pass(ctx context.Context, p *plan.Plan) error {
	want := g.rules.render(p)
	err := g.bring(ctx, p, want)
	if g.failing = nil; err != nil {
		g.failing = &want
	}
	return err
}

// bring brings the kernel to want, which was rendered of p.
func (g *programmer) bring(ctx context.Context, p *plan.Plan, want kernel.Ruleset) error {
	start := time.Now()
	full := !g.known
	if !g.known {
		have, err := g.rules.Observe(ctx)
		if err != nil {
			return g.finish(start, nil, nil, err)
		}
		g.have, g.known = have, true
	}
	if err := g.openPortal(ctx, p); err != nil {
		return g.finish(start, nil, nil, err)
	}
	ops := kernel.Diff(g.have, want)
	if ops.Empty() {
		g.was, g.exact = p, true
		g.rules.watch.Expect(want)
		g.figures.holds(want)
		return g.finish(start, &held{all: p.Services}, nil, nil)
	}
	applied, err := g.rules.Apply(ctx, ops)
	g.figures.wrote(applied)
	g.drains.soon()
	if err == nil && len(applied.Failed) == 0 {
		if full || !g.exact {
			defer g.applied(g.was, nil)
		} else {
			defer g.applied(g.was, p)
		}
		g.have, g.was, g.exact = want, p, true
		g.rules.watch.Expect(want)
		g.figures.programmed(want, ops, full, time.Since(start))
		g.log.Debug("programmed the kernel", "chains", applied.Chains, "rules", applied.Rules, "entries", applied.Entries, "virtual servers", applied.Virtuals, "took", time.Since(start))
		return g.finish(start, &held{all: p.Services}, nil, nil)
	}
	defer g.applied(g.was, nil)
	// What took effect is known only by looking.
	g.known, g.exact = false, false
	have, observeErr := g.rules.Observe(ctx)
	if observeErr != nil {
		return g.finish(start, &held{programmed: map[service.Key]uint64{}}, nil, errors.Join(err, observeErr))
	}
	g.have, g.known = have, true
	g.figures.holds(have)
	g.rules.watch.Expect(asWanted(have, want)) // what else is damaged doesn't wait for the retry
	failed := map[service.Key]plan.Failure{}
	for k, why := range applied.Failed {
		if s := p.Find(k); s != nil {
			failed[k] = g.failure(k, plan.Failure{Since: start, Reason: why.Error(), Hash: s.KernelHash})
		}
	}
	if err == nil {
		err = servicesFailed(len(failed))
	}
	return g.finish(start, &held{programmed: g.rules.programmed(have, want, p)}, failed, err)
}

// servicesFailed is the error of a pass that wrote all rules but those of so many services.
type servicesFailed int

func (n servicesFailed) Error() string {
	return fmt.Sprintf("program %d services: see each one's reason", int(n))
}

// openPortal is the first step: it programs what leads to userspace, which
// takes a moment, before the rules of all services, which may take many seconds
// or fail. Until those are in the kernel, userspace serves everything.
func (g *programmer) openPortal(ctx context.Context, p *plan.Plan) error {
	select {
	case <-g.portal:
		return nil
	default:
	}
	// Not by render, which would forget the services, and find all of them new with
	// the next plan.
	shared := g.rules.fresh(&plan.Plan{Mode: p.Mode, Kernel: p.Kernel, Fallback: p.Fallback, Policy: p.Policy})
	want := withShared(g.have, shared)
	if ops := kernel.Diff(g.have, want); !ops.Empty() {
		g.exact = false
		applied, err := g.rules.Apply(ctx, ops)
		g.figures.wrote(applied)
		if err != nil {
			g.known = false
			return fmt.Errorf("open the portal: %w", err)
		}
	}
	g.have = want
	g.portalReady()
	return nil
}

// portalReady lets the heartbeat begin.
func (g *programmer) portalReady() {
	select {
	case <-g.portal:
	default:
		close(g.portal)
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

// finish publishes the outcome of a pass; nil for what is held leaves the last.
func (g *programmer) finish(start time.Time, now *held, failed map[service.Key]plan.Failure, err error) error {
	if err != nil {
		g.figures.ruleFailures.Add(1)
	}
	g.mu.Lock()
	old := g.result
	if now != nil {
		*now = now.without(g.latest.Load()) // which may be a later plan
	}
	var rest servicesFailed
	r := programResult{
		held: old.held, failed: failed, passes: old.passes + 1, lastOK: old.lastOK, lastErr: err, took: time.Since(start),
		written: old.written || err == nil || errors.As(err, &rest),
	}
	news := now != nil && !now.same(old.held)
	if news || now != nil && now.all != nil {
		r.held = *now // else the same map tells plan.Compute that nothing is new
	}
	if err == nil {
		r.lastOK = time.Now()
		g.portalReady()
	}
	g.result = r
	g.mu.Unlock()
	if news || !maps.Equal(old.failed, r.failed) || (old.lastErr == nil) != (err == nil) {
		g.changed()
	}
	return err
}
