package kerneltest

import (
	"errors"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"time"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Subject is a data plane with its steering, in the node of a [Scene].
type Subject struct {
	Mode      plan.Mode
	DataPlane plan.DataPlane
	TCPPort   uint16 // of userspace's listeners
	UDPPort   uint16
	Program   func(p *plan.Plan) // makes the kernel do what p says
	Heartbeat interface {        // the rest of [kernel.Heartbeat] is for starts
		Alive(d time.Duration) error
		Dead() error
	}
	Plane interface {
		kernel.Counter
		kernel.AffinityKeeper
	}
	// Firewall makes the host drop what it doesn't say itself, but for what comes by lo; nil
	// where kproxy's rules can't overrule that.
	Firewall func()
}

// Packets are the tests with real packets that every data plane passes, by name. Each runs in
// a scene of its own.
var Packets = map[string]func(*Scene, *Subject){
	"clients stay with their endpoint": clientsStay,
	"which address endpoints see":      whatEndpointsSee,
	"refusals":                         refusals,
	"refused while it leaves":          lateRefusal,
	"redirect":                         redirect,
}

func (s *Scene) plan(x *Subject, services ...*plan.Service) *plan.Plan {
	for _, s := range services {
		Kernel(x.DataPlane)(s)
	}
	return Plan(x.Mode, services...)
}

func (s *Scene) must(err error) {
	s.T.Helper()
	if err != nil {
		s.T.Fatal(err)
	}
}

func clientsStay(s *Scene, x *Subject) {
	sticky := Service("sticky", service.TCP, Cluster(s.Virtual(1)), NodePort(30080), External(s.Virtual(2)), s.Endpoints(2, 3, 4), Affinity(time.Hour))
	sticky.Port.ClusterIPs, sticky.Port.Number = []netip.Addr{netip.MustParseAddrPort(s.Virtual(1)).Addr()}, 80
	x.Program(s.plan(x, sticky))
	endpoints := map[string]bool{}
	for _, to := range []string{s.Virtual(1), s.NodePort(30080), s.Virtual(2)} {
		first := s.Asks(10, 1, service.TCP, to)
		if len(first) != 1 || first["two"]+first["three"]+first["four"] != 10 {
			s.T.Errorf("one client's connections to %s went to %v", to, first)
		}
		for name := range first {
			endpoints[name] = true
		}
	}
	if len(endpoints) > 1 && x.DataPlane != plan.IPVS { // which keeps them for each virtual server, as kube-proxy's does
		s.T.Errorf("one client's connections to the addresses of one service went to %v", endpoints)
	}
	// A client that userspace kept with "four" stays with it, but in IPVS, which nobody can tell.
	four, node := s.Endpoint(4), s.NodeAddress(s.Family, 4)
	moving := []kernel.Moving{{Service: sticky}}
	s.must(x.Plane.SeedAffinity(s.T.Context(), moving, map[service.Key][]kernel.Client{sticky.Port.Key: {{Address: node, Endpoint: four, Remaining: time.Minute}}}))
	s.On(0, func() {
		if out, err := exec.Command("ip", "route", "add", netip.MustParseAddrPort(s.Virtual(1)).Addr().String(), "dev", "host4", "src", node.String()).CombinedOutput(); err != nil {
			s.T.Fatalf("%v: %s", err, out)
		}
	})
	seeded := s.Asks(10, 0, service.TCP, s.Virtual(1))
	if want := map[string]int{"four": 10}; x.DataPlane != plan.IPVS {
		s.Expect("seeded client", want, seeded)
	} else if len(seeded) != 1 {
		s.T.Errorf("one client's connections went to %v", seeded)
	}
	clients, err := x.Plane.ReadAffinity(moving)
	s.must(err)
	found := false
	for _, c := range clients[sticky.Port.Key] {
		if c.Address == node {
			found = true
			if c.Remaining < 50*time.Minute || c.Endpoint != four && x.DataPlane != plan.IPVS {
				s.T.Errorf("new connections didn't prolong the stay: %v", c)
			}
		}
	}
	if !found {
		s.T.Errorf("the client isn't among %v", clients)
	}
	// Its endpoint goes: it stays with another.
	x.Program(s.plan(x, Service("sticky", service.TCP, Cluster(s.Virtual(1)), s.Endpoints(2, 3), Affinity(time.Hour))))
	if got := s.Asks(10, 0, service.TCP, s.Virtual(1)); len(got) != 1 || got["two"]+got["three"] != 10 {
		s.T.Errorf("once its endpoint had gone, the client went to %v", got)
	}
}

func whatEndpointsSee(s *Scene, x *Subject) {
	local := func(f *plan.Frontend) { f.Local, f.ShortCircuit, f.Masquerade = true, true, plan.MasqueradeNodeLocal }
	at := func(h int, isLocal bool) func(*plan.Service) {
		return Endpoint(s.Endpoint(h).String(), 1, isLocal)
	}
	p := s.plan(x, Service("web", service.TCP,
		Cluster(s.Virtual(1)), External(s.Virtual(2)), External(s.Virtual(3), local),
		Cluster(s.Virtual(4), func(f *plan.Frontend) { f.Masquerade = plan.MasqueradeUnlessPod }),
		NodePort(30080), at(2, true), at(3, false)))
	client, pod := s.Address(s.Family, 1), s.Address(s.Family, 3)
	p.Policy.PodCIDRs = []netip.Prefix{netip.PrefixFrom(pod, s.Family.Bits())}
	x.Program(p)
	asNode := func(what string, got string) {
		s.T.Helper()
		if got != s.NodeAddress(s.Family, 2).String() && got != s.NodeAddress(s.Family, 3).String() {
			s.T.Errorf("%s: the endpoint sees %s, want the node", what, got)
		}
	}
	s.Expect("through the cluster address", client.String(), s.Seen(1, s.Virtual(1)))
	asNode("through an external address", s.Seen(1, s.Virtual(2)))
	asNode("through a node port", s.Seen(1, s.NodePort(30080)))
	s.Expect("with a local policy", client.String(), s.Seen(1, s.Virtual(3)))
	s.Expect("with a local policy, outsiders", map[string]int{"two": 6}, s.Asks(6, 1, service.TCP, s.Virtual(3)))
	both := map[string]bool{"two": true, "three": true}
	s.Expect("with a local policy, this node", both, s.Who(20, 0, service.TCP, s.Virtual(3)))
	s.Expect("with a local policy, pods", both, s.Who(20, 3, service.TCP, s.Virtual(3)))
	asNode("a client outside the pod network", s.Seen(1, s.Virtual(4)))
	// A pod that meets itself is masqueraded, or its answer would never leave it.
	seen := map[string]bool{}
	for range 20 {
		seen[s.Seen(3, s.Virtual(4))] = true
	}
	s.Expect("a pod that reaches the other, and itself", map[string]bool{pod.String(): true, s.NodeAddress(s.Family, 3).String(): true}, seen)
}

func refusals(s *Scene, x *Subject) {
	verdict := func(v plan.Verdict) func(*plan.Frontend) { return func(f *plan.Frontend) { f.Verdict = v } }
	ranges := func(ps ...netip.Prefix) func(*plan.Frontend) {
		return func(f *plan.Frontend) { f.SourceRanges = ps }
	}
	client := netip.PrefixFrom(s.Address(s.Family, 1), s.Family.Bits())
	around, _ := client.Addr().Prefix(client.Bits() - 8)
	other := netip.PrefixFrom(s.Address(s.Family, 2), s.Family.Bits())
	x.Program(s.plan(x,
		Service("rejected", service.TCP, Cluster(s.Virtual(1), verdict(plan.Reject)), NodePort(30081, verdict(plan.Reject))),
		Service("rejected", service.UDP, Cluster(s.Virtual(1), verdict(plan.Reject))),
		Service("dropped", service.TCP, Cluster(s.Virtual(2), verdict(plan.Drop)), NodePort(30082, verdict(plan.Drop))),
		Service("ranged", service.TCP, LoadBalancer(s.Virtual(3), ranges(client, around)), LoadBalancer(s.Virtual(4), ranges(other)), s.Endpoints(2)),
		Service("neighbour", service.TCP, Cluster(s.Virtual(5)), s.Endpoints(2)),
	))
	before, err := x.Plane.Counts(s.T.Context())
	s.must(err)
	for _, tt := range []struct {
		what  string
		from  int
		proto service.Protocol
		to    string
		want  error
	}{
		{"no endpoint", 1, service.TCP, s.Virtual(1), ErrRefused},
		{"no endpoint, from the node", 0, service.TCP, s.Virtual(1), ErrRefused},
		{"no endpoint, UDP", 1, service.UDP, s.Virtual(1), ErrRefused},
		{"no endpoint, node port", 1, service.TCP, s.NodePort(30081), ErrRefused},
		{"dropped", 1, service.TCP, s.Virtual(2), ErrTimeout},
		{"dropped, node port", 1, service.TCP, s.NodePort(30082), ErrTimeout},
		{"in the source ranges", 1, service.TCP, s.Virtual(3), nil},
		{"outside the source ranges", 1, service.TCP, s.Virtual(4), ErrTimeout},
		{"another service", 1, service.TCP, s.Virtual(5), nil},
	} {
		timeout := patience * askTimeout
		if errors.Is(tt.want, ErrTimeout) {
			timeout = silence
		}
		if _, _, err := s.ask(tt.from, tt.proto, netip.MustParseAddrPort(tt.to), timeout); !errors.Is(err, tt.want) {
			s.T.Errorf("%s: %v, want %v", tt.what, err, tt.want)
		}
	}
	if c, err := x.Plane.Counts(s.T.Context()); err != nil || c.Refused-before.Refused < 4 {
		s.T.Errorf("counts %+v, %v; want four refusals more than %+v", c, err, before)
	}
}

// lateRefusal: what an endpoint that leaves refuses of what was on its way to it is swallowed, and the client's next SYN, two
// seconds later, goes to another endpoint.
func lateRefusal(s *Scene, x *Subject) {
	closed := netip.AddrPortFrom(s.Address(s.Family, 3), 9)
	silent := func(does string) {
		s.On(3, func() { s.must(exec.Command("nft", strings.Fields(does)...).Run()) })
	}
	silent("add table inet silent; add chain inet silent in { type filter hook input priority 0 ; } ; add rule inet silent in tcp dport 9 drop")
	x.Program(s.plan(x, Service("web", service.TCP, Cluster(s.Virtual(1)), Endpoint(closed.String(), 1, false))))
	s.must(x.Heartbeat.Alive(time.Hour))
	table, err := conntrack.Dial()
	s.must(err)
	defer table.Close()
	type answer struct {
		server string
		err    error
	}
	answered := make(chan answer, 1)
	go func() {
		server, _, err := s.ask(1, service.TCP, netip.MustParseAddrPort(s.Virtual(1)), patience*askTimeout)
		answered <- answer{server, err}
	}()
	for {
		flows, err := table.List(conntrack.Wanted{Protocol: service.TCP, From: closed})
		s.must(err)
		if len(flows) > 0 || len(answered) > 0 {
			break
		}
		time.Sleep(time.Millisecond)
	}
	x.Program(s.plan(x, Service("web", service.TCP, Cluster(s.Virtual(1)), s.Endpoints(2), Unusable(closed.String(), false))))
	silent("delete table inet silent")
	if a := <-answered; a.server != "two" || a.err != nil {
		s.T.Errorf("answered by %q, %v; want two", a.server, a.err)
	}
}

// redirect: what is in the userspace set is redirected while kproxy is alive, and the
// heartbeat's end sends new connections to the kernel's rules.
func redirect(s *Scene, x *Subject) {
	if x.Firewall != nil {
		x.Firewall()
	}
	for _, port := range slices.Compact([]uint16{x.TCPPort, x.UDPPort}) {
		s.Serve(0, "userspace", port)
	}
	web := Service("web", service.TCP, Cluster(s.Virtual(1)), NodePort(30080), s.Endpoints(2), InUserspace)
	dns := Service("dns", service.UDP, Cluster(s.Virtual(1)), NodePort(30080), s.Endpoints(2), InUserspace)
	offloaded := Service("offloaded", service.TCP, Cluster(s.Virtual(2)), NodePort(30081), s.Endpoints(3))
	x.Program(s.plan(x, web, dns, offloaded))
	who := func(proto service.Protocol, from int, to string) string {
		server, _, err := s.Ask(from, proto, netip.MustParseAddrPort(to), true)
		if err != nil {
			return err.Error()
		}
		return server
	}
	check := func(when, userspace string) {
		s.T.Helper()
		for _, proto := range []service.Protocol{service.TCP, service.UDP} {
			s.Expect(when+": cluster address "+proto.String(), userspace, who(proto, 1, s.Virtual(1)))
			s.Expect(when+": node port "+proto.String(), userspace, who(proto, 1, s.NodePort(30080)))
		}
		s.Expect(when+": offloaded", "three", who(service.TCP, 1, s.Virtual(2)))
		s.Expect(when+": offloaded node port", "three", who(service.TCP, 1, s.NodePort(30081)))
	}
	check("not alive", "two")
	for range 2 {
		s.must(x.Heartbeat.Alive(time.Hour))
	}
	check("alive", "userspace")
	s.Expect("alive: from the node", "userspace", who(service.TCP, 0, s.Virtual(1)))
	s.Expect("alive: node port on loopback, though offloaded", "userspace", who(service.TCP, 0, s.Addr("127.0.0.1:30081", "[::1]:30081")))
	if x.Firewall != nil { // the listener's own port is closed to those who weren't redirected
		if _, _, err := s.Ask(1, service.TCP, netip.MustParseAddrPort(s.NodePort(x.TCPPort)), false); !errors.Is(err, ErrTimeout) {
			s.T.Errorf("the listener itself: %v", err)
		}
	}
	web2 := *web
	web2.DataPlane = x.DataPlane
	x.Program(s.plan(x, &web2, dns, offloaded))
	s.Expect("offloaded", "two", who(service.TCP, 1, s.Virtual(1)))
	s.must(x.Heartbeat.Dead())
	check("removed", "two")
	s.must(x.Heartbeat.Alive(time.Second))
	time.Sleep(1500 * time.Millisecond) // what a dead kproxy does
	check("expired", "two")
	if c, err := x.Plane.Counts(s.T.Context()); err != nil || c.Steered < 6 {
		s.T.Errorf("counts %+v, %v; want six that were steered", c, err)
	}
}
