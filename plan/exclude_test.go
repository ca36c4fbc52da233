package plan

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/service"
)

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
