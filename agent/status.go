package agent

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace"
)

// Status describes everything as of now.
func (a *Agent) Status() plan.Status {
	now := time.Now()
	st := plan.Status{
		Version: a.version, Mode: a.policy.Mode, Node: a.node, UptimeSeconds: int64(now.Sub(a.started).Seconds()),
		Sources: []plan.SourceStatus{}, Capabilities: []plan.CapStatus{}, Services: []plan.ServiceStatus{},
	}
	if a.isSetUp.Load() {
		st.Sources = a.sourceStatus()
	}
	p := a.current.Load()
	if p == nil {
		return st // Run may still be setting up what is read below
	}
	st.Alive, st.Capabilities, st.Sync = a.heart.alive.Load(), append(capabilities(a.caps), plan.CapStatus(p.Policy.Detector())), a.syncStatus()
	if left := a.left.Load(); left != nil {
		st.Capabilities = slices.Concat(st.Capabilities, *left)
	}
	if err := a.accounting.Refresh(accountingAge, a.conntrack.List); err != nil {
		a.log.Warn("the kernel's connections can't be counted", "error", err)
	}
	p, us, kernel := a.counters()
	moved := a.figures.moves.byService()
	st.Services = p.Rows(now)
	for i, s := range p.Services {
		addCounters(&st.Services[i], us[s.Port.Key], kernel[s.Port.Key])
		st.Services[i].Offloads, st.Services[i].Recalls = moved[s.Port.Key].offloads, moved[s.Port.Key].recalls
		if more := a.healths.problemsOf(s.Port.Namespace, s.Port.Name); len(more) > 0 {
			st.Services[i].Problems = slices.Concat(st.Services[i].Problems, more)
		}
	}
	return st
}

// counters returns the current plan, and what the data planes have counted for its
// services.
func (a *Agent) counters() (*plan.Plan, map[service.Key]userspace.Counters, map[service.Key]conntrack.ServiceFigures) {
	a.counting.RLock()
	defer a.counting.RUnlock()
	return a.current.Load(), a.userspace.Counters(), a.accounting.Figures()
}

// syncStatus joins what the two loops say: an error of the slow one is an
// error of the sync, although the services it concerns are served in userspace.
func (a *Agent) syncStatus() plan.SyncStatus {
	s, _ := a.sync.get()
	if err := a.programmer.report().lastErr; err != nil && s.LastError == "" {
		s.LastError = err.Error()
	}
	if err := a.sweeper.report(); err != nil && s.LastError == "" {
		s.LastError = fmt.Sprintf("delete stale conntrack entries: %v", err)
	}
	return s
}

func (a *Agent) sourceStatus() []plan.SourceStatus {
	out := []plan.SourceStatus{}
	for _, s := range a.source.Status() {
		out = append(out, plan.SourceStatus{Name: s.Name, Synced: s.Synced, Error: strings.Join(s.Errors, "\n"), ServiceNetworks: s.ServiceNetworks})
	}
	return out
}

func capabilities(c plan.Caps) []plan.CapStatus {
	out := make([]plan.CapStatus, len(c.All))
	for i, x := range c.All {
		out[i] = plan.CapStatus(x)
	}
	return out
}

// addCounters fills a row's counters from both kinds of data planes.
func addCounters(row *plan.ServiceStatus, us userspace.Counters, k conntrack.ServiceFigures) {
	row.Connections = connectionsOf(us, k.Figures)
	at := make(map[netip.AddrPort]*userspace.EndpointCounters, len(us.Endpoints))
	for i := range us.Endpoints {
		at[us.Endpoints[i].Address] = &us.Endpoints[i]
	}
	for i := range row.Endpoints {
		e := &row.Endpoints[i]
		f := k.Endpoints[e.Address]
		e.ActiveConnections, e.TotalConnections = f.Active, f.Total
		e.BytesIn, e.BytesOut = f.BytesIn, f.BytesOut
		if u := at[e.Address]; u != nil {
			e.ActiveConnections += u.Active
			e.TotalConnections += u.Total
			e.Failures = u.Failures
			e.BytesIn += u.BytesIn
			e.BytesOut += u.BytesOut
		}
	}
}

// Connections lists what is alive in every data plane.
func (a *Agent) Connections(context.Context) ([]plan.ConnectionStatus, error) {
	if a.current.Load() == nil {
		return nil, errStarting
	}
	return a.connections()
}

// errStarting is what is said while Run sets up.
var errStarting = errors.New("kproxy is still starting")

// Subscribe returns the events from now on.
func (a *Agent) Subscribe() (<-chan plan.Event, func()) { return a.events.subscribe() }

// Pin keeps a service port in a data plane until PreferAuto.
func (a *Agent) Pin(k service.Key, pref service.Preference) error {
	if a.current.Load() == nil {
		return errStarting
	}
	if err := a.pins.set([]service.Key{k}, pref); err != nil {
		return err
	}
	a.log.Info("pinned", "service", k, "dataplane", pref)
	a.kick()
	return nil
}

// LastSync returns when the last pass succeeded, zero if none has, and since
// when a change waits for one, zero if none waits. A pass counts from when
// services can be reached: the rules that lead to userspace are in the kernel, the
// forwarder serves, and the rules of services have been tried.
func (a *Agent) LastSync() (success, pendingSince time.Time) {
	s, pending := a.sync.get()
	if !a.isSetUp.Load() || !a.heart.served.Load() || a.programmer.report().passes == 0 {
		return time.Time{}, pending
	}
	return s.LastSuccess, pending
}
