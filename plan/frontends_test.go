package plan

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/service"
)

// say tells a frontend in one line.
func say(f Frontend) string {
	out := string(f.Kind) + " " + f.Family.String() + " " + addressText(f) + " " + string(f.Verdict) + " masquerade=" + string(f.Masquerade)
	if f.Local {
		out += " local"
	}
	if f.ShortCircuit {
		out += " short-circuit"
	}
	for _, r := range f.SourceRanges {
		out += " from=" + r.String()
	}
	return out
}

func addressText(f Frontend) string {
	if f.Kind == NodePort {
		return fmt.Sprintf(":%d", f.Address.Port())
	}
	return f.Address.String()
}

func sayAll(s *Service) []string {
	var out []string
	for _, f := range s.Frontends {
		out = append(out, say(f))
	}
	return out
}

// balancer makes a port of type LoadBalancer that has every kind of address.
func balancer(p *service.Port) {
	p.NodePort, p.ExternallyAccessible = 30080, true
	p.LoadBalancerIPs = addrs("203.0.113.1")
	p.ExternalIPs = addrs("198.51.100.1")
}

const local, remote = "10.0.0.1 n1 ready", "10.0.0.2 n2 ready"

type frontendTest struct {
	name      string
	port      []func(*service.Port)
	policy    func(*Policy)
	endpoints []string
	want      []string
	problems  []string
}

var frontendTests = []frontendTest{
	{name: "cluster address", endpoints: []string{local}, want: []string{
		"cluster-ip ipv4 10.96.0.1:80 forward masquerade=never",
	}},
	{name: "every kind, policy Cluster", port: []func(*service.Port){balancer}, endpoints: []string{remote}, want: []string{
		"cluster-ip ipv4 10.96.0.1:80 forward masquerade=never",
		"external-ip ipv4 198.51.100.1:80 forward masquerade=always",
		"load-balancer ipv4 203.0.113.1:80 forward masquerade=always",
		"node-port ipv4 :30080 forward masquerade=always",
	}},
	{name: "every kind, external Local, endpoint here", port: []func(*service.Port){balancer, eTPLocal}, endpoints: []string{local}, want: []string{
		"cluster-ip ipv4 10.96.0.1:80 forward masquerade=never",
		"external-ip ipv4 198.51.100.1:80 forward masquerade=node-clients local short-circuit",
		"load-balancer ipv4 203.0.113.1:80 forward masquerade=node-clients local short-circuit",
		"node-port ipv4 :30080 forward masquerade=node-clients local short-circuit",
	}},
	{name: "external Local, endpoint elsewhere", port: []func(*service.Port){external, eTPLocal}, endpoints: []string{remote}, want: []string{
		"cluster-ip ipv4 10.96.0.1:80 forward masquerade=never",
		"node-port ipv4 :30080 drop masquerade=node-clients local short-circuit",
	}},
	{name: "external Local, no endpoint anywhere", port: []func(*service.Port){external, eTPLocal}, want: []string{
		"cluster-ip ipv4 10.96.0.1:80 reject masquerade=never",
		"node-port ipv4 :30080 reject masquerade=node-clients local short-circuit",
	}},
	{name: "internal Local, endpoint elsewhere", port: []func(*service.Port){external, iTPLocal}, endpoints: []string{remote}, want: []string{
		"cluster-ip ipv4 10.96.0.1:80 drop masquerade=never local",
		"node-port ipv4 :30080 forward masquerade=always",
	}},
	{name: "weight 0 everywhere", port: []func(*service.Port){external, eTPLocal}, endpoints: []string{local + " weight:0", remote + " weight:0"}, want: []string{
		"cluster-ip ipv4 10.96.0.1:80 reject masquerade=never",
		"node-port ipv4 :30080 reject masquerade=node-clients local short-circuit",
	}},
	{name: "weight 0 here", port: []func(*service.Port){external, eTPLocal}, endpoints: []string{local + " weight:0", remote}, want: []string{
		"cluster-ip ipv4 10.96.0.1:80 forward masquerade=never",
		"node-port ipv4 :30080 drop masquerade=node-clients local short-circuit",
	}},
	{name: "masquerade all", policy: func(p *Policy) { p.MasqueradeAll, p.PodCIDRs = true, prefixes("10.0.0.0/8") }, endpoints: []string{local}, want: []string{
		"cluster-ip ipv4 10.96.0.1:80 forward masquerade=always",
	}},
	{name: "pod CIDRs, of one family", policy: func(p *Policy) { p.PodCIDRs = prefixes("10.0.0.0/8") },
		port: []func(*service.Port){func(p *service.Port) { p.ClusterIPs = addrs("10.96.0.1", "fd96::1") }}, endpoints: []string{local, "fd00::1 n1 ready"}, want: []string{
			"cluster-ip ipv4 10.96.0.1:80 forward masquerade=unless-pod",
			"cluster-ip ipv6 [fd96::1]:80 forward masquerade=never",
		}},
	{name: "dual stack, endpoints of one family", port: []func(*service.Port){external, func(p *service.Port) { p.ClusterIPs = addrs("10.96.0.1", "fd96::1") }}, endpoints: []string{local}, want: []string{
		"cluster-ip ipv4 10.96.0.1:80 forward masquerade=never",
		"cluster-ip ipv6 [fd96::1]:80 reject masquerade=never",
		"node-port ipv4 :30080 forward masquerade=always",
		"node-port ipv6 :30080 reject masquerade=always",
	}},
	{name: "an external address of a family without cluster address", port: []func(*service.Port){balancer, func(p *service.Port) {
		p.NodePort, p.ExternalIPs, p.LoadBalancerIPs = 0, addrs("2001:db8::1"), nil
	}}, endpoints: []string{local}, want: []string{
		"cluster-ip ipv4 10.96.0.1:80 forward masquerade=never",
	}, problems: []string{"2001:db8::1 is not served: the service has no IPv6 cluster address"}},
	{name: "no cluster address", port: []func(*service.Port){balancer, func(p *service.Port) {
		p.ClusterIPs, p.ExternalIPs = nil, nil
	}}, endpoints: []string{local}, want: []string{
		"load-balancer ipv4 203.0.113.1:80 forward masquerade=always",
		"node-port ipv4 :30080 forward masquerade=always",
	}},
	{name: "one address as every kind", port: []func(*service.Port){balancer, func(p *service.Port) {
		p.NodePort = 0
		p.ExternalIPs = addrs("10.96.0.1", "203.0.113.1")
		p.LoadBalancerIPs = addrs("10.96.0.1", "203.0.113.1")
	}}, endpoints: []string{local}, want: []string{
		"cluster-ip ipv4 10.96.0.1:80 forward masquerade=never",
		"load-balancer ipv4 203.0.113.1:80 forward masquerade=always",
	}},
	{name: "source ranges", port: []func(*service.Port){balancer, func(p *service.Port) {
		p.SourceRanges = prefixes("198.51.100.0/24", "2001:db8::/32")
	}}, endpoints: []string{local}, want: []string{
		"cluster-ip ipv4 10.96.0.1:80 forward masquerade=never",
		"external-ip ipv4 198.51.100.1:80 forward masquerade=always",
		"load-balancer ipv4 203.0.113.1:80 forward masquerade=always from=198.51.100.0/24",
		"node-port ipv4 :30080 forward masquerade=always",
	}},
	{name: "source ranges that admit everybody", port: []func(*service.Port){balancer, func(p *service.Port) {
		p.NodePort, p.ExternalIPs = 0, nil
		p.SourceRanges = prefixes("198.51.100.0/24", "0.0.0.0/0")
	}}, endpoints: []string{local}, want: []string{
		"cluster-ip ipv4 10.96.0.1:80 forward masquerade=never",
		"load-balancer ipv4 203.0.113.1:80 forward masquerade=always",
	}},
	{name: "source ranges that admit this node", port: []func(*service.Port){balancer, func(p *service.Port) {
		p.NodePort, p.ExternalIPs = 0, nil
		p.SourceRanges = prefixes("192.168.0.0/16")
	}}, endpoints: []string{local}, want: []string{
		"cluster-ip ipv4 10.96.0.1:80 forward masquerade=never",
		"load-balancer ipv4 203.0.113.1:80 forward masquerade=always from=192.168.0.0/16 from=203.0.113.1/32",
	}},
	{name: "source ranges of the other family only", port: []func(*service.Port){balancer, func(p *service.Port) {
		p.NodePort, p.ExternalIPs = 0, nil
		p.SourceRanges = prefixes("2001:db8::/32")
	}}, endpoints: []string{local}, want: []string{
		"cluster-ip ipv4 10.96.0.1:80 forward masquerade=never",
		"load-balancer ipv4 203.0.113.1:80 forward masquerade=always",
	}, problems: []string{"its source ranges don't restrict IPv4 clients: none of them is IPv4"}},
	{name: "weights under round robin", endpoints: []string{local + " weight:3", remote, "10.0.0.3 n1 ready weight:0"}, want: []string{
		"cluster-ip ipv4 10.96.0.1:80 forward masquerade=never",
	}, problems: []string{"its weights have no effect: the algorithm is round-robin, not weighted-round-robin"}},
}

func TestFrontends(t *testing.T) {
	for _, tt := range frontendTests {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			if tt.policy != nil {
				tt.policy(&w.in.Policy)
			}
			w.set(port("a", tt.port...), tt.endpoints...)
			s := w.one()
			if diff := cmp.Diff(tt.want, sayAll(s)); diff != "" {
				t.Errorf("frontends (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(tt.problems, s.Problems); diff != "" {
				t.Errorf("problems (-want +got):\n%s", diff)
			}
		})
	}
}

func TestContests(t *testing.T) {
	older := func(p *service.Port) { p.Created = t0.Add(-1) }
	nodePort := func(p *service.Port) { external(p) }
	ip := func(s string) func(*service.Port) { return func(p *service.Port) { p.ClusterIPs = addrs(s) } }
	udp := func(p *service.Port) { p.Protocol = service.UDP }
	number := func(n uint16) func(*service.Port) { return func(p *service.Port) { p.Number = n } }
	tests := []struct {
		name  string
		ports []service.Port
		want  map[string][]string // problems
	}{
		{"the older wins", []service.Port{port("a"), port("b", older)}, map[string][]string{
			"ns/a": {"10.96.0.1:80 (TCP) belongs to ns/b, which is older"},
		}},
		{"of equally old ones the first wins", []service.Port{port("a"), port("b"), port("c")}, map[string][]string{
			"ns/b": {"10.96.0.1:80 (TCP) belongs to ns/a, which comes first by name"},
			"ns/c": {"10.96.0.1:80 (TCP) belongs to ns/a, which comes first by name"},
		}},
		{"other protocols and ports are other places", []service.Port{port("a"), port("b", udp), port("c", number(81))}, nil},
		{"a node port", []service.Port{port("a", nodePort), port("b", nodePort, ip("10.96.0.2"))}, map[string][]string{
			"ns/b": {"node port 30080 (TCP) belongs to ns/a, which comes first by name"},
		}},
		{"a node port of both families is one sentence", []service.Port{
			port("a", nodePort, func(p *service.Port) { p.ClusterIPs = addrs("10.96.0.1", "fd96::1") }),
			port("b", nodePort, func(p *service.Port) { p.ClusterIPs = addrs("10.96.0.2", "fd96::2") }),
		}, map[string][]string{
			"ns/b": {"node port 30080 (TCP) belongs to ns/a, which comes first by name"},
		}},
		{"an external address that is another's cluster address", []service.Port{
			port("a", ip("10.96.0.2"), func(p *service.Port) { p.ExternalIPs = addrs("10.96.0.1") }),
			port("b", older),
		}, map[string][]string{
			"ns/a": {"10.96.0.1:80 (TCP) belongs to ns/b, which is older"},
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			for _, p := range tt.ports {
				w.set(p, "10.0.0.1 n1 ready")
			}
			p := w.compute()
			var got map[string][]string
			for _, s := range p.Services {
				if s.Problems != nil {
					if got == nil {
						got = map[string][]string{}
					}
					got[s.Port.Key.String()] = s.Problems
				}
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("problems (-want +got):\n%s", diff)
			}
		})
	}
}

// TestContestEnds: the loser gets the address when the winner goes, although
// nothing about the loser itself changed.
func TestContestEnds(t *testing.T) {
	w := newWorld(t)
	w.set(port("a"), "10.0.0.1 n1 ready")
	w.set(port("b"), "10.0.0.2 n1 ready")
	b := w.compute().Services[1]
	if b.State != StateRejecting || b.Reason != "all its addresses belong to other services" {
		t.Errorf("loser stands at %s (%s)", b.State, b.Reason)
	}
	delete(w.ports, port("a").Key)
	if b := w.one(); len(b.Frontends) != 1 || b.Problems != nil {
		t.Errorf("without the winner: frontends %v, problems %v", b.Frontends, b.Problems)
	}
}

// TestOwnAddressAsSource: where a service's address is on the node's link, the
// node connects from it.
func TestOwnAddressAsSource(t *testing.T) {
	w := newWorld(t)
	in(ModeIPVS)(w)
	w.in.Policy.NodeAddresses = addrs("198.51.100.1")
	w.set(port("a", eTPLocal, func(p *service.Port) {
		p.LoadBalancerIPs, p.ExternallyAccessible = addrs("203.0.113.1"), true
		p.SourceRanges = prefixes("192.168.0.0/24") // the node's
	}), "10.0.0.2 n2 ready")
	s := w.one()
	for i := range s.Frontends {
		f := &s.Frontends[i]
		own, other := Client{Address: f.Address.Addr()}, Client{Address: netip.MustParseAddr("192.168.0.9")}
		if got := s.VerdictFor(f, own, &Policy{}); got != Forward {
			t.Errorf("%s: %s for its own address, want forward", f.Kind, got)
		}
		backend := endpoint("10.0.0.2").Address.Addr()
		if !f.Masquerades(own, backend, &w.in.Policy) || f.Masquerades(other, backend, &w.in.Policy) {
			t.Errorf("%s: masquerades itself %v, another %v, want true, false", f.Kind,
				f.Masquerades(own, backend, &w.in.Policy), f.Masquerades(other, backend, &w.in.Policy))
		}
	}
}

// TestHostsOfOneNetwork: they answer each other without passing this node, which
// therefore masquerades; but this node's own endpoints can't.
func TestHostsOfOneNetwork(t *testing.T) {
	p := Policy{Links: prefixes("192.168.0.0/24"), NodeAddresses: addrs("192.168.0.1")}
	bridged := Policy{BridgedLinks: p.Links, NodeAddresses: p.NodeAddresses}
	f := Frontend{Kind: NodePort, Masquerade: MasqueradeNodeLocal}
	for _, tt := range []struct {
		client, backend string
		want            bool
	}{
		{"192.168.0.9", "192.168.0.2", true},
		{"192.168.0.9", "192.168.0.1", false},
		{"192.168.0.9", "10.0.0.2", false},
		{"192.168.0.9", "192.168.0.9", true},
	} {
		c := Client{Address: netip.MustParseAddr(tt.client)}
		if got := f.Masquerades(c, netip.MustParseAddr(tt.backend), &p); got != tt.want {
			t.Errorf("%s to %s: masqueraded %v, want %v", tt.client, tt.backend, got, tt.want)
		}
		itself := tt.client == tt.backend
		if got := f.Masquerades(c, netip.MustParseAddr(tt.backend), &bridged); got != itself {
			t.Errorf("%s to %s, bridged: masqueraded %v, want %v", tt.client, tt.backend, got, itself)
		}
		socket := c.Address
		if tt.want {
			socket = netip.MustParseAddr("240.168.0.9")
		}
		if got := bridged.SocketAddress(c, netip.MustParseAddr(tt.backend)); got != socket {
			t.Errorf("%s to %s, bridged: a socket bears %v, want %v", tt.client, tt.backend, got, socket)
		}
	}
}

// TestOwnAddresses: a service address that is the node's own is a problem where
// IPVS answers on it.
func TestOwnAddresses(t *testing.T) {
	const own = "203.0.113.1 is this node's own address: the service answers there on port 80, the node's own ports stay reachable there, and the address is left where it is"
	tests := []struct {
		name string
		mode Mode
		port func(*service.Port)
		want []string
	}{
		{"mode ipvs", ModeIPVS, balancer, []string{own}},
		{"auto", ModeAuto, balancer, []string{own}},
		{"auto, but on iptables", ModeAuto, func(p *service.Port) { balancer(p); p.Algorithm = service.Random }, nil},
		{"mode iptables", ModeIPTables, balancer, nil},
		{"a node port only", ModeIPVS, external, nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			in(tt.mode)(w)
			w.set(port("a", tt.port), "10.0.0.1 n1 ready")
			if s := w.one(); s.Problems != nil {
				t.Errorf("problems before: %q", s.Problems)
			}
			w.in.Policy.NodeAddresses = addrs("192.168.0.1", "203.0.113.1")
			if diff := cmp.Diff(tt.want, w.one().Problems); diff != "" {
				t.Errorf("problems (-want +got):\n%s", diff)
			}
		})
	}
}

// TestWeightsOfScheduler: a scheduler that goes by weight gets them, whatever
// the algorithm; userspace goes by the algorithm.
func TestWeightsOfScheduler(t *testing.T) {
	const plain = "its weights have no effect: the algorithm is round-robin, not weighted-round-robin"
	const only = "its weights have no effect in userspace: the algorithm is round-robin, not weighted-round-robin"
	for _, tt := range []struct {
		mode   Mode
		port   service.Port
		weight uint32
		want   []string
	}{
		{ModeIPVS, port("a"), 1, []string{plain}},
		{ModeIPVS, port("a", scheduler("wrr")), 3, []string{only}},
		{ModeIPVS, port("a", scheduler("rr")), 1, []string{plain}},
		{ModeIPTables, port("a", scheduler("wrr")), 1, []string{plain}},
		{ModeIPVS, port("a", algorithm(service.WeightedRoundRobin)), 3, nil},
	} {
		w := newWorld(t)
		in(tt.mode)(w)
		w.set(tt.port, "10.0.0.1 n1 ready weight:3", "10.0.0.2 n1 ready")
		s := w.one()
		if got := s.Groups[service.IPv4].Cluster[0].Weight; got != tt.weight {
			t.Errorf("%s, %s %s: weight %d, want %d", tt.mode, s.Port.Algorithm, s.Port.Scheduler, got, tt.weight)
		}
		if diff := cmp.Diff(tt.want, s.Problems); diff != "" {
			t.Errorf("%s, %s %s: problems (-want +got):\n%s", tt.mode, s.Port.Algorithm, s.Port.Scheduler, diff)
		}
	}
}

func TestVerdictFor(t *testing.T) {
	w := newWorld(t)
	pods := prefixes("10.0.0.0/24")
	w.in.Policy.PodCIDRs = pods
	w.set(port("a", eTPLocal, func(p *service.Port) {
		p.ClusterIPs, p.LoadBalancerIPs, p.ExternallyAccessible = nil, addrs("203.0.113.1"), true
		p.SourceRanges = prefixes("198.51.100.0/24", "10.0.0.0/24", "192.168.0.0/16")
	}), "10.0.0.2 n2 ready")
	s := w.one()
	f := &s.Frontends[0]
	if !s.Serves(f) || s.DataPlane != Userspace {
		t.Errorf("serves %v in %q; short-circuited clients have an endpoint", s.Serves(f), s.DataPlane)
	}
	for _, tt := range []struct {
		client Client
		want   Verdict
	}{
		{Client{Address: netip.MustParseAddr("198.51.100.9")}, Drop},               // outside: no endpoint here
		{Client{Address: netip.MustParseAddr("8.8.8.8")}, Drop},                    // not admitted
		{Client{Address: netip.MustParseAddr("10.0.0.7")}, Forward},                // a pod
		{Client{Address: netip.MustParseAddr("192.168.0.1"), Node: true}, Forward}, // this node
	} {
		if got := s.VerdictFor(f, tt.client, &w.in.Policy); got != tt.want {
			t.Errorf("%v: %s, want %s", tt.client.Address, got, tt.want)
		}
	}
}

func TestNodePortAddresses(t *testing.T) {
	const v4, v6 = "127.0.0.1 192.0.2.1 198.51.100.1", "::1 2001:db8::1"
	for _, tt := range []struct {
		name   string
		policy Policy
		node   []netip.Addr // of the Node object
		want   [2]string
	}{
		{"all", Policy{}, nil, [2]string{v4, v6}},
		{"not on loopback", Policy{NoLocalhostNodePorts: true}, nil, [2]string{"192.0.2.1 198.51.100.1", "2001:db8::1"}},
		{"one family's", Policy{NodePortNetworks: prefixes("192.0.2.0/24")}, nil, [2]string{"192.0.2.1", v6}},
		{"every address, spelt out", Policy{NodePortNetworks: prefixes("192.0.2.0/24", "0.0.0.0/0")}, nil, [2]string{v4, v6}},
		{"loopback too", Policy{NodePortNetworks: prefixes("198.51.100.0/24", "127.0.0.0/8", "::1/128")}, nil, [2]string{"127.0.0.1 198.51.100.1", "::1"}},
		{"loopback, but not", Policy{NodePortNetworks: prefixes("127.0.0.0/8"), NoLocalhostNodePorts: true}, nil, [2]string{"", "2001:db8::1"}},
		{"primary", Policy{PrimaryNodePorts: true}, addrs("192.0.2.1"), [2]string{"192.0.2.1", ""}},
		{"primary and more", Policy{PrimaryNodePorts: true, NodePortNetworks: prefixes("2001:db8::/64")}, addrs("192.0.2.1"), [2]string{"192.0.2.1", "2001:db8::1"}},
		{"primary, without a Node object", Policy{PrimaryNodePorts: true}, nil, [2]string{"", ""}},
	} {
		p := tt.policy.of(&service.Snapshot{}, &service.Node{Addresses: tt.node})
		p.NodeAddresses = addrs("192.0.2.1", "198.51.100.1", "2001:db8::1")
		for _, f := range service.Families {
			got := ""
			for _, a := range addrs("127.0.0.1", "192.0.2.1", "198.51.100.1", "::1", "2001:db8::1") {
				if service.FamilyOf(a) != f || !p.AnswersNodePorts(a) {
					continue
				}
				if got += " " + a.String(); !a.IsLoopback() != slices.Contains(p.NodePortAddresses(f), a) {
					t.Errorf("%s: %s is in %s: %v", tt.name, a, p.NodePortAddresses(f), a.IsLoopback())
				}
			}
			if want := tt.want[f]; got != want && got != " "+want {
				t.Errorf("%s, %s: %q, want %q", tt.name, f, got, want)
			}
		}
	}
}

// A node port that answers nowhere says so, in every family in which the node
// has addresses; and follows the node's addresses.
func TestNodePortAnswersNowhere(t *testing.T) {
	w := newWorld(t)
	w.in.Policy.NodePortNetworks = prefixes("192.0.2.0/24", "fd00:9::/64")
	w.in.Policy.NodeAddresses = addrs("198.51.100.1")
	w.set(port("a", func(p *service.Port) { p.NodePort, p.ClusterIPs = 30080, addrs("10.96.0.1", "fd00:96::1") }), "10.0.0.1 n1 ready")
	if diff := cmp.Diff([]string{"node port 30080 answers on no IPv4 address of this node: none is in 192.0.2.0/24"}, w.one().Problems); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}
	w.in.Policy.NodeAddresses = addrs("192.0.2.7", "198.51.100.1")
	if got := w.one().Problems; got != nil {
		t.Errorf("with an address: %q", got)
	}
	w.in.Policy.NodePortNetworks, w.in.Policy.PrimaryNodePorts, w.node.Addresses = nil, true, nil
	if diff := cmp.Diff([]string{"node port 30080 answers on no IPv4 address of this node: its Node object has none"}, w.one().Problems); diff != "" {
		t.Errorf("problems (-want +got):\n%s", diff)
	}
}
