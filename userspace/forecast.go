package userspace

import (
	"net/netip"
	"time"

	"kproxy.dev/kproxy/lb"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Forecast is what a Server would do with a client's next connection.
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
	Next    bool    // it is next if nobody else comes first
	Active  int64   // connections that it has now
	Ejected time.Time
	// Source is the address that the endpoint sees; the zero Addr is one of this
	// node's, which the kernel chooses.
	Source netip.Addr
	// Transparent: Source isn't this node's own.
	Transparent bool
}

// Forecast says what the Server would do with a connection or datagram of c's
// to an address, and does nothing of it; false if it serves nobody there.
func (s *Server) Forecast(proto service.Protocol, to netip.AddrPort, c plan.Client) (Forecast, bool) {
	f, ok := s.table.lookup(proto, to, s.locals.mustContain)
	if !ok {
		return Forecast{}, false
	}
	state, now := f.view.state, time.Now()
	g := f.group(c, s.table.rules())
	out := Forecast{Service: f.view.plan.Port.Key, Algorithm: g.algorithm, Retries: s.retries(f.view.plan.Port)}
	targets := make([]lb.Target, len(g.backends))
	for i, b := range g.backends {
		targets[i] = lb.Target{Address: b.Address, Weight: b.Weight}
	}
	p := lb.ProspectOf(g.picker, targets, c.Address, &ejected{g, now})
	if p.Next < 0 && !anyShare(p.Shares) { // those in ejection are better than none
		p = lb.ProspectOf(g.picker, targets, c.Address, nil)
	}
	if a := state.affinity.Load(); a != nil {
		out.Affine, _ = a.Peek(c.Address, now)
		p = stay(g, p, out.Affine, &ejected{g, now})
	}
	for i, b := range g.backends {
		e, from := g.endpoints[i], s.table.source(f, c, b.Address.Addr())
		out.Endpoints = append(out.Endpoints, Prospect{
			Address: b.Address, Share: p.Shares[i], Next: p.Next == i, Active: e.load.Active(),
			Ejected: e.ejection.Until(now), Source: from.addr, Transparent: from.transparent,
		})
	}
	return out, true
}

// ejected skips those in ejection.
type ejected struct {
	group *group
	now   time.Time
}

func (e *ejected) Skip(i int) bool { return e.group.endpoints[i].ejection.Ejected(e.now) }

func anyShare(shares []float64) bool {
	for _, s := range shares {
		if s > 0 {
			return true
		}
	}
	return false
}

// stay gives everything to the endpoint that the client stays with, if it takes
// connections; see choice.sticky.
func stay(g *group, p lb.Prospect, affine netip.AddrPort, skip lb.Skip) lb.Prospect {
	for i := range g.backends {
		if b := &g.backends[i]; b.Address == affine && b.Weight > 0 && !skip.Skip(i) {
			p = lb.Prospect{Shares: make([]float64, len(g.backends)), Next: i}
			p.Shares[i] = 1
		}
	}
	return p
}
