package agent

import (
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// staleCleanup deletes the conntrack entries that lead clients elsewhere than the
// plan in force does. Most plans can't leave any; but rules that were missing for a
// while or came late, closed redirect sets, or a clean-up that failed may have left
// some.
//
// It runs beside the fast loop: the kernel takes ten milliseconds to go through
// an empty table, and new connections go where they should without it. Requests that
// come while it runs are one clean-up.
type staleCleanup struct {
	log  *slog.Logger
	plan func() *plan.Plan // in force
	// stale deletes what going from a former plan to p has made stale.
	stale func(former []*plan.Plan, p *plan.Plan) error
	// halfOpen deletes what waits for endpoints that p doesn't use.
	halfOpen func(families [2]bool, p *plan.Plan) error
	cleaned  func(time.Duration)

	wake chan struct{} // 1 slot: triggers coalesce

	mu      sync.Mutex // the loops request, run takes
	pending pending
	err     error // of the last clean-up
}

// pending is what a clean-up has to look for.
type pending struct {
	stale    bool
	former   []*plan.Plan // whose rules were in the kernel until a moment ago
	halfOpen [2]bool      // by family
}

// maxFormer is how many plans are remembered while clean-ups fail.
const maxFormer = 64

var bothFamilies = [2]bool{service.IPv4: true, service.IPv6: true}

func (w *pending) add(o pending) {
	w.stale = w.stale || o.stale
	w.former = append(w.former, o.former...)
	if more := len(w.former) - maxFormer; more > 0 {
		w.former = slices.Delete(w.former, 0, more)
	}
	for f := range w.halfOpen {
		w.halfOpen[f] = w.halfOpen[f] || o.halfOpen[f]
	}
}

func (w *pending) empty() bool { return !w.stale && w.halfOpen == [2]bool{} }

// follow requests a search for what going from old by d may have left.
func (s *staleCleanup) follow(old *plan.Plan, d plan.Delta) { s.request(between(old, d)) }

// all requests a search of every entry. It is called when flows may have begun while
// no rules led to their endpoints: UDP clients would otherwise stay with what
// conntrack remembers for as long as they send.
func (s *staleCleanup) all() {
	s.request(pending{stale: true, halfOpen: bothFamilies})
}

// written is called when the kernel's rules were written; was is the plan that they
// followed before, nil if that isn't known. Until then flows may have begun by
// those, or, where somebody had removed them or only a part had been written,
// otherwise. Where that can't be, d isn't Full and says what has changed: the rest
// has misled no flow.
func (s *staleCleanup) written(was *plan.Plan, d plan.Delta) {
	w := pending{stale: true, former: []*plan.Plan{was}, halfOpen: bothFamilies}
	if was != nil && !d.Full {
		w = between(was, d)
	}
	s.request(w)
}

// between is what going from old by d may leave.
func between(old *plan.Plan, d plan.Delta) pending {
	w := pending{halfOpen: conntrack.HalfOpenIn(d)}
	if conntrack.MayBeStale(d) {
		w.stale, w.former = true, []*plan.Plan{old}
	}
	return w
}

func (s *staleCleanup) request(w pending) {
	if w.empty() {
		return
	}
	s.mu.Lock()
	s.pending.add(w)
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// report returns the error of the last clean-up.
func (s *staleCleanup) report() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// run cleans up until ctx is done.
func (s *staleCleanup) run(ctx context.Context) error {
	retry := time.NewTimer(time.Hour)
	defer retry.Stop()
	wait := retryFirst
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-s.wake:
		case <-retry.C:
		}
		err := s.clean()
		if err == nil {
			retry.Stop()
			wait = retryFirst
			continue
		}
		s.log.Error("stale conntrack entries can't be deleted", "error", err, "retry", wait)
		retry.Reset(wait)
		wait = min(2*wait, retryMax)
	}
}

// clean does what is pending, by the plan that is in force now.
func (s *staleCleanup) clean() error {
	s.mu.Lock()
	w := s.pending
	s.pending = pending{}
	s.mu.Unlock()
	// Only now: a plan is in force before it requests anything, and what a later one
	// requests is the next clean-up's.
	p := s.plan()
	var err error
	if p != nil {
		err = s.do(w, p)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err = err; err != nil || p == nil { // it waits for the first plan
		s.pending.add(w)
	}
	return err
}

func (s *staleCleanup) do(w pending, p *plan.Plan) error {
	if w.empty() {
		return nil
	}
	start := time.Now()
	if w.stale {
		defer func() { s.cleaned(time.Since(start)) }()
		if len(w.former) == 0 {
			w.former = []*plan.Plan{nil}
		}
		if err := s.stale(w.former, p); err != nil {
			return err
		}
	}
	if w.halfOpen == [2]bool{} {
		return nil
	}
	return s.halfOpen(w.halfOpen, p)
}
