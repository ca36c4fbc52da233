package ipvs_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// wholeBackend is a backend as the agent makes it, rules included, for the
// namespace of the calling thread.
func wholeBackend(t *testing.T) (kernel.Backend, kernel.SetStore) {
	t.Helper()
	release, err := kernel.Release()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := kernel.EnsureSysctls(append(kernel.Sysctls(), ipvs.Sysctls(release, false)...)); err != nil {
		t.Fatal(err)
	}
	if err := steering.DefaultRouting().Ensure(); err != nil { // to the listener
		t.Fatal(err)
	}
	table := openTable(t)
	link, err := ipvs.OpenLink()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(link.Close)
	sets, err := kernel.OpenIPSets()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(sets.Close)
	c := steering.DefaultEnv(nil)
	c.Sets = sets
	return ipvs.New(ipvs.Config{Rules: iptables.New(c), Sets: sets, Table: table, Link: link, DrainTimeout: time.Minute}), sets
}

// scene is a network whose node has rules: host 1 is the client, hosts 2 and 3
// are endpoints "two" and "three" on port 8080.
type scene struct {
	*kerneltest.Network
	t       *testing.T
	family  service.Family
	backend kernel.Backend
	sets    kernel.SetStore
	have    kernel.Ruleset
	portal  []kernel.Set
}

// inEachFamily runs test on a scene of each family.
func inEachFamily(t *testing.T, test func(s *scene)) {
	needsIPVS(t)
	for _, f := range service.Families {
		t.Run(f.String(), func(t *testing.T) {
			s := &scene{Network: kerneltest.NewNetwork(t, 3), t: t, family: f}
			for i, name := range []string{"two", "three"} {
				s.Serve(i+2, name, 8080)
			}
			for _, l := range []uint16{rulesOptions().TCPPort, rulesOptions().UDPPort} {
				s.Serve(0, "userspace", l)
			}
			s.backend, s.sets = wholeBackend(t)
			test(s)
		})
	}
}

// program makes the kernel do what services say, portal included.
func (s *scene) program(services ...*plan.Service) {
	s.t.Helper()
	p := kerneltest.Plan(plan.ModeIPVS, services...)
	for i := 1; i <= 3; i++ {
		p.Policy.NodeAddresses = append(p.Policy.NodeAddresses, s.NodeAddress(s.family, i))
	}
	ctx := context.Background()
	want := render(p)
	a, err := s.backend.Apply(ctx, kernel.Diff(s.have, want))
	if err != nil || len(a.Failed) > 0 {
		s.t.Fatalf("Apply: %v, %v", err, a.Failed)
	}
	portal := steering.Sets(p)
	if _, err := kernel.ApplySets(ctx, s.sets, kernel.DiffSets(s.portal, portal)); err != nil {
		s.t.Fatal(err)
	}
	s.have, s.portal = want, portal
	time.Sleep(time.Millisecond) // the kernel's own workers make an IPv6 address usable (addrconf_dad_work)
}

func (s *scene) addr(v4, v6 string) string {
	if s.family == service.IPv6 {
		return v6
	}
	return v4
}

// vip is a service address.
func (s *scene) vip(last int) netip.AddrPort {
	return netip.MustParseAddrPort(s.addr(fmt.Sprintf("10.96.0.%d:80", last), fmt.Sprintf("[fd00:96::%d]:80", last)))
}

// web is a service of TCP that IPVS carries to port 8080 of hosts, or to another
// port.
func (s *scene) web(options ...func(*plan.Service)) *plan.Service {
	return kerneltest.Service("web", service.TCP, append(options, onIPVS)...)
}

func (s *scene) endpoint(host int, port uint16, local bool) func(*plan.Service) {
	return kerneltest.Endpoint(netip.AddrPortFrom(s.Address(s.family, host), port).String(), 1, local)
}

// asks counts who answers n connections from a host.
func (s *scene) asks(n, from int, to netip.AddrPort) map[string]int {
	s.t.Helper()
	return s.asksBy(service.TCP, n, from, to)
}

func (s *scene) asksBy(p service.Protocol, n, from int, to netip.AddrPort) map[string]int {
	s.t.Helper()
	out := map[string]int{}
	for range n {
		server, _, err := s.Ask(from, p, to, true)
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

// TestSplit: endpoints take turns, by their weights, and clients stay where they
// are to stay; over TCP, UDP and SCTP.
func TestSplit(t *testing.T) {
	inEachFamily(t, func(s *scene) {
		if err := lab.HasSCTP(); err != nil {
			t.Fatal(err) // kernels that have IPVS have it
		}
		var all []*plan.Service
		for _, p := range []service.Protocol{service.TCP, service.UDP, service.SCTP} {
			three := kerneltest.Endpoint(netip.AddrPortFrom(s.Address(s.family, 3), 8080).String(), 3, false)
			all = append(all,
				kerneltest.Service("even", p, kerneltest.Cluster(s.vip(1).String()), s.endpoint(2, 8080, true), s.endpoint(3, 8080, false), onIPVS),
				kerneltest.Service("weighted", p, kerneltest.Cluster(s.vip(2).String()), kerneltest.Algorithm(service.WeightedRoundRobin), s.endpoint(2, 8080, true), three, onIPVS),
				kerneltest.Service("sticky", p, kerneltest.Cluster(s.vip(3).String()), kerneltest.Affinity(time.Hour), s.endpoint(2, 8080, true), s.endpoint(3, 8080, false), onIPVS),
				kerneltest.Service("node", p, kerneltest.Cluster(s.vip(4).String()), kerneltest.NodePort(30080), s.endpoint(2, 8080, true), onIPVS))
		}
		for i, name := range []string{"two", "three"} {
			s.ServeSCTP(i+2, name, 8080)
		}
		s.program(all...)
		for _, p := range []service.Protocol{service.TCP, service.UDP, service.SCTP} {
			for _, from := range []int{0, 1, 2} { // an endpoint is a client as well
				s.expect(fmt.Sprintf("round robin, %s from %d", p, from), map[string]int{"two": 6, "three": 6}, s.asksBy(p, 12, from, s.vip(1)))
			}
			s.expect("weights 1 and 3, "+p.String(), map[string]int{"two": 3, "three": 9}, s.asksBy(p, 12, 1, s.vip(2)))
			if got := s.asksBy(p, 6, 1, s.vip(3)); len(got) != 1 || got["two"]+got["three"] != 6 {
				s.t.Errorf("one client's connections, %s: %v", p, got)
			}
			node := netip.AddrPortFrom(s.NodeAddress(s.family, 1), 30080)
			s.expect("node port, "+p.String(), map[string]int{"two": 2}, s.asksBy(p, 2, 1, node))
		}
	})
}

// TestRefusedGoesElsewhere: a live kproxy swallows an endpoint's refusal, and the
// client's next SYN, a second later, goes to another endpoint. Without one, or
// where kproxy says so, the client hears of it.
func TestRefusedGoesElsewhere(t *testing.T) {
	inEachFamily(t, func(s *scene) {
		closed := netip.AddrPortFrom(s.Address(s.family, 3), 9)
		s.program(s.web(kerneltest.Cluster(s.vip(1).String()), s.endpoint(2, 8080, false), s.endpoint(3, 9, false)))
		both := map[string]int{"two": 2, kerneltest.ErrRefused.Error(): 2}
		s.expect("not alive", both, s.asks(4, 1, s.vip(1)))
		s.expect("not alive, from the node", both, s.asks(4, 0, s.vip(1)))
		if err := (&steering.Redirects{Store: s.sets}).Alive(time.Hour); err != nil {
			s.t.Fatal(err)
		}
		for range 2 { // one of two is sent to the closed port first
			server, err := s.patient(1, s.vip(1))
			if server != "two" || err != nil {
				s.t.Errorf("alive: %q, %v, want two", server, err)
			}
		}
		if err := (&steering.Redirects{Store: s.sets}).LetRefusals(closed, time.Hour); err != nil {
			s.t.Fatal(err)
		}
		s.expect("let through", both, s.asks(4, 1, s.vip(1)))
	})
}

// patient connects with time for another SYN.
func (s *scene) patient(from int, to netip.AddrPort) (server string, err error) {
	s.On(from, func() {
		var c net.Conn
		if c, err = net.DialTimeout("tcp", to.String(), 20*time.Second); err != nil {
			return
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
		fmt.Fprintln(c, "?")
		_, err = fmt.Fscan(c, &server)
	})
	return server, err
}

// TestPings: a service's address answers pings, as any address of a host does.
func TestPings(t *testing.T) {
	inEachFamily(t, func(s *scene) {
		s.program(s.web(kerneltest.Cluster(s.vip(1).String()), s.endpoint(2, 8080, false)))
		for _, from := range []int{0, 1} {
			s.On(from, func() { run(s.t, fmt.Sprintf("ping -c 1 -W 5 %s", s.vip(1).Addr())) })
		}
	})
}

// TestHealthPort: a load balancer reaches the port for health checks by its own
// address, and no other port of the node.
func TestHealthPort(t *testing.T) {
	inEachFamily(t, func(s *scene) {
		s.Serve(0, "health", 30200)
		s.Serve(0, "host", 30201)
		health := func(p *plan.Service) { p.Port.HealthCheckNodePort = 30200 }
		s.program(s.web(kerneltest.LoadBalancer(s.vip(1).String()), s.endpoint(2, 8080, true), health))
		at := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(s.vip(1).Addr(), port) }
		s.expect("health", map[string]int{"health": 1}, s.asks(1, 1, at(30200)))
		s.expect("another port", map[string]int{kerneltest.ErrRefused.Error(): 1}, s.asks(1, 1, at(30201)))
	})
}

// TestEndpointOnTheNode: an endpoint may have the node's own address (a pod with
// the host's network).
func TestEndpointOnTheNode(t *testing.T) {
	inEachFamily(t, func(s *scene) {
		s.Serve(0, "self", 8080)
		at := netip.AddrPortFrom(s.NodeAddress(s.family, 1), 8080).String()
		s.program(s.web(kerneltest.Cluster(s.vip(1).String()), kerneltest.NodePort(30080), kerneltest.Endpoint(at, 1, true)))
		for _, from := range []int{0, 1, 2} {
			s.expect(fmt.Sprintf("cluster address, from %d", from), map[string]int{"self": 2}, s.asks(2, from, s.vip(1)))
			node := netip.AddrPortFrom(s.NodeAddress(s.family, max(from, 1)), 30080)
			s.expect(fmt.Sprintf("node port, from %d", from), map[string]int{"self": 2}, s.asks(2, from, node))
		}
	})
}

// TestAddressOfANodePort: a node port is on the node's own addresses, not on
// those of services, whatever serves it.
func TestAddressOfANodePort(t *testing.T) {
	inEachFamily(t, func(s *scene) {
		if err := (&steering.Redirects{Store: s.sets}).Alive(time.Hour); err != nil && !errors.Is(err, kernel.ErrNotFound) {
			s.t.Fatal(err)
		}
		for _, plane := range []func(*plan.Service){onIPVS, kerneltest.InUserspace} {
			s.program(s.web(kerneltest.Cluster(s.vip(1).String()), kerneltest.NodePort(30080), s.endpoint(2, 8080, false), plane))
			if err := (&steering.Redirects{Store: s.sets}).Alive(time.Hour); err != nil {
				s.t.Fatal(err)
			}
			s.expect("node port on a service address", map[string]int{kerneltest.ErrRefused.Error(): 1},
				s.asks(1, 1, netip.AddrPortFrom(s.vip(1).Addr(), 30080)))
		}
	})
}

// TestOutputPolicy: where the host lets nothing out, IPVS still forwards; the
// node's own programs are the host's business, as in mode iptables.
func TestOutputPolicy(t *testing.T) {
	inEachFamily(t, func(s *scene) {
		firewall := kernel.DefaultVariant().Program[s.family]
		run(s.t, fmt.Sprintf("%[1]s -P INPUT DROP; %[1]s -P FORWARD DROP; %[1]s -P OUTPUT DROP", firewall))
		if s.family == service.IPv6 {
			run(s.t, fmt.Sprintf("%[1]s -A INPUT -p icmpv6 -j ACCEPT; %[1]s -A OUTPUT -p icmpv6 -j ACCEPT", firewall))
		}
		s.program(s.web(kerneltest.Cluster(s.vip(1).String()), kerneltest.External(s.vip(2).String()), kerneltest.NodePort(30080), s.endpoint(2, 8080, false), s.endpoint(3, 8080, false)))
		node := netip.AddrPortFrom(s.NodeAddress(s.family, 1), 30080)
		for _, to := range []netip.AddrPort{s.vip(1), s.vip(2), node} {
			s.expect(to.String(), map[string]int{"two": 2, "three": 2}, s.asks(4, 1, to))
		}
		if server, _, err := s.Ask(0, service.TCP, s.vip(1), false); err == nil {
			s.t.Errorf("the node's own: answered by %s", server)
		}
		run(s.t, fmt.Sprintf("%s -I INPUT 1 -s %s -j DROP", firewall, s.Address(s.family, 1)))
		if server, _, err := s.Ask(1, service.TCP, s.vip(1), false); !errors.Is(err, kerneltest.ErrTimeout) {
			s.t.Errorf("a rule of the host: %s, %v", server, err)
		}
	})
}
