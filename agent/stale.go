package agent

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace"
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
	halfOpen func(p *plan.Plan) error
	cleaned  func(time.Duration)

	wake chan struct{} // 1 slot: triggers coalesce

	mu      sync.Mutex // the loops request, run takes
	pending pending
	soon    bool  // a clean-up has been triggered, halfOpenDelay after the request
	err     error // of the last clean-up
}

// halfOpenDelay is how long a search for half-open connections waits for others, to be one with them: a client
// sends its SYN again after a second (RFC 6298), and going through the kernel's table is most of what a change costs.
const halfOpenDelay = 200 * time.Millisecond

// pending says what a clean-up has to look for.
type pending struct {
	stale    bool
	former   []*plan.Plan // whose rules were in the kernel until a moment ago
	halfOpen bool
	ejected  bool // an endpoint was: its clients send their SYNs again within the second
}

// maxFormer is how many plans are remembered while clean-ups fail.
const maxFormer = 64

func (w *pending) add(o pending) {
	w.stale = w.stale || o.stale
	w.former = append(w.former, o.former...)
	if more := len(w.former) - maxFormer; more > 0 {
		w.former = slices.Delete(w.former, 0, more)
	}
	w.halfOpen, w.ejected = w.halfOpen || o.halfOpen, w.ejected || o.ejected
}

func (w *pending) empty() bool { return !w.stale && !w.halfOpen }

// follow requests a search for what going from old by d may have left.
func (s *staleCleanup) follow(old *plan.Plan, d plan.Delta) { s.request(between(old, d)) }

// all requests a search of every entry. It is called when flows may have begun while
// no rules led to their endpoints: UDP clients would otherwise stay with what
// conntrack remembers for as long as they send.
func (s *staleCleanup) all() {
	s.request(pending{stale: true, halfOpen: true})
}

// written is called when the kernel's rules were written; was is the plan that they
// followed before, nil if that isn't known. Until then flows may have begun by
// those, or, where others had removed them or only a part had been written,
// otherwise. Where that can't be, d isn't Full and says what has changed: the rest
// has misled no flow.
func (s *staleCleanup) written(was *plan.Plan, d plan.Delta) {
	w := pending{stale: true, former: []*plan.Plan{was}, halfOpen: true}
	if was != nil && !d.Full {
		w = between(was, d)
	}
	s.request(w)
}

// between returns what going from old by d may leave.
func between(old *plan.Plan, d plan.Delta) pending {
	w := pending{halfOpen: conntrack.MayBeHalfOpen(d), ejected: d.Ejects()}
	if conntrack.MayBeStale(d) {
		w.stale, w.former = true, []*plan.Plan{old}
	}
	return w
}

// request asks for a clean-up: at once, or soon where only TCP clients wait.
func (s *staleCleanup) request(w pending) {
	if w.empty() {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pending.add(w)
	switch {
	case w.stale || w.ejected:
		s.trigger()
	case !s.soon:
		s.soon = true
		time.AfterFunc(halfOpenDelay, s.trigger)
	}
}

func (s *staleCleanup) trigger() {
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
	s.pending, s.soon = pending{}, false
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
	if !w.halfOpen {
		return nil
	}
	return s.halfOpen(p)
}

// deleteHalfOpen deletes the TCP entries that wait for endpoints which p doesn't use.
func (a *Agent) deleteHalfOpen(p *plan.Plan) error {
	flows, err := a.conntrack.ListUnanswered(service.TCP)
	if err != nil {
		return err
	}
	for _, by := range a.plansSince(p) {
		flows = conntrack.HalfOpen(flows, by, a.local)
	}
	return a.deleteFlows(flows)
}

// plansSince returns p and the plans that were computed after it. Flows that are
// listed may have begun by those, and not be stale: each requests a clean-up of its
// own, once it is in force.
func (a *Agent) plansSince(p *plan.Plan) []*plan.Plan {
	out := []*plan.Plan{p}
	for _, later := range []*plan.Plan{a.current.Load(), a.coming.Load()} {
		if later != nil && !slices.Contains(out, later) {
			out = append(out, later)
		}
	}
	return out
}

// deleteStale deletes the UDP entries that going from the former plans to p has
// made stale.
func (a *Agent) deleteStale(former []*plan.Plan, p *plan.Plan) error {
	flows, err := a.conntrack.List(service.UDP)
	if err != nil {
		return err
	}
	plans := a.plansSince(p) // after the list
	_, udp := a.userspace.Ports()
	alive := liveFlows(a.userspace.Connections())
	c := conntrack.StaleConfig{
		Listeners: []uint16{udp}, Local: a.local,
		HasSession: func(f conntrack.Flow) bool { return alive[flowOf(f)] },
	}
	for _, old := range former {
		stale := staleByAll(flows, old, plans, c)
		if err := a.deleteFlows(stale); err != nil {
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

func (a *Agent) deleteFlows(flows []conntrack.Flow) error {
	for _, f := range flows {
		a.log.Debug("deleting a stale conntrack entry", "flow", f)
		if err := a.conntrack.Delete(f); err != nil {
			return err
		}
		a.figures.forgot(&f)
	}
	return nil
}

// accountingAge is how old the figures of the kernel's live connections may be:
// a list of a full table takes a while, and status may be asked for often.
const accountingAge = time.Second

// Connections lists what is alive in every data plane, sorted.
func (a *Agent) Connections(context.Context) ([]plan.ConnectionStatus, error) {
	if a.current.Load() == nil {
		return nil, errStarting
	}
	if err := a.accounting.Refresh(0, a.conntrack.List); err != nil {
		return nil, err
	}
	rows := []plan.ConnectionStatus{}
	now := time.Now()
	for _, c := range a.userspace.Connections() {
		rows = append(rows, userspaceRow(c, now))
	}
	for _, c := range a.accounting.Connections() {
		rows = append(rows, a.kernelRow(c, now))
	}
	slices.SortStableFunc(rows, compareRows)
	return rows, nil
}

func userspaceRow(c userspace.Connection, now time.Time) plan.ConnectionStatus {
	return plan.ConnectionStatus{
		Protocol: c.Protocol.String(), Client: c.Client, Service: c.Service.String(), Address: c.Address, Endpoint: c.Endpoint,
		DataPlane: plan.Userspace, AgeSeconds: now.Sub(c.Started).Seconds(), BytesIn: c.BytesIn, BytesOut: c.BytesOut,
	}
}

func (a *Agent) kernelRow(c conntrack.Connection, now time.Time) plan.ConnectionStatus {
	f := &c.Flow
	row := plan.ConnectionStatus{
		Protocol: f.Protocol.String(), Client: f.OrigSrc, Service: c.Service.String(), Address: f.OrigDst, Endpoint: f.ReplySrc,
		DataPlane: carrier(f, a.caps.Planes), BytesIn: f.OrigBytes, BytesOut: f.ReplyBytes,
	}
	if !f.Start.IsZero() {
		row.AgeSeconds = now.Sub(f.Start).Seconds()
	}
	return row
}

// carrier is the data plane that carries a flow.
func carrier(f *conntrack.Flow, planes []plan.Abilities) plan.DataPlane {
	at := slices.IndexFunc(planes, func(a plan.Abilities) bool { return a.DestinationNAT == f.DestinationNAT() })
	if at < 0 {
		return plan.None
	}
	return planes[at].Plane
}

func compareRows(x, y plan.ConnectionStatus) int {
	return cmp.Or(
		strings.Compare(x.Service, y.Service), strings.Compare(x.Protocol, y.Protocol),
		x.Client.Compare(y.Client), x.Address.Compare(y.Address),
	)
}
