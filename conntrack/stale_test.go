package conntrack

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// The domain of Stale: what a flow was sent to, and where it goes.
type (
	destination struct {
		name string
		addr func(service.Family) netip.AddrPort
	}
	target struct {
		name string
		addr func(f service.Family, dst netip.AddrPort) netip.AddrPort
	}
)

var destinations = []destination{
	{"service address", func(f service.Family) netip.AddrPort { return at(f, services, 10, 53) }},
	{"node port", func(f service.Family) netip.AddrPort { return at(f, nodes, 1, nodePort) }},
	{"loopback node port", func(f service.Family) netip.AddrPort { return netip.AddrPortFrom(loopback(f), nodePort) }},
	{"foreign address", func(f service.Family) netip.AddrPort { return at(f, services, 99, 53) }},
	{"foreign port", func(f service.Family) netip.AddrPort { return at(f, services, 10, 54) }},
	{"node port of another host", func(f service.Family) netip.AddrPort { return at(f, nodes, 2, nodePort) }},
}

var targets = []target{
	{"endpoint", func(f service.Family, _ netip.AddrPort) netip.AddrPort { return at(f, pods, 2, 5353) }},
	{"removed endpoint", func(f service.Family, _ netip.AddrPort) netip.AddrPort { return at(f, pods, 3, 5353) }},
	{"removed port of an endpoint", func(f service.Family, _ netip.AddrPort) netip.AddrPort { return at(f, pods, 2, 5354) }},
	{"listener", func(f service.Family, _ netip.AddrPort) netip.AddrPort { return at(f, nodes, 1, listener) }},
	{"loopback listener", func(f service.Family, _ netip.AddrPort) netip.AddrPort {
		return netip.AddrPortFrom(loopback(f), listener)
	}},
	{"earlier listener", func(f service.Family, _ netip.AddrPort) netip.AddrPort { return at(f, nodes, 1, oldListener) }},
	{"nowhere else", func(_ service.Family, dst netip.AddrPort) netip.AddrPort { return dst }},
}

// situation is a change of plans and the targets that it makes stale, for
// flows to each kind of destination.
type situation struct {
	name     string
	old, now *plan.Plan
	sessions bool
	stale    map[string][]string // destination → targets
}

func situations() []situation {
	k := udpKey("dns")
	all := func(targets ...string) map[string][]string {
		return map[string][]string{"service address": targets, "node port": targets, "loopback node port": targets}
	}
	// Node ports on loopback addresses are always the forwarder's.
	butLoopback := func(targets ...string) map[string][]string {
		m := all(targets...)
		m["loopback node port"] = []string{"removed endpoint", "removed port of an endpoint", "earlier listener", "nowhere else"}
		return m
	}
	const (
		removed, port, ours, ours2, earlier, nowhere = "removed endpoint", "removed port of an endpoint",
			"listener", "loopback listener", "earlier listener", "nowhere else"
	)
	full := func(c ...func(*plan.Service)) *plan.Plan { return planOf(serviceOf(k, 10, c...)) }
	less := withoutEndpoint(3)
	return []situation{
		{"start, offloaded", nil, full(less), false, butLoopback(removed, port, ours, ours2, earlier, nowhere)},
		{"start, in userspace", nil, full(less, inPlane(plan.Userspace)), false, all(removed, port, earlier, nowhere)},
		{"endpoint removed", full(), full(less), true, all(removed, port, earlier, nowhere)},
		{"endpoint not serving", full(), full(notServing(3)), true, all(removed, port, earlier, nowhere)},
		{"endpoint added", full(less), full(), true, all(port, earlier, nowhere)},
		{"offloaded, sessions live", full(inPlane(plan.Userspace), less), full(less), true, all(removed, port, earlier, nowhere)},
		{"recalled", full(less), full(less, inPlane(plan.Userspace)), false, all(removed, port, earlier, nowhere)},
		{"emptied", full(less), full(rejecting), false, all("endpoint", removed, port, ours, ours2, earlier)},
		{"emptied, sessions live", full(less), full(rejecting), true, all("endpoint", removed, port, earlier)},
		{"deleted", full(), planOf(), false, all("endpoint", removed, ours, ours2, earlier)},
		{"deleted, sessions live", full(), planOf(), true, all("endpoint", removed, ours, ours2, earlier)},
		{"deleted before the start", nil, planOf(), false, all()},
		{"address taken over", full(), planOf(serviceOf(udpKey("new"), 10, less)), true, all(removed, port, earlier, nowhere)},
	}
}

func TestStale(t *testing.T) {
	for _, s := range situations() {
		for _, family := range service.Families {
			for _, protocol := range []service.Protocol{service.TCP, service.UDP, service.SCTP} {
				t.Run(fmt.Sprintf("%s/%s/%s", s.name, family, protocol), func(t *testing.T) {
					testSituation(t, s, family, protocol)
				})
			}
		}
	}
}

func testSituation(t *testing.T, s situation, family service.Family, protocol service.Protocol) {
	config := StaleConfig{Listeners: []uint16{listener}, Local: isLocal, HasSession: func(Flow) bool { return s.sessions }}
	got, want := map[string]bool{}, map[string]bool{}
	for _, d := range destinations {
		for _, to := range targets {
			dst := d.addr(family)
			f := flow(family, protocol, dst, to.addr(family, dst))
			name := d.name + " to " + to.name
			zoned := f
			zoned.Zone = 3
			switch stale := Stale([]Flow{zoned, f}, s.old, s.now, config); len(stale) {
			case 1:
				got[name] = stale[0] == f
			case 2:
				t.Errorf("%s: the entry in a zone is stale as well", name)
			}
		}
		if protocol == service.UDP {
			for _, to := range s.stale[d.name] {
				want[d.name+" to "+to] = true
			}
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("stale (-want +got):\n%s", diff)
	}
}

// A TCP service on the same address and port has no part in it.
func TestStaleIgnoresOtherProtocols(t *testing.T) {
	k := udpKey("dns")
	k.Protocol = service.TCP
	p := planOf(serviceOf(k, 10, withoutEndpoint(3)))
	f := flow(service.IPv4, service.UDP, at(service.IPv4, services, 10, 53), at(service.IPv4, pods, 3, 5353))
	if got := Stale([]Flow{f}, p, p, StaleConfig{Local: isLocal}); len(got) != 0 {
		t.Errorf("got %v, want none", got)
	}
}

// A flow whose session is just being made isn't taken for one without.
func TestStaleLeavesFirstDatagramAlone(t *testing.T) {
	k := udpKey("dns")
	f := flow(service.IPv4, service.UDP, at(service.IPv4, services, 10, 53), at(service.IPv4, nodes, 1, listener))
	f.Status = 0
	for _, c := range []struct {
		name     string
		now      *plan.Plan
		listener uint16
		want     int
	}{
		{"offloaded", planOf(serviceOf(k, 10)), listener, 0},
		{"emptied", planOf(serviceOf(k, 10, rejecting)), listener, 1},
		{"redirected to an earlier listener", planOf(serviceOf(k, 10)), listener + 1, 1},
	} {
		got := Stale([]Flow{f}, planOf(serviceOf(k, 10, inPlane(plan.Userspace))), c.now, StaleConfig{Listeners: []uint16{c.listener}, Local: isLocal})
		if len(got) != c.want {
			t.Errorf("%s: %d stale, want %d", c.name, len(got), c.want)
		}
	}
}

// A host-network endpoint on the port of its own node port isn't rewritten,
// and still served.
func TestStaleKeepsEndpointAtItsOwnFrontend(t *testing.T) {
	self := at(service.IPv4, nodes, 1, nodePort)
	p := planOf(serviceOf(udpKey("dns"), 10, func(s *plan.Service) {
		s.Endpoints = []plan.Endpoint{{Endpoint: &service.Endpoint{Address: self, Serving: true}}}
	}))
	if got := Stale([]Flow{flow(service.IPv4, service.UDP, self, self)}, nil, p, StaleConfig{Local: isLocal}); len(got) != 0 {
		t.Errorf("got %v, want none", got)
	}
}

func TestMayBeStale(t *testing.T) {
	k, tcp := udpKey("dns"), udpKey("dns")
	tcp.Protocol = service.TCP
	base := planOf(serviceOf(k, 10), serviceOf(tcp, 10))
	cases := []struct {
		name     string
		old, now *plan.Plan
		want     bool
	}{
		{"start", nil, base, true},
		{"the same plan", base, base, false},
		{"equal plans", base, planOf(serviceOf(k, 10), serviceOf(tcp, 10)), false},
		{"TCP endpoint removed", base, planOf(serviceOf(k, 10), serviceOf(tcp, 10, withoutEndpoint(3))), false},
		{"TCP service removed", base, planOf(serviceOf(k, 10)), false},
		{"TCP service added", planOf(serviceOf(k, 10)), base, false},
		{"endpoint removed", base, planOf(serviceOf(k, 10, withoutEndpoint(3)), serviceOf(tcp, 10)), true},
		{"endpoint not serving", base, planOf(serviceOf(k, 10, notServing(3)), serviceOf(tcp, 10)), true},
		{"data plane moved", base, planOf(serviceOf(k, 10, inPlane(plan.Userspace)), serviceOf(tcp, 10)), true},
		{"service added", planOf(serviceOf(tcp, 10)), base, true},
		{"service removed", base, planOf(serviceOf(tcp, 10)), true},
		{"service replaced", planOf(serviceOf(udpKey("a"), 10)), planOf(serviceOf(udpKey("b"), 10)), true},
		{"first of two removed", planOf(serviceOf(udpKey("a"), 1), serviceOf(udpKey("b"), 2)), planOf(serviceOf(udpKey("b"), 2)), true},
		{"address changed", base, planOf(serviceOf(k, 11), serviceOf(tcp, 10)), true},
	}
	for _, c := range cases {
		d := plan.Between(c.old, c.now)
		d.Full = c.old == nil
		if got := MayBeStale(d); got != c.want {
			t.Errorf("%s: got %v, want %v", c.name, got, c.want)
		}
	}
}

// BenchmarkStale: 1,000 services, 100,000 flows, of which a tenth are stale.
func BenchmarkStale(b *testing.B) {
	p := &plan.Plan{}
	var flows []Flow
	for i := range 1000 {
		k := udpKey(fmt.Sprintf("s%04d", i))
		s := serviceOf(k, 10)
		s.Frontends = s.Frontends[:1]
		s.Frontends[0].Address = netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), 53)
		p.Services = append(p.Services, s)
		for j := range 100 {
			to := at(service.IPv4, pods, 2+j%10/9*2, 5353) // one in ten to pod 4, which isn't an endpoint
			flows = append(flows, flow(service.IPv4, service.UDP, s.Frontends[0].Address, to))
		}
	}
	config := StaleConfig{Listeners: []uint16{listener}, Local: isLocal}
	b.ReportAllocs()
	for b.Loop() {
		if got := len(Stale(flows, p, p, config)); got != len(flows)/10 {
			b.Fatalf("%d stale, want a tenth of %d", got, len(flows))
		}
	}
}

// TestKeeps: which endpoints keep the UDP flows they have.
func TestKeeps(t *testing.T) {
	serving := service.Endpoint{Ready: true, Serving: true, Weight: 1}
	drained := serving
	drained.Weight = 0
	for _, tt := range []struct {
		name string
		e    plan.Endpoint
		want bool
	}{
		{"in use", plan.Endpoint{Endpoint: &serving, Usable: true, Probed: &plan.Probed{Health: "up"}}, true},
		{"not probed", plan.Endpoint{Endpoint: &serving, Usable: true, Probed: &plan.Probed{Health: "unknown"}}, true},
		{"drained by weight 0", plan.Endpoint{Endpoint: &drained, Probed: &plan.Probed{Health: "up"}}, true},
		{"terminating and serving", plan.Endpoint{Endpoint: &service.Endpoint{Serving: true, Terminating: true}, Probed: &plan.Probed{Health: "unknown"}}, true},
		{"down", plan.Endpoint{Endpoint: &serving, Probed: &plan.Probed{Health: "down"}}, false},
		{"down like all others, and used nevertheless", plan.Endpoint{Endpoint: &serving, Usable: true, Probed: &plan.Probed{Health: "down"}}, true},
		{"not serving", plan.Endpoint{Endpoint: &service.Endpoint{}, Probed: &plan.Probed{Health: "up"}}, false},
	} {
		if got := tt.e.Keeps(); got != tt.want {
			t.Errorf("an endpoint that is %s keeps its flows: %v, want %v", tt.name, got, tt.want)
		}
	}
}

func tcpKey(name string) service.Key {
	return service.Key{Namespace: "default", Name: name, Port: "p", Protocol: service.TCP}
}

// unusable takes the endpoint at pod host out of use.
func unusable(host int) func(*plan.Service) {
	return func(s *plan.Service) {
		for i := range s.Endpoints {
			if e := &s.Endpoints[i]; e.Address == at(service.FamilyOf(e.Address.Addr()), pods, host, 5353) {
				e.Usable = false
			}
		}
	}
}

// clusterOnly leaves the node port out.
func clusterOnly(s *plan.Service) {
	s.Frontends = slices.DeleteFunc(s.Frontends, func(f plan.Frontend) bool { return f.Kind == plan.NodePort })
}

// refused has no usable endpoint.
func refused(s *plan.Service) {
	for i := range s.Frontends {
		s.Frontends[i].Verdict = plan.Reject
	}
}

// TestHalfOpen: only connections are given up that wait for an endpoint which isn't
// used any more, or that began without a rule.
func TestHalfOpen(t *testing.T) {
	p := &plan.Plan{Services: []*plan.Service{
		serviceOf(tcpKey("web"), 10, unusable(3)),
		serviceOf(tcpKey("virtual"), 12, clusterOnly, func(s *plan.Service) { s.DataPlane = plan.IPVS }),
		serviceOf(tcpKey("closed"), 13, clusterOnly, refused),
	}}
	for _, f := range service.Families {
		waiting := Flow{
			Family: f, Protocol: service.TCP, TCPState: tcpSynSent,
			OrigSrc: at(f, clients, 2, 50000), OrigDst: at(f, services, 10, 53),
			ReplySrc: at(f, pods, 3, 5353), ReplyDst: at(f, clients, 2, 50000),
		}
		for _, tt := range []struct {
			name   string
			change func(*Flow)
			gone   bool
		}{
			{"waits for an endpoint that is down", func(*Flow) {}, true},
			{"waits for one that was removed", func(x *Flow) { x.ReplySrc = at(f, pods, 4, 5353) }, true},
			{"waits for one in use", func(x *Flow) { x.ReplySrc = at(f, pods, 2, 5353) }, false},
			{"to a node port", func(x *Flow) { x.OrigDst = at(f, nodes, 1, nodePort) }, true},
			{"is established", func(x *Flow) { x.TCPState, x.Status = 3, statusSeenReply }, false},
			{"was answered", func(x *Flow) { x.Status = statusSeenReply }, false},
			{"is UDP", func(x *Flow) { x.Protocol, x.TCPState = service.UDP, 0 }, false},
			{"goes to another service's address", func(x *Flow) { x.OrigDst = at(f, services, 11, 53) }, false},
			{"isn't rewritten", func(x *Flow) { x.ReplySrc = x.OrigDst }, true},
			{"isn't rewritten, but answered", func(x *Flow) { x.ReplySrc, x.Status = x.OrigDst, statusSeenReply }, false},
			{"isn't rewritten, and IPVS's", func(x *Flow) { x.OrigDst = at(f, services, 12, 53); x.ReplySrc = x.OrigDst }, false},
			{"isn't rewritten, and refused", func(x *Flow) { x.OrigDst = at(f, services, 13, 53); x.ReplySrc = x.OrigDst }, false},
			{"isn't rewritten, to no service", func(x *Flow) { x.OrigDst = at(f, services, 14, 53); x.ReplySrc = x.OrigDst }, false},
			{"is the forwarder's", func(x *Flow) { x.ReplySrc = at(f, nodes, 1, listener) }, false},
			{"is in a zone", func(x *Flow) { x.Zone = 1 }, false},
		} {
			x := waiting
			tt.change(&x)
			if got := len(HalfOpen([]Flow{x}, p, isLocal)) == 1; got != tt.gone {
				t.Errorf("%s, a connection that %s: given up %v, want %v", f, tt.name, got, tt.gone)
			}
		}
	}
}

func TestMayBeHalfOpen(t *testing.T) {
	planOf := func(change ...func(*plan.Service)) *plan.Plan {
		return &plan.Plan{Services: []*plan.Service{serviceOf(tcpKey("web"), 10, change...)}}
	}
	without := func(s *plan.Service) { s.Endpoints = slices.Delete(s.Endpoints, 1, 2) }
	for _, tt := range []struct {
		name     string
		old, now *plan.Plan
		unused   []netip.AddrPort
		others   bool
	}{
		{"at start", nil, planOf(), nil, true},
		{"a service came", &plan.Plan{}, planOf(), nil, true},
		{"one that is refused came", &plan.Plan{}, planOf(refused), nil, false},
		{"a node port was added", planOf(clusterOnly), planOf(), nil, true},
		{"a node port was removed", planOf(), planOf(clusterOnly), nil, false},
		{"nothing changed", planOf(), planOf(), nil, false},
		{"an endpoint went down", planOf(), planOf(unusable(2)), []netip.AddrPort{at(service.IPv4, pods, 2, 5353), at(service.IPv6, pods, 2, 5353)}, false},
		{"an endpoint was removed", planOf(), planOf(without), []netip.AddrPort{at(service.IPv4, pods, 3, 5353)}, false},
		{"an endpoint of IPVS was removed", planOf(inPlane(plan.IPVS)), planOf(inPlane(plan.IPVS), without), []netip.AddrPort{at(service.IPv4, pods, 3, 5353)}, true},
		{"an endpoint came up", planOf(unusable(2)), planOf(), nil, false},
		{"the service is gone", planOf(), &plan.Plan{}, nil, false},
	} {
		if unused, others := MayBeHalfOpen(plan.Between(tt.old, tt.now)); !slices.Equal(unused, tt.unused) || others != tt.others {
			t.Errorf("%s: %v, others %v, want %v and %v", tt.name, unused, others, tt.unused, tt.others)
		}
	}
}
