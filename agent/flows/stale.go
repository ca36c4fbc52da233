package flows

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/service/wake"
	"kproxy.dev/kproxy/userspace"
)

// StaleCleanup deletes the conntrack entries that lead clients elsewhere than the
// plan in force does. Most plans can't leave any; but rules that were missing for a
// while or came late, closed redirect sets, or a clean-up that failed may have left
// some.
//
// It runs beside the fast loop: the kernel takes ten milliseconds to list an empty
// table, and new connections go where they should without it. Requests that come
// while it runs are one clean-up.
type StaleCleanup struct {
	Config
	sweep  func(w pending, p *plan.Plan) error // looks for what is pending and deletes it
	coming atomic.Pointer[plan.Plan]           // that the fast loop carries out, or last tried to

	wake chan struct{} // 1 slot: triggers coalesce

	mu      sync.Mutex // the loops request, Run takes
	pending pending
	soon    *time.Timer // triggers a clean-up halfOpenDelay after the request; nil for none
	err     error       // of the last clean-up
}

// Config holds what a StaleCleanup works with.
type Config struct {
	Log       *slog.Logger
	Conntrack *conntrack.Client
	Userspace *userspace.Server
	Local     func(netip.Addr) bool // whether packets to an address are delivered on this node
	Plan      func() *plan.Plan     // in force
	Deleted   func(*conntrack.Flow)
	Cleaned   func(time.Duration)
}

// NewStaleCleanup returns a StaleCleanup that does nothing by itself before Run.
func NewStaleCleanup(c Config) *StaleCleanup {
	s := &StaleCleanup{Config: c, wake: make(chan struct{}, 1)}
	s.sweep = s.deleteLeft
	return s
}

// Retries of a clean-up that failed.
const (
	retryFirst = 500 * time.Millisecond
	retryMax   = 30 * time.Second
)

// halfOpenDelay has a search for half-open connections wait for others, to be one with them: a client
// sends its SYN again after a second (RFC 6298), and a list of the kernel's table would be most of what a change costs.
const halfOpenDelay = 200 * time.Millisecond

// pending says what a clean-up has to look for.
type pending struct {
	stale    bool
	former   []*plan.Plan // whose rules were in the kernel until a moment ago
	halfOpen bool
	unused   []netip.AddrPort // TCP endpoints to which alone there may be half-open connections; of no use beside halfOpen
	ejected  bool             // an endpoint was: its clients send their SYNs again within the second
}

// maxFormer bounds how many plans are remembered while clean-ups fail; of more endpoints than maxUnused, even a short table
// is listed about as quickly.
const maxFormer, maxUnused = 64, 16

func (w *pending) add(o pending) {
	w.stale = w.stale || o.stale
	w.former = append(w.former, o.former...)
	if more := len(w.former) - maxFormer; more > 0 {
		w.former = slices.Delete(w.former, 0, more)
	}
	w.halfOpen, w.ejected = w.halfOpen || o.halfOpen, w.ejected || o.ejected
	for _, at := range o.unused {
		if !slices.Contains(w.unused, at) {
			w.unused = append(w.unused, at)
		}
	}
	if w.halfOpen = w.halfOpen || len(w.unused) > maxUnused; w.halfOpen {
		w.unused = nil
	}
}

func (w *pending) empty() bool { return !w.stale && !w.halfOpen && len(w.unused) == 0 }

// Coming notes the plan that the fast loop carries out.
func (s *StaleCleanup) Coming(p *plan.Plan) { s.coming.Store(p) }

// Follow requests a search for what going from old by d may have left.
func (s *StaleCleanup) Follow(old *plan.Plan, d plan.Delta) { s.request(between(old, d)) }

// All requests a search of every entry. It is called when flows may have begun while
// no rules led to their endpoints: UDP clients would otherwise stay with what
// conntrack remembers for as long as they send.
func (s *StaleCleanup) All() {
	s.request(pending{stale: true, halfOpen: true})
}

// Written is called when the kernel's rules were written; was is the plan that they
// followed before, nil if that isn't known. Until then flows may have begun by
// those, or, where others had removed them or only a part had been written,
// otherwise. Where that can't be, d isn't Full and says what has changed: the rest
// has misled no flow.
func (s *StaleCleanup) Written(was *plan.Plan, d plan.Delta) {
	w := pending{stale: true, former: []*plan.Plan{was}, halfOpen: true}
	if was != nil && !d.Full {
		w = between(was, d)
	}
	s.request(w)
}

// between returns what going from old by d may leave.
func between(old *plan.Plan, d plan.Delta) pending {
	w := pending{ejected: d.Ejects()}
	w.unused, w.halfOpen = conntrack.MayBeHalfOpen(d)
	if conntrack.MayBeStale(d) {
		w.stale, w.former = true, []*plan.Plan{old}
	}
	return w
}

// request asks for a clean-up: at once, or soon where only TCP clients wait.
func (s *StaleCleanup) request(w pending) {
	if w.empty() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pending.add(w)
	switch {
	case w.stale || w.ejected:
		s.trigger()
	case s.soon == nil:
		s.soon = time.AfterFunc(halfOpenDelay, s.trigger)
	}
}

func (s *StaleCleanup) trigger() { wake.Up(s.wake) }

// Report returns the error of the last clean-up.
func (s *StaleCleanup) Report() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Run cleans up until ctx is done.
func (s *StaleCleanup) Run(ctx context.Context) error {
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
		s.Log.Error("stale conntrack entries can't be deleted", "error", err, "retry", wait)
		retry.Reset(wait)
		wait = min(2*wait, retryMax)
	}
}

// take returns what is pending, which is its caller's from then on. mu is held.
func (s *StaleCleanup) take() pending {
	w := s.pending
	s.pending = pending{}
	if s.soon != nil {
		s.soon.Stop()
		s.soon = nil
	}
	return w
}

// clean does what is pending, by the plan that is in force now.
func (s *StaleCleanup) clean() error {
	s.mu.Lock()
	w := s.take()
	s.mu.Unlock()
	// Only now: a plan is in force before it requests anything, and what a later one
	// requests is the next clean-up's.
	p := s.Plan()
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

func (s *StaleCleanup) do(w pending, p *plan.Plan) error {
	if w.empty() {
		return nil
	}
	if w.stale {
		start := time.Now()
		defer func() { s.Cleaned(time.Since(start)) }()
		if len(w.former) == 0 {
			w.former = []*plan.Plan{nil}
		}
	}
	return s.sweep(w, p)
}

// deleteLeft deletes the TCP entries that wait for endpoints which p doesn't use, and the UDP entries that going from the former
// plans to p has made stale. The kernel goes through a short table once for both, where it must list.
func (s *StaleCleanup) deleteLeft(w pending, p *plan.Plan) error {
	if s.Conntrack.DeleteUnanswered(w.unused...) != nil {
		w.halfOpen = true
	}
	var which []conntrack.Wanted
	if w.stale {
		which = append(which, conntrack.Wanted{Protocol: service.UDP})
	}
	if w.halfOpen {
		which = append(which, conntrack.Wanted{Protocol: service.TCP, Unanswered: true})
	}
	if which == nil {
		return nil
	}
	flows, err := s.Conntrack.List(which...)
	if err != nil {
		return err
	}
	plans := s.plansSince(p) // after the list
	if w.halfOpen {          // first, as an endpoint that terminates may answer meanwhile
		if err := s.deleteHalfOpen(flows, plans); err != nil {
			return err
		}
	}
	if w.stale {
		return s.deleteStale(flows, w.former, plans)
	}
	return nil
}

// deleteHalfOpen deletes those of the flows that wait for endpoints which none of the plans uses.
func (s *StaleCleanup) deleteHalfOpen(flows []conntrack.Flow, plans []*plan.Plan) error {
	for _, p := range plans {
		flows = conntrack.HalfOpen(flows, p, s.Local)
	}
	return s.delete(flows)
}

// plansSince returns p and the plans that were computed after it. Flows that are
// listed may have begun by those, and not be stale: each requests a clean-up of its
// own, once it is in force.
func (s *StaleCleanup) plansSince(p *plan.Plan) []*plan.Plan {
	out := []*plan.Plan{p}
	for _, later := range []*plan.Plan{s.Plan(), s.coming.Load()} {
		if later != nil && !slices.Contains(out, later) {
			out = append(out, later)
		}
	}
	return out
}

// deleteStale deletes the UDP entries among flows that going from one of the former plans to each of plans has made stale. It
// alters flows.
func (s *StaleCleanup) deleteStale(flows []conntrack.Flow, former, plans []*plan.Plan) error {
	_, udp := s.Userspace.Ports()
	alive := liveFlows(s.Userspace.Connections())
	c := conntrack.StaleConfig{
		Listeners: []uint16{udp}, Local: s.Local,
		HasSession: func(f conntrack.Flow) bool { return alive[flowOf(f)] },
	}
	for _, old := range former {
		stale := staleByAll(flows, old, plans, c)
		if err := s.delete(stale); err != nil {
			return err
		}
		deleted := make(map[conntrack.Flow]bool, len(stale))
		for _, f := range stale {
			deleted[f] = true
		}
		flows = slices.DeleteFunc(flows, func(f conntrack.Flow) bool { return deleted[f] })
	}
	return nil
}

// staleByAll returns the flows that going from old to each of the plans makes stale.
func staleByAll(flows []conntrack.Flow, old *plan.Plan, plans []*plan.Plan, c conntrack.StaleConfig) []conntrack.Flow {
	for _, p := range plans {
		if len(flows) > 0 {
			flows = conntrack.Stale(flows, old, p, c)
		}
	}
	return flows
}

func (s *StaleCleanup) delete(flows []conntrack.Flow) error {
	for _, f := range flows {
		s.Log.Debug("deleting a stale conntrack entry", "flow", f)
		if err := s.Conntrack.Delete(f); err != nil {
			return err
		}
		s.Deleted(&f)
	}
	return nil
}

// ForgetListener deletes the UDP entries that lead to this process, which is
// about to end: the next datagram of each client goes to the kernel's rules.
func (s *StaleCleanup) ForgetListener() error {
	p := s.Plan()
	if p == nil {
		return nil
	}
	flows, err := s.Conntrack.List(conntrack.Wanted{Protocol: service.UDP})
	if err != nil {
		return fmt.Errorf("list UDP flows: %w", err)
	}
	return s.delete(conntrack.Stale(flows, nil, p, conntrack.StaleConfig{Local: s.Local}))
}
