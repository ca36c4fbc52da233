package service

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

var compareNetip = cmp.Options{
	cmpopts.EquateComparable(netip.Addr{}, netip.AddrPort{}, netip.Prefix{}),
	cmpopts.EquateEmpty(),
}

func key(name string) Key { return Key{Namespace: "default", Name: name, Protocol: TCP} }

func ipList(list ...string) (out []netip.Addr) {
	for _, s := range list {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

func prefixList(list ...string) (out []netip.Prefix) {
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

func endpoint(address string) Endpoint {
	return Endpoint{Address: netip.MustParseAddrPort(address), Ready: true, Serving: true, Weight: 1}
}

func mustAdd(t *testing.T, b *Builder, p Port) {
	t.Helper()
	if err := b.AddPort(p); err != nil {
		t.Fatal(err)
	}
}

func TestZeroSnapshot(t *testing.T) {
	var s Snapshot
	if s.Len() != 0 || s.Node().Name != "" {
		t.Errorf("the zero Snapshot holds %d ports and node %q", s.Len(), s.Node().Name)
	}
	for p := range s.All() {
		t.Errorf("the zero Snapshot holds %v", p)
	}
	if _, _, ok := s.Get(key("web")); ok {
		t.Error("the zero Snapshot has a service")
	}
}

func TestBuildSortsAndCompacts(t *testing.T) {
	var b Builder
	b.SetNode(Node{Name: "n", Addresses: ipList("10.0.0.2", "10.0.0.1", "10.0.0.2"), PodCIDRs: prefixList("fd00::/64", "10.1.0.0/24")})
	b.AddEndpoint(key("web"), endpoint("10.2.0.3:80")) // before its port
	mustAdd(t, &b, Port{
		Key:             key("web"),
		ClusterIPs:      ipList("fd00::1", "10.96.0.1", "fd00::1"),
		ExternalIPs:     ipList("192.0.2.2", "192.0.2.1"),
		LoadBalancerIPs: ipList("192.0.2.9", "192.0.2.8", "192.0.2.9"),
		SourceRanges:    prefixList("10.0.0.0/16", "10.0.0.0/8", "10.0.0.0/16"),
		Source:          "a.yaml:1",
	})
	mustAdd(t, &b, Port{Key: key("api"), Algorithm: Maglev, Prefer: PreferKernel})
	e := endpoint("10.2.0.2:80")
	e.Hints = &Hints{Zones: []string{"b", "a", "b"}, Nodes: []string{"n2", "n1"}}
	b.AddEndpoint(key("web"), e)
	b.AddEndpoint(key("gone"), endpoint("10.2.0.9:80")) // of a port that nobody adds
	s := b.Build()

	e.Hints = &Hints{Zones: []string{"a", "b"}, Nodes: []string{"n1", "n2"}}
	type row struct {
		Port      Port
		Endpoints []Endpoint
	}
	want := []row{
		{Port: Port{Key: key("api"), Algorithm: Maglev, Prefer: PreferKernel}},
		{Port: Port{
			Key:             key("web"),
			ClusterIPs:      ipList("10.96.0.1", "fd00::1"),
			ExternalIPs:     ipList("192.0.2.1", "192.0.2.2"),
			LoadBalancerIPs: ipList("192.0.2.8", "192.0.2.9"),
			SourceRanges:    prefixList("10.0.0.0/8", "10.0.0.0/16"),
			Algorithm:       RoundRobin,
			Prefer:          PreferAuto,
			Source:          "a.yaml:1",
		}, Endpoints: []Endpoint{e, endpoint("10.2.0.3:80")}},
	}
	var got []row
	for p, eps := range s.All() {
		got = append(got, row{*p, eps})
	}
	if diff := cmp.Diff(want, got, compareNetip); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	node := Node{Name: "n", Addresses: ipList("10.0.0.1", "10.0.0.2"), PodCIDRs: prefixList("10.1.0.0/24", "fd00::/64")}
	if diff := cmp.Diff(node, s.Node(), compareNetip); diff != "" {
		t.Errorf("node (-want +got):\n%s", diff)
	}
}

func TestAddPortRefusesASecond(t *testing.T) {
	var b Builder
	mustAdd(t, &b, Port{Key: key("web"), Number: 80})
	err := b.AddPort(Port{Key: key("web"), Number: 81})
	if got, want := errorText(err), "service port default/web tcp is defined twice"; got != want {
		t.Errorf("error %q, want %q", got, want)
	}
	udp := key("web")
	udp.Protocol = UDP
	mustAdd(t, &b, Port{Key: udp, Number: 80})
	s := b.Build()
	if p, _, _ := s.Get(key("web")); s.Len() != 2 || p.Number != 80 {
		t.Errorf("%d ports, the first with number %d; want 2, the first with 80", s.Len(), p.Number)
	}
}

func TestOverlappingEndpoints(t *testing.T) {
	base := endpoint("10.2.0.2:80")
	change := func(f func(*Endpoint)) Endpoint { e := base; f(&e); return e }
	terminating := change(func(e *Endpoint) { e.Terminating = true })
	unready := change(func(e *Endpoint) { e.Ready = false })
	notServing := change(func(e *Endpoint) { e.Ready, e.Serving = false, false })
	terminatingUnready := change(func(e *Endpoint) { e.Terminating, e.Ready = true, false })
	heavy := change(func(e *Endpoint) { e.Weight = 5 })
	cases := map[string]struct {
		in   []Endpoint
		want Endpoint
	}{
		"not terminating wins":             {[]Endpoint{terminating, base}, base},
		"not terminating wins, if unready": {[]Endpoint{terminating, unready}, unready},
		"ready wins":                       {[]Endpoint{unready, base}, base},
		"serving wins":                     {[]Endpoint{notServing, unready}, unready},
		"ready terminating wins":           {[]Endpoint{terminatingUnready, terminating}, terminating},
		"the heavier wins":                 {[]Endpoint{base, heavy}, heavy},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			for range 2 {
				var b Builder
				mustAdd(t, &b, Port{Key: key("web")})
				for _, e := range c.in {
					b.AddEndpoint(key("web"), e)
				}
				_, got, _ := b.Build().Get(key("web"))
				if diff := cmp.Diff([]Endpoint{c.want}, got, compareNetip); diff != "" {
					t.Errorf("(-want +got):\n%s", diff)
				}
				slices.Reverse(c.in)
			}
		})
	}
}

// The order in which things are added never shows.
func TestBuildIsIndependentOfOrder(t *testing.T) {
	type addition func(*Builder)
	var additions []addition
	for i := range 20 {
		k := key(fmt.Sprintf("svc-%d", i))
		additions = append(additions, func(b *Builder) { _ = b.AddPort(Port{Key: k, Number: 80}) })
		for j := range 5 {
			e := endpoint(fmt.Sprintf("10.2.0.%d:80", j%3))
			e.Ready, e.Weight, e.Node = j%2 == 0, uint16(j), fmt.Sprintf("node-%d", j)
			additions = append(additions, func(b *Builder) { b.AddEndpoint(k, e) })
		}
	}
	rng := rand.New(rand.NewPCG(1, 2))
	var want *Snapshot
	for range 20 {
		rng.Shuffle(len(additions), func(i, j int) { additions[i], additions[j] = additions[j], additions[i] })
		var b Builder
		for _, add := range additions {
			add(&b)
		}
		got := b.Build()
		if want == nil {
			want = got
		}
		if got.Hash() != want.Hash() {
			t.Fatal("two orders give two hashes")
		}
	}
}

// A Snapshot keeps its content whatever happens to what it was built from.
func TestSnapshotIsImmutable(t *testing.T) {
	var b Builder
	clusterIPs, problems, hints := ipList("10.96.0.1"), []string{"p"}, []string{"a"}
	cidrs := prefixList("10.1.0.0/24")
	b.SetNode(Node{PodCIDRs: cidrs})
	mustAdd(t, &b, Port{Key: key("web"), ClusterIPs: clusterIPs, Problems: problems})
	e := endpoint("10.2.0.2:80")
	e.Hints = &Hints{Zones: hints}
	b.AddEndpoint(key("web"), e)
	first := b.Build()

	clusterIPs[0], problems[0], hints[0] = netip.MustParseAddr("10.96.0.2"), "q", "b"
	cidrs[0] = netip.MustParsePrefix("10.9.0.0/24")
	b.SetNode(Node{Name: "other"})
	b.AddEndpoint(key("web"), endpoint("10.2.0.1:80"))
	mustAdd(t, &b, Port{Key: key("api")})
	second := b.Build()

	p, eps, _ := first.Get(key("web"))
	want := []Endpoint{endpoint("10.2.0.2:80")}
	want[0].Hints = &Hints{Zones: []string{"a"}}
	if diff := cmp.Diff(want, eps, compareNetip); diff != "" {
		t.Errorf("endpoints (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(ipList("10.96.0.1"), p.ClusterIPs, compareNetip); diff != "" {
		t.Errorf("cluster IPs (-want +got):\n%s", diff)
	}
	if p.Problems[0] != "p" || first.Len() != 1 || first.Node().PodCIDRs[0] != netip.MustParsePrefix("10.1.0.0/24") {
		t.Errorf("the first Snapshot changed: %v, %d ports, %v", p.Problems, first.Len(), first.Node())
	}
	if first.Hash() == second.Hash() || second.Len() != 2 {
		t.Errorf("the second Snapshot has %d ports and hash %x, the first %x", second.Len(), second.Hash(), first.Hash())
	}
}

func TestGetAndAtAgree(t *testing.T) {
	var b Builder
	for _, name := range []string{"c", "a", "b"} {
		mustAdd(t, &b, Port{Key: key(name)})
		b.AddEndpoint(key(name), endpoint("10.2.0.2:80"))
	}
	s := b.Build()
	hashes := map[uint64]bool{}
	for i := range s.Len() {
		p, eps, hash := s.At(i)
		q, qeps, ok := s.Get(p.Key)
		if !ok || p != q || len(eps) != 1 || len(qeps) != 1 {
			t.Errorf("At(%d) and Get(%v) differ", i, p.Key)
		}
		hashes[hash] = true
	}
	if len(hashes) != 3 {
		t.Errorf("three ports have %d different hashes", len(hashes))
	}
	for _, name := range []string{"", "aa", "d"} {
		if _, _, ok := s.Get(key(name)); ok {
			t.Errorf("Get found %q", name)
		}
	}
	for range s.All() {
		break // an iteration may end early
	}
}
