package conntrack

import (
	"net/netip"
	"slices"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// at is an address and port for tests that run for both families: the host
// number makes 10.x.0.n or fd00:x::n.
func at(f service.Family, net, host int, port uint16) netip.AddrPort {
	if f == service.IPv4 {
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(net), 0, byte(host)}), port)
	}
	return netip.AddrPortFrom(netip.AddrFrom16([16]byte{0: 0xfd, 3: byte(net), 15: byte(host)}), port)
}

func loopback(f service.Family) netip.Addr {
	if f == service.IPv4 {
		return netip.MustParseAddr("127.0.0.1")
	}
	return netip.IPv6Loopback()
}

// The networks of the tests.
const (
	clients  = 1
	pods     = 2
	nodes    = 3
	services = 96
)

const (
	listener    uint16 = 40000
	oldListener uint16 = 39999
	nodePort    uint16 = 30053
)

// isLocal knows one node address per family and the loopback ones.
func isLocal(a netip.Addr) bool {
	return a.IsLoopback() || slices.ContainsFunc(service.Families[:], func(f service.Family) bool {
		return a == at(f, nodes, 1, 0).Addr()
	})
}

func udpKey(name string) service.Key {
	return service.Key{Namespace: "default", Name: name, Port: "p", Protocol: service.UDP}
}

// serviceOf makes a dual-stack service with a cluster address and a node port
// and two endpoints per family: pods 2 and 3, port 5353.
func serviceOf(k service.Key, host int, change ...func(*plan.Service)) *plan.Service {
	s := &plan.Service{
		Port:      &service.Port{Key: k, Number: 53, NodePort: nodePort},
		DataPlane: plan.IPTables,
	}
	for _, f := range service.Families {
		s.Frontends = append(s.Frontends, plan.Frontend{
			Kind: plan.ClusterIP, Family: f, Protocol: k.Protocol, Verdict: plan.Forward, Address: at(f, services, host, 53),
		})
	}
	for _, f := range service.Families {
		s.Frontends = append(s.Frontends, plan.Frontend{
			Kind: plan.NodePort, Family: f, Protocol: k.Protocol, Verdict: plan.Forward, Address: netip.AddrPortFrom(netip.Addr{}, nodePort),
		})
	}
	for _, f := range service.Families {
		for host := 2; host <= 3; host++ {
			s.Endpoints = append(s.Endpoints, plan.Endpoint{
				Endpoint: &service.Endpoint{Address: at(f, pods, host, 5353), Ready: true, Serving: true, Weight: 1}, Usable: true,
			})
		}
	}
	for _, c := range change {
		c(s)
	}
	return s
}

func planOf(s ...*plan.Service) *plan.Plan {
	slices.SortFunc(s, func(a, b *plan.Service) int { return a.Port.Compare(b.Port.Key) })
	return &plan.Plan{Services: s}
}

func inPlane(d plan.DataPlane) func(*plan.Service) {
	return func(s *plan.Service) { s.DataPlane = d }
}

// withoutEndpoint removes pod number host from both families.
func withoutEndpoint(host int) func(*plan.Service) {
	return func(s *plan.Service) {
		s.Endpoints = slices.DeleteFunc(s.Endpoints, func(e plan.Endpoint) bool {
			return e.Address == at(service.IPv4, pods, host, 5353) || e.Address == at(service.IPv6, pods, host, 5353)
		})
	}
}

func notServing(host int) func(*plan.Service) {
	return func(s *plan.Service) {
		for i := range s.Endpoints {
			e := &s.Endpoints[i]
			if e.Address == at(service.IPv4, pods, host, 5353) || e.Address == at(service.IPv6, pods, host, 5353) {
				e.Ready, e.Serving, e.Terminating = false, false, true
			}
		}
	}
}

// rejecting takes all endpoints away.
func rejecting(s *plan.Service) {
	s.Endpoints, s.DataPlane = nil, plan.None
	for i := range s.Frontends {
		s.Frontends[i].Verdict = plan.Reject
	}
}

// flow makes an entry of client 9 to dst whose packets go to target.
func flow(f service.Family, p service.Protocol, dst, target netip.AddrPort) Flow {
	client := at(f, clients, 9, 50000)
	return Flow{
		Family: f, Protocol: p, ID: 1, Status: statusSeenReply,
		OrigSrc: client, OrigDst: dst, ReplySrc: target, ReplyDst: client,
	}
}
