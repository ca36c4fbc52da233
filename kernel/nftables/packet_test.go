package nftables_test

import (
	"fmt"
	"net"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/nftables"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/lb"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

func options() nftables.Options {
	o := nftables.DefaultOptions()
	o.TCPPort, o.UDPPort = 10244, 10244
	return o
}

// scene is a scene whose node has the tables.
type scene struct {
	*kerneltest.Scene
	plane *nftables.Plane
	was   *plan.Plan
}

func onEachFamily(t *testing.T, test func(s *scene)) {
	for _, f := range service.Families {
		t.Run(f.String(), func(t *testing.T) {
			s := &scene{Scene: kerneltest.NewScene(t, f)}
			s.open()
			test(s)
		})
	}
}

func (s *scene) open() { s.openWith(options()) }

func (s *scene) openWith(o nftables.Options) {
	s.T.Helper()
	routing := steering.DefaultRouting()
	var err error
	if s.plane, err = nftables.Open(o, &routing); err != nil {
		s.T.Fatal(err)
	}
	s.was = nil
	s.T.Cleanup(func() { nftables.Close(s.plane) })
}

// program makes the kernel do what p says.
func (s *scene) program(p *plan.Plan) {
	s.T.Helper()
	d := plan.Between(s.was, p)
	d.Full = s.was == nil
	s.was = p
	if r := s.plane.Follow(s.T.Context(), p, d); r.Err != nil {
		s.T.Fatal(r.Err)
	}
	s.plane.Want(p, d)
	if r := s.plane.Sync(s.T.Context(), func() {}); !r.OK() {
		s.T.Fatal(r.Err)
	}
	if out, err := exec.Command("nft", "list", "ruleset").CombinedOutput(); err != nil {
		s.T.Errorf("nft list ruleset: %v: %s", err, out)
	}
}

func plane(services ...*plan.Service) *plan.Plan {
	for _, s := range services {
		kerneltest.Kernel(plan.NFTables)(s)
	}
	return kerneltest.Plan(plan.ModeNFTables, services...)
}

func run(t testing.TB, command string) string {
	t.Helper()
	out, err := exec.Command("sh", "-ec", command).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", command, err, out)
	}
	return string(out)
}

func TestSplit(t *testing.T) {
	t.Parallel()
	onEachFamily(t, func(s *scene) {
		e := func(h int, weight uint32) func(*plan.Service) {
			return kerneltest.Endpoint(s.Endpoint(h).String(), weight, false)
		}
		s.program(plane(
			kerneltest.Service("tcp", service.TCP, kerneltest.Cluster(s.Virtual(1)), kerneltest.NodePort(30080), s.Endpoints(2, 3, 4)),
			kerneltest.Service("udp", service.UDP, kerneltest.Cluster(s.Virtual(1)), s.Endpoints(2, 3, 4)),
			kerneltest.Service("weighted", service.TCP, kerneltest.Cluster(s.Virtual(2)), kerneltest.Algorithm(service.WeightedRoundRobin), e(2, 3), e(3, 1), e(4, 0)),
			inTurn(kerneltest.Service("turns", service.TCP, kerneltest.Cluster(s.Virtual(3)), kerneltest.NodePort(30081), s.Endpoints(2, 3, 4))),
			inTurn(kerneltest.Service("turns", service.UDP, kerneltest.Cluster(s.Virtual(3)), kerneltest.Algorithm(service.WeightedRoundRobin), e(2, 3), e(3, 2), e(4, 0))),
			inTurn(kerneltest.Service("drained", service.TCP, kerneltest.Cluster(s.Virtual(4)), e(2, 1), e(3, 1), e(4, 0))),
		))
		equal := map[string]int{"two": 10, "three": 10, "four": 10}
		s.Expect("in turn", equal, s.Asks(30, 1, service.TCP, s.Virtual(3)))
		s.Expect("in turn, node port", equal, s.Asks(30, 1, service.TCP, s.NodePort(30081)))
		s.Expect("weights 3, 2, 0, in turn", map[string]int{"two": 18, "three": 12}, s.Asks(30, 1, service.UDP, s.Virtual(3)))
		s.Expect("one has weight 0, in turn", map[string]int{"two": 5, "three": 5}, s.Asks(10, 1, service.TCP, s.Virtual(4)))
		for what, got := range map[string]map[string]int{
			"TCP": s.Asks(90, 1, service.TCP, s.Virtual(1)), "UDP": s.Asks(90, 1, service.UDP, s.Virtual(1)),
			"from the node": s.Asks(90, 0, service.TCP, s.Virtual(1)), "node port": s.Asks(90, 1, service.TCP, s.NodePort(30080)),
		} {
			for _, name := range []string{"two", "three", "four"} {
				if got[name] < 10 || got[name] > 55 { // 30 expected, more than four standard deviations
					s.T.Errorf("%s: 90 connections went to %v", what, got)
				}
			}
		}
		if got := s.Asks(100, 1, service.TCP, s.Virtual(2)); got["two"] < 55 || got["three"] < 5 || got["two"]+got["three"] != 100 {
			s.T.Errorf("weights 3, 1, 0: %v", got)
		}
	})
}

// TestAffinityOfALocalPolicy: a client that an address with a traffic policy leads to an endpoint on this node stays with
// its own, elsewhere, at the other addresses of the service.
func TestAffinityOfALocalPolicy(t *testing.T) {
	t.Parallel()
	onEachFamily(t, func(s *scene) {
		web := kerneltest.Service("web", service.TCP, kerneltest.Affinity(time.Hour), kerneltest.Cluster(s.Virtual(1)),
			kerneltest.External(s.Virtual(2), func(f *plan.Frontend) { f.Local = true }),
			kerneltest.Endpoint(s.Endpoint(2).String(), 1, true), kerneltest.Endpoint(s.Endpoint(3).String(), 1, false))
		s.program(plane(web))
		client := kernel.Client{Address: s.Address(s.Family, 1), Endpoint: s.Endpoint(3), Remaining: time.Hour}
		if err := s.plane.SeedAffinity(t.Context(), []kernel.Moving{{Service: web}}, map[service.Key][]kernel.Client{web.Port.Key: {client}}); err != nil {
			s.T.Fatal(err)
		}
		s.Expect("by the cluster address", map[string]int{"three": 3}, s.Asks(3, 1, service.TCP, s.Virtual(1)))
		s.Expect("by the address with a policy", map[string]int{"two": 3}, s.Asks(3, 1, service.TCP, s.Virtual(2)))
		s.Expect("by the cluster address again", map[string]int{"three": 3}, s.Asks(3, 1, service.TCP, s.Virtual(1)))
	})
}

// TestSourceHash: the kernel sends each client where userspace would, by every address, whatever the weights.
func TestSourceHash(t *testing.T) {
	t.Parallel()
	onEachFamily(t, func(s *scene) {
		bySource := func(more ...func(*plan.Service)) []func(*plan.Service) {
			return append(more, kerneltest.Algorithm(service.SourceHash))
		}
		weighted := []uint32{3, 1, 0}
		s.program(plane(
			kerneltest.Service("equal", service.TCP, bySource(kerneltest.Cluster(s.Virtual(1)), kerneltest.NodePort(30080), s.Endpoints(2, 3, 4))...),
			kerneltest.Service("weighted", service.TCP, bySource(kerneltest.Cluster(s.Virtual(2)), kerneltest.Affinity(time.Hour),
				kerneltest.Endpoint(s.Endpoint(2).String(), weighted[0], false), kerneltest.Endpoint(s.Endpoint(3).String(), weighted[1], false), kerneltest.Endpoint(s.Endpoint(4).String(), weighted[2], false))...),
		))
		picker := func(weights ...uint32) lb.Picker {
			targets := make([]lb.Target, len(weights))
			for i, w := range weights {
				targets[i] = lb.Target{Address: s.Endpoint(i + 2), Weight: w}
			}
			return lb.New(service.SourceHash, targets, 0)
		}
		nodePort := netip.AddrPortFrom(s.NodeAddress(s.Family, 2), 30080).String() // not that of the client's network, from which it would have another source
		names, reached := []string{"two", "three", "four"}, map[string]bool{}
		for i := range 20 {
			client := netip.MustParseAddr(s.Addr(fmt.Sprintf("192.0.2.%d", i+1), fmt.Sprintf("2001:db8::%d", i+1)))
			s.On(1, func() {
				run(t, fmt.Sprintf("ip addr add %s/%d dev lo nodad; ip route replace default via %s src %[1]s", client, client.BitLen(), s.NodeAddress(s.Family, 1)))
			})
			s.On(0, func() { run(t, fmt.Sprintf("ip route add %s via %s", client, s.Address(s.Family, 1))) })
			for to, p := range map[string]lb.Picker{s.Virtual(1): picker(1, 1, 1), nodePort: picker(1, 1, 1), s.Virtual(2): picker(weighted...)} {
				want := names[p.Pick(client, nil)]
				got, _, err := s.Ask(1, service.TCP, netip.MustParseAddrPort(to), true)
				if err != nil || got != want {
					s.T.Errorf("%s at %s is answered by %s, %v; want %s", client, to, got, err, want)
				}
				reached[want] = true
			}
		}
		if len(reached) < 3 {
			s.T.Errorf("20 clients reach %v", reached)
		}
	})
}

// TestFlowtable: where the kernel has flowtables, established connections to endpoints pass by one, by devices that
// came later too, and go on when it isn't wanted any more. Where the kernel has none, all works without, and
// kproxy says why.
func TestFlowtable(t *testing.T) {
	t.Parallel()
	onEachFamily(t, func(s *scene) {
		facts, err := nftables.NewDriver("", true).Probe(t.Context(), plan.ModeNFTables, true)
		at := slices.IndexFunc(facts.Capabilities, func(c plan.Capability) bool { return c.Name == "flowtables" })
		if err != nil || facts.Missing != nil || at < 0 {
			s.T.Fatalf("%+v, %v", facts, err)
		}
		c := facts.Capabilities[at]
		o := options()
		o.Flowtable = c.Supported
		s.openWith(o)
		p := plane(kerneltest.Service("web", service.TCP, kerneltest.Cluster(s.Virtual(1)), s.Endpoints(2)))
		s.program(p)
		s.Expect("who answers", map[string]int{"two": 3}, s.Asks(3, 1, service.TCP, s.Virtual(1)))
		if !c.Supported {
			if !strings.Contains(c.Reason, "CONFIG_NF_FLOW_TABLE") {
				s.T.Errorf("the kernel has no flowtables, because %s", c.Reason)
			}
			return
		}
		var held net.Conn
		s.On(1, func() { held, err = net.DialTimeout("tcp", s.Virtual(1), 20*time.Second) })
		if err != nil {
			s.T.Fatal(err)
		}
		defer held.Close()
		exchange := func() {
			for range 10 {
				if _, err := held.Write([]byte("hello\n")); err != nil {
					s.T.Fatal(err)
				}
				if err := held.SetReadDeadline(time.Now().Add(20 * time.Second)); err != nil {
					s.T.Fatal(err)
				}
				if n, err := held.Read(make([]byte, 100)); err != nil || n == 0 {
					s.T.Fatalf("%d bytes, %v", n, err)
				}
			}
		}
		exchange()
		family := s.Addr("ipv4", "ipv6")
		if list := run(t, "conntrack -L -f "+family+" 2>/dev/null | grep -v TIME_WAIT"); !strings.Contains(list, "[OFFLOAD]") {
			s.T.Errorf("no connection passes by the flowtable:\n%s", list)
		}
		run(t, "ip link add later type veth peer name later-peer && ip link set later up")
		if found, err := s.plane.Check(t.Context()); err != nil || len(found) > 0 {
			s.T.Errorf("Check says %v, %v", found, err)
		}
		if list := run(t, "nft list flowtables "+s.Addr("ip", "ip6")); !strings.Contains(list, "later") || strings.Contains(list, "lo,") {
			s.T.Errorf("after a device came:\n%s", list)
		}
		exchange()
		s.open()
		s.program(p)
		if list := run(t, "nft list ruleset"); strings.Contains(list, "flowtable") {
			s.T.Errorf("without the flag:\n%s", list)
		}
		exchange()
	})
}

// inTurn is a service that asks for its algorithm.
func inTurn(s *plan.Service) *plan.Service {
	s.Port.AlgorithmGiven = true
	return s
}

// TestPackets: what every data plane does.
func TestPackets(t *testing.T) {
	t.Parallel()
	for name, test := range kerneltest.Packets {
		t.Run(name, func(t *testing.T) {
			onEachFamily(t, func(s *scene) {
				test(s.Scene, &kerneltest.Subject{
					Mode: plan.ModeNFTables, DataPlane: plan.NFTables, TCPPort: options().TCPPort, UDPPort: options().UDPPort,
					Program: s.program, Heartbeat: s.plane, Plane: s.plane,
				})
			})
		})
	}
}
