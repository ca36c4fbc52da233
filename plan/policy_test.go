package plan

import (
	"fmt"
	"net/netip"
	"reflect"
	"strings"
	"testing"

	"kproxy.dev/kproxy/service"
)

// TestPoliciesDiffer: two policies are equal if nothing differs, whatever field a release adds.
func TestPoliciesDiffer(t *testing.T) {
	for _, f := range reflect.VisibleFields(reflect.TypeFor[Policy]()) {
		a, b := newWorld(t).in.Policy, newWorld(t).in.Policy
		if !a.Equal(&b) {
			t.Fatal("a policy differs from a copy of it")
		}
		vary(t, reflect.ValueOf(&b).Elem().FieldByName(f.Name))
		if a.Equal(&b) {
			t.Errorf("policies that differ in %s are equal", f.Name)
		}
	}
}

func TestIsPod(t *testing.T) {
	client := func(a, in string) Client { return Client{Address: netip.MustParseAddr(a), Interface: in} }
	node := Client{Address: netip.MustParseAddr("10.0.0.1"), Node: true, Interface: "cni0"}
	cidrs, bridge, prefix := Policy{PodCIDRs: prefixes("10.0.0.0/24")}, Policy{PodBridge: "cni0"}, Policy{PodInterfacePrefix: "veth"}
	for _, tt := range []struct {
		name   string
		policy Policy
		client Client
		want   bool
	}{
		{"no detector", Policy{}, client("10.0.0.7", "cni0"), false},
		{"in the network", cidrs, client("10.0.0.7", ""), true},
		{"in the network, this node's", cidrs, node, true},
		{"outside the network", cidrs, client("10.0.1.7", ""), false},
		{"on the bridge", bridge, client("192.0.2.7", "cni0"), true},
		{"on another bridge", bridge, client("192.0.2.7", "cni01"), false},
		{"this node itself", bridge, node, false},
		{"nobody said on which interface", bridge, client("192.0.2.7", ""), false},
		{"on an interface of the name", prefix, client("fd00::7", "veth1234"), true},
		{"on one that is called so", prefix, client("fd00::7", "veth"), true},
		{"on another interface", prefix, client("fd00::7", "eth0"), false},
	} {
		if got := tt.policy.IsPod(tt.client); got != tt.want {
			t.Errorf("%s: %v, want %v", tt.name, got, tt.want)
		}
	}
}

// Which clients of a cluster address are masqueraded depends on the detector's
// families: interfaces have both.
func TestDetectors(t *testing.T) {
	for _, tt := range []struct {
		name   string
		change func(*Policy)
		want   [2]Masquerade
		says   string
	}{
		{"none", func(*Policy) {}, [2]Masquerade{MasqueradeNever, MasqueradeNever}, "set --cluster-cidr"},
		{"ClusterCIDR", func(p *Policy) { p.PodCIDRs = prefixes("fd00:2::/64") }, [2]Masquerade{MasqueradeNever, MasqueradeUnlessPod}, "fd00:2::/64"},
		{"NodeCIDR", func(p *Policy) { p.NodePodCIDRs = true }, [2]Masquerade{MasqueradeUnlessPod, MasqueradeNever}, "10.1.0.0/24"},
		{"BridgeInterface", func(p *Policy) { p.PodBridge = "cni0" }, [2]Masquerade{MasqueradeUnlessPod, MasqueradeUnlessPod}, "interface cni0"},
		{"InterfaceNamePrefix", func(p *Policy) { p.PodInterfacePrefix = "veth" }, [2]Masquerade{MasqueradeUnlessPod, MasqueradeUnlessPod}, "begin with veth"},
	} {
		w := newWorld(t)
		w.node.PodCIDRs = prefixes("10.1.0.0/24")
		tt.change(&w.in.Policy)
		w.set(port("a", func(p *service.Port) { p.ClusterIPs = addrs("10.96.0.1", "fd00:96::1") }), "10.0.0.1 n1 ready", "fd00::1 n1 ready")
		s := w.one()
		got := [2]Masquerade{s.Frontends[0].Masquerade, s.Frontends[1].Masquerade}
		if got != tt.want {
			t.Errorf("%s: masquerade %v, want %v", tt.name, got, tt.want)
		}
		if d := w.previous.Policy.Detector(); !strings.Contains(d.Reason, tt.says) || d.Supported != (tt.name != "none") {
			t.Errorf("%s: %+v, want %q in it", tt.name, d, tt.says)
		}
	}
}

// The pods' networks of a Node object are followed.
func TestNodePodCIDRs(t *testing.T) {
	w := newWorld(t)
	w.in.Policy.NodePodCIDRs = true
	w.set(port("a"), "10.0.0.1 n1 ready")
	if got := w.one().Frontends[0].Masquerade; got != MasqueradeNever {
		t.Errorf("without podCIDRs: %s", got)
	}
	if d := w.previous.Policy.Detector(); !strings.Contains(d.Reason, "no podCIDRs") {
		t.Errorf("without podCIDRs: %+v", d)
	}
	before := w.one().KernelHash
	w.node.PodCIDRs = prefixes("10.1.0.0/24")
	s := w.one()
	if s.Frontends[0].Masquerade != MasqueradeUnlessPod || s.KernelHash == before {
		t.Errorf("with podCIDRs: %s, same rules: %v", s.Frontends[0].Masquerade, s.KernelHash == before)
	}
}

// TestClosed: the networks of cluster IPs are those of the flag and of the snapshot, none twice; pods and hosts on this node's links that
// have addresses in them keep those; and a network that holds all cluster IPs besides is no exception.
func TestClosed(t *testing.T) {
	for _, tt := range []struct {
		name                 string
		flag, api            string
		pods, links, bridged string
		open                 bool
		v4, v6               string // what is closed, but what
	}{
		{name: "nothing is known", v4: "[] []", v6: "[] []"},
		{name: "flag", flag: "10.96.0.0/12 fd00:96::/112", v4: "[10.96.0.0/12] []", v6: "[fd00:96::/112] []"},
		{name: "not closed", flag: "10.96.0.0/12", api: "10.96.0.0/12", open: true, v4: "[] []", v6: "[] []"},
		{name: "both", flag: "10.112.0.0/16", api: "10.96.0.0/12", v4: "[10.96.0.0/12 10.112.0.0/16] []", v6: "[] []"},
		{name: "overlapping", flag: "10.96.0.0/16 10.96.0.0/12", api: "10.100.0.0/24 10.96.0.0/12 10.112.0.0/12", v4: "[10.96.0.0/12 10.112.0.0/12] []", v6: "[] []"},
		{name: "others within", flag: "10.96.0.0/12 fd00::/16", pods: "10.100.0.0/16 fd00:2::/64 10.2.0.0/16", links: "10.100.1.0/24 10.101.0.0/24", bridged: "10.102.0.0/24 10.112.0.0/24",
			v4: "[10.96.0.0/12] [10.100.0.0/16 10.101.0.0/24 10.102.0.0/24]", v6: "[fd00::/16] [fd00:2::/64]"},
		{name: "others around", flag: "10.96.0.0/12", pods: "10.0.0.0/8", links: "10.96.0.0/12", v4: "[10.96.0.0/12] []", v6: "[] []"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var b service.Builder
			b.AddServiceCIDRs(prefixes(strings.Fields(tt.api)...)...)
			p := DefaultPolicy()
			p.CloseClusterIPs, p.ServiceCIDRs = !tt.open, prefixes(strings.Fields(tt.flag)...)
			p.PodCIDRs, p.Links, p.BridgedLinks = prefixes(strings.Fields(tt.pods)...), prefixes(strings.Fields(tt.links)...), prefixes(strings.Fields(tt.bridged)...)
			made, _ := Compute(nil, Inputs{Snapshot: b.Build(), Policy: p})
			for f, want := range []string{tt.v4, tt.v6} {
				closed, but := made.Policy.Closed(service.Family(f))
				if got := fmt.Sprint(closed, " ", but); got != want {
					t.Errorf("%s: %s, want %s", service.Family(f), got, want)
				}
			}
		})
	}
}
