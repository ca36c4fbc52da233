package takeover

import (
	"net/netip"
	"time"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace/handover"
)

// HealthOut returns what v knows, for a successor.
func HealthOut(v *health.View) (out []handover.Health) {
	for t, s := range v.States() {
		h := handover.Health{
			Protocol: uint32(t.Protocol), Kind: string(t.Check.Kind), Path: t.Check.Path, Port: uint32(t.Check.Port),
			Status: uint32(s.Status), Since: s.Since.UnixNano(), LastError: s.LastError,
		}
		h.Address = handover.Packed(t.Address)
		for _, at := range s.Flaps {
			h.Flaps = append(h.Flaps, at.UnixNano())
		}
		out = append(out, h)
	}
	return out
}

// HealthIn returns what a predecessor's HealthOut said.
func HealthIn(in []handover.Health) map[health.Target]health.State {
	out := make(map[health.Target]health.State, len(in))
	for _, h := range in {
		t := health.Target{
			Protocol: service.Protocol(h.Protocol), Address: handover.Unpacked(h.Address),
			Check: service.HealthCheck{Kind: service.Check(h.Kind), Path: h.Path, Port: uint16(h.Port)},
		}
		if h.Status > uint32(health.Down) {
			continue // of a later release
		}
		s := health.State{Status: health.Status(h.Status), Since: time.Unix(0, h.Since), LastError: h.LastError}
		for _, at := range h.Flaps {
			s.Flaps = append(s.Flaps, time.Unix(0, at))
		}
		out[t] = s
	}
	return out
}

// CountersOut returns what the kernel's data planes have counted, for a successor.
func CountersOut(figures map[service.Key]conntrack.ServiceFigures) (out []handover.Service) {
	counters := func(f conntrack.Figures) handover.Counters {
		return handover.Counters{Total: f.Total, Failed: f.Failed, BytesIn: f.BytesIn, BytesOut: f.BytesOut}
	}
	for k, s := range figures {
		row := handover.Service{Namespace: k.Namespace, Name: k.Name, Port: k.Port, Protocol: uint32(k.Protocol), Counters: counters(s.Figures)}
		for address, f := range s.Endpoints {
			row.Endpoints = append(row.Endpoints, handover.Endpoint{Address: handover.Packed(address), Counters: counters(f)})
		}
		out = append(out, row)
	}
	return out
}

// countersIn returns what a predecessor's CountersOut said.
func countersIn(in []handover.Service) map[service.Key]conntrack.ServiceFigures {
	figures := func(c handover.Counters) conntrack.Figures {
		return conntrack.Figures{Total: c.Total, Failed: c.Failed, BytesIn: c.BytesIn, BytesOut: c.BytesOut}
	}
	out := make(map[service.Key]conntrack.ServiceFigures, len(in))
	for _, row := range in {
		s := conntrack.ServiceFigures{Figures: figures(row.Counters), Endpoints: map[netip.AddrPort]conntrack.Figures{}}
		for _, e := range row.Endpoints {
			s.Endpoints[handover.Unpacked(e.Address)] = figures(e.Counters)
		}
		out[service.Key{Namespace: row.Namespace, Name: row.Name, Port: row.Port, Protocol: service.Protocol(row.Protocol)}] = s
	}
	return out
}
