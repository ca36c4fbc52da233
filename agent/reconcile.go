package agent

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/service/wake"
)

// How often the fast loop checks what doesn't announce itself: connections
// carried, and damage to the redirect sets, which is to be mended within five
// seconds.
const (
	countEvery  = time.Second
	damageEvery = 3 * time.Second
)

// fast is the fast loop. It owns the current plan; everybody else reads it
// through a.current.
//
// Triggers coalesce in a 1-slot channel: a change that arrives while a pass
// runs causes one more pass.
func (a *Agent) fast(ctx context.Context) error {
	wake := time.NewTimer(0)
	defer wake.Stop()
	count, damage := time.NewTicker(countEvery), time.NewTicker(damageEvery)
	defer count.Stop()
	defer damage.Stop()
	wait := retryFirst
	for a.waitForTrigger(ctx, wake.C, count.C, damage.C) {
		if !a.passing.enter(ctx) {
			return nil
		}
		p, err := a.pass(ctx)
		a.passing.leave()
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			a.figures.passFailures.Add(1)
			a.log.Error("a pass failed; the last good state stays in force", "error", err, "retry", wait)
			wake.Reset(wait)
			wait = min(2*wait, retryMax)
		default:
			wait = retryFirst
			wake.Reset(untilWake(p, time.Now()))
		}
		a.announceSync()
	}
	return nil
}

// waitForTrigger returns true when a new pass is due, false when ctx is done.
func (a *Agent) waitForTrigger(ctx context.Context, wake, count, damage <-chan time.Time) bool {
	for {
		select {
		case <-ctx.Done():
			return false
		case <-a.trigger:
			return true
		case <-a.source.Snapshots():
			return true
		case <-a.prober.Changes():
			return true
		case <-wake:
			return true
		case <-count:
			a.announceSync() // programming the rules and stale-entry cleanup fail on their own
			if a.carried.update(a.dirty) {
				return true
			}
		case <-damage:
			if a.redirectsDamaged() {
				return true
			}
		}
	}
}

// redirectsDamaged checks whether others changed the redirect sets.
func (a *Agent) redirectsDamaged() bool {
	found, err := a.steering.Damage()
	if err != nil {
		a.log.Warn("the redirect sets can't be read", "error", err)
	}
	if found != "" {
		a.log.Warn("the redirect sets were changed by somebody else; repairing", "found", found)
		a.figures.setRepairs.Add(1)
		a.repairing = true
	}
	return found != ""
}

// untilWake bounds the plan's own wake-up to something a timer takes.
func untilWake(p *plan.Plan, now time.Time) time.Duration {
	if p.Wake.IsZero() {
		return time.Hour
	}
	return max(p.Wake.Sub(now), time.Millisecond)
}

// kick asks for a pass.
func (a *Agent) kick() { wake.Up(a.trigger) }

// pass computes a plan and carries it out. The order matters: the forwarder
// knows a service before it is redirected connections, and forgets it after
// redirecting stopped; a service leaves the kernel rules before they change.
func (a *Agent) pass(ctx context.Context) (*plan.Plan, error) {
	a.sync.begun(time.Now())
	if a.programmer.atomic {
		if !a.programmer.passing.enter(ctx) {
			return nil, ctx.Err()
		}
		defer a.programmer.passing.leave()
	}
	start := time.Now()
	var triggers [2][]time.Time
	if a.triggers != nil {
		triggers = a.triggers() // before Latest, which has at least what they led to
	}
	old, snapshot := a.current.Load(), a.source.Latest()
	a.figures.begun(snapshot, triggers)
	in := a.inputs(start, old, snapshot)
	p, d := plan.Compute(old, in)
	a.staleFlows.Coming(p)
	if a.uncommitted { // the forwarder has prepared a plan that never came in force
		a.userspace.Prepare(p, plan.Between(old, p))
	} else {
		a.userspace.Prepare(p, d)
	}
	a.uncommitted = true
	if old != nil && a.affinity != nil {
		a.affinity.Move(old, p, d)
	}
	a.repair.Follow(p, d)
	following := time.Now()
	r := a.steering.Follow(ctx, p, d)
	a.programmer.did(&r, following)
	if r.Err != nil {
		a.repairing = true
		if a.programmer.stumbled(d) {
			a.kick()
		}
		return p, a.sync.failed(fmt.Errorf("update the redirect sets: %w", r.Err))
	}
	a.commit(p, d)
	a.dirty, a.healthRevision = map[service.Key]bool{}, in.Health.Revision
	a.carried.forget(d)
	a.recents.Follow(d)
	if d.Full || !d.SameTargets(a.health) {
		a.prober.Update(plan.Targets(snapshot, a.health, p.Policy.ExcludeCIDRs...))
	}
	a.logDetector(old, p)
	a.followPassive(d)
	a.healths.Follow(p, d)
	a.adopted = nil // only the first plan asks: a service that comes later is new
	a.programmer.program(p, d, &r)
	a.staleFlows.Follow(old, d)
	if a.repairing { // not before: until now flows may have begun without them
		a.repairing = false
		a.staleFlows.All()
	}
	took := time.Since(start)
	a.sync.done(took)
	a.figures.done(snapshot, took)
	if old != nil || a.from == nil { // else they are no news
		a.announce(d.Events(p.Time), old == nil)
	}
	a.recordMoves(d)
	a.recordEjections(d, p.Time)
	if old == nil && a.from != nil {
		a.accounting.Resume(a.from.Kernel)
	}
	if old == nil { // what is there now began before this process: it is counted from here
		if err := a.accounting.Refresh(0, a.conntrack.List); err != nil {
			a.log.Warn("the kernel's connections can't be counted", "error", err)
		}
	}
	return p, nil
}

// commit makes p the current plan. Who reads counters for the one before meanwhile finds none of what p doesn't have.
func (a *Agent) commit(p *plan.Plan, d plan.Delta) {
	a.userspace.Commit()
	a.uncommitted = false
	a.accounting.SetPlan(p, d)
	a.hearing.Lock()
	a.skipOwnEnds()
	a.hearing.Unlock()
	a.figures.moves.count(d)
	a.current.Store(p)
}

// inputs gathers what Compute wants to know.
func (a *Agent) inputs(now time.Time, old *plan.Plan, snapshot *service.Snapshot) plan.Inputs {
	programmed, failed := a.programmer.observed(a.dirty)
	a.carried.update(a.dirty)
	in := plan.Inputs{
		Now: now, Snapshot: snapshot, Health: a.prober.View(), Ejected: a.ejections(old), Caps: a.capsNow(now), Policy: a.policyNow(),
		Observed: plan.Observed{
			Carried: a.carried.total, Programmed: programmed, InStep: a.programmer.inStep, Adopted: a.adopted,
		},
		Failed: failed, Pins: a.orders.Pins.Get(a.dirty),
	}
	if old != nil && in.Health.Revision == a.healthRevision {
		in.Dirty = a.dirty
	}
	return in
}

// maxAnnounced is how many services a start is logged of, one by one; with more,
// they are counted.
const maxAnnounced = 100

// announce tells the log and the subscribers what changed, or what there is at
// the start.
func (a *Agent) announce(events []plan.Event, first bool) {
	level := slog.LevelInfo
	if first && len(events) > maxAnnounced {
		a.log.Info("started with many services; kproxy status lists them", "service ports", len(events))
		level = slog.LevelDebug
	}
	for _, e := range events {
		a.log.Log(context.Background(), level, e.Message, "kind", e.Kind, "service", e.Service)
	}
	a.events.publish(events)
}

// passes holds what is known of the fast loop's passes.
type passes struct {
	status  plan.SyncStatus
	queued  time.Time       // when one was last due
	pending time.Time       // since when a change waits for a successful one
	last    []plan.SyncTime // when they ended and how long they took, oldest first; never modified
}

// syncState holds passes. Safe for concurrent use.
type syncState struct {
	mu sync.Mutex
	passes
}

// announceSync publishes what became of the syncs since it was last called. Only
// the fast loop calls it.
func (a *Agent) announceSync() {
	now := a.syncStatus().LastError
	a.events.publish(syncEvents(a.announced, now))
	a.announced = now
}

// syncEvents returns what a person would want to see of a change of the last
// sync's error, which is empty for none: a failure once, however often it repeats
// itself, and its end.
func syncEvents(was, now string) []plan.Event {
	message := "sync succeeds again"
	switch now {
	case was:
		return nil
	case "":
	default:
		message = "sync failed: " + onOneLine(now)
	}
	return []plan.Event{{Time: time.Now(), Kind: "sync", Message: message}}
}

// onOneLine returns a list of errors, as errors.Join and go-multierror print it, as a
// sentence.
func onOneLine(list string) string {
	var out []string
	for line := range strings.Lines(list) {
		line = strings.TrimPrefix(strings.TrimSpace(line), "* ")
		if line != "" && !strings.HasSuffix(line, " occurred:") { // go-multierror's heading
			out = append(out, line)
		}
	}
	return strings.Join(out, "; ")
}

// maxSyncTimes is how many passes' times are remembered.
const maxSyncTimes = 60

// begun records that a pass was due at start. As long as none succeeds, what it
// is about waits: also while this one hangs.
func (s *syncState) begun(start time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.queued = start
	if s.pending.IsZero() {
		s.pending = start
	}
}

// failed records a failed pass and returns its error.
func (s *syncState) failed(err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status.LastError = err.Error()
	return err
}

// done records a pass that took effect.
func (s *syncState) done(took time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status = plan.SyncStatus{
		Generation: s.status.Generation + 1, LastSuccess: time.Now(), DurationSeconds: took.Seconds(),
	}
	s.pending = time.Time{}
	kept := s.last[max(0, len(s.last)-maxSyncTimes+1):]
	s.last = slices.Concat(kept, []plan.SyncTime{{Time: s.status.LastSuccess, DurationSeconds: s.status.DurationSeconds}})
}

func (s *syncState) get() passes {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.passes
}
