package plan

import (
	"net/netip"
	"slices"
	"time"
)

// Rows returns a row for every service port as of now, without the counters,
// which the data planes have.
func (p *Plan) Rows(now time.Time) []ServiceStatus {
	out := make([]ServiceStatus, len(p.Services))
	for i, s := range p.Services {
		out[i] = s.Row(now)
	}
	return out
}

// RowsOf is Rows for the ports of one service.
func (p *Plan) RowsOf(namespace, name string) []ServiceStatus {
	var out []ServiceStatus
	for _, s := range p.Services {
		if s.Port.Namespace == namespace && s.Port.Name == name {
			out = append(out, s.Row(p.Time))
		}
	}
	return out
}

// Row returns the status of s as of now, without the counters. Its endpoints
// are in the order of s.Endpoints.
func (s *Service) Row(now time.Time) ServiceStatus {
	proto, _ := s.Port.Protocol.MarshalText() // never fails
	row := ServiceStatus{
		Namespace: s.Port.Namespace, Name: s.Port.Name, Port: s.Port.Port,
		Protocol: string(proto), Algorithm: string(s.Port.Algorithm),
		AffinitySeconds: s.Port.Affinity.Seconds(), SourceRanges: s.Port.SourceRanges,
		Addresses: []netip.AddrPort{},
		DataPlane: s.DataPlane, State: s.State, Reason: s.Reason, Cause: s.Cause,
		QualifiesInSeconds: secondsUntil(s.QualifiesAt, now),
		Beneath:            s.Beneath, BeneathReason: s.BeneathReason, Scheduler: s.Scheduler,
		Degraded: s.Degraded, Problems: s.Problems,
		Endpoints: make([]EndpointStatus, len(s.Endpoints)),
	}
	if s.Port.InternalLocal {
		row.InternalPolicy = "Local"
	}
	if s.Port.ExternalLocal {
		row.ExternalPolicy = "Local"
	}
	for i := range s.Frontends {
		if f := &s.Frontends[i]; f.Kind == NodePort {
			row.NodePort = f.Address.Port()
		} else {
			row.Addresses = append(row.Addresses, f.Address)
		}
	}
	slices.SortFunc(row.Addresses, netip.AddrPort.Compare)
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		row.Endpoints[i] = EndpointStatus{
			Address: e.Address, Node: e.Node,
			Ready: e.Ready, Serving: e.Serving, Terminating: e.Terminating,
			Local: e.Local, Weight: e.Weight, Usable: e.Usable,
			Health: e.Health, Since: e.Since, LastError: e.Error,
		}
	}
	return row
}

func secondsUntil(at, now time.Time) float64 {
	if at.IsZero() {
		return 0
	}
	return max(at.Sub(now), 0).Seconds()
}
