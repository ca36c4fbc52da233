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
	st.NotReady = a.NotReady()
	st.Ready = st.NotReady == ""
	p := a.current.Load()
	if p == nil {
		return st // Run may still be setting up what is read below
	}
	if a.pins.problem != "" {
		st.Sources = append(st.Sources, plan.SourceStatus{Name: a.pins.path, Synced: true, Error: a.pins.problem})
	}
	st.Alive, st.Capabilities, st.Sync = a.heart.alive.Load(), append(capabilities(a.caps), plan.CapStatus(p.Policy.Detector())), a.syncStatus()
	st.Exhausted = a.userspace.Exhausted()
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
		if pace := a.prober.Pace(s.Port.Namespace); pace > 1 && a.health.Fill(s.Port.Health, s.Port.Protocol).Kind != service.CheckOff {
			st.Services[i].Problems = append(slices.Clone(st.Services[i].Problems), fmt.Sprintf(
				"its endpoints are probed %.3g times less often than they should be: its namespace asks for more than its share of --health-max-rate %d probes a second", pace, a.cfg.Health.MaxRate))
		}
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
		e.ActiveConnections, e.TotalConnections, e.Failures = f.Active, f.Total, f.Failed
		e.BytesIn, e.BytesOut = f.BytesIn, f.BytesOut
		if u := at[e.Address]; u != nil {
			e.ActiveConnections += u.Active
			e.TotalConnections += u.Total
			e.Failures += u.Failures
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
