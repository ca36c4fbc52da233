package userspace

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// End says how a connection or session ended, or why no endpoint took it.
type End struct {
	Connection       // its endpoint is the last that was tried; Service is zero where there is none at the address
	Reset      bool  // by a reset, or it was cut short
	Refused    error // nil if an endpoint took it
}

// Why clients are refused, where the kernel doesn't say.
var (
	errNoService  = errors.New("there is no service at this address")
	errOutside    = errors.New("the client is outside the service's source ranges")
	errNoEndpoint = errors.New("no endpoint can take it")
	errReset      = errors.New("it reset the connection before it said anything")
)

// missed is an attempt that failed.
type missed struct {
	endpoint netip.AddrPort
	err      error
}

// explain says why no endpoint took a client; tried is how many were.
func (m *missed) explain(tried int) (last netip.AddrPort, why error) {
	if m == nil {
		return last, errNoEndpoint
	}
	if why = m.err; tried > 1 {
		why = fmt.Errorf("none of %d endpoints tried took it; the last one: %w", tried, why)
	}
	return m.endpoint, why
}

// turnedAway reports a client that no plan lets in.
func (s *Server) turnedAway(f front, proto service.Protocol, client, orig netip.AddrPort, from plan.Client) {
	x := End{Connection: Connection{Protocol: proto, Client: client, Address: orig, Started: time.Now()}, Refused: errNoService}
	if f.view != nil {
		x.Service, x.Refused = f.view.plan.Port.Key, errNoEndpoint
		if !f.Allows(from) {
			x.Refused = errOutside
		}
	}
	s.cfg.OnEnd(x)
}

// connectTimes keeps how long the last connects to an endpoint took. The zero value is ready, and small: of many
// endpoints the first connect may never come. Any number of goroutines may use it.
type connectTimes struct{ last atomic.Pointer[lastTimes] }

// lastTimes are the last ones, in microseconds.
type lastTimes struct {
	count atomic.Uint64
	times [64]atomic.Uint32
}

func (c *connectTimes) add(d time.Duration) {
	l := c.last.Load()
	if l == nil {
		if l = new(lastTimes); !c.last.CompareAndSwap(nil, l) {
			l = c.last.Load()
		}
	}
	i := l.count.Add(1) - 1
	l.times[i%uint64(len(l.times))].Store(uint32(min(max(d.Microseconds(), 1), 1<<31)))
}

func (c *connectTimes) summary(of netip.AddrPort) plan.ConnectTime {
	var all []float64
	if l := c.last.Load(); l != nil {
		for i := range l.times {
			if t := l.times[i].Load(); t > 0 { // else it is counted, but not stored yet
				all = append(all, float64(t)/1e6)
			}
		}
	}
	if len(all) == 0 {
		return plan.ConnectTime{Endpoint: of}
	}
	slices.Sort(all)
	return plan.ConnectTime{Endpoint: of, Connects: len(all), MedianSeconds: all[len(all)/2], MaxSeconds: all[len(all)-1]}
}

// ConnectTimes returns how long the last TCP connects to the endpoints of a service port took, from connect(2) to when its loop
// heard that the endpoint had answered, in the order of addresses; of those that were connected to.
func (s *Server) ConnectTimes(k service.Key) []plan.ConnectTime {
	s.mu.Lock()
	v := s.plans.views[k]
	s.mu.Unlock()
	out := []plan.ConnectTime{}
	if v == nil {
		return out
	}
	v.state.mu.Lock()
	defer v.state.mu.Unlock()
	for a, e := range v.state.endpoints {
		if t := e.connects.summary(a); t.Connects > 0 {
			out = append(out, t)
		}
	}
	slices.SortFunc(out, func(a, b plan.ConnectTime) int { return a.Endpoint.Compare(b.Endpoint) })
	return out
}
