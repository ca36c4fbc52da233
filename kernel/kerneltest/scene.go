package kerneltest

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// The hosts of a scene; 0 is the node itself. The gateway is the node's way to
// everywhere else, and tells of what comes by there that shouldn't.
const (
	node = iota
	outside
	two   // an endpoint on this node
	three // an endpoint on another node
	pod
	gateway
	hosts = gateway
)

var hostNames = [...]string{"node", "outside", "two", "three", "pod", "gateway"}

// serviceNetworks hold the addresses of all offers.
var serviceNetworks = []string{"10.96.0.0/24", "198.18.0.0/24", "192.0.2.0/24", "fd00:96::/64", "fd00:18::/64", "2001:db8::/64"}

// watchGateway makes the gateway answer for service addresses that nobody is to
// be reached at.
func (n *Network) watchGateway() {
	n.t.Helper()
	n.On(gateway, func() {
		n.sysctl("ipv4/ip_forward", "1")
		n.sysctl("ipv6/conf/all/forwarding", "1")
		n.sysctl("ipv4/icmp_ratelimit", "0")
		n.sysctl("ipv6/icmp/ratelimit", "0")
		for _, s := range serviceNetworks {
			_, to, err := net.ParseCIDR(s)
			n.must(err)
			n.must(netlink.RouteAdd(&netlink.Route{Dst: to, Type: unix.RTN_UNREACHABLE}))
		}
	})
}

// offer is a service of a scene, served over every protocol at the same addresses.
type offer struct {
	name      string
	number    int // makes its addresses and its node port
	endpoints []int
	unready   []int
	change    func(*service.Port)
}

// port is what services answer on.
const port = 80

// offers are the services of every scene.
func offers(n *Network) []offer {
	onlyLocal := func(p *service.Port) { p.InternalLocal, p.ExternalLocal = true, true }
	ranges := func(addresses ...netip.Addr) func(*service.Port) {
		return func(p *service.Port) {
			for _, a := range addresses {
				p.SourceRanges = append(p.SourceRanges, netip.PrefixFrom(a, a.BitLen()))
			}
		}
	}
	var outsiders []netip.Addr
	for _, f := range service.Families {
		outsiders = append(outsiders, n.Address(f, outside))
	}
	return []offer{
		{name: "both", number: 1, endpoints: []int{two, three}},
		{name: "local", number: 2, endpoints: []int{two, three}, change: onlyLocal},
		{name: "elsewhere", number: 3, endpoints: []int{three}, change: onlyLocal},
		{name: "nothing", number: 4},
		{name: "ranged", number: 5, endpoints: []int{two}, change: ranges(outsiders...)},
		{name: "node's range", number: 6, endpoints: []int{two}, change: ranges(n.nodeAddresses()...)},
		{name: "unready", number: 7, endpoints: []int{two}, unready: []int{three}},
		{name: "sticky", number: 8, endpoints: []int{two, three}, change: func(p *service.Port) { p.Affinity = time.Hour }},
		{name: "weighted", number: 9, endpoints: []int{two, two, two, three}, change: func(p *service.Port) {
			p.Algorithm, p.AlgorithmGiven = service.WeightedRoundRobin, true
		}},
	}
}

func (o offer) key(p service.Protocol) service.Key {
	return service.Key{Namespace: "default", Name: o.name, Port: p.String(), Protocol: p}
}

// at is the address of one kind, in one family. That of a node port depends on
// the client, who uses the node's address on its own link.
func (o offer) at(k plan.Kind, f service.Family, n *Network, client int) netip.AddrPort {
	form := map[plan.Kind][2]string{
		plan.ClusterIP: {"10.96.0.%d", "fd00:96::%d"}, plan.ExternalIP: {"198.18.0.%d", "fd00:18::%d"}, plan.LoadBalancer: {"192.0.2.%d", "2001:db8::%d"},
	}
	if k == plan.NodePort {
		return netip.AddrPortFrom(n.NodeAddress(f, max(client, 1)), o.nodePort())
	}
	return netip.AddrPortFrom(netip.MustParseAddr(fmt.Sprintf(form[k][f], o.number)), port)
}

func (o offer) nodePort() uint16 { return uint16(30000 + o.number) }

func (o offer) port(p service.Protocol, n *Network) service.Port {
	out := service.Port{Key: o.key(p), Number: port, NodePort: o.nodePort(), ExternallyAccessible: true}
	for _, f := range service.Families {
		out.ClusterIPs = append(out.ClusterIPs, o.at(plan.ClusterIP, f, n, 0).Addr())
		out.ExternalIPs = append(out.ExternalIPs, o.at(plan.ExternalIP, f, n, 0).Addr())
		out.LoadBalancerIPs = append(out.LoadBalancerIPs, o.at(plan.LoadBalancer, f, n, 0).Addr())
	}
	if o.change != nil {
		o.change(&out)
	}
	return out
}

// addTo adds the service to a snapshot.
func (o offer) addTo(t *testing.T, b *service.Builder, n *Network) {
	t.Helper()
	for _, p := range []service.Protocol{service.TCP, service.UDP, service.SCTP} {
		if err := b.AddPort(o.port(p, n)); err != nil {
			t.Fatal(err)
		}
		weights := map[int]uint16{}
		for _, e := range o.endpoints {
			weights[e]++ // named as often as its weight
		}
		for _, e := range o.unready {
			weights[e] = 1
		}
		for host, weight := range weights {
			for _, f := range service.Families {
				ready := !slices.Contains(o.unready, host)
				e := service.Endpoint{Address: netip.AddrPortFrom(n.Address(f, host), 8080), Node: "elsewhere", Ready: ready, Serving: ready, Weight: weight}
				if host == two {
					e.Node = here
				}
				b.AddEndpoint(o.key(p), e)
			}
		}
	}
}

// offloaded is the plan of a scene, every service of which the kernel serves as
// far as it can.
func offloaded(t *testing.T, m Mode, policy plan.Policy, n *Network) *plan.Plan {
	t.Helper()
	var b service.Builder
	b.SetNode(service.Node{Name: here, Addresses: n.nodeAddresses()})
	for _, o := range offers(n) {
		o.addTo(t, &b, n)
	}
	policy.Mode, policy.NodeAddresses = m.Mode, n.nodeAddresses()
	p := Compute(m.Plane, policy, b.Build())
	for _, s := range p.Services {
		if s.DataPlane == plan.Userspace {
			s.DataPlane = s.Beneath
		}
	}
	return p
}

func (n *Network) nodeAddresses() []netip.Addr {
	var out []netip.Addr
	for i := range n.hosts {
		for _, f := range service.Families {
			out = append(out, n.NodeAddress(f, i+1))
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return out
}
