package agent

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"time"

	"kproxy.dev/kproxy/agent/flows"
	"kproxy.dev/kproxy/agent/node"
	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace"
)

// Status describes everything as of now.
func (a *Agent) Status() plan.Status {
	now := time.Now()
	st, p := a.summary(now)
	if p == nil {
		return st
	}
	st.Services = make([]plan.ServiceStatus, len(p.Services))
	meters := a.meters.of(a, p)
	for i, s := range p.Services {
		row := &st.Services[i]
		*row = s.Row(now)
		a.addCounters(row, &meters[i], s.Port.Key)
		a.addChecks(row, s.Port)
		if pace := a.prober.Pace(s.Port.Namespace); pace > 1 && a.health.Fill(s.Port.Health, s.Port.Protocol).Kind != service.CheckOff {
			row.Problems = append(slices.Clone(row.Problems), fmt.Sprintf(
				"its endpoints are probed %.3g times less often than they should be: its namespace asks for more than its share of --health-max-rate %d probes a second", pace, a.cfg.Health.MaxRate))
		}
		if more := a.healths.ProblemsOf(s.Port.Namespace, s.Port.Name); len(more) > 0 {
			row.Problems = slices.Concat(row.Problems, more)
		}
	}
	return st
}

// Summary returns Status without rows for service ports, and what makes them.
func (a *Agent) Summary() (plan.Status, plan.ServiceRows) {
	now := time.Now()
	st, p := a.summary(now)
	if p == nil {
		return st, plan.ServiceRows{}
	}
	meters := a.meters.of(a, p)
	var row plan.ServiceStatus
	return st, plan.ServiceRows{
		Services:    p.Services,
		Connections: func(i int) plan.Connections { return meters[i].connections() },
		Row: func(i int) *plan.ServiceStatus {
			s := p.Services[i]
			s.Fill(&row, now)
			a.addCounters(&row, &meters[i], s.Port.Key)
			return &row
		},
	}
}

// summary returns the status without service ports, and the plan, whose service ports' counters it brings up to date. While Run may
// still be setting up what is read for that, there is no plan.
func (a *Agent) summary(now time.Time) (plan.Status, *plan.Plan) {
	st := plan.Status{
		Version: a.options.Version, Mode: a.policy.Mode, Node: a.node, UptimeSeconds: int64(now.Sub(a.started).Seconds()),
		Sources: []plan.SourceStatus{}, Capabilities: []plan.Capability{}, Services: []plan.ServiceStatus{},
	}
	if a.isSetUp.Load() {
		st.Sources = a.sourceStatus()
	}
	st.NotReady = a.NotReady()
	st.Ready = st.NotReady == ""
	p := a.current.Load()
	if p == nil {
		return st, nil
	}
	if a.orders.Pins.Problem != "" {
		st.Sources = append(st.Sources, plan.SourceStatus{Name: a.orders.Pins.Path, Synced: true, Error: a.orders.Pins.Problem})
	}
	st.Alive, st.Capabilities, st.Sync = a.heart.alive.Load(), slices.Concat(a.caps.All, []plan.Capability{p.Policy.Detector()}), a.syncStatus()
	st.Exhausted = a.userspace.Exhausted()
	st.PassiveHealth = a.passive.status()
	st.Drain = a.drainStatus(p)
	if left := a.left.Load(); left != nil {
		st.Capabilities = slices.Concat(st.Capabilities, *left)
	}
	if w, ok := a.programmer.plane.(kernel.Warner); ok { // what it can't find out, the next status may
		st.Warnings, _ = a.warnings.get(warningsAge, func([]string) ([]string, error) { return w.Warnings() })
	}
	st.Warnings = slices.Concat(a.passive.view().Warnings(), st.Warnings)
	if err := a.accounting.Refresh(accountingAge, a.conntrack.List); err != nil {
		a.log.Warn("the kernel's connections can't be counted", "error", err)
	}
	a.settle()
	return st, p
}

// warningsAge is how old a plane's warnings may be: live screens ask all the time.
const warningsAge = 5 * time.Second

func (a *Agent) sourceStatus() []plan.SourceStatus {
	out := []plan.SourceStatus{}
	for _, s := range a.source.Status() {
		out = append(out, plan.SourceStatus{Name: s.Name, Synced: s.Synced, Error: strings.Join(s.Errors, "\n"), Saved: s.Saved})
	}
	return out
}

// addCounters fills a row's counters.
func (a *Agent) addCounters(row *plan.ServiceStatus, m *meter, key service.Key) {
	us, k, moved := m.user.Counters(), m.kernel.Figures(), a.figures.moves.of(key)
	row.Connections, row.Offloads, row.Recalls = connectionsOf(&us, &k.Figures), moved.offloads, moved.recalls
	if l := us.Looped; time.Since(l.Last) < loopedShown {
		row.Problems = append(slices.Clone(row.Problems), fmt.Sprintf(
			"%d connections or datagrams, the last from %s, arrived with a TTL of 1 and weren't forwarded: a loop, as where an endpoint is a node and its port a node port, unless that client traces its route", l.Count, l.From))
	}
	at := make(map[netip.AddrPort]conntrack.Figures, len(us.Endpoints)+len(k.Endpoints))
	for _, e := range k.Endpoints {
		at[e.Address] = e.Figures
	}
	for _, e := range us.Endpoints {
		f := at[e.Address]
		at[e.Address] = conntrack.Figures{
			Active: f.Active + e.Active, Total: f.Total + e.Total, Failed: f.Failed + e.Failures, BytesIn: f.BytesIn + e.BytesIn, BytesOut: f.BytesOut + e.BytesOut,
		}
	}
	for i := range row.Endpoints {
		e := &row.Endpoints[i]
		f := at[e.Address]
		e.ActiveConnections, e.TotalConnections, e.Failures = f.Active, f.Total, f.Failed
		e.BytesIn, e.BytesOut = f.BytesIn, f.BytesOut
		if e.Ejected != nil {
			e.LastError = a.passive.view().Text(e.Ejected, time.Now())
		}
	}
}

// loopedShown is how long a service's problems tell of packets that arrived with a TTL of 1.
const loopedShown = 10 * time.Minute

// addChecks says of a row's endpoints when they were last checked, and how long that took.
func (a *Agent) addChecks(row *plan.ServiceStatus, p *service.Port) {
	view := a.prober.View()
	for i := range row.Endpoints {
		e := &row.Endpoints[i]
		c := a.prober.Last(view.Target(p, e.Address))
		e.LastCheck, e.LastCheckSeconds = c.At, c.Took.Seconds()
	}
}

// accountingAge bounds how old the figures of the kernel's live connections may be:
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
	return flows.Rows(a.userspace.Connections(), a.accounting.Connections(), a.caps.Planes), nil
}

// Recent returns what is remembered of a service port's clients, and what the kernel and userspace carry
// for them now.
func (a *Agent) Recent(k service.Key) (plan.Recent, error) {
	if a.current.Load() == nil {
		return plan.Recent{}, errStarting
	}
	if err := a.accounting.Refresh(accountingAge, a.conntrack.List); err != nil {
		return plan.Recent{}, err
	}
	return a.recents.Of(k, a.accounting, a.userspace), nil
}

// Refused returns [flows.Recents.Refused].
func (a *Agent) Refused() []plan.Ended { return a.recents.Refused() }

// errStarting is what is said while Run sets up.
var errStarting = errors.New("kproxy is still starting")

// Subscribe returns the events from now on.
func (a *Agent) Subscribe() (<-chan plan.Event, func()) { return a.events.subscribe(eventBuffer) }

// Pin keeps a service port in a data plane until PreferAuto.
func (a *Agent) Pin(k service.Key, pref service.Preference) error {
	if a.current.Load() == nil {
		return errStarting
	}
	if err := a.orders.Take(func() error { return a.orders.Pins.Set([]service.Key{k}, pref) }); err != nil {
		return err
	}
	a.log.Info("pinned", "service", k, "dataplane", pref)
	a.kick()
	return nil
}

// NotReady says why new connections to some service may not be carried yet, or are
// no longer; it is empty while they all are. That takes a plan of everything that the
// source says, the sets and rules that lead to userspace, a forwarder that serves, and
// the kernel's rules: those of each service have been written, or failed with a reason
// that the service's status gives, and userspace serves it meanwhile.
func (a *Agent) NotReady() string {
	if why := a.notReady(); why != "" {
		return why
	}
	a.wasReady.Store(true)
	return ""
}

// everReady reports whether kproxy is ready or has been.
func (a *Agent) everReady() bool { return a.wasReady.Load() || a.NotReady() == "" }

func (a *Agent) notReady() string {
	switch {
	case !a.isSetUp.Load():
		return "kproxy is still setting up"
	case a.stopping.Load() != nil:
		return "kproxy is being stopped"
	}
	st := a.sync.get().status
	if st.Generation == 0 {
		if st.LastError != "" {
			return "the first pass failed: " + st.LastError
		}
		for _, s := range a.source.Status() {
			if !s.Synced {
				return fmt.Sprintf("source %s hasn't been read as a whole yet", s.Name)
			}
		}
		return "the first pass isn't done yet"
	}
	r := a.programmer.report()
	switch {
	case !r.written && r.lastErr != nil:
		return fmt.Sprintf("the kernel's rules can't be written: %v", r.lastErr)
	case !r.written:
		return "the kernel's rules aren't written yet"
	case !a.heart.served.Load():
		return "the forwarder doesn't serve yet"
	case !a.heart.alive.Load():
		return "the forwarder doesn't serve: its heartbeat failed"
	}
	return a.arrivals.notReady()
}

// syncStatus joins what the two loops say: an error of the slow one is an
// error of the sync, although the services it concerns are served in userspace.
// No pass counts as a success before kproxy has been ready.
func (a *Agent) syncStatus() plan.SyncStatus {
	s := a.sync.get().status
	if !a.everReady() {
		s.LastSuccess = time.Time{}
	}
	if err := a.programmer.report().lastErr; err != nil && s.LastError == "" {
		s.LastError = err.Error()
	}
	if err := a.staleFlows.Report(); err != nil && s.LastError == "" {
		s.LastError = fmt.Sprintf("delete stale conntrack entries: %v", err)
	}
	return s
}

// LastSync returns when the last pass succeeded, zero until kproxy has been ready,
// and since when a change waits for one, zero if none waits.
func (a *Agent) LastSync() (success, pendingSince time.Time) {
	s := a.sync.get()
	if !a.everReady() {
		return time.Time{}, s.pending
	}
	return s.status.LastSuccess, s.pending
}

// Traffic reads what Status says of connections, and returns the plan and what calls each for its service ports, without
// making a row for each of thousands: for all, or, if the plan is still last, for those that have ever carried anything. It
// is for samples that are taken all the time: what the kernel carries may be older the more connections there are.
func (a *Agent) Traffic(last *plan.Plan) (is *plan.Plan, some func(each func(service.Key, plan.DataPlane, plan.Connections))) {
	p := a.current.Load()
	if p == nil {
		return nil, func(func(service.Key, plan.DataPlane, plan.Connections)) {}
	}
	if err := a.accounting.Refresh(max(accountingAge, a.accounting.BackgroundAge()), a.conntrack.List); err != nil {
		a.log.Warn("the kernel's connections can't be counted", "error", err)
	}
	a.settle()
	meters := a.meters.of(a, p)
	return p, func(each func(service.Key, plan.DataPlane, plan.Connections)) {
		for i, s := range p.Services {
			if c := meters[i].connections(); p != last || c != (plan.Connections{}) {
				each(s.Port.Key, s.DataPlane, c)
			}
		}
	}
}

// Trace follows a packet through the kernel as it is now, and through userspace
// as the plan in force has it. It changes nothing; a request may ask it to send
// one probe.
func (a *Agent) Trace(ctx context.Context, req trace.Request) (trace.Result, error) {
	p := a.current.Load()
	if p == nil {
		return trace.Result{}, errStarting
	}
	proxy := &trace.Proxy{
		Plan: p, Alive: a.heart.alive.Load(), Marks: a.marks(),
		Forecast: a.userspace.Forecast, Connections: a.userspace.Connections,
		Missing: a.steering.Missing, Explainers: node.Explainers(),
	}
	if v, ok := a.driver.(interface{ Variant() kernel.Variant }); ok {
		proxy.Variant = v.Variant()
	}
	if r, ok := a.programmer.plane.(kernel.Renderer); ok {
		proxy.Render = r.Fresh
	} else if c, ok := a.programmer.plane.(kernel.Comparer); ok {
		proxy.Compare = c.Compare
	}
	return trace.Run(ctx, req, proxy)
}

// NodeFigures returns what there is to say about this node as of now. It reads
// two small files and lists sets without their entries; it runs no program.
func (a *Agent) NodeFigures() plan.NodeFigures {
	release, _ := kernel.Release() // empty if it can't be read
	out := plan.NodeFigures{Kernel: release, Syncs: a.sync.get().last, Rules: map[string]map[string]int{}}
	if count, limit, err := conntrack.Use(); err == nil { // else there is none, and 0 is true
		out.Conntrack = plan.Usage{Count: count, Max: limit}
	}
	if a.current.Load() != nil { // else Run may still be setting up
		out.Sets = len(a.countSets())
	}
	f := &a.figures
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, fam := range service.Families {
		out.Virtuals += f.holds.Virtuals[fam]
		if f.holds.Rules[fam] != nil {
			out.Rules[fam.String()] = maps.Clone(f.holds.Rules[fam])
		}
	}
	return out
}

// SubscribeDeep is Subscribe for subscribers that keep events for others: it also keeps
// up with the thousands that a start or a recall of everything makes at once.
func (a *Agent) SubscribeDeep() (<-chan plan.Event, func()) {
	return a.events.subscribe(deepEventBuffer)
}

// Drain has load balancers leave this node out, and moves new connections of all services that the kernel can serve
// to it, or ends that. Connections that there are go on, and what only userspace serves is served.
func (a *Agent) Drain(on bool) error {
	if a.current.Load() == nil {
		return errStarting
	}
	if err := a.orders.Take(func() error { return a.orders.Drained.Set(on) }); err != nil {
		return err
	}
	a.log.Info("drained by kproxy drain", "on", on)
	a.kick()
	return nil
}

// Drained reports whether it is.
func (a *Agent) Drained() bool { return a.isSetUp.Load() && a.orders.Drained.Since.Load() != nil }

// drainStatus is nil if the node isn't drained; p is the current plan.
func (a *Agent) drainStatus(p *plan.Plan) *plan.Drain {
	since := a.orders.Drained.Since.Load()
	if since == nil {
		return nil
	}
	out := &plan.Drain{Since: *since}
	kept := map[service.Key]bool{}
	for _, s := range p.Services {
		if s.DataPlane == plan.Userspace {
			kept[s.Port.Key] = true
			out.Kept = append(out.Kept, s.Port.Key.String())
		}
	}
	for _, c := range a.userspace.Connections() {
		if c.Protocol == service.TCP && (c.Started.Before(*since) || !kept[c.Service]) {
			out.Left++
		}
	}
	return out
}
