package userspace

import (
	"net/netip"
	"slices"
	"time"

	"kproxy.dev/kproxy/lb"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// choice is one client's search for an endpoint that takes it. It is used by
// one goroutine.
type choice struct {
	group    *group
	affinity *lb.Affinity // nil without
	client   netip.Addr
	before   netip.AddrPort // the endpoint that it had before a restart; invalid for none
	tried    []int
	room     [4]int // what tried needs with the default number of retries
	now      time.Time
}

func newChoice(g *group, a *lb.Affinity, client netip.Addr) *choice {
	c := &choice{group: g, affinity: a, client: client}
	c.tried = c.room[:0]
	return c
}

// next returns an endpoint that wasn't tried yet, its Load acquired, or nil
// when none is left. A client with affinity gets its endpoint first, or that of before a restart.
func (c *choice) next() *endpoint {
	c.now = time.Now()
	i := -1
	if len(c.tried) == 0 {
		if c.affinity != nil {
			before, _ := c.affinity.Get(c.client, c.now)
			i = c.acquire(before)
		}
		if i < 0 {
			i = c.acquire(c.before)
		}
	}
	if i < 0 {
		i = c.group.picker.Acquire(c.client, c)
	}
	if i < 0 {
		return nil
	}
	c.tried = append(c.tried, i)
	return c.group.endpoints[i]
}

// acquire acquires the endpoint at an address, if that is valid and it takes connections.
func (c *choice) acquire(addr netip.AddrPort) int {
	if !addr.IsValid() {
		return -1
	}
	i := c.takes(addr)
	if i >= 0 {
		c.group.endpoints[i].load.Acquire()
	}
	return i
}

// takes returns which endpoint is at an address, -1 if none is that takes connections.
func (c *choice) takes(addr netip.AddrPort) int {
	for i := range c.group.backends {
		if b := &c.group.backends[i]; b.Address == addr {
			if b.Weight == 0 || c.Skip(i) {
				return -1
			}
			return i
		}
	}
	return -1
}

// exclude makes next leave out e, which has failed already.
func (c *choice) exclude(e *endpoint) {
	if i := slices.Index(c.group.endpoints, e); i >= 0 {
		c.tried = append(c.tried, i)
	}
}

// connected makes the client stick to e.
func (c *choice) connected(e *endpoint) {
	if c.affinity != nil {
		c.affinity.Set(c.client, e.address, c.now)
	}
}

// Skip excludes endpoints that were tried (lb.Skip).
func (c *choice) Skip(i int) bool { return slices.Contains(c.tried, i) }

// Forecast says what a Server would do with a client's next connection.
type Forecast struct {
	Service   service.Key
	Algorithm service.Algorithm
	Endpoints []Prospect // those it chooses from, in the plan's order
	// Affine is the endpoint that the client stays with; invalid if none.
	Affine netip.AddrPort
	// Retries is how many further endpoints are tried.
	Retries int
}

// Prospect is one endpoint of a Forecast.
type Prospect struct {
	Address netip.AddrPort
	Share   float64 // its probability of being tried first, 0..1
	Next    bool    // it is next if no other client comes first
	Active  int64   // connections that it has now
	// Source is the address that the endpoint sees; the zero Addr is one of this
	// node's, which the kernel chooses.
	Source netip.Addr
	// Transparent: Source isn't this node's own.
	Transparent bool
}

// Forecast says what the Server would do with a connection or datagram of c's
// to an address, and does nothing of it; false if it serves no service there.
func (s *Server) Forecast(proto service.Protocol, to netip.AddrPort, c plan.Client) (Forecast, bool) {
	f, ok := s.table.lookup(proto, to, s.locals.mustContain)
	if !ok {
		return Forecast{}, false
	}
	g := f.group(c, s.table.rules())
	search := newChoice(g, f.view.state.affinity.Load(), c.Address)
	search.now = time.Now()
	out := Forecast{Service: f.view.plan.Port.Key, Algorithm: f.view.plan.Port.Algorithm, Retries: s.retries(f.view.plan.Port)}
	p := lb.ProspectOf(g.picker, g.targets, c.Address, search)
	if search.affinity != nil {
		out.Affine, _ = search.affinity.Peek(c.Address, search.now)
		if i := search.takes(out.Affine); i >= 0 {
			p = lb.Prospect{Shares: make([]float64, len(g.backends)), Next: i}
			p.Shares[i] = 1
		}
	}
	for i, b := range g.backends {
		e, from := g.endpoints[i], s.table.source(f, c, b.Address.Addr())
		out.Endpoints = append(out.Endpoints, Prospect{
			Address: b.Address, Share: p.Shares[i], Next: p.Next == i, Active: e.load.Active(),
			Source: from.addr, Transparent: from.transparent,
		})
	}
	return out, true
}
