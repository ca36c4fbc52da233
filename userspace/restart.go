package userspace

import (
	"net/netip"
	"sync"
	"time"

	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace/handover"
)

// rememberedFor bounds how long a client's next datagram finds the endpoint of before a restart: conntrack keeps a UDP stream as long
// (nf_conntrack_udp_timeout_stream).
const rememberedFor = 2 * time.Minute

// remembered tells which endpoints clients of UDP had before a restart. It doesn't change; nil knows of none.
type remembered struct {
	flows map[udpFlow]endpointBefore
	until time.Time // of the last one
}

// udpFlow is a client, and where its datagrams go.
type udpFlow struct{ client, original netip.AddrPort }

type endpointBefore struct {
	address netip.AddrPort
	until   time.Time
}

// Remember describes the clients that have affinity and the endpoints of UDP sessions, for the Restore of a Server that begins when this
// one has ended. It comes before Drain.
func (s *Server) Remember() *handover.Userspace {
	d := description{Handover: &Handover{State: &handover.Userspace{}}, services: map[*serviceState]uint32{}, clock: time.Now()}
	s.mu.Lock()
	for _, v := range s.plans.views {
		d.service(v.state)
	}
	s.mu.Unlock()
	var mu sync.Mutex
	d.State.Before = s.before.Load().rows(d.clock) // sessions come behind, and count
	s.everySession(func(x *session) {
		e := x.endpoint.Load()
		if e == nil {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		d.State.Before = append(d.State.Before, handover.Flow{Client: handover.Packed(x.client), Original: handover.Packed(x.orig), Endpoint: handover.Packed(e.address)})
	})
	return d.State
}

// Restore has clients keep the endpoints that they had when another Server's Remember described them, some time ago, where these still
// take connections. It comes after Prepare and before Run.
func (s *Server) Restore(state *handover.Userspace, age time.Duration) {
	then := time.Now().Add(-age)
	s.mu.Lock()
	for _, row := range state.Services {
		if v := s.plans.views[service.Key{Namespace: row.Namespace, Name: row.Name, Port: row.Port, Protocol: service.Protocol(row.Protocol)}]; v != nil {
			v.state.stick(row.Affinity, then)
		}
	}
	s.mu.Unlock()
	s.before.Store(rememberedOf(state.Before, then))
}

// rememberedOf reads what rows described then; nil where that is nothing.
func rememberedOf(rows []handover.Flow, then time.Time) *remembered {
	if len(rows) == 0 {
		return nil
	}
	r := &remembered{flows: make(map[udpFlow]endpointBefore, len(rows))}
	for i := range rows {
		f := &rows[i]
		until := then.Add(rememberedFor - time.Duration(max(f.Silent, 0)))
		r.flows[udpFlow{handover.Unpacked(f.Client), handover.Unpacked(f.Original)}] = endpointBefore{handover.Unpacked(f.Endpoint), until}
		if until.After(r.until) {
			r.until = until
		}
	}
	return r
}

// rows describes what is known now.
func (r *remembered) rows(now time.Time) (out []handover.Flow) {
	if r == nil {
		return nil
	}
	for f, e := range r.flows {
		if left := e.until.Sub(now); left > 0 {
			out = append(out, handover.Flow{
				Client: handover.Packed(f.client), Original: handover.Packed(f.original), Endpoint: handover.Packed(e.address), Silent: int64(rememberedFor - left),
			})
		}
	}
	return out
}

// endpointBefore returns the endpoint that a client had before a restart; invalid for none.
func (s *Server) endpointBefore(client, original netip.AddrPort) netip.AddrPort {
	r := s.before.Load()
	if r == nil {
		return netip.AddrPort{}
	}
	now := time.Now()
	if now.After(r.until) {
		s.before.CompareAndSwap(r, nil)
		return netip.AddrPort{}
	}
	if e := r.flows[udpFlow{client, original}]; now.Before(e.until) {
		return e.address
	}
	return netip.AddrPort{}
}

// stick has clients keep their endpoints, for as long as was left at a time.
func (s *serviceState) stick(clients []handover.Affine, then time.Time) {
	affinity := s.affinity.Load()
	if affinity == nil {
		return
	}
	for _, r := range clients {
		client, _ := netip.AddrFromSlice(r.Client)
		if left := time.Duration(r.Remaining); left <= affinity.Timeout() {
			affinity.Set(client, handover.Unpacked(r.Endpoint), then.Add(left-affinity.Timeout()))
		}
	}
}
