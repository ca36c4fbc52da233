package trace

import (
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// bridged puts the client, host 1, behind a port of a bridge, and the endpoint, host 2, behind one of another, or of the same. Nobody has
// to ask for a neighbour. Rules may show packets of bridges to IP's hooks.
func bridged(t *testing.T, first, second, shows string) *kerneltest.Network {
	t.Helper()
	if _, err := os.Stat("/proc/sys/net/bridge"); err != nil && shows == "1" {
		t.Skipf("needs the module br_netfilter: %v", err)
	}
	n := kerneltest.NewNetwork(t, 2)
	n.Serve(2, "b", 9000)
	for i, br := range []string{first, second} {
		host, address := []string{"host1", "host2"}[i], n.NodeAddress(service.IPv4, i+1).String()
		if _, err := netlink.LinkByName(br); err != nil {
			sh(t, "ip link add "+br+" address 02:00:00:00:00:0"+[]string{"1", "2"}[i]+" type bridge", "ip link set "+br+" up")
		}
		six := n.NodeAddress(service.IPv6, i+1).String() + "/64 dev "
		sh(t, "ip addr del "+address+"/24 dev "+host, "ip addr del "+six+host, "ip link set "+host+" master "+br, "ip addr add "+address+"/24 dev "+br, "ip addr add "+six+br+" nodad")
		mac := ""
		n.On(i+1, func() { mac = hardware(t, "eth0") })
		sh(t, "ip neigh replace "+n.Address(service.IPv4, i+1).String()+" lladdr "+mac+" dev "+br+" nud permanent")
		router := hardware(t, br)
		n.On(i+1, func() { sh(t, "ip neigh replace "+address+" lladdr "+router+" dev eth0 nud permanent") })
	}
	sh(t, "iptables -t nat -A PREROUTING -d 10.96.0.10 -p tcp --dport 80 -j DNAT --to-destination 10.2.0.2:9000")
	if _, err := os.Stat("/proc/sys/net/bridge"); err == nil {
		sh(t, "sysctl -qw net.bridge.bridge-nf-call-iptables="+shows, "sysctl -qw net.bridge.bridge-nf-call-ip6tables="+shows)
	}
	return n
}

// hardware is a link's address.
func hardware(t *testing.T, link string) string {
	t.Helper()
	l, err := netlink.LinkByName(link)
	if err != nil {
		t.Fatal(err)
	}
	return l.Attrs().HardwareAddr.String()
}

// onBridge are rules of others for packets of bridges.
type onBridge struct {
	name, hook string // with its priority
	rules      string // each ends with a semicolon but the last; after "&&" comes a command of its own
	verdict    Verdict
	culprit    string
}

// compareBridged compares a trace with what packets do, one set of rules after the other, on the thread of the caller, which is in the
// node's namespace.
func compareBridged(t *testing.T, n *kerneltest.Network, all []onBridge) {
	t.Helper()
	compareBridgedTo(t, n, netip.MustParseAddrPort("10.96.0.10:80"), all)
}

func compareBridgedTo(t *testing.T, n *kerneltest.Network, to netip.AddrPort, all []onBridge) {
	t.Helper()
	for _, tt := range all {
		rules, commands, _ := strings.Cut(tt.rules, " && ")
		hook, priority, _ := strings.Cut(tt.hook, " ")
		if hook != "" {
			policy := ""
			if before, after, ok := strings.Cut(rules, "policy drop; "); ok {
				policy, rules = "policy drop; ", before+after
			}
			sh(t, "nft add table bridge t { chain c { type filter hook "+hook+" priority "+priority+" ; "+policy+rules+" ; } ; }")
		}
		lift := []string{"nft delete table bridge t"}
		for line := range strings.SplitSeq(commands, " && ") {
			if line != "" {
				sh(t, line)
				lift = []string{"nft delete table bridge t", "iptables -F FORWARD", "nft delete table bridge filter", "nft delete table bridge nat"}
			}
		}
		compareOne(t, n, to, &tt)
		for _, line := range lift {
			_ = exec.Command("sh", "-c", line).Run() // of what there is
		}
	}
}

func compareOne(t *testing.T, n *kerneltest.Network, to netip.AddrPort, tt *onBridge) {
	t.Helper()
	req := Request{Address: to, Protocol: service.TCP, From: n.Address(service.FamilyOf(to.Addr()), 1)}
	_, _, err := n.Ask(1, service.TCP, req.Address, tt.verdict == Forwarded || tt.verdict == Refused)
	got := map[bool]Verdict{true: Forwarded, false: Dropped}[err == nil]
	if errors.Is(err, kerneltest.ErrRefused) {
		got = Refused
	}
	r, err := Run(t.Context(), req, nil)
	if err != nil {
		t.Fatal(err)
	}
	if r.Verdict != tt.verdict || got != tt.verdict && tt.verdict != Undetermined || !strings.Contains(r.Culprit, tt.culprit) || tt.culprit == "" && r.Culprit != "" {
		t.Errorf("%s: verdict %s, want %s and %q; real packets: %s\n%s", tt.name, r.Verdict, tt.verdict, tt.culprit, got, r.Text(Look{Width: 200}))
	}
	names := func(what string) bool {
		return slices.ContainsFunc(r.Findings, func(f Finding) bool { return strings.Contains(f.What+f.Where, what) })
	}
	if tt.verdict == Forwarded && names("bridge") || tt.verdict == Undetermined && !names(atBridge) {
		t.Errorf("%s: what is innocent is named, or what isn't known isn't: %+v", tt.name, r.Findings)
	}
}

const atBridge = "rule 1 of chain c in nftables table bridge t"

// TestBridges: chains of the family bridge are followed where packets come in by a bridge's port, and where they leave by one.
func TestBridges(t *testing.T) {
	n := bridged(t, "br1", "br2", "0")
	seen(t, n, 1)
	seen(t, n, 2)
	client, endpoint := "", ""
	n.On(1, func() { client = hardware(t, "eth0") })
	n.On(2, func() { endpoint = hardware(t, "eth0") })
	compareBridged(t, n, []onBridge{
		{"prerouting", "prerouting -300", "iifname host1 ip daddr 10.96.0.10 tcp dport 80 drop", Dropped, "drops the packet: iifname \"host1\" ip daddr 10.96.0.10 tcp dport 80 drop (" + atBridge},
		{"input", "input 0", "iifname host1 ip daddr 10.96.0.10 drop", Dropped, atBridge},
		{"output", "output 0", "oifname host2 ip daddr 10.2.0.2 tcp dport 9000 drop", Dropped, atBridge},
		{"postrouting", "postrouting 0", "ip saddr 10.1.0.2 drop", Dropped, atBridge},
		{"the answer comes in", "prerouting 0", "iifname host2 tcp sport 9000 drop", Dropped, "the answer of 10.2.0.2:9000"},
		{"the answer is delivered", "input 0", "ip saddr 10.2.0.2 drop", Dropped, "the answer of 10.2.0.2:9000"},
		{"the answer leaves", "output 0", "oifname host1 ip saddr 10.96.0.10 drop", Dropped, "the answer of 10.2.0.2:9000"},
		{"the answer is sent", "postrouting 0", "oifname host1 tcp sport 80 drop", Dropped, "the answer of 10.2.0.2:9000"},
		{"the third packet", "prerouting 0", "iifname host1 tcp flags & (syn | ack) == ack drop", Dropped, "completes the handshake"},
		{"from the client's card", "prerouting 0", "ether saddr " + client + " ether type ip drop", Dropped, atBridge},
		{"to the bridge's address", "input 0", "ether daddr 02:00:00:00:00:01 ip protocol tcp drop", Dropped, atBridge},
		{"to the endpoint's card", "postrouting 0", "ether daddr " + endpoint + " drop", Dropped, atBridge},
		{"from the bridge's address", "output 0", "ether saddr 02:00:00:00:00:02 tcp dport 9000 drop", Dropped, atBridge},
		{"a policy", "input 0", "policy drop; ether type arp accept", Dropped, "the policy of chain c drops the packet"},
		{"a mark", "prerouting 0", "iifname host1 ip daddr 10.96.0.10 meta mark set 7 && iptables -A FORWARD -m mark --mark 7 -j DROP", Dropped, "--mark 0x7"},
		{"a set", "input 0", "ip daddr . tcp dport { 10.96.0.10 . 80, 10.96.0.11 . 80 } drop", Dropped, atBridge},
		{"not understood", "prerouting 0", "iifname host1 ip daddr 10.96.0.10 meta cpu 999 drop", Undetermined, ""},

		{"nothing", "", "", Forwarded, ""},
		{"ARP", "prerouting 0", "ether type arp drop", Forwarded, ""},
		{"ARP by the protocol", "output 0", "meta protocol arp drop", Forwarded, ""},
		{"IPv6", "input 0", "ip6 daddr fd00:1::1 drop; ether type ip6 drop", Forwarded, ""},
		{"another port", "prerouting 0", "iifname host3 drop; iifname host2 ip daddr 10.96.0.10 drop; tcp dport 81 drop", Forwarded, ""},
		{"the endpoint, too early", "input 0", "ip daddr 10.2.0.2 drop", Forwarded, ""},
		{"the service, too late", "output 0", "ip daddr 10.96.0.10 drop; iifname host1 drop", Forwarded, ""},
		{"other cards", "prerouting 0", "ether saddr 02:11:22:33:44:55 drop; ether daddr ff:ff:ff:ff:ff:ff drop; meta pkttype { broadcast, multicast } drop", Forwarded, ""},
		{"broadcast that leaves", "postrouting 0", "ether daddr & 01:00:00:00:00:00 == 01:00:00:00:00:00 drop; vlan id 5 drop", Forwarded, ""},
		{"a counter", "prerouting 0", "counter; ip protocol tcp counter accept", Forwarded, ""},
		{"between ports", "forward 0", "policy drop; ip daddr 10.2.0.2 drop", Forwarded, ""},
		{"a mark that nobody asks for", "prerouting 0", "meta mark set 0x900", Forwarded, ""},
	})
}

// TestBridgesByExpression: expressions that not every kernel has. Where this one has none, the VM's has.
func TestBridgesByExpression(t *testing.T) {
	for _, tt := range []onBridge{
		{"the name of a bridge", "input 0", "meta ibrname br1 ip daddr 10.96.0.10 drop", Dropped, atBridge},
		{"the name of the other bridge", "postrouting 0", "meta obrname br2 ip saddr 10.1.0.2 drop", Dropped, atBridge},
		{"refused", "prerouting 0", "iifname host1 tcp dport 80 reject with tcp reset", Refused, atBridge},
		{"by the state", "prerouting 0", "ct state new iifname host1 drop", Dropped, atBridge},
		{"other bridge", "input 0", "meta ibrname br3 drop; meta obrname br1 drop; oifname host1 drop", Forwarded, ""},
		{"by the state, accepted", "prerouting 0", "policy drop; ct state established,new accept; ether type arp accept", Forwarded, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := bridged(t, "br1", "br2", "0")
			seen(t, n, 1)
			seen(t, n, 2)
			out, err := exec.Command("nft", "add table bridge u { chain c { "+strings.ReplaceAll(tt.rules, "policy drop; ", "")+" ; } ; }; delete table bridge u").CombinedOutput()
			if err != nil { // such as EOPNOTSUPP, ENOENT, EPROTO
				t.Skipf("this kernel has none: %v: %s", err, out)
			}
			compareBridged(t, n, []onBridge{tt})
		})
	}
}

// TestEbtables: what ebtables writes is followed too.
func TestEbtables(t *testing.T) {
	out, err := exec.Command("ebtables", "--version").CombinedOutput()
	if err != nil || !strings.Contains(string(out), "nf_tables") {
		t.Skipf("needs ebtables of the nft variant: %v: %s", err, out)
	}
	n := bridged(t, "br1", "br2", "0")
	seen(t, n, 1)
	seen(t, n, 2)
	compareBridged(t, n, []onBridge{
		{"INPUT", "", " && ebtables -A INPUT -p IPv4 --ip-dst 10.96.0.10 --ip-proto tcp --ip-dport 80 -j DROP", Dropped, "ip daddr 10.96.0.10 tcp dport 80 drop (rule 1 of chain INPUT in nftables table bridge filter"},
		{"OUTPUT", "", " && ebtables -A OUTPUT -p IPv4 -o host2 --ip-dst 10.2.0.0/24 -j DROP", Dropped, "rule 1 of chain OUTPUT"},
		{"PREROUTING", "", " && ebtables -t nat -A PREROUTING -p IPv4 -i host1 --ip-src 10.1.0.2 -j DROP", Dropped, "rule 1 of chain PREROUTING in nftables table bridge nat"},
		{"the answer", "", " && ebtables -t nat -A POSTROUTING -p IPv4 --ip-proto tcp --ip-sport 79:81 -j DROP", Dropped, "the answer of 10.2.0.2:9000"},
		{"all but", "", " && ebtables -A INPUT -i host1 -p IPv4 --ip-dst ! 10.96.0.11 -j DROP", Dropped, "rule 1 of chain INPUT"},
		{"a policy", "", " && ebtables -P INPUT DROP && ebtables -A INPUT -p ARP -j ACCEPT", Dropped, "the policy of chain INPUT"},
		{"innocent", "", " && ebtables -A FORWARD -p IPv4 --ip-dst 10.2.0.2 -j DROP && ebtables -A INPUT -p ARP --arp-ip-dst 10.1.0.1 -j DROP && ebtables -A INPUT -p IPv4 --ip-dst 10.96.0.11 -j DROP && " +
			"ebtables -A OUTPUT -p IPv4 --ip-proto udp --ip-dport 9000 -j DROP && ebtables -A OUTPUT -p IPv4 --ip-proto tcp --ip-dport 9001:9010 -j DROP && ebtables -A INPUT -d Broadcast -j DROP && ebtables -A OUTPUT -p IPv6 -j DROP && " +
			"ebtables -A INPUT --log --log-prefix x", Forwarded, ""},
	})
}

// TestBridgesOfIPv6: so are rules for IPv6.
func TestBridgesOfIPv6(t *testing.T) {
	n := bridged(t, "br1", "br2", "0")
	seen(t, n, 1)
	seen(t, n, 2)
	sh(t, "ip6tables -t nat -A PREROUTING -d fd00:96::10 -p tcp --dport 80 -j DNAT --to-destination [fd00:2::2]:9000")
	for _, i := range []int{1, 2} {
		n.On(i, func() { sh(t, "ip neigh flush dev eth0") })
	}
	all := []onBridge{
		{"nothing", "", "", Forwarded, ""},
		{"input", "input 0", "ip6 daddr fd00:96::10 tcp dport 80 drop", Dropped, "ip6 daddr fd00:96::10 tcp dport 80 drop (" + atBridge},
		{"output", "output 0", "oifname host2 ether type ip6 ip6 daddr fd00:2::2 tcp dport 9000 drop", Dropped, atBridge},
		{"IPv4", "input 0", "ip daddr 10.96.0.10 drop; ether type ip drop; ip6 daddr fd00:2::2 tcp dport 9000 drop", Forwarded, ""},
	}
	if _, err := exec.LookPath("ebtables-nft"); err == nil {
		all = append(all, onBridge{"ebtables", "", " && ebtables-nft -A OUTPUT -p IPv6 --ip6-dst fd00:2::/64 --ip6-proto tcp --ip6-dport 9000 -j DROP", Dropped, "rule 1 of chain OUTPUT"},
			onBridge{"ebtables, innocent", "", " && ebtables-nft -A INPUT -p IPv6 --ip6-dst fd00:96::11 -j DROP && ebtables-nft -A INPUT -p IPv4 --ip-dst 10.96.0.10 -j DROP", Forwarded, ""})
	}
	compareBridgedTo(t, n, netip.MustParseAddrPort("[fd00:96::10]:80"), all)
}

// TestPortsOfBridges: chains of the ports' own devices are followed as well, and what isn't followed is named.
func TestPortsOfBridges(t *testing.T) {
	n := bridged(t, "br1", "br2", "0")
	seen(t, n, 1)
	seen(t, n, 2)
	to := netip.MustParseAddrPort("10.96.0.10:80")
	const guard = "chain c in nftables table netdev guard"
	for _, tt := range []onBridge{
		{"", "ingress device host1", "ip daddr 10.96.0.10 drop", Dropped, guard},
		{"", "egress device host2", "ip daddr 10.2.0.2 drop", Dropped, guard},
		{"", "ingress device host2", "tcp sport 9000 drop", Dropped, guard},
		{"", "ingress device host2", "ip daddr 10.96.0.10 drop", Forwarded, ""},
	} {
		sh(t, "nft add table netdev guard { chain c { type filter hook "+tt.hook+" priority 0 ; "+tt.rules+" ; } ; }")
		tt.name = tt.hook
		compareOne(t, n, to, &tt)
		sh(t, "nft delete table netdev guard")
	}
	sh(t, "ip link add link br2 name above type macvlan", "ip link set above up", "ip addr add 10.7.0.1/24 dev above",
		"iptables -t nat -A PREROUTING -d 10.96.0.11 -p tcp --dport 80 -j DNAT --to-destination 10.7.0.2:9000", "nft add table bridge t { chain c { type filter hook output priority 0 ; ip daddr 10.7.0.2 drop ; } ; }")
	r, err := Run(t.Context(), Request{Address: netip.MustParseAddrPort("10.96.0.11:80"), Protocol: service.TCP, From: n.Address(service.IPv4, 1)}, nil)
	if err != nil || !slices.ContainsFunc(r.Findings, func(f Finding) bool {
		return strings.HasPrefix(f.What, "packets of link above pass bridge br2") && f.Where == "link above"
	}) {
		t.Errorf("%v, findings %+v", err, r.Findings)
	}
}

// TestBridgePortIsLearned: the port of a host whose network namespace isn't seen is where the bridge has seen it.
func TestBridgePortIsLearned(t *testing.T) {
	n := bridged(t, "br1", "br2", "0")
	sh(t, "ip link add left type veth peer name right", "ip link set left master br1", "ip link set left up", "ip link set right up")
	if _, _, err := n.Ask(1, service.TCP, netip.MustParseAddrPort("10.96.0.10:80"), true); err != nil {
		t.Fatal(err)
	}
	rules := []onBridge{
		{"its port", "prerouting 0", "iifname host1 ip daddr 10.96.0.10 drop", Dropped, atBridge},
		{"another", "prerouting 0", "iifname left ip daddr 10.96.0.10 drop", Forwarded, ""},
	}
	compareBridged(t, n, rules)
	sh(t, "bridge link set dev host1 learning off", "bridge fdb flush dev br1") // or what ends the connection would tell
	r, err := Run(t.Context(), Request{Address: netip.MustParseAddrPort("10.96.0.10:80"), Protocol: service.TCP, From: n.Address(service.IPv4, 1)}, nil)
	if err != nil || r.Verdict != Forwarded {
		t.Errorf("without rules: %v, %s", err, r.Verdict)
	}
	sh(t, "nft add table bridge t { chain c { type filter hook prerouting priority 0 ; iifname left ip daddr 10.96.0.10 drop ; } ; }")
	if r, err = Run(t.Context(), Request{Address: netip.MustParseAddrPort("10.96.0.10:80"), Protocol: service.TCP, From: n.Address(service.IPv4, 1)}, nil); err != nil || r.Verdict != Undetermined {
		t.Errorf("where the port isn't known: %v, %s", err, r.Verdict)
	}
}

// TestBridgesThatShow: where a bridge shows packets to the hooks of IP, its later rules see translated addresses, and packets between
// its ports pass FORWARD.
func TestBridgesThatShow(t *testing.T) {
	n := bridged(t, "br1", "br2", "1")
	seen(t, n, 1)
	seen(t, n, 2)
	if !kernel.BridgeCallsNetfilter(service.IPv4) {
		t.Fatal("it doesn't show them")
	}
	compareBridged(t, n, []onBridge{
		{"before", "prerouting -200", "ip daddr 10.96.0.10 drop", Dropped, atBridge},
		{"before, translated", "prerouting -200", "ip daddr 10.2.0.2 drop", Forwarded, ""},
		{"behind", "prerouting 100", "ip daddr 10.2.0.2 tcp dport 9000 drop", Dropped, atBridge},
		{"behind, as it was", "prerouting 100", "ip daddr 10.96.0.10 drop", Forwarded, ""},
		{"either", "prerouting 0", "ip daddr 10.96.0.10 drop", Undetermined, ""},
		{"neither", "prerouting 0", "ip daddr 10.96.0.11 drop; ether type arp drop; tcp dport 81 drop", Forwarded, ""},
		{"both", "prerouting 0", "iifname host1 tcp sport 1-65535 drop", Dropped, atBridge},
		{"input", "input 0", "ip daddr 10.2.0.2 drop", Dropped, atBridge},
		{"input, as it was", "input 0", "ip daddr 10.96.0.10 drop", Forwarded, ""},
		{"output", "output 0", "oifname host2 ip daddr 10.2.0.2 drop", Dropped, atBridge},
		{"the answer", "prerouting 100", "tcp sport 9000 drop", Dropped, "the answer of 10.2.0.2:9000"},
		{"the answer leaves", "postrouting 0", "tcp sport 80 drop", Dropped, "the answer of 10.2.0.2:9000"},
		{"the third packet", "prerouting -200", "iifname host1 tcp flags & (syn | ack) == ack drop", Dropped, "completes the handshake"},
		{"between ports", "forward 0", "ip daddr 10.2.0.2 drop", Forwarded, ""},
	})
}

// TestBridgedConnection: client and endpoint are on one bridge. If that shows packets to the hooks of IP, they pass it without being
// routed; answers too, if the endpoint needs no router.
func TestBridgedConnection(t *testing.T) {
	n := bridged(t, "br1", "br1", "1")
	seen(t, n, 1)
	seen(t, n, 2)
	compareBridged(t, n, []onBridge{
		{"nothing", "", "", Forwarded, ""},
		{"between ports", "forward 0", "iifname host1 oifname host2 ip daddr 10.2.0.2 tcp dport 9000 drop", Dropped, atBridge},
		{"between other ports", "forward 0", "iifname host2 oifname host1 drop; ip daddr 10.96.0.10 drop", Forwarded, ""},
		{"it isn't delivered", "input 0", "iifname host1 drop", Forwarded, ""},
		{"it isn't the bridge's", "output 0", "oifname host2 drop", Forwarded, ""},
		{"postrouting", "postrouting 0", "oifname host2 ip daddr 10.2.0.2 drop", Dropped, atBridge},
		{"the answer", "input 0", "iifname host2 tcp sport 9000 drop", Dropped, "the answer of 10.2.0.2:9000"},
		{"the answer leaves", "output 0", "oifname host1 tcp sport 80 drop", Dropped, "the answer of 10.2.0.2:9000"},
	})
	client := ""
	n.On(1, func() { client = hardware(t, "eth0") })
	n.On(2, func() { sh(t, "ip addr add 10.1.0.3/24 dev eth0") })
	sh(t, "iptables -t nat -F PREROUTING", "iptables -t nat -A PREROUTING -d 10.96.0.10 -p tcp --dport 80 -j DNAT --to-destination 10.1.0.3:9000")
	neighbours := []onBridge{
		{"neighbours", "", "", Forwarded, ""},
		{"between neighbours", "forward 0", "iifname host1 oifname host2 ip daddr 10.1.0.3 drop", Dropped, atBridge},
		{"the neighbour's answer", "forward 0", "iifname host2 oifname host1 tcp sport 9000 drop", Dropped, "the answer of 10.1.0.3:9000"},
		{"the neighbour's answer to the client's card", "prerouting -200", "iifname host2 ether daddr " + client + " ip protocol tcp drop", Dropped, "the answer of 10.1.0.3:9000"},
		{"the neighbour's answer isn't delivered", "input 0", "policy drop; ether type arp accept", Forwarded, ""},
		{"nor is it the bridge's", "output 0", "ip protocol tcp drop", Forwarded, ""},
	}
	compareBridged(t, n, neighbours)
	sh(t, "iptables -t nat -A POSTROUTING -j MASQUERADE")
	compareBridged(t, n, []onBridge{
		{"masqueraded", "", "", Forwarded, ""},
		{"masqueraded, between neighbours", "forward 0", "iifname host2 oifname host1 ip daddr 10.1.0.2 drop", Dropped, "the answer of 10.1.0.3:9000"},
		{"masqueraded, as it comes", "prerouting -200", "ip daddr 10.1.0.1 tcp sport 9000 drop", Dropped, "the answer of 10.1.0.3:9000"},
	})
	sh(t, "sysctl -qw net.bridge.bridge-nf-call-iptables=0")
	compareBridged(t, n, []onBridge{
		{"routed", "", "", Forwarded, ""},
		{"routed, between ports", "forward 0", "ip protocol tcp drop", Forwarded, ""},
		{"routed, it is delivered", "input 0", "iifname host1 ip daddr 10.96.0.10 drop", Dropped, atBridge},
		{"routed, the answer leaves", "postrouting 0", "oifname host1 tcp sport 80 drop", Dropped, "the answer of 10.1.0.3:9000"},
	})
}
