package kerneltest

import (
	"cmp"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"net/netip"
	"slices"
	"time"

	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/kernel/nftables"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Planes returns the abilities of kproxy's kernel data planes, the one that mode
// auto prefers first, on a host that has those named.
func Planes(has ...plan.DataPlane) []plan.Abilities {
	host := func(d plan.DataPlane) plan.Capability {
		return plan.Capability{Name: string(d), Supported: slices.Contains(has, d)}
	}
	return []plan.Abilities{ipvs.Abilities(host(plan.IPVS), "", nil), iptables.Abilities(host(plan.IPTables)), nftables.Abilities(host(plan.NFTables))}
}

// Plan returns a plan of services, in key order, with hashes filled in.
func Plan(mode plan.Mode, services ...*plan.Service) *plan.Plan {
	p := &plan.Plan{Kernel: []plan.DataPlane{plan.IPTables}, TellsClients: true, Services: slices.Clone(services)}
	switch mode {
	case plan.ModeUserspace:
		p.Kernel, p.TellsClients = nil, false
	case plan.ModeNFTables:
		p.Kernel = []plan.DataPlane{plan.NFTables}
	case plan.ModeIPVS:
		p.Kernel, p.TellsClients = []plan.DataPlane{plan.IPVS}, false
	case plan.ModeAuto:
		p.Kernel, p.TellsClients = []plan.DataPlane{plan.IPVS, plan.IPTables}, false
	}
	for _, s := range p.Services {
		s.KernelHash = hash(s, &p.Policy)
		s.Leaving = slices.ContainsFunc(s.Endpoints, func(e plan.Endpoint) bool { return e.Leaves() })
	}
	slices.SortFunc(p.Services, func(a, b *plan.Service) int { return a.Port.Key.Compare(b.Port.Key) })
	return p
}

func hash(s *plan.Service, p *plan.Policy) uint64 {
	h := fnv.New64a()
	fmt.Fprintf(h, "%v %v %v %v %v %v %v %v", s.Port.Key, s.Port.Algorithm, s.Scheduler, s.Port.Affinity,
		s.Frontends, s.Groups, s.Kernel, *p)
	for _, e := range s.Endpoints {
		said := *e.Endpoint
		said.Hints = nil // what is pointed to, not where that is; so below
		fmt.Fprint(h, said, e.ZoneHints(), e.NodeHints())
		if e.Probed != nil {
			fmt.Fprint(h, *e.Probed)
		}
		e.Endpoint, e.Probed = nil, nil
		fmt.Fprint(h, e)
	}
	return h.Sum64()
}

// Service returns a service port that is served by iptables.
func Service(name string, proto service.Protocol, options ...func(*plan.Service)) *plan.Service {
	s := &plan.Service{
		Port: &service.Port{
			Key:       service.Key{Namespace: "default", Name: name, Protocol: proto},
			Algorithm: service.RoundRobin,
		},
		DataPlane: plan.IPTables, Kernel: plan.IPTables, TellsClients: true,
	}
	for _, o := range options {
		o(s)
	}
	return s
}

// Cluster adds a cluster IP.
func Cluster(address string, options ...func(*plan.Frontend)) func(*plan.Service) {
	return frontend(plan.ClusterIP, netip.MustParseAddrPort(address), plan.MasqueradeNever, options)
}

// External adds an external IP, of which every client is masqueraded.
func External(address string, options ...func(*plan.Frontend)) func(*plan.Service) {
	return frontend(plan.ExternalIP, netip.MustParseAddrPort(address), plan.MasqueradeAlways, options)
}

// LoadBalancer adds the address of a load balancer.
func LoadBalancer(address string, options ...func(*plan.Frontend)) func(*plan.Service) {
	return frontend(plan.LoadBalancer, netip.MustParseAddrPort(address), plan.MasqueradeAlways, options)
}

// NodePort adds a node port in both families.
func NodePort(port uint16, options ...func(*plan.Frontend)) func(*plan.Service) {
	return func(s *plan.Service) {
		for _, f := range service.Families {
			frontend(plan.NodePort, netip.AddrPortFrom(netip.Addr{}, port), plan.MasqueradeAlways,
				append([]func(*plan.Frontend){func(fe *plan.Frontend) { fe.Family = f }}, options...))(s)
		}
	}
}

func frontend(kind plan.Kind, a netip.AddrPort, m plan.Masquerade, options []func(*plan.Frontend)) func(*plan.Service) {
	return func(s *plan.Service) {
		f := plan.Frontend{
			Kind: kind, Family: service.FamilyOf(a.Addr()), Protocol: s.Port.Protocol,
			Address: a, Verdict: plan.Forward, Masquerade: m,
		}
		for _, o := range options {
			o(&f)
		}
		s.Frontends = append(s.Frontends, f)
	}
}

// Endpoints adds endpoints of weight 1 on other nodes.
func Endpoints(addresses ...string) func(*plan.Service) {
	return func(s *plan.Service) {
		for _, a := range addresses {
			Endpoint(a, 1, false)(s)
		}
	}
}

// Endpoint adds one endpoint that is usable.
func Endpoint(address string, weight uint32, local bool) func(*plan.Service) {
	return func(s *plan.Service) {
		b := plan.Backend{Address: netip.MustParseAddrPort(address), Weight: weight, Local: local}
		list(s, b, true)
		g := &s.Groups[service.FamilyOf(b.Address.Addr())]
		g.Cluster = append(g.Cluster, b)
		if local {
			g.Local = append(g.Local, b)
		}
	}
}

// Unusable adds an endpoint that is listed, but takes no new connection now.
func Unusable(address string, local bool) func(*plan.Service) {
	return func(s *plan.Service) {
		list(s, plan.Backend{Address: netip.MustParseAddrPort(address), Weight: 1, Local: local}, false)
	}
}

func list(s *plan.Service, b plan.Backend, usable bool) {
	e := plan.Endpoint{
		Endpoint: &service.Endpoint{Address: b.Address, Node: "elsewhere", Ready: usable, Serving: usable, Weight: uint16(b.Weight)},
		Local:    b.Local, Usable: usable, Probed: &plan.Probed{Health: "unknown"},
	}
	if b.Local {
		e.Node = "here"
	}
	s.Endpoints = append(s.Endpoints, e)
}

// Kernel sets the fallback, the kernel data plane that has a service's rules.
func Kernel(d plan.DataPlane) func(*plan.Service) {
	return func(s *plan.Service) {
		caps := plan.Caps{Planes: Planes()}
		a := caps.Plane(d)
		s.Kernel, s.TellsClients, s.Scheduler = d, a.TellsClients, ""
		if a.Schedulers {
			s.Scheduler = cmp.Or(s.Port.Scheduler, a.Algorithms[s.Port.Algorithm], a.Algorithms[service.RoundRobin])
		}
		if s.DataPlane != plan.Userspace {
			s.DataPlane = d
		}
	}
}

// Algorithm sets how endpoints are chosen.
func Algorithm(a service.Algorithm) func(*plan.Service) {
	return func(s *plan.Service) { s.Port.Algorithm = a }
}

// Affinity makes clients stay with their endpoints.
func Affinity(d time.Duration) func(*plan.Service) {
	return func(s *plan.Service) { s.Port.Affinity = d }
}

// InUserspace lets userspace serve new connections.
func InUserspace(s *plan.Service) { s.DataPlane = plan.Userspace }

// Many returns n services with a cluster IP and endpoints each, as clusters have
// them: addresses of 10.96.0.0/12, at random.
func Many(n, endpoints int) []*plan.Service {
	rng := rand.New(rand.NewPCG(1, 2))
	taken := map[uint32]bool{}
	out := make([]*plan.Service, n)
	for i := range out {
		a := rng.Uint32N(1 << 20)
		for taken[a] {
			a = rng.Uint32N(1 << 20)
		}
		taken[a] = true
		out[i] = Service(fmt.Sprintf("service-%d", i), service.TCP, Cluster(fmt.Sprintf("10.%d.%d.%d:80", 96+a>>16, a>>8&255, a&255)))
		for e := range endpoints {
			id := i*endpoints + e
			Endpoint(fmt.Sprintf("10.%d.%d.%d:8080", 128+id>>16, id>>8&255, id&255), 1, false)(out[i])
		}
	}
	return out
}
