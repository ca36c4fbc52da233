package agent

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace"
)

// forgetStaleFlows deletes the entries that would keep clients away from where
// p wants their packets to go. Most plans can't have made any; but rules that
// were missing for a while or came late, a portal that was closed, or a sweep
// that failed may have left some.
func (a *Agent) forgetStaleFlows(old, p *plan.Plan) error {
	owed, former := a.sweeps.take()
	err := a.sweep(append(former, old), p, owed)
	if err != nil {
		a.sweeps.owe(former...)
	}
	return err
}

// sweep looks at the entries that going from the former plans to p may have
// made stale; the last of them is p's predecessor.
func (a *Agent) sweep(former []*plan.Plan, p *plan.Plan, all bool) error {
	start := time.Now()
	old := former[len(former)-1]
	if all || conntrack.MayBeStale(old, p) {
		defer func() { a.figures.swept(time.Since(start)) }()
		if err := a.deleteStale(former, p); err != nil {
			return err
		}
	}
	if !all && !conntrack.MayBeHalfOpen(old, p) {
		return nil
	}
	flows, err := a.conntrack.ListUnanswered(service.TCP)
	if err != nil {
		return err
	}
	return a.deleteFlows(conntrack.HalfOpen(flows, p, a.userspace.Local))
}

// oweSweep asks for a pass that looks at every entry. It is called when flows
// may have begun while the way to their endpoints wasn't there, or was still
// that of an earlier plan: UDP clients would otherwise stay with what conntrack
// remembers for as long as they send.
func (a *Agent) oweSweep(former ...*plan.Plan) {
	a.sweeps.owe(former...)
	a.kick()
}

// sweeps are the looks at every conntrack entry that are due. Safe for
// concurrent use; the zero value is ready.
type sweeps struct {
	mu     sync.Mutex // the loops owe, the fast one takes
	due    bool
	former []*plan.Plan // whose rules were in the kernel until a moment ago
}

func (s *sweeps) owe(former ...*plan.Plan) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.due, s.former = true, append(s.former, former...)
}

func (s *sweeps) take() (due bool, former []*plan.Plan) {
	s.mu.Lock()
	defer s.mu.Unlock()
	due, former = s.due, s.former
	s.due, s.former = false, nil
	return due, former
}

func (a *Agent) deleteStale(former []*plan.Plan, p *plan.Plan) error {
	flows, err := a.conntrack.List(service.UDP)
	if err != nil {
		return err
	}
	_, udp := a.userspace.Ports()
	sessions := a.udpSessions()
	c := conntrack.StaleConfig{
		Listeners: []uint16{udp}, Local: a.userspace.Local,
		HasSession: func(f conntrack.Flow) bool { return sessions[session{f.OrigSrc, f.OrigDst}] },
	}
	for _, old := range former {
		stale := conntrack.Stale(flows, old, p, c)
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
		rows = append(rows, kernelRow(c, now))
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

func kernelRow(c conntrack.Connection, now time.Time) plan.ConnectionStatus {
	f := &c.Flow
	plane := plan.IPVS
	if f.DestinationNAT() {
		plane = plan.IPTables
	}
	row := plan.ConnectionStatus{
		Protocol: f.Protocol.String(), Client: f.OrigSrc, Service: c.Service.String(), Address: f.OrigDst, Endpoint: f.ReplySrc,
		DataPlane: plane, BytesIn: f.OrigBytes, BytesOut: f.ReplyBytes,
	}
	if !f.Start.IsZero() {
		row.AgeSeconds = now.Sub(f.Start).Seconds()
	}
	return row
}

func compareRows(x, y plan.ConnectionStatus) int {
	return cmp.Or(
		strings.Compare(x.Service, y.Service), strings.Compare(x.Protocol, y.Protocol),
		x.Client.Compare(y.Client), x.Address.Compare(y.Address),
	)
}
