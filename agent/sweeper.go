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

// sweeper deletes the conntrack entries that would keep clients away from where
// the plan in force wants their packets to go. Most plans can't have made any; but
// rules that were missing for a while or came late, a portal that was closed, or a
// sweep that failed may have left some.
//
// It works beside the fast loop: the kernel takes ten milliseconds to go through
// an empty table, and new connections go where they should without it. What
// comes while it works is one sweep.
type sweeper struct {
	log  *slog.Logger
	plan func() *plan.Plan // in force
	// stale deletes what going from a former plan to p has made stale.
	stale func(former []*plan.Plan, p *plan.Plan) error
	// halfOpen deletes what waits for endpoints that p doesn't use.
	halfOpen func(families [2]bool, p *plan.Plan) error
	swept    func(time.Duration)

	wake chan struct{} // 1 slot: triggers coalesce

	mu   sync.Mutex // the loops owe, run takes
	owed sweep
	err  error // of the last sweep
}

// sweep is what there is to look for.
type sweep struct {
	stale    bool
	former   []*plan.Plan // whose rules were in the kernel until a moment ago
	halfOpen [2]bool      // by family
}

// formerAtMost is how many plans are remembered while sweeps fail.
const formerAtMost = 64

var bothFamilies = [2]bool{service.IPv4: true, service.IPv6: true}

func (w *sweep) add(o sweep) {
	w.stale = w.stale || o.stale
	w.former = append(w.former, o.former...)
	if more := len(w.former) - formerAtMost; more > 0 {
		w.former = slices.Delete(w.former, 0, more)
	}
	for f := range w.halfOpen {
		w.halfOpen[f] = w.halfOpen[f] || o.halfOpen[f]
	}
}

func (w *sweep) empty() bool { return !w.stale && w.halfOpen == [2]bool{} }

// follow has looked for what going from old by d may have left.
func (s *sweeper) follow(old *plan.Plan, d plan.Delta) { s.owe(between(old, d)) }

// all has looked at every entry. It is called when flows may have begun while the
// way to their endpoints wasn't there: UDP clients would otherwise stay with what
// conntrack remembers for as long as they send.
func (s *sweeper) all() {
	s.owe(sweep{stale: true, halfOpen: bothFamilies})
}

// written is called when the kernel's rules were written; was is the plan that they
// followed before, nil if that isn't known. Until then flows may have begun by
// those, or, where somebody had removed them or only a part had been written,
// otherwise. Where that can't be, d isn't Full and says what has changed: the rest
// has led no flow astray.
func (s *sweeper) written(was *plan.Plan, d plan.Delta) {
	w := sweep{stale: true, former: []*plan.Plan{was}, halfOpen: bothFamilies}
	if was != nil && !d.Full {
		w = between(was, d)
	}
	s.owe(w)
}

// between is what going from old by d may leave.
func between(old *plan.Plan, d plan.Delta) sweep {
	w := sweep{halfOpen: conntrack.HalfOpenIn(d)}
	if conntrack.MayBeStale(d) {
		w.stale, w.former = true, []*plan.Plan{old}
	}
	return w
}

func (s *sweeper) owe(w sweep) {
	if w.empty() {
		return
	}
	s.mu.Lock()
	s.owed.add(w)
	s.mu.Unlock()
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// report returns the error of the last sweep.
func (s *sweeper) report() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// run sweeps until ctx is done.
func (s *sweeper) run(ctx context.Context) error {
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
		err := s.sweep()
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

// sweep does what is owed, by the plan that is in force now.
func (s *sweeper) sweep() error {
	s.mu.Lock()
	w := s.owed
	s.owed = sweep{}
	s.mu.Unlock()
	// Only now: the plan that owes something is in force before it says so, and what
	// one owes that comes from here on is the next sweep's.
	p := s.plan()
	var err error
	if p != nil {
		err = s.do(w, p)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.err = err; err != nil || p == nil { // what is owed waits for the first plan
		s.owed.add(w)
	}
	return err
}

func (s *sweeper) do(w sweep, p *plan.Plan) error {
	if w.empty() {
		return nil
	}
	start := time.Now()
	if w.stale {
		defer func() { s.swept(time.Since(start)) }()
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
