package trace

import (
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace/netfilter"
	"kproxy.dev/kproxy/userspace"
)

// transparentMark is what kproxy's answers bear that go to a client's address.
const transparentMark = 0x1000

// scene is a host for tests: what the kernel would say.
type scene struct {
	rules     string // as iptables-save prints them
	local     []string
	routes    map[string]string // address → link; "" for no route
	forgotten string            // no route to it for what endpoints send
	listening []string
	balancer  *kernel.Balancer
	off       string // setting that keeps packets from being forwarded
	filter    reversePath
	use       [2]int // of the conntrack table, and its limit
}

// The usual scene: a node between a client's network and two backends.
func usual() scene {
	return scene{
		local:  []string{"10.1.0.1", "10.2.0.1", "10.96.0.99"},
		routes: map[string]string{"10.1.0.2": "client", "10.2.0.2": "b1", "10.2.0.3": "b2", "10.96.0.10": "client"},
		use:    [2]int{1, 100},
	}
}

func (c scene) host(t *testing.T) *hostState {
	t.Helper()
	own := addresses{links: map[netip.Addr]string{}}
	for _, a := range c.local {
		own.links[netip.MustParseAddr(a)] = "client"
	}
	tables, err := netfilter.Parse(service.IPv4, c.rules, nil, fakeHost{})
	if err != nil {
		t.Fatal(err)
	}
	s := &hostState{addresses: own, walk: tables.Walk, rules: tables.Rules}
	s.route = func(q query) route {
		r := route{query: q, kind: unix.RTN_UNICAST, source: netip.MustParseAddr("10.1.0.1")}
		if s.local(q.to) || q.mark&transparentMark == transparentMark && q.in != "" {
			r.kind, r.link = unix.RTN_LOCAL, loopback
		} else if r.link = c.routes[q.to.String()]; r.link == "" || q.in != "" && q.to.String() == c.forgotten {
			r.err = unix.ENETUNREACH
		}
		return r
	}
	s.listener = func(_ service.Protocol, a netip.AddrPort) (listener, bool, error) {
		for _, l := range c.listening {
			if at := netip.MustParseAddrPort(l); at.Port() == a.Port() && (at.Addr().IsUnspecified() || at == a) {
				return listener{address: at}, true, nil
			}
		}
		return listener{}, false, nil
	}
	s.stopped = func(uint32) (int, string) { return 0, "" }
	s.disabled = func(service.Family) string { return "" }
	s.forwarding = func(service.Family, string) string { return c.off }
	s.reversePath = func(netip.Addr, string, uint32) reversePath { return c.filter }
	s.conntrack = func() (int, int, error) { return c.use[0], c.use[1], nil }
	s.sets = func(func(string) bool) ([]kernel.SetState, error) { return nil, nil }
	s.hops = func(*route) []nextHop { return nil }
	s.uplink = func(service.Family) string { return "" }
	s.hop = func(*route) (hop, error) { return hop{carrier: true}, nil }
	s.throughDefault = func(query) bool { return false }
	s.linksDown = func() []string { return nil }
	s.bridge = func(string) *bridge { return nil }
	s.programs = func(string) []Finding { return nil }
	s.neighbours = func() (neighbourhood, error) { return neighbourhood{}, nil }
	return s
}

// Explain implements kernel.Explainer.
func (c scene) Explain(_ service.Protocol, at netip.AddrPort, _ netip.Addr) (*kernel.Balancer, error) {
	if at.String() != "10.96.0.99:80" {
		return nil, nil
	}
	return c.balancer, nil
}

// Compare implements kernel.Explainer.
func (scene) Compare(*kernel.Ruleset, service.Protocol, netip.AddrPort) ([]Mismatch, error) {
	return nil, nil
}

// fakeHost is the scene's, as rules ask.
type fakeHost struct{}

func (fakeHost) AddressType(netip.Addr) (string, error) { return "UNICAST", nil }
func (fakeHost) InterfaceAddress(string, service.Family) (netip.Addr, error) {
	return netip.MustParseAddr("10.1.0.1"), nil
}
func (fakeHost) MasqueradeAddress(string, netip.Addr) (netip.Addr, error) {
	return netip.MustParseAddr("10.2.0.1"), nil
}
func (fakeHost) Listens(service.Protocol, netip.AddrPort) (netfilter.Socket, error) {
	return netfilter.Socket{}, nil
}

// trace follows a packet through the scene.
func (c scene) trace(t *testing.T, from, to string, proxy *Proxy) Result {
	t.Helper()
	req := Request{Address: netip.MustParseAddrPort(to), Protocol: service.TCP}
	if from != "" {
		req.From = netip.MustParseAddr(from)
	}
	x := newTracer(req, proxy, c.host(t))
	x.explainers = []kernel.Explainer{c}
	x.follow()
	x.compare()
	return x.result()
}

// onePlan is a plan of one service with two endpoints.
func onePlan(plane plan.DataPlane) *plan.Plan {
	p := &plan.Plan{Policy: plan.DefaultPolicy()}
	s := &plan.Service{
		Port:      &service.Port{Key: service.Key{Namespace: "default", Name: "web", Protocol: service.TCP}, Number: 80, ClusterIPs: []netip.Addr{netip.MustParseAddr("10.96.0.10")}},
		Frontends: []plan.Frontend{{Kind: plan.ClusterIP, Protocol: service.TCP, Address: netip.MustParseAddrPort("10.96.0.10:80"), Verdict: plan.Forward, Masquerade: plan.MasqueradeNever}},
		DataPlane: plane, State: plan.StatePinned, Reason: "pinned",
	}
	for _, a := range []string{"10.2.0.2:9000", "10.2.0.3:9000"} {
		at := netip.MustParseAddrPort(a)
		s.Endpoints = append(s.Endpoints, plan.Endpoint{Endpoint: &service.Endpoint{Address: at, Ready: true, Serving: true, Weight: 1, Node: "n"}, Usable: true, Probed: &plan.Probed{Health: "up"}})
		s.Groups[service.IPv4].Cluster = append(s.Groups[service.IPv4].Cluster, plan.Backend{Address: at, Weight: 1})
	}
	p.Services = []*plan.Service{s}
	return p
}

// forecasts is a proxy that would choose among endpoints with shares.
func forecasts(p *plan.Plan, source string, shares ...float64) *Proxy {
	return &Proxy{Plan: p, Alive: true, Marks: kernel.DefaultMarks(),
		Forecast: func(service.Protocol, netip.AddrPort, plan.Client) (userspace.Forecast, bool) {
			f := userspace.Forecast{Service: p.Services[0].Port.Key, Algorithm: service.RoundRobin}
			for i, s := range shares {
				e := userspace.Prospect{Address: p.Services[0].Endpoints[i].Address, Share: s}
				if source != "" {
					e.Source, e.Transparent = netip.MustParseAddr(source), true
				}
				f.Endpoints = append(f.Endpoints, e)
			}
			return f, true
		}}
}
