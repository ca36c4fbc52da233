package trace

import (
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// sh runs lines in the test's namespace.
func sh(t *testing.T, lines ...string) {
	t.Helper()
	for _, line := range lines {
		words := strings.Fields(line)
		if out, err := exec.Command(words[0], words[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%s: %v\n%s", line, err, out)
		}
	}
}

// TestRoutes: what the kernel answers, and how it is told.
func TestRoutes(t *testing.T) {
	kerneltest.Namespace(t)
	sh(t, "ip link add left type veth peer name right", "ip link set left up", "ip link set right up",
		"ip addr add 10.1.0.1/24 dev left", "ip addr add fd00:1::1/64 dev left nodad", "sysctl -qw net.ipv4.ip_forward=1",
		"ip route add 10.2.0.0/24 via 10.1.0.9", "ip route add blackhole 10.3.0.1", "ip route add unreachable 10.3.0.2", "ip route add prohibit 10.3.0.3",
		"ip route add 10.4.0.0/24 dev right table 77", "ip rule add fwmark 0x10 lookup 77", "ip -6 route add blackhole fd00:3::1")
	for _, tt := range []struct {
		query  query
		passes bool
		words  []string
	}{
		{query{to: netip.MustParseAddr("10.2.0.2")}, true, []string{"10.2.0.2 via 10.1.0.9 dev left src 10.1.0.1"}},
		{query{to: netip.MustParseAddr("10.2.0.2"), from: netip.MustParseAddr("10.1.0.5"), in: "left"}, true, []string{"via 10.1.0.9 dev left"}},
		{query{to: netip.MustParseAddr("10.1.0.1")}, true, []string{"local 10.1.0.1"}},
		{query{to: netip.MustParseAddr("10.3.0.1")}, false, []string{"ip route get 10.3.0.1", "blackhole"}},
		{query{to: netip.MustParseAddr("10.3.0.2")}, false, []string{"unreachable"}},
		{query{to: netip.MustParseAddr("10.3.0.3")}, false, []string{"prohibit"}},
		{query{to: netip.MustParseAddr("10.9.0.1")}, false, []string{"there is no route"}},
		{query{to: netip.MustParseAddr("10.4.0.1")}, false, []string{"there is no route"}},
		{query{to: netip.MustParseAddr("10.4.0.1"), mark: 0x10}, true, []string{"dev right", "table 77"}},
		{query{to: netip.MustParseAddr("fd00:1::2")}, true, []string{"fd00:1::2 dev left src fd00:1::1"}},
		{query{to: netip.MustParseAddr("fd00:9::2")}, false, []string{"no route"}},
		{query{to: netip.MustParseAddr("fd00:3::1")}, false, []string{"blackhole"}},
	} {
		r := askRoute(tt.query)
		if r.passes() != tt.passes {
			t.Errorf("%s: passes %v, want %v (%v)", r.command(), r.passes(), tt.passes, r.err)
		}
		for _, word := range tt.words {
			if text := r.String() + " " + r.failure(); !strings.Contains(text, word) {
				t.Errorf("%s: %q doesn't say %q", r.command(), text, word)
			}
		}
	}
	own, err := localAddresses()
	if err != nil {
		t.Fatal(err)
	}
	if own.links[netip.MustParseAddr("10.1.0.1")] != "left" || own.linkTo(netip.MustParseAddr("10.1.0.77")) != "left" || own.linkTo(netip.MustParseAddr("10.2.0.2")) != "" {
		t.Errorf("addresses %+v", own)
	}
}

// TestAnyClient: the default gateway stands for clients outside; without one it is a pod of
// this node, and without that nobody.
func TestAnyClient(t *testing.T) {
	kerneltest.Namespace(t)
	sh(t, "ip link add left type veth peer name right", "ip link set left up", "ip link set right up", "ip addr add 10.1.0.1/24 dev left")
	proxy := forecasts(onePlan(plan.Userspace), "")
	if got := anyClient(service.IPv4, proxy); got.IsValid() {
		t.Errorf("without gateway and pod: %s", got)
	}
	proxy.Plan.Services[0].Endpoints[1].Local = true
	if got := anyClient(service.IPv4, proxy); got != netip.MustParseAddr("10.2.0.3") {
		t.Errorf("without gateway: %s", got)
	}
	sh(t, "ip route add default via 10.1.0.9")
	if got := anyClient(service.IPv4, proxy); got != netip.MustParseAddr("10.1.0.9") {
		t.Errorf("with gateway: %s", got)
	}
}

// TestSettings: forwarding and the reverse path filter, as they are set.
func TestSettings(t *testing.T) {
	kerneltest.Namespace(t)
	sh(t, "ip link add left type veth peer name right", "ip link add le.ft type veth peer name ri.ght", "ip link set left up", "ip link set right up",
		"ip addr add 10.1.0.1/24 dev left", "ip addr add 10.5.0.1/24 dev right", "sysctl -qw net.ipv4.conf.all.rp_filter=0", "sysctl -qw net.ipv4.conf.left.rp_filter=0")
	client := netip.MustParseAddr("10.5.0.2") // its network is right's
	for _, tt := range []struct {
		set, in string
		refused bool
		setting string
	}{
		{"net.ipv4.conf.left.rp_filter=0", "left", false, ""},
		{"net.ipv4.conf.left.rp_filter=1", "left", true, "net.ipv4.conf.left.rp_filter"},
		{"net.ipv4.conf.left.rp_filter=2", "left", false, "net.ipv4.conf.left.rp_filter"},
		{"net.ipv4.conf.left.rp_filter=0", "left", false, ""},
		{"net.ipv4.conf.all.rp_filter=1", "left", true, "net.ipv4.conf.all.rp_filter"},
		{"net.ipv4.conf.right.rp_filter=0", "right", false, "net.ipv4.conf.all.rp_filter"},
	} {
		sh(t, "sysctl -qw "+tt.set)
		if r := checkReversePath(client, tt.in, 0); r.refused != tt.refused || r.setting != tt.setting {
			t.Errorf("%s, from %s on %s: refused %v by %q, want %v by %q", tt.set, client, tt.in, r.refused, r.setting, tt.refused, tt.setting)
		}
	}
	for _, tt := range []struct{ set, in, want string }{
		{"net.ipv4.ip_forward=0", "left", "net.ipv4.ip_forward"},
		{"net.ipv4.ip_forward=1", "left", ""},
		{"net.ipv4.conf.left.forwarding=0", "left", "net.ipv4.conf.left.forwarding"},
		{"net.ipv4.conf.le/ft.forwarding=0", "le.ft", "net.ipv4.conf.le/ft.forwarding"},
	} {
		sh(t, "sysctl -qw "+tt.set)
		if got := forwardingOff(service.IPv4, tt.in); got != tt.want {
			t.Errorf("%s: forwarding of %s is kept by %q, want %q", tt.set, tt.in, got, tt.want)
		}
	}
	sh(t, "sysctl -qw net.ipv6.conf.all.forwarding=0")
	if got := forwardingOff(service.IPv6, "left"); got != "net.ipv6.conf.all.forwarding" {
		t.Errorf("IPv6: %q", got)
	}
	sh(t, "sysctl -qw net.ipv6.conf.all.forwarding=1")
	if got := forwardingOff(service.IPv6, "left"); got != "" {
		t.Errorf("IPv6: %q", got)
	}
}

// TestListeners: who gets what is sent to an address of this node's.
func TestListeners(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs root: network namespaces")
	}
	kerneltest.Namespace(t)
	for _, address := range []string{"127.0.0.1:7001", "[::]:7002", "0.0.0.0:7003", "[::1]:7004"} {
		network := "tcp"
		if strings.HasPrefix(address, "0") || strings.HasPrefix(address, "1") {
			network = "tcp4"
		}
		l, err := net.Listen(network, address)
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
	}
	u, err := net.ListenPacket("udp4", "0.0.0.0:7005")
	if err != nil {
		t.Fatal(err)
	}
	defer u.Close()
	for _, tt := range []struct {
		proto service.Protocol
		to    string
		want  bool
	}{
		{service.TCP, "127.0.0.1:7001", true}, {service.TCP, "127.0.0.2:7001", false}, {service.UDP, "127.0.0.1:7001", false},
		{service.TCP, "127.0.0.1:7002", true}, {service.TCP, "[::1]:7002", true},
		{service.TCP, "127.0.0.9:7003", true}, {service.TCP, "[::1]:7003", false},
		{service.TCP, "[::1]:7004", true}, {service.TCP, "127.0.0.1:7004", false},
		{service.UDP, "127.0.0.1:7005", true}, {service.TCP, "127.0.0.1:7005", false}, {service.TCP, "127.0.0.1:7999", false},
	} {
		if _, ok, err := listenerFor(tt.proto, netip.MustParseAddrPort(tt.to)); ok != tt.want || err != nil {
			t.Errorf("%s %s: somebody listens: %v, %v; want %v", tt.proto, tt.to, ok, err, tt.want)
		}
	}
}
