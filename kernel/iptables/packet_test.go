package iptables_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/kernel/kerneltest"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// scene is a network whose node has rules: host 1 is the client, hosts 2 to 4
// are endpoints "two" to "four" on port 8080.
type scene struct {
	*kerneltest.Network
	t        *testing.T
	family   service.Family
	variant  kernel.Variant
	backend  *iptables.Backend
	sets     *kernel.IPSets
	have     kernel.Ruleset
	redirect []kernel.Set
}

// onEachKernel runs test for both variants and both families.
func onEachKernel(t *testing.T, test func(s *scene)) {
	for _, v := range variants {
		for _, f := range service.Families {
			t.Run(v.Name+"/"+f.String(), func(t *testing.T) {
				s := &scene{Network: kerneltest.NewNetwork(t, 4), t: t, family: f, variant: v}
				for i, name := range []string{"two", "three", "four"} {
					s.Serve(i+2, name, 8080)
				}
				s.backend, s.sets = newBackend(t, v)
				if err := steering.DefaultRouting().Ensure(); err != nil {
					t.Fatal(err)
				}
				test(s)
			})
		}
	}
}

// program makes the kernel do what p says, redirect sets included.
func (s *scene) program(p *plan.Plan) {
	s.t.Helper()
	ctx := context.Background()
	want := iptables.Render(p, options())
	a, err := s.backend.Apply(ctx, kernel.Diff(s.have, want))
	if err != nil || len(a.Failed) > 0 {
		s.t.Fatalf("Apply: %v, %v", err, a.Failed)
	}
	s.have = want
	redirect := steering.Sets(p)
	if _, err := kernel.ApplySets(ctx, s.sets, kernel.DiffSets(s.redirect, redirect)); err != nil {
		s.t.Fatal(err)
	}
	s.redirect = redirect
}

func (s *scene) addr(v4, v6 string) string {
	if s.family == service.IPv6 {
		return v6
	}
	return v4
}

// virtual is an address outside the network, to serve at.
func (s *scene) virtual(last int) string {
	return s.addr(fmt.Sprintf("10.96.0.%d:80", last), fmt.Sprintf("[fd00:96::%d]:80", last))
}

// endpoints are those on the given hosts.
func (s *scene) endpoints(hosts ...int) func(*plan.Service) {
	var out []string
	for _, h := range hosts {
		out = append(out, netip.AddrPortFrom(s.Address(s.family, h), 8080).String())
	}
	return kerneltest.Endpoints(out...)
}

// asks counts who answers n connections from a host.
func (s *scene) asks(n, from int, proto service.Protocol, to string) map[string]int {
	s.t.Helper()
	out := map[string]int{}
	for range n {
		server, _, err := s.Ask(from, proto, netip.MustParseAddrPort(to))
		if err != nil {
			server = err.Error()
		}
		out[server]++
	}
	return out
}

func (s *scene) expect(what string, want, got any) {
	s.t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		s.t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

// seen is the client's address that the endpoint sees.
func (s *scene) seen(from int, to string) string {
	s.t.Helper()
	_, client, err := s.Ask(from, service.TCP, netip.MustParseAddrPort(to))
	if err != nil {
		return err.Error()
	}
	return client
}

func TestSplitIsExact(t *testing.T) {
	onEachKernel(t, func(s *scene) {
		e := func(h int, weight uint32) func(*plan.Service) {
			return kerneltest.Endpoint(netip.AddrPortFrom(s.Address(s.family, h), 8080).String(), weight, false)
		}
		s.program(kerneltest.Plan(plan.ModeIPTables,
			kerneltest.Service("tcp", service.TCP, kerneltest.Cluster(s.virtual(1)), s.endpoints(2, 3, 4)),
			kerneltest.Service("udp", service.UDP, kerneltest.Cluster(s.virtual(1)), s.endpoints(2, 3, 4)),
			kerneltest.Service("sctp", service.SCTP, kerneltest.Cluster(s.virtual(1)), kerneltest.NodePort(30080), s.endpoints(2, 3, 4)),
			kerneltest.Service("weighted", service.TCP, kerneltest.Cluster(s.virtual(2)), kerneltest.Algorithm(service.WeightedRoundRobin), e(2, 3), e(3, 2), e(4, 0)),
		))
		equal := map[string]int{"two": 10, "three": 10, "four": 10}
		s.expect("TCP", equal, s.asks(30, 1, service.TCP, s.virtual(1)))
		s.expect("UDP", equal, s.asks(30, 1, service.UDP, s.virtual(1)))
		s.expect("TCP from the node", equal, s.asks(30, 0, service.TCP, s.virtual(1)))
		s.expect("weights 3, 2, 0", map[string]int{"two": 18, "three": 12}, s.asks(30, 1, service.TCP, s.virtual(2)))
		if lab.HasSCTP() == nil { // else the test of mode ipvs, whose kernels have it, says how it fares
			for i, name := range []string{"two", "three", "four"} {
				s.ServeSCTP(i+2, name, 8080)
			}
			s.expect("SCTP", equal, s.asks(30, 1, service.SCTP, s.virtual(1)))
			s.expect("SCTP by a node port", map[string]int{"two": 1, "three": 1, "four": 1}, s.asks(3, 1, service.SCTP, netip.AddrPortFrom(s.NodeAddress(s.family, 1), 30080).String()))
		}
	})
}

func TestRandomSplit(t *testing.T) {
	onEachKernel(t, func(s *scene) {
		s.program(kerneltest.Plan(plan.ModeIPTables, kerneltest.Service("random", service.TCP, kerneltest.Cluster(s.virtual(1)),
			kerneltest.Algorithm(service.Random), s.endpoints(2, 3, 4))))
		got := s.asks(150, 1, service.TCP, s.virtual(1))
		for _, name := range []string{"two", "three", "four"} {
			if got[name] < 25 || got[name] > 75 { // 50 expected, more than four standard deviations
				s.t.Errorf("150 connections went to %v", got)
			}
		}
	})
}

func TestClientsStayWithTheirEndpoint(t *testing.T) {
	onEachKernel(t, func(s *scene) {
		sticky := kerneltest.Service("sticky", service.TCP, kerneltest.Cluster(s.virtual(1)), s.endpoints(2, 3, 4), kerneltest.Affinity(time.Hour))
		s.program(kerneltest.Plan(plan.ModeIPTables, sticky))
		first := s.asks(10, 1, service.TCP, s.virtual(1))
		if len(first) != 1 || first["two"]+first["three"]+first["four"] != 10 {
			s.t.Errorf("one client's connections went to %v", first)
		}
		// A client that userspace kept with "four" stays with it.
		four := netip.AddrPortFrom(s.Address(s.family, 4), 8080)
		node := s.NodeAddress(s.family, 4)
		if err := iptables.SeedAffinity(s.sets, sticky.Port.Key, []netip.AddrPort{four}, []kernel.Client{{Address: node, Endpoint: four, Remaining: time.Minute}}); err != nil {
			s.t.Fatal(err)
		}
		s.On(0, func() {
			run(s.t, fmt.Sprintf("ip route add %s dev host4 src %s", netip.MustParseAddrPort(s.virtual(1)).Addr(), node))
		})
		s.expect("seeded client", map[string]int{"four": 10}, s.asks(10, 0, service.TCP, s.virtual(1)))
		clients, err := iptables.ReadAffinity(s.sets, sticky.Port.Key, []netip.AddrPort{four})
		if err != nil {
			s.t.Fatal(err)
		}
		for _, c := range clients {
			if c.Address == node && c.Remaining < 50*time.Minute {
				s.t.Errorf("new connections didn't prolong the stay: %v is left", c.Remaining)
			}
		}
	})
}

func TestWhichAddressEndpointsSee(t *testing.T) {
	onEachKernel(t, func(s *scene) {
		local := func(f *plan.Frontend) { f.Local, f.ShortCircuit, f.Masquerade = true, true, plan.MasqueradeNodeLocal }
		at := func(h int, isLocal bool) func(*plan.Service) {
			return kerneltest.Endpoint(netip.AddrPortFrom(s.Address(s.family, h), 8080).String(), 1, isLocal)
		}
		p := kerneltest.Plan(plan.ModeIPTables, kerneltest.Service("web", service.TCP,
			kerneltest.Cluster(s.virtual(1)), kerneltest.External(s.virtual(2)), kerneltest.External(s.virtual(3), local),
			kerneltest.Cluster(s.virtual(4), func(f *plan.Frontend) { f.Masquerade = plan.MasqueradeUnlessPod }),
			kerneltest.NodePort(30080), at(2, true), at(3, false)))
		p.Policy.PodCIDRs = []netip.Prefix{netip.PrefixFrom(s.Address(s.family, 3), s.family.Bits())}
		s.program(p)
		nodeSide := map[string]bool{s.NodeAddress(s.family, 2).String(): true, s.NodeAddress(s.family, 3).String(): true}

		s.expect("through the cluster address", s.Address(s.family, 1).String(), s.seen(1, s.virtual(1)))
		if got := s.seen(1, s.virtual(2)); !nodeSide[got] {
			s.t.Errorf("through an external address the endpoint sees %s, want the node", got)
		}
		nodePort := netip.AddrPortFrom(s.NodeAddress(s.family, 1), 30080).String()
		if got := s.seen(1, nodePort); !nodeSide[got] {
			s.t.Errorf("through a node port the endpoint sees %s, want the node", got)
		}
		s.expect("with a local policy", s.Address(s.family, 1).String(), s.seen(1, s.virtual(3)))
		s.expect("with a local policy, outsiders", map[string]int{"two": 6}, s.asks(6, 1, service.TCP, s.virtual(3)))
		s.expect("with a local policy, this node", map[string]int{"two": 3, "three": 3}, s.asks(6, 0, service.TCP, s.virtual(3)))
		s.expect("with a local policy, pods", 2, len(s.asks(6, 3, service.TCP, s.virtual(3))))
		if got := s.seen(1, s.virtual(4)); !nodeSide[got] {
			s.t.Errorf("a client outside the pod network is seen as %s, want the node", got)
		}
		// Connections alternate, so two of them meet both endpoints; a pod that
		// meets itself is masqueraded, or its answer would never leave it.
		seen := map[string]bool{s.seen(3, s.virtual(4)): true, s.seen(3, s.virtual(4)): true}
		s.expect("a pod that reaches the other, and itself",
			map[string]bool{s.Address(s.family, 3).String(): true, s.NodeAddress(s.family, 3).String(): true}, seen)
	})
}

func TestRefusals(t *testing.T) {
	onEachKernel(t, func(s *scene) {
		verdict := func(v plan.Verdict) func(*plan.Frontend) { return func(f *plan.Frontend) { f.Verdict = v } }
		ranges := func(p netip.Prefix) func(*plan.Frontend) {
			return func(f *plan.Frontend) { f.SourceRanges = []netip.Prefix{p} }
		}
		client := netip.PrefixFrom(s.Address(s.family, 1), s.family.Bits())
		other := netip.PrefixFrom(s.Address(s.family, 2), s.family.Bits())
		s.program(kerneltest.Plan(plan.ModeIPTables,
			kerneltest.Service("rejected", service.TCP, kerneltest.Cluster(s.virtual(1), verdict(plan.Reject)), kerneltest.NodePort(30081, verdict(plan.Reject))),
			kerneltest.Service("rejected", service.UDP, kerneltest.Cluster(s.virtual(1), verdict(plan.Reject))),
			kerneltest.Service("dropped", service.TCP, kerneltest.Cluster(s.virtual(2), verdict(plan.Drop)), kerneltest.NodePort(30082, verdict(plan.Drop))),
			kerneltest.Service("ranged", service.TCP, kerneltest.LoadBalancer(s.virtual(3), ranges(client)), kerneltest.LoadBalancer(s.virtual(4), ranges(other)), s.endpoints(2)),
			kerneltest.Service("neighbour", service.TCP, kerneltest.Cluster(s.virtual(5)), s.endpoints(2)),
		))
		node := s.NodeAddress(s.family, 1)
		tests := []struct {
			what  string
			from  int
			proto service.Protocol
			to    string
			want  error
		}{
			{"no endpoint", 1, service.TCP, s.virtual(1), kerneltest.ErrRefused},
			{"no endpoint, from the node", 0, service.TCP, s.virtual(1), kerneltest.ErrRefused},
			{"no endpoint, UDP", 1, service.UDP, s.virtual(1), kerneltest.ErrRefused},
			{"no endpoint, node port", 1, service.TCP, netip.AddrPortFrom(node, 30081).String(), kerneltest.ErrRefused},
			{"dropped", 1, service.TCP, s.virtual(2), kerneltest.ErrTimeout},
			{"dropped, node port", 1, service.TCP, netip.AddrPortFrom(node, 30082).String(), kerneltest.ErrTimeout},
			{"in the source ranges", 1, service.TCP, s.virtual(3), nil},
			{"outside the source ranges", 1, service.TCP, s.virtual(4), kerneltest.ErrTimeout},
			{"another service", 1, service.TCP, s.virtual(5), nil},
		}
		for _, tt := range tests {
			if _, _, err := s.Ask(tt.from, tt.proto, netip.MustParseAddrPort(tt.to)); !errors.Is(err, tt.want) {
				s.t.Errorf("%s: %v, want %v", tt.what, err, tt.want)
			}
		}
	})
}

// TestRedirect: what is in the userspace set is redirected while kproxy is alive,
// and the heartbeat's end sends new connections to the kernel's rules.
func TestRedirect(t *testing.T) {
	onEachKernel(t, func(s *scene) {
		firewall := s.variant.Program[s.family]
		run(s.t, fmt.Sprintf("%[1]s -P INPUT DROP; %[1]s -P FORWARD DROP", firewall))
		if s.family == service.IPv6 {
			run(s.t, firewall+" -A INPUT -p icmpv6 -j ACCEPT")
		}
		for _, l := range []uint16{options().TCPPort, options().UDPPort} {
			s.Serve(0, "userspace", l)
		}
		web := kerneltest.Service("web", service.TCP, kerneltest.Cluster(s.virtual(1)), kerneltest.NodePort(30080), s.endpoints(2))
		dns := kerneltest.Service("dns", service.UDP, kerneltest.Cluster(s.virtual(1)), kerneltest.NodePort(30080), s.endpoints(2))
		offloaded := kerneltest.Service("offloaded", service.TCP, kerneltest.Cluster(s.virtual(2)), kerneltest.NodePort(30081), s.endpoints(3))
		kerneltest.InUserspace(web)
		kerneltest.InUserspace(dns)
		s.program(kerneltest.Plan(plan.ModeIPTables, web, dns, offloaded))
		nodePort := func(n uint16) string { return netip.AddrPortFrom(s.NodeAddress(s.family, 1), n).String() }
		who := func(proto service.Protocol, from int, to string) string {
			server, _, err := s.Ask(from, proto, netip.MustParseAddrPort(to))
			if err != nil {
				return err.Error()
			}
			return server
		}
		check := func(when, userspace string) {
			s.t.Helper()
			for _, proto := range []service.Protocol{service.TCP, service.UDP} {
				s.expect(when+": cluster address "+proto.String(), userspace, who(proto, 1, s.virtual(1)))
				s.expect(when+": node port "+proto.String(), userspace, who(proto, 1, nodePort(30080)))
			}
			s.expect(when+": offloaded", "three", who(service.TCP, 1, s.virtual(2)))
			s.expect(when+": offloaded node port", "three", who(service.TCP, 1, nodePort(30081)))
		}
		check("not alive", "two")
		if err := (&steering.Redirects{Store: s.sets}).Alive(time.Hour); err != nil {
			s.t.Fatal(err)
		}
		check("alive", "userspace")
		loopback := s.addr("127.0.0.1:30081", "[::1]:30081")
		run(s.t, firewall+" -I INPUT -i lo -j ACCEPT")
		s.expect("alive: from the node", "userspace", who(service.TCP, 0, s.virtual(1)))
		s.expect("alive: node port on loopback, though offloaded", "userspace", who(service.TCP, 0, loopback))
		// The listener's own port is closed to those who weren't redirected.
		s.expect("the listener itself", kerneltest.ErrTimeout.Error(), who(service.TCP, 1, nodePort(options().TCPPort)))
		web2 := *web
		web2.DataPlane = plan.IPTables
		s.program(kerneltest.Plan(plan.ModeIPTables, &web2, dns, offloaded))
		s.expect("offloaded", "two", who(service.TCP, 1, s.virtual(1)))
		if err := (&steering.Redirects{Store: s.sets}).Dead(); err != nil {
			s.t.Fatal(err)
		}
		check("removed", "two")
		if err := (&steering.Redirects{Store: s.sets}).Alive(time.Second); err != nil {
			s.t.Fatal(err)
		}
		time.Sleep(1500 * time.Millisecond) // what a dead kproxy does
		check("expired", "two")
	})
}
