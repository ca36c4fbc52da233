package agent

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"time"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace"
)

// deleteHalfOpen deletes the TCP entries that wait for endpoints which p doesn't use.
func (a *Agent) deleteHalfOpen(families [2]bool, p *plan.Plan) error {
	flows, err := a.conntrack.ListUnanswered(service.TCP, families)
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
	sessions := a.udpSessions()
	c := conntrack.StaleConfig{
		Listeners: []uint16{udp}, Local: a.local,
		HasSession: func(f conntrack.Flow) bool { return sessions[session{f.OrigSrc, f.OrigDst}] },
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

// session is a UDP flow that userspace carries.
type session struct{ client, orig netip.AddrPort }

func (a *Agent) udpSessions() map[session]bool {
	m := map[session]bool{}
	for _, c := range a.userspace.Connections() {
		if c.Protocol == service.UDP {
			m[session{c.Client, c.Address}] = true
		}
	}
	return m
}

// accountingAge is how old the figures of the kernel's live connections may be:
// a list of a full table takes a while, and status may be asked for often.
const accountingAge = time.Second

// connections lists what is alive in every data plane, sorted.
func (a *Agent) connections() ([]plan.ConnectionStatus, error) {
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
