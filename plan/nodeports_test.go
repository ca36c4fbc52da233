package plan

import (
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/service"
)

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
		p := tt.policy.of(&service.Node{Addresses: tt.node})
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
