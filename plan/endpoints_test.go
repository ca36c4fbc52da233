package plan

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service"
)

var compareAddrs = cmp.Options{
	cmp.Comparer(func(a, b netip.Addr) bool { return a == b }),
	cmp.Comparer(func(a, b netip.AddrPort) bool { return a == b }),
	cmp.Comparer(func(a, b netip.Prefix) bool { return a == b }),
}

// external makes a port of type NodePort with the policies given.
func external(p *service.Port) { p.NodePort, p.ExternallyAccessible = 30080, true }
func iTPLocal(p *service.Port) { p.InternalLocal = true }
func eTPLocal(p *service.Port) { p.ExternalLocal = true }

type selectTest struct {
	name           string
	port           []func(*service.Port)
	noZone, noName bool
	endpoints      []string
	cluster, local string
}

// selectTests cover what upstream's TestCategorizeEndpoints covers. The node
// is n1 in zone-a unless a case says otherwise. Endpoints are told by the last
// number of their address; "-" means that the group isn't used at all.
var selectTests = []selectTest{
	{name: "zone hints used", endpoints: []string{"10.0.0.1 n1 ready zone:zone-a", "10.0.0.2 n2 ready zone:zone-b", "10.0.0.3 n3 ready zone:zone-c", "10.0.0.4 n4 ready zone:zone-a"}, cluster: "1 4"},
	{name: "zone hints ignored: node has no zone", noZone: true, endpoints: []string{"10.0.0.1 n1 ready zone:zone-a", "10.0.0.2 n2 ready zone:zone-b"}, cluster: "1 2"},
	{name: "zone hints ignored: no endpoint for the zone", endpoints: []string{"10.0.0.1 n1 ready zone:zone-b", "10.0.0.2 n2 ready zone:zone-c"}, cluster: "1 2"},
	{name: "zone hints ignored: one has none", endpoints: []string{"10.0.0.1 n1 ready zone:zone-a", "10.0.0.2 n2 ready", "10.0.0.3 n3 ready zone:zone-b"}, cluster: "1 2 3"},
	{name: "zone hints ignored: only an unready endpoint in the zone", endpoints: []string{"10.0.0.1 n1 zone:zone-a", "10.0.0.2 n2 ready zone:zone-b"}, cluster: "2"},
	{name: "zone hints used although an unready endpoint has none", endpoints: []string{"10.0.0.1 n1 ready zone:zone-a", "10.0.0.2 n2", "10.0.0.3 n2 ready zone:zone-b"}, cluster: "1"},
	{name: "zone hints used, the unready in the zone left out", endpoints: []string{"10.0.0.1 n1 ready zone:zone-a", "10.0.0.2 n2 zone:zone-a", "10.0.0.3 n2 ready zone:zone-b"}, cluster: "1"},
	{name: "several zone hints on an endpoint", endpoints: []string{"10.0.0.1 n1 ready zone:zone-a,zone-b", "10.0.0.2 n2 ready zone:zone-b,zone-c", "10.0.0.3 n3 ready zone:zone-a,zone-c"}, cluster: "1 3"},
	{name: "no hints at all", endpoints: []string{"10.0.0.1 n1 ready", "10.0.0.2 n2 ready"}, cluster: "1 2"},
	{name: "node hints used", endpoints: []string{"10.0.0.1 n1 ready node:n1 zone:zone-a", "10.0.0.2 n2 ready node:n2 zone:zone-a"}, cluster: "1"},
	{name: "several node hints on an endpoint", endpoints: []string{"10.0.0.1 n2 ready node:n1,n2", "10.0.0.2 n3 ready node:n3"}, cluster: "1"},
	{name: "node hints fall back to zone: none for the node", endpoints: []string{"10.0.0.1 n2 ready node:n2 zone:zone-a", "10.0.0.2 n3 ready node:n3 zone:zone-b"}, cluster: "1"},
	{name: "node hints fall back to zone: one has none", endpoints: []string{"10.0.0.1 n1 ready node:n1 zone:zone-a", "10.0.0.2 n2 ready zone:zone-a", "10.0.0.3 n3 ready node:n3 zone:zone-b"}, cluster: "1 2"},
	{name: "node hints fall back to zone: that for the node isn't ready", endpoints: []string{"10.0.0.1 n1 node:n1 zone:zone-a", "10.0.0.2 n2 ready node:n2 zone:zone-a", "10.0.0.3 n3 ready node:n3 zone:zone-b"}, cluster: "2"},
	{name: "node hints fall back to all", endpoints: []string{"10.0.0.1 n2 ready node:n2", "10.0.0.2 n3 ready node:n3"}, cluster: "1 2"},
	{name: "node hints don't match a node without a name", noName: true, noZone: true, endpoints: []string{"10.0.0.1 ready node:n2", "10.0.0.2 n3 ready node:n3"}, cluster: "1 2"},

	{name: "internal Local ignores topology", port: []func(*service.Port){iTPLocal}, endpoints: []string{"10.0.0.1 n1 ready zone:zone-b", "10.0.0.2 n2 ready zone:zone-a"}, cluster: "-", local: "1"},
	{name: "external Local: cluster follows topology, local doesn't", port: []func(*service.Port){external, eTPLocal}, endpoints: []string{"10.0.0.1 n1 ready zone:zone-b", "10.0.0.2 n2 ready zone:zone-a"}, cluster: "2", local: "1"},
	{name: "internal Local, external Cluster with hints: union", port: []func(*service.Port){external, iTPLocal}, endpoints: []string{"10.0.0.1 n1 ready zone:zone-b", "10.0.0.2 n2 ready zone:zone-a", "10.0.0.3 n1 ready zone:zone-a"}, cluster: "2 3", local: "1 3"},

	{name: "both Cluster", port: []func(*service.Port){external}, endpoints: []string{"10.0.0.1 n1 ready", "10.0.0.2 n2 ready"}, cluster: "1 2", local: "-"},
	{name: "internal Local: some local", port: []func(*service.Port){iTPLocal}, endpoints: []string{"10.0.0.1 n1 ready", "10.0.0.2 n2 ready"}, cluster: "-", local: "1"},
	{name: "internal Local: none local", port: []func(*service.Port){iTPLocal}, endpoints: []string{"10.0.0.1 n3 ready", "10.0.0.2 n2 ready"}, cluster: "-", local: ""},
	{name: "internal Local: local unready", port: []func(*service.Port){iTPLocal}, endpoints: []string{"10.0.0.1 n1", "10.0.0.2 n2 ready"}, cluster: "-", local: ""},
	{name: "external Local: some local", port: []func(*service.Port){external, eTPLocal}, endpoints: []string{"10.0.0.1 n1 ready", "10.0.0.2 n2 ready"}, cluster: "1 2", local: "1"},
	{name: "external Local: none local", port: []func(*service.Port){external, eTPLocal}, endpoints: []string{"10.0.0.1 n3 ready", "10.0.0.2 n2 ready"}, cluster: "1 2", local: ""},
	{name: "both Local, externally accessible: cluster for the short circuit", port: []func(*service.Port){external, iTPLocal, eTPLocal}, endpoints: []string{"10.0.0.1 n1 ready", "10.0.0.2 n2 ready"}, cluster: "1 2", local: "1"},
	{name: "not externally accessible ignores external Local", port: []func(*service.Port){eTPLocal}, endpoints: []string{"10.0.0.1 n1 ready", "10.0.0.2 n2 ready"}, cluster: "1 2", local: "-"},
	{name: "not externally accessible, both Local", port: []func(*service.Port){eTPLocal, iTPLocal}, endpoints: []string{"10.0.0.1 n1 ready", "10.0.0.2 n2 ready"}, cluster: "-", local: "1"},

	{name: "Cluster: serving and terminating used when none is ready", endpoints: []string{"10.0.0.1 n1 serving terminating", "10.0.0.2 n2 serving terminating", "10.0.0.3 n3", "10.0.0.4 n2 terminating"}, cluster: "1 2"},
	{name: "Cluster: terminating left out when one is ready", endpoints: []string{"10.0.0.1 n1 serving terminating", "10.0.0.2 n2 ready"}, cluster: "2"},
	{name: "Cluster: fallback ignores topology", endpoints: []string{"10.0.0.1 n1 serving terminating zone:zone-b", "10.0.0.2 n2 serving terminating zone:zone-a"}, cluster: "1 2"},
	{name: "Cluster: serving alone isn't enough", endpoints: []string{"10.0.0.1 n1 serving"}, cluster: ""},
	{name: "internal Local: local terminating, remote ready", port: []func(*service.Port){iTPLocal}, endpoints: []string{"10.0.0.1 n1 serving terminating", "10.0.0.2 n2 ready"}, cluster: "-", local: "1"},
	{name: "internal Local: remote terminating only", port: []func(*service.Port){iTPLocal}, endpoints: []string{"10.0.0.2 n2 serving terminating"}, cluster: "-", local: ""},
	{name: "external Local: local terminating, remote ready", port: []func(*service.Port){external, eTPLocal}, endpoints: []string{"10.0.0.1 n1 serving terminating", "10.0.0.2 n2 ready"}, cluster: "2", local: "1"},
	{name: "external Local: all terminating", port: []func(*service.Port){external, eTPLocal}, endpoints: []string{"10.0.0.1 n1 serving terminating", "10.0.0.2 n2 serving terminating"}, cluster: "1 2", local: "1"},
	{name: "external Local: local ready, local terminating", port: []func(*service.Port){external, eTPLocal}, endpoints: []string{"10.0.0.1 n1 serving terminating", "10.0.0.3 n1 ready", "10.0.0.2 n2 ready"}, cluster: "2 3", local: "3"},
	{name: "publishNotReadyAddresses: ready and terminating is ready", endpoints: []string{"10.0.0.1 n1 ready terminating", "10.0.0.2 n2 serving terminating"}, cluster: "1"},

	{name: "no endpoints, Cluster", port: []func(*service.Port){external}, cluster: "", local: "-"},
	{name: "no endpoints, both Local", port: []func(*service.Port){external, iTPLocal, eTPLocal}, cluster: "", local: ""},
	{name: "all unready", port: []func(*service.Port){external, iTPLocal, eTPLocal}, endpoints: []string{"10.0.0.1 n1", "10.0.0.2 n2"}, cluster: "", local: ""},
	{name: "an endpoint without a node isn't local to a node without a name", port: []func(*service.Port){iTPLocal}, noName: true, endpoints: []string{"10.0.0.1 ready"}, cluster: "-", local: ""},
	{name: "the other family's hints don't count", endpoints: []string{"10.0.0.1 n1 ready zone:zone-a", "10.0.0.2 n2 ready zone:zone-b", "fd00::3 n3 ready"}, cluster: "1"},
}

func TestSelect(t *testing.T) {
	for _, tt := range selectTests {
		t.Run(tt.name, func(t *testing.T) {
			p := port("a", tt.port...)
			node := testNode
			if tt.noZone {
				node.Zone = ""
			}
			if tt.noName {
				node.Name = ""
			}
			var b service.Builder
			b.SetNode(node)
			b.AddPort(p)
			for _, e := range endpoints(tt.endpoints...) {
				b.AddEndpoint(p.Key, e)
			}
			in := Inputs{Now: t0, Snapshot: b.Build(), Caps: allCaps, Policy: DefaultPolicy()}
			got, _ := Compute(nil, in)
			checkPlan(t, &in, got)
			g := got.Services[0].Groups[service.IPv4]
			check := func(name, want string, backends []Backend) {
				if (want == "-" || want == "") && backends == nil {
					return
				}
				if names := lastNumbers(backends); names != want {
					t.Errorf("%s group is %q, want %q", name, names, want)
				}
			}
			check("cluster", tt.cluster, g.Cluster)
			check("local", tt.local, g.Local)
		})
	}
}

// lastNumbers returns the last part of each backend's address: "1 2 3".
func lastNumbers(backends []Backend) string {
	var out []string
	for _, b := range backends {
		a := b.Address.Addr().String()
		out = append(out, a[strings.LastIndexAny(a, ".:")+1:])
	}
	return strings.Join(out, " ")
}

func TestHealthAndWeights(t *testing.T) {
	wrr := func(p *service.Port) { p.Algorithm = service.WeightedRoundRobin }
	tests := []struct {
		name      string
		port      []func(*service.Port)
		endpoints []string
		down      []string
		unknown   []string // else up
		cluster   []Backend
		reason    string
	}{
		{name: "the one that is down is left out", endpoints: []string{"10.0.0.1 ready", "10.0.0.2 ready"}, down: []string{"10.0.0.1"},
			cluster: []Backend{{Address: endpoint("10.0.0.2").Address, Weight: 1}}, reason: firstOne},
		{name: "what isn't known is used", endpoints: []string{"10.0.0.1 ready", "10.0.0.2 ready"}, down: []string{"10.0.0.1"}, unknown: []string{"10.0.0.2"},
			cluster: []Backend{{Address: endpoint("10.0.0.2").Address, Weight: 1}}, reason: firstOne},
		{name: "all down", endpoints: []string{"10.0.0.1 ready", "10.0.0.2 ready"}, down: []string{"10.0.0.1", "10.0.0.2"},
			cluster: []Backend{{Address: endpoint("10.0.0.1").Address, Weight: 1}, {Address: endpoint("10.0.0.2").Address, Weight: 1}},
			reason:  "all 2 endpoints are down: serving as if all were up"},
		{name: "the only one down", endpoints: []string{"10.0.0.1 ready"}, down: []string{"10.0.0.1"},
			cluster: []Backend{{Address: endpoint("10.0.0.1").Address, Weight: 1}}, reason: "its only endpoint is down: serving as if it were up"},
		{name: "one that drains doesn't keep a dead one from serving", port: []func(*service.Port){wrr},
			endpoints: []string{"10.0.0.1 ready weight:3", "10.0.0.2 ready weight:0"}, down: []string{"10.0.0.1"},
			cluster: []Backend{{Address: endpoint("10.0.0.1").Address, Weight: 3}, {Address: endpoint("10.0.0.2").Address}},
			reason:  "its only endpoint is down: serving as if it were up"},
		{name: "weights count where the algorithm knows them", port: []func(*service.Port){wrr}, endpoints: []string{"10.0.0.1 ready weight:3"},
			cluster: []Backend{{Address: endpoint("10.0.0.1").Address, Weight: 3}}, reason: firstOne},
		{name: "round robin knows 0 only", endpoints: []string{"10.0.0.1 ready weight:3", "10.0.0.2 ready weight:0"},
			cluster: []Backend{{Address: endpoint("10.0.0.1").Address, Weight: 1}, {Address: endpoint("10.0.0.2").Address}}, reason: firstOne},
		{name: "weight 0 everywhere", endpoints: []string{"10.0.0.1 ready weight:0"},
			cluster: []Backend{{Address: endpoint("10.0.0.1").Address}}, reason: "all its endpoints have weight 0"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			w.set(port("a", tt.port...), tt.endpoints...)
			for _, e := range endpoints(tt.endpoints...) {
				w.health("a", e.Address.Addr().String(), health.Up, t0)
			}
			for _, a := range tt.down {
				w.health("a", a, health.Down, t0)
			}
			for _, a := range tt.unknown {
				w.health("a", a, health.Unknown, t0)
			}
			s := w.one()
			if diff := cmp.Diff(tt.cluster, s.Groups[service.IPv4].Cluster, compareAddrs); diff != "" {
				t.Errorf("backends (-want +got):\n%s", diff)
			}
			if s.Reason != tt.reason {
				t.Errorf("reason %q, want %q", s.Reason, tt.reason)
			}
		})
	}
}

func TestRefusals(t *testing.T) {
	tests := []struct {
		name      string
		port      []func(*service.Port)
		endpoints []string
		want      string
	}{
		{"none", nil, nil, "it has no endpoints"},
		{"one unready", nil, []string{"10.0.0.1 n1"}, "its only endpoint isn't ready"},
		{"some unready", nil, []string{"10.0.0.1 n1", "10.0.0.2 n1"}, "none of its 2 endpoints is ready"},
		{"drained", nil, []string{"10.0.0.1 n1 ready weight:0"}, "all its endpoints have weight 0"},
		{"elsewhere", []func(*service.Port){iTPLocal}, []string{"10.0.0.1 n2 ready"}, "its traffic policy is Local and no endpoint on this node takes connections"},
		{"other family", nil, []string{"fd00::1 n2 ready"}, "it has no endpoint of its addresses' family"},
		{"no address", []func(*service.Port){func(p *service.Port) { p.ClusterIPs = nil }}, []string{"10.0.0.1 n2 ready"}, "it has no address"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			w.set(port("a", tt.port...), tt.endpoints...)
			if s := w.one(); s.Reason != tt.want || s.State != StateRejecting {
				t.Errorf("%s (%s), want rejecting (%s)", s.State, s.Reason, tt.want)
			}
		})
	}
}

// TestLeaves: an endpoint that leaves keeps its connections and gets no new ones.
func TestLeaves(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*Endpoint)
		want   bool
	}{
		{"for another zone", func(*Endpoint) {}, false},
		{"in use", func(e *Endpoint) { e.Usable = true }, false},
		{"not ready", func(e *Endpoint) { e.Ready = false }, true},
		{"terminating", func(e *Endpoint) { e.Terminating = true }, true},
		{"down", func(e *Endpoint) { e.Health = downText }, true},
		{"drained by its weight", func(e *Endpoint) { e.Weight = 0 }, true},
		{"of another proxy", func(e *Endpoint) { e.Ready, e.Excluded = false, true }, false},
	} {
		e := Endpoint{Endpoint: &service.Endpoint{Ready: true, Serving: true, Weight: 1}, Probed: &Probed{Health: "up"}}
		tt.change(&e)
		if got := e.Leaves(); got != tt.want {
			t.Errorf("%s: leaves %v, want %v", tt.name, got, tt.want)
		}
	}
}

// everywhere is a service with an address of every kind in both families.
func everywhere(p *service.Port) {
	p.ClusterIPs, p.ExternalIPs = addrs("10.96.0.1", "fd00:96::1"), addrs("198.51.100.1", "fd00:98::1")
	p.LoadBalancerIPs, p.NodePort = addrs("203.0.113.1", "fd00:99::1"), 30080
	p.SourceRanges = prefixes("192.0.2.0/24")
}

// Which families of a service another proxy serves, and what is said of it.
func TestExclude(t *testing.T) {
	for _, tt := range []struct {
		name     string
		eps      []string
		excluded [2]bool
		state    State
		reason   string
		problems []string
		usable   int
	}{
		{name: "none", eps: []string{"10.0.0.1 n1 ready", "fd00::1 n1 ready"}, state: StateQualifying, reason: "waiting for its first connection", usable: 2},
		{name: "all", eps: []string{"10.245.0.1 n1 ready", "10.245.0.2 n2", "fd00:245::1 n1 ready"}, excluded: [2]bool{true, true},
			state: StateExcluded, reason: "left to another proxy: all its endpoints are in 10.245.0.0/16 and fd00:245::/64"},
		{name: "all, none of them ready", eps: []string{"10.245.0.1 n1", "fd00:245::1 n1"}, excluded: [2]bool{true, true},
			state: StateExcluded, reason: "left to another proxy: all its endpoints are in 10.245.0.0/16 and fd00:245::/64"},
		{name: "all of one family", eps: []string{"10.245.0.1 n1 ready", "fd00::1 n1 ready"}, excluded: [2]bool{true, false},
			state: StateQualifying, reason: "waiting for its first connection", usable: 1,
			problems: []string{"IPv4 is left to another proxy: all its IPv4 endpoints are in 10.245.0.0/16"}},
		{name: "all of one family, none in the other", eps: []string{"10.245.0.1 n1 ready"}, excluded: [2]bool{true, false},
			state: StateRejecting, reason: "it has no endpoints that aren't another proxy's",
			problems: []string{"IPv4 is left to another proxy: all its IPv4 endpoints are in 10.245.0.0/16"}},
		{name: "some", eps: []string{"10.0.0.1 n1 ready", "10.245.0.1 n1 ready", "10.246.0.1 n1 ready", "fd00::1 n1 ready"},
			state: StateQualifying, reason: "waiting for its first connection", usable: 2,
			problems: []string{"2 of its 3 IPv4 endpoints are another proxy's, in 10.245.0.0/16 and 10.246.0.0/16: it is served with the others only"}},
		{name: "some, the others aren't ready", eps: []string{"10.0.0.1 n1", "10.245.0.1 n1 ready", "fd00::1 n1"},
			state: StateRejecting, reason: "none of its 2 endpoints is ready",
			problems: []string{"1 of its 2 IPv4 endpoints are another proxy's, in 10.245.0.0/16: it is served with the others only"}},
		{name: "no endpoints", state: StateRejecting, reason: "it has no endpoints"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			w.in.Policy.ExcludeCIDRs = prefixes("10.245.0.0/16", "10.246.0.0/16", "fd00:245::/64")
			w.set(port("a", everywhere, func(p *service.Port) { p.SourceRanges = append(p.SourceRanges, prefixes("fd00:1::/64")...) }), tt.eps...)
			s := w.one()
			if s.Excluded != tt.excluded || s.State != tt.state || s.Reason != tt.reason {
				t.Errorf("excluded %v, %s: %s; want %v, %s: %s", s.Excluded, s.State, s.Reason, tt.excluded, tt.state, tt.reason)
			}
			if diff := cmp.Diff(tt.problems, s.Problems); diff != "" {
				t.Errorf("problems (-want +got):\n%s", diff)
			}
			frontends, usable := [2]int{}, 0
			for _, f := range s.Frontends {
				frontends[f.Family]++
			}
			for _, e := range s.Endpoints {
				if e.Usable {
					usable++
				}
			}
			for _, f := range service.Families {
				if want := map[bool]int{false: 4}[tt.excluded[f]]; frontends[f] != want {
					t.Errorf("%d frontends of %s, want %d", frontends[f], f, want)
				}
			}
			if usable != tt.usable {
				t.Errorf("%d endpoints usable, want %d", usable, tt.usable)
			}
		})
	}
}

// An endpoint of another proxy's has no say in whose turn topology hints make it,
// and none in a Local policy.
func TestExcludedEndpointsDontCount(t *testing.T) {
	w := newWorld(t)
	w.in.Policy.ExcludeCIDRs = prefixes("10.245.0.0/16")
	w.set(port("a", eTPLocal, func(p *service.Port) { p.NodePort, p.ExternallyAccessible = 30080, true }),
		"10.0.0.1 n2 ready zone:zone-a", "10.0.0.2 n2 ready zone:zone-b", "10.245.0.1 n1 ready")
	s := w.one()
	g := s.Groups[service.IPv4]
	if len(g.Cluster) != 1 || g.Cluster[0].Address.Addr() != addrs("10.0.0.1")[0] || len(g.Local) != 0 {
		t.Errorf("groups %v", g)
	}
	if f := s.Frontends[1]; f.Kind != NodePort || f.Verdict != Drop {
		t.Errorf("%s: %s, want drop: the endpoint on this node is another proxy's", f.Kind, f.Verdict)
	}
}

// A service that comes back from another proxy stands where it stood.
func TestIntoExclusionAndOut(t *testing.T) {
	w := newWorld(t)
	w.in.Policy.ExcludeCIDRs, w.in.Policy.OffloadAfter = prefixes("10.245.0.0/16"), 0
	w.in.Observed.Carried[keyOf("a")] = 1
	w.set(port("a"), "10.0.0.1 n1 ready")
	w.one()
	w.program()
	if s := w.one(); s.State != StateOffloaded || s.DataPlane != IPTables {
		t.Fatalf("%s in %s, want offloaded", s.State, s.DataPlane)
	}
	w.set(port("a"), "10.245.0.1 n1 ready")
	s := w.one()
	if s.State != StateExcluded {
		t.Fatalf("%s: %s", s.State, s.Reason)
	}
	want := []Event{{Time: t0, Kind: "dataplane", Service: "ns/a", Message: "iptables to none: left to another proxy: all its endpoints are in 10.245.0.0/16"}}
	if diff := cmp.Diff(want, w.delta.Events(t0)); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	delete(w.in.Observed.Programmed, keyOf("a"))
	w.set(port("a"), "10.0.0.1 n1 ready")
	if s = w.one(); s.State != StateOffloaded || s.DataPlane != Userspace {
		t.Errorf("%s in %s, want offloaded, but in userspace until its rules are there", s.State, s.DataPlane)
	}
	w.program()
	if s = w.one(); s.DataPlane != IPTables {
		t.Errorf("in %s: %s", s.DataPlane, s.Reason)
	}
	w.in.Policy.ExcludeCIDRs = prefixes("10.0.0.0/24")
	if s = w.one(); s.State != StateExcluded {
		t.Errorf("another policy: %s: %s", s.State, s.Reason)
	}
}

// Nobody probes another proxy's endpoints.
func TestTargetsExclude(t *testing.T) {
	w := newWorld(t)
	w.set(port("a"), "10.0.0.1 n1 ready", "10.245.0.1 n1 ready")
	got := Targets(w.snapshot(), testHealth, prefixes("10.245.0.0/16")...)
	if len(got) != 1 || got[0].Address.Addr() != addrs("10.0.0.1")[0] {
		t.Errorf("targets %v", got)
	}
}
