package userspace

import (
	"net/netip"
	"sync"
	"time"

	"kproxy.dev/kproxy/handover"
	"kproxy.dev/kproxy/service"
)

// rememberedFor bounds how long a client's next datagram finds the endpoint of before a restart: conntrack keeps a UDP stream as long
// (nf_conntrack_udp_timeout_stream).
const rememberedFor = 2 * time.Minute

// remembered tells which endpoints clients of UDP had before a restart. It doesn't change.
type remembered struct {
	endpoints map[[2]netip.AddrPort]netip.AddrPort // by client, and where its datagrams go
	until     time.Time
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
	s.everySession(func(x *session) {
		e := x.endpoint.Load()
		if e == nil {
			return
		}
		mu.Lock()
		defer mu.Unlock()
		d.State.Sessions = append(d.State.Sessions, &handover.Session{Flow: handover.Flow{
			Client: handover.Packed(x.client), Original: handover.Packed(x.orig), Endpoint: handover.Packed(e.address),
		}})
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
	r := &remembered{endpoints: map[[2]netip.AddrPort]netip.AddrPort{}, until: then.Add(rememberedFor)}
	for _, row := range state.Sessions {
		f := &row.Flow
		r.endpoints[[2]netip.AddrPort{handover.Unpacked(f.Client), handover.Unpacked(f.Original)}] = handover.Unpacked(f.Endpoint)
	}
	s.before.Store(r)
}

// endpointBefore returns the endpoint that a client had before a restart; invalid for none.
func (s *Server) endpointBefore(client, original netip.AddrPort) netip.AddrPort {
	r := s.before.Load()
	if r == nil {
		return netip.AddrPort{}
	}
	if time.Now().After(r.until) {
		s.before.Store(nil)
		return netip.AddrPort{}
	}
	return r.endpoints[[2]netip.AddrPort{client, original}]
}

// stick has clients keep their endpoints, for as long as was left at a time.
func (s *serviceState) stick(clients []*handover.Affine, then time.Time) {
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
