package userspace

import (
	"cmp"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"kproxy.dev/kproxy/service"
)

// Connection is a row of the live table: a TCP connection or a UDP session.
type Connection struct {
	Protocol service.Protocol
	Service  service.Key
	Client   netip.AddrPort
	Address  netip.AddrPort // where the client connected to
	Endpoint netip.AddrPort // that it is at, or tries to connect to; invalid while none has been found
	Taken    bool           // of TCP: an endpoint has taken it at least once
	Started  time.Time
	BytesIn  uint64 // from client to endpoint
	BytesOut uint64
}

// Counters are one service port's figures since it exists. Total counts
// connections and sessions that an endpoint took, Failed those that none took,
// Retried attempts on a further endpoint.
type Counters struct {
	Active    int64
	Total     uint64
	Failed    uint64
	Retried   uint64
	BytesIn   uint64
	BytesOut  uint64
	Looped    Looped
	Endpoints []EndpointCounters // in address order; of a service that no client came to, none
}

// EndpointCounters are one endpoint's figures for a service port.
type EndpointCounters struct {
	Address  netip.AddrPort
	Active   int64
	Total    uint64
	Failures uint64 // attempts that failed
	BytesIn  uint64
	BytesOut uint64
}

// Connections returns the live table, oldest first.
func (s *Server) Connections() []Connection {
	flows := s.live.all()
	out := make([]Connection, len(flows))
	for i, f := range flows {
		out[i] = f.describe()
	}
	slices.SortFunc(out, func(a, b Connection) int {
		return cmp.Or(a.Started.Compare(b.Started), a.Client.Compare(b.Client))
	})
	return out
}

// Settle counts what live connections and sessions have carried until now, for meters.
func (s *Server) Settle() {
	for _, f := range s.live.all() {
		f.settle()
	}
}

// Meter reads what a service port has carried, and failed to, as of the last Settle; also after it has gone, as those who read may
// have begun before. The zero value reads nothing.
type Meter struct{ state *serviceState }

// Meter returns a service port's, and whether there is that port.
func (s *Server) Meter(k service.Key) (m Meter, ok bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if v := s.plans.views[k]; v != nil {
		return Meter{v.state}, true
	}
	return Meter{}, false
}

// Totals returns Counters without endpoints.
func (m Meter) Totals() (c Counters) {
	if m.state != nil {
		c = m.state.totals()
	}
	return c
}

// Counters returns all figures.
func (m Meter) Counters() (c Counters) {
	if m.state != nil {
		c = m.state.figures()
	}
	return c
}

// Traffic calls visit with the totals of every service port that has ever carried
// anything, or failed to, live bytes included.
func (s *Server) Traffic(visit func(service.Key, Counters)) {
	s.Settle()
	s.mu.Lock()
	defer s.mu.Unlock()
	for k, v := range s.plans.views {
		if c := v.state.totals(); !c.silent() {
			visit(k, c)
		}
	}
}

// silent reports whether nothing was carried, nor failed.
func (c *Counters) silent() bool {
	return c.Active == 0 && c.Total|c.Failed|c.Retried|c.BytesIn|c.BytesOut == 0
}

// totals are the figures without those of endpoints.
func (s *serviceState) totals() Counters {
	return Counters{
		Active: s.active.Load(), Total: s.counters.total.Load(), Failed: s.failed.Load(), Retried: s.retried.Load(),
		BytesIn: s.counters.bytesIn.Load(), BytesOut: s.counters.bytesOut.Load(), Looped: s.hops.looped(),
	}
}

func (s *serviceState) figures() Counters {
	c := s.totals()
	s.mu.Lock()
	defer s.mu.Unlock()
	c.Endpoints = make([]EndpointCounters, 0, len(s.endpoints))
	for a, e := range s.endpoints {
		c.Endpoints = append(c.Endpoints, EndpointCounters{
			Address: a, Active: e.load.Active(), Total: e.counters.total.Load(), Failures: e.failures.Load(),
			BytesIn: e.counters.bytesIn.Load(), BytesOut: e.counters.bytesOut.Load(),
		})
	}
	slices.SortFunc(c.Endpoints, func(a, b EndpointCounters) int { return a.Address.Compare(b.Address) })
	return c
}

// flow is a TCP connection or a UDP session in the live table.
type flow interface {
	describe() Connection
	settle() // moves what was counted since the last time into the counters
	kill()   // ends it now, from outside; it leaves the table by itself
}

// described holds what others see of a flow. Once the flow is in the table, only endpoint and
// the meters change.
type described struct {
	state    *serviceState
	orig     netip.AddrPort // where the client connected to
	client   netip.AddrPort
	started  time.Time
	meters   [2]meter
	endpoint atomic.Pointer[endpoint]
	taken    atomic.Bool // of TCP: an endpoint has taken it at least once
}

func (x *described) describe() Connection {
	c := Connection{
		Protocol: x.state.key.Protocol, Service: x.state.key, Client: x.client, Address: x.orig, Started: x.started,
		BytesIn: x.meters[clientSide].count.Load(), BytesOut: x.meters[endpointSide].count.Load(), Taken: x.taken.Load(),
	}
	if e := x.endpoint.Load(); e != nil {
		c.Endpoint = e.address
	}
	return c
}

// settle counts for the endpoint of now: where TCP tries another one, no bytes were moved, and UDP has settled.
func (x *described) settle() {
	if e := x.endpoint.Load(); e != nil {
		x.meters[clientSide].settle(&x.state.counters.bytesIn, &e.counters.bytesIn)
		x.meters[endpointSide].settle(&x.state.counters.bytesOut, &e.counters.bytesOut)
	}
}

// live is the table of connections and sessions.
type live struct{ flows sync.Map } // flow → nothing

func (l *live) add(f flow)    { l.flows.Store(f, nil) }
func (l *live) remove(f flow) { l.flows.Delete(f) }

// all returns what is in the table.
func (l *live) all() (out []flow) {
	l.flows.Range(func(f, _ any) bool {
		out = append(out, f.(flow))
		return true
	})
	return out
}

// meter counts one flow's bytes. They reach the counters of its service and
// endpoint when counters are read or the flow ends, so that connections of one
// service don't contend for its counters.
type meter struct {
	count   atomic.Uint64
	settled atomic.Uint64
}

func (m *meter) add(n int) { m.count.Add(uint64(n)) }

// settle adds what is new to each of totals, exactly once however many call it.
func (m *meter) settle(totals ...*atomic.Uint64) {
	for {
		done, now := m.settled.Load(), m.count.Load()
		if done == now {
			return
		}
		if m.settled.CompareAndSwap(done, now) {
			for _, t := range totals {
				t.Add(now - done)
			}
			return
		}
	}
}
