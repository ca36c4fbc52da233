package flows

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"time"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/health/passive"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace"
)

// Rows returns what userspace carries, and what the kernel does with its data planes, sorted.
func Rows(user []userspace.Connection, kernel []conntrack.Connection, planes []plan.Abilities) []plan.ConnectionStatus {
	rows := []plan.ConnectionStatus{}
	now := time.Now()
	for _, c := range user {
		rows = append(rows, userspaceRow(c, now))
	}
	for _, c := range kernel {
		rows = append(rows, kernelRow(c, planes, now))
	}
	slices.SortStableFunc(rows, compareRows)
	return rows
}

func userspaceRow(c userspace.Connection, now time.Time) plan.ConnectionStatus {
	return plan.ConnectionStatus{
		Protocol: c.Protocol.String(), Client: c.Client, Service: c.Service.String(), Address: c.Address, Endpoint: c.Endpoint,
		DataPlane: plan.Userspace, AgeSeconds: now.Sub(c.Started).Seconds(), BytesIn: c.BytesIn, BytesOut: c.BytesOut,
	}
}

func kernelRow(c conntrack.Connection, planes []plan.Abilities, now time.Time) plan.ConnectionStatus {
	f := &c.Flow
	row := plan.ConnectionStatus{
		Protocol: f.Protocol.String(), Client: f.OrigSrc, Service: c.Service.String(), Address: f.OrigDst, Endpoint: f.ReplySrc,
		DataPlane: carrier(f, planes), BytesIn: f.OrigBytes, BytesOut: f.ReplyBytes,
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

// listEach is for how many endpoints connections are looked up one by one; for more, one list of all is cheaper.
const listEach = 8

// Departed returns the TCP endpoints that are gone, or neither ready nor serving any more, but for those of services that
// are to be left alone.
func Departed(d plan.Delta) (out []health.Endpoint) {
	for _, c := range d.Changes {
		if c.Was == nil || c.Was.Port.Protocol != service.TCP {
			continue
		}
		serves := map[netip.AddrPort]bool{}
		if c.Is != nil {
			for i := range c.Is.Endpoints {
				e := &c.Is.Endpoints[i]
				serves[e.Address] = e.Ready || e.Serving
			}
		}
		for i := range c.Was.Endpoints {
			if e := &c.Was.Endpoints[i]; c.Was.MayBeEjected(e) && !serves[e.Address] {
				out = append(out, health.Endpoint{Protocol: service.TCP, Address: e.Address})
			}
		}
	}
	return out
}

// To returns the flows to endpoints that have been answered, userspace's among them: the kernel tracks its connections, too.
func To(c *conntrack.Client, endpoints []health.Endpoint) (map[health.Endpoint][]passive.Flow, error) {
	out := make(map[health.Endpoint][]passive.Flow, len(endpoints))
	add := func(at health.Endpoint, flows []conntrack.Flow) {
		for i := range flows {
			if f := &flows[i]; f.Answered() && !f.Refused() {
				out[at] = append(out[at], passive.Flow{ID: f.Key(), Open: f.Open(), Received: f.ReplyBytes})
			}
		}
	}
	if len(endpoints) <= listEach {
		for _, at := range endpoints {
			flows, err := c.ListTo(at.Protocol, at.Address)
			if err != nil {
				return nil, err
			}
			add(at, flows)
		}
		return out, nil
	}
	wanted := make(map[health.Endpoint]bool, len(endpoints))
	for _, at := range endpoints {
		wanted[at] = true
	}
	flows, err := c.List(0)
	if err != nil {
		return nil, err
	}
	for i := range flows {
		if at := (health.Endpoint{Protocol: flows[i].Protocol, Address: flows[i].ReplySrc}); wanted[at] {
			add(at, flows[i:i+1])
		}
	}
	return out, nil
}
