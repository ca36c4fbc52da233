package netfilter_test

import (
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
	"kproxy.dev/kproxy/trace/netfilter"
)

// native are rules of nftables, as foreign are of iptables: of a chain f at the
// hook forward, whose policy is to accept. IP is ip or ip6.
var native = []struct {
	name  string
	rules string
	maybe bool
}{
	{name: "nothing", rules: ``},
	{name: "source", rules: `add rule inet x f IP saddr C R`},
	{name: "not source", rules: `add rule inet x f IP saddr != C R`},
	{name: "source network", rules: `add rule inet x f IP saddr {10.1.0.0/16|fd00:1::/32} R`},
	{name: "the other family", rules: `add rule inet x f {ip6 saddr ::/0|ip saddr 0.0.0.0/0} R`},
	{name: "range", rules: `add rule inet x f IP daddr {10.2.0.1-10.2.0.9|fd00:2::1-fd00:2::9} R`},
	{name: "outside a range", rules: `add rule inet x f IP daddr != {10.2.0.1-10.2.0.9|fd00:2::1-fd00:2::9} R`},
	{name: "ports outside a range", rules: `add rule inet x f tcp dport != 9000-9100 R`},
	{name: "port", rules: `add rule inet x f tcp dport 8080 R`},
	{name: "port above", rules: `add rule inet x f tcp dport > 8080 R`},
	{name: "ports in a set", rules: `add rule inet x f tcp dport [ 80, 8000-8090 ] R`},
	{name: "ports not in a set", rules: `add rule inet x f tcp dport != [ 80, 443 ] R`},
	{name: "UDP port", rules: `add rule inet x f udp dport 8080 R`},
	{name: "any port", rules: `add rule inet x f meta l4proto [ tcp, udp ] th dport 8080 R`},
	{name: "protocol", rules: `add rule inet x f meta l4proto udp R`},
	{name: "interfaces", rules: `add rule inet x f iifname host1 oifname "hos*" R`},
	{name: "interfaces in a set", rules: `add rule inet x f iifname [ "host2", "host1" ] R`},
	{name: "not interface", rules: `add rule inet x f iifname != host1 R`},
	{name: "not the interface of none", rules: `add chain inet x g [ type filter hook prerouting priority 0; ]; add rule inet x g oifname != host1 R`},
	{name: "another index than none's", rules: `add chain inet x g [ type filter hook prerouting priority 0; ]; add rule inet x g oif != lo R`},
	{name: "the interface of none", rules: `add chain inet x g [ type filter hook prerouting priority 0; ]; add rule inet x g oifname host1 R`},
	{name: "state", rules: `add rule inet x f ct state new R`},
	{name: "states", rules: `add rule inet x f ct state established,related accept; add rule inet x f ct state invalid,new R`},
	{name: "states by map", rules: `add rule inet x f ct state vmap [ established : accept, invalid : drop ]; add rule inet x f R`},
	{name: "ports by map", rules: `add chain inet x y; add rule inet x y R; add rule inet x f tcp dport vmap [ 22 : accept, 8080 : jump y ]`},
	{name: "map without it", rules: `add rule inet x f tcp dport vmap [ 22 : drop, 23 : accept ]; add rule inet x f IP saddr C R`},
	{name: "named set", rules: `add set inet x s [ type TYPE; ]; add element inet x s [ C ]; add rule inet x f IP saddr @s R`},
	{name: "named set of others", rules: `add set inet x s [ type TYPE; ]; add element inet x s [ S ]; add rule inet x f IP saddr @s R`},
	{name: "intervals", rules: `add set inet x s [ type TYPE; flags interval; elements = [ {10.1.0.0/16|fd00:1::/32} ]; ]; add rule inet x f IP saddr @s R`},
	{name: "pairs", rules: `add set inet x s [ type TYPE . inet_service; flags interval; elements = [ {10.2.0.0/16|fd00:2::/32} . 8000-8100 ]; ]; add rule inet x f IP daddr . tcp dport @s R`},
	{name: "other pairs", rules: `add rule inet x f IP daddr . tcp dport [ S . 80, C . 8080 ] R`},
	{name: "entries with lifetimes", rules: `add set inet x s [ type TYPE; flags timeout; ]; add element inet x s [ C timeout 1h ]; add rule inet x f IP saddr @s R`},
	{name: "chains", rules: `add chain inet x y; add rule inet x y tcp dport 8080 return; add rule inet x y accept; add rule inet x f jump y; add rule inet x f R`},
	{name: "go to", rules: `add chain inet x y; add rule inet x y udp dport 8080 accept; add rule inet x f goto y; add rule inet x f R`},
	{name: "accepted before", rules: `add rule inet x f tcp dport 8080 accept; add rule inet x f R`},
	{name: "dormant", rules: `add table inet y [ flags dormant; ]; add chain inet y g [ type filter hook forward priority 0; ]; add rule inet y g R`},
	{name: "woken up", rules: `add table inet y [ flags dormant; ]; add chain inet y g [ type filter hook forward priority 0; ]; add rule inet y g R; add table inet y`},
	{name: "two base chains", rules: `add chain inet x g [ type filter hook forward priority 10; ]; add rule inet x f accept; add rule inet x g R`},
	{name: "mark", rules: `add chain inet x g [ type filter hook prerouting priority -150; ]; add rule inet x g meta mark set 0x5; add rule inet x f meta mark & 0x4 == 0x4 R`},
	{name: "mark with more", rules: `add chain inet x g [ type filter hook prerouting priority -150; ]; add rule inet x g meta mark set 1; add rule inet x g meta mark set meta mark or 4; add rule inet x f meta mark 5 R`},
	{name: "connection's mark", rules: `add chain inet x g [ type filter hook prerouting priority -150; ]; add rule inet x g ct mark set 7; add rule inet x f ct mark 7 R`},
	{name: "flags", rules: `add rule inet x f tcp flags & (syn|ack) == syn R`},
	{name: "other flags", rules: `add rule inet x f tcp flags & (fin|rst) != 0 R`},
	{name: "both flags", rules: `add rule inet x f tcp flags & (syn|ack) == syn|ack R`},
	{name: "no flags but", rules: `add rule inet x f tcp flags != syn R`},
	{name: "just the flag", rules: `add rule inet x f tcp flags == syn R`},
	{name: "map with all others", rules: `add map inet x m [ type inet_service : verdict; elements = [ * : accept, 80 : drop ]; ]; add chain inet x y; add rule inet x y R; add rule inet x f tcp dport vmap @m; add rule inet x f R`},
	{name: "map with all others too", rules: `add map inet x m [ type inet_service : verdict; elements = [ * : drop, 8080 : accept ]; ]; add rule inet x f ct direction original tcp dport vmap @m; add rule inet x f R`},
	{name: "local", rules: `add rule inet x f fib daddr type local R`},
	{name: "not local", rules: `add rule inet x f fib saddr type != local R`},
	{name: "rewritten", rules: `add rule inet x f ct status dnat R`},
	{name: "original", rules: `add rule inet x f ct direction original ct original IP daddr S R`},
	{name: "reply", rules: `add rule inet x f ct direction reply R`},
	{name: "connection's mark before conntrack", rules: `add chain inet x g [ type filter hook prerouting priority -300; ]; add rule inet x g ct mark != 7 meta mark set 3; add rule inet x f meta mark 3 R`},
	{name: "original source before conntrack", rules: `add chain inet x g [ type filter hook prerouting priority -300; ]; add rule inet x g ct original IP saddr != S meta mark set 3; add rule inet x f meta mark 3 R`},
	{name: "source of answers before conntrack", rules: `add chain inet x g [ type filter hook prerouting priority -300; ]; add rule inet x g ct reply IP saddr != C meta mark set 3; add rule inet x f meta mark 3 R`},
	{name: "direction before conntrack", rules: `add chain inet x g [ type filter hook prerouting priority -300; ]; add rule inet x g ct direction original meta mark set 3; add rule inet x f meta mark 3 R`},
	{name: "untracked", rules: `add chain inet x g [ type filter hook prerouting priority -300; ]; add rule inet x g tcp dport 8080 notrack; add rule inet x f ct state untracked R`},
	{name: "numbers", rules: `add rule inet x f numgen inc mod 1 < 1 R`},
	{name: "numbers above", rules: `add rule inet x f numgen random mod 2 offset 7 < 7 R`},
	{name: "hash of the source", rules: `add rule inet x f jhash IP saddr mod 7 seed 0x1 offset 2 < 5 R`},
	{name: "hash of the destination", rules: `add rule inet x f jhash IP daddr mod 1000 seed 0x5 > 500 R`},
	{name: "hash of more", rules: `add rule inet x f jhash IP daddr . tcp dport mod 1000 seed 0x5 > 500 R`},
	{name: "hash of what isn't known", rules: `add rule inet x f jhash tcp sport mod 2 seed 0x5 offset 7 < 7 R`},
	{name: "hash of the flow", rules: `add rule inet x f symhash mod 2 offset 7 > 6 accept`},
	{name: "a mark's bits by map", rules: `add map inet x m [ type inet_service : mark; elements = [ 8080 : 5, 81 : 6 ]; ]; add rule inet x f meta mark set tcp dport map @m; add rule inet x f meta mark & 0x5 == 0x5 R`},
	{name: "no mark by map", rules: `add map inet x m [ type inet_service : mark; elements = [ 81 : 6 ]; ]; add rule inet x f meta mark set tcp dport map @m R`},
	{name: "published by map", rules: `add table IP x; add map IP x m [ type inet_service : TYPE . inet_service; elements = [ 8080 : {10.3.0.2|fd00:3::2} . 8080 ]; ]; add chain IP x g [ type nat hook prerouting priority -100; ]; add rule IP x g dnat to tcp dport map @m`},
	{name: "published by a map of pairs", rules: `add table IP x; add map IP x m [ type TYPE . inet_service . mark : TYPE . inet_service; elements = [ S . 8080 . 3 : {10.3.0.2|fd00:3::2} . 8080 ]; ]; add chain IP x g [ type nat hook prerouting priority -100; ]; add rule IP x g meta mark set 3; add rule IP x g meta l4proto tcp dnat to IP daddr . tcp dport . meta mark map @m`},
	{name: "added, and looked up", rules: `add set inet x s [ type TYPE; flags dynamic,timeout; ]; add rule inet x f update @s [  IP saddr timeout 1h ]; add rule inet x f IP saddr @s R`},
	{name: "added, deleted, and looked up", rules: `add set inet x s [ type TYPE; flags dynamic,timeout; ]; add rule inet x f add @s [  IP saddr timeout 1h ]; add rule inet x f delete @s [  IP saddr ]; add rule inet x f IP saddr @s R`},
	{name: "no transparent socket", rules: `add chain inet x g [ type filter hook prerouting priority -150; ]; add rule inet x g socket transparent 1 R`},
	{name: "a socket is missed by TPROXY", rules: `add chain inet x g [ type filter hook prerouting priority -150; ]; add rule inet x g meta l4proto tcp tproxy to :9 meta mark set 3; add rule inet x f meta mark 3 R`},
	{name: "range of marks", rules: `add chain inet x g [ type filter hook prerouting priority -150; ]; add rule inet x g meta mark set 0x5; add rule inet x f meta mark 4-6 R`},
	{name: "network of pairs", rules: `add set inet x s [ type TYPE . inet_service . TYPE; flags interval; ]; add element inet x s [ S . 8080 . {10.1.0.0/16|fd00:1::/32} ]; add rule inet x f IP daddr . tcp dport . IP saddr @s R`},
	{name: "hop limit", rules: `add rule inet x f {ip ttl 1|ip6 hoplimit 1} R`},
	{name: "hop limit, forwarded", rules: `add rule inet x f {ip ttl 63|ip6 hoplimit 63} R`},
	{name: "hop limit above", rules: `add rule inet x f {ip ttl > 63|ip6 hoplimit > 63} R`},
	{name: "hop limit set", rules: `add chain inet x g [ type filter hook prerouting priority -150; ]; add rule inet x g meta l4proto tcp {ip ttl set 1|ip6 hoplimit set 1}; add chain inet x o [ type filter hook output priority 0; ]; add rule inet x o {icmp|icmpv6} type time-exceeded drop`},
	{name: "hop limit set, and seen", rules: `add chain inet x g [ type filter hook prerouting priority -150; ]; add rule inet x g meta l4proto tcp {ip ttl set 9|ip6 hoplimit set 9}; add rule inet x f {ip ttl 8|ip6 hoplimit 8} R`},
	{name: "long", rules: `add rule inet x f meta length > 9000 R`},
	{name: "length", rules: `add rule inet x f meta length {60|80} R`},
	{name: "header's length", rules: `add rule inet x f {ip length 60|ip6 length 40} R`},
	{name: "length of TCP's header", rules: `add rule inet x f tcp doff 10 R`},
	{name: "has timestamps", rules: `add rule inet x f tcp option timestamp exists R`},
	{name: "has no SACK", rules: `add rule inet x f tcp option sack-perm missing R`},
	{name: "fast open", rules: `add rule inet x f tcp option fastopen exists R`},
	{name: "MSS", rules: `add rule inet x f tcp option maxseg size {1460|1440} R`},
	{name: "small MSS", rules: `add rule inet x f tcp option maxseg size 1-536 R`},
	{name: "MSS lowered", rules: `add chain inet x g [ type filter hook prerouting priority -150; ]; add rule inet x g tcp flags syn tcp option maxseg size set 500; add rule inet x f tcp option maxseg size < 536 R`},
	{name: "MSS isn't raised", rules: `add chain inet x g [ type filter hook prerouting priority -150; ]; add rule inet x g tcp flags syn tcp option maxseg size set 9000; add rule inet x f tcp option maxseg size > 1460 R`},
	{name: "MSS of the path", rules: `add chain inet x g [ type filter hook forward priority -150; ]; add rule inet x g tcp flags syn tcp option maxseg size set rt mtu; add rule inet x f tcp option maxseg size < 536 R`, maybe: true},
	{name: "MSS of the path, innocent", rules: `add chain inet x g [ type filter hook forward priority -150; ]; add rule inet x g tcp flags syn tcp option maxseg size set rt mtu`},
	{name: "stripped", rules: `add chain inet x g [ type filter hook prerouting priority -150; ]; add rule inet x g reset tcp option sack-perm; add rule inet x f tcp option sack-perm missing R`},
	{name: "scale", rules: `add rule inet x f tcp option window count > 20 R`, maybe: true},
	{name: "class", rules: `add rule inet x f IP dscp cs0 R`},
	{name: "other class", rules: `add rule inet x f IP dscp ef R`},
	{name: "one of the classes", rules: `add rule inet x f IP dscp [ cs0, ef ] R`},
	{name: "none of the classes", rules: `add rule inet x f IP dscp [ af11, ef ] R`},
	{name: "class set", rules: `add chain inet x g [ type filter hook prerouting priority -150; ]; add rule inet x g IP dscp set af41; add rule inet x f IP dscp af41 R`},
	{name: "fragments", rules: `add rule inet x f {ip frag-off & 0x1fff != 0|exthdr frag exists} R`},
	{name: "options of the header", rules: `add rule inet x f {ip option lsrr exists|exthdr rt exists} R`},
	{name: "ping", rules: `add rule inet x f {icmp type echo-request|icmpv6 type echo-request} R`},
	{name: "log", rules: `add rule inet x f log prefix "x" counter R`},
	{name: "only counted", rules: `add rule inet x f counter`},
	{name: "published", rules: `add chain inet x g [ type nat hook prerouting priority -100; ]; add rule inet x g tcp dport 8080 dnat IP to {10.3.0.2:8080|[fd00:3::2]:8080}`},
	{name: "masquerade", rules: `add chain inet x g [ type nat hook postrouting priority 100; ]; add rule inet x g oifname host2 masquerade`},
	{name: "own network", rules: `add chain inet x g [ type nat hook postrouting priority 100; ]; add rule inet x g snat IP prefix to {10.244.7.0/24|fd00:7::/64}`},
	{name: "own source", rules: `add chain inet x g [ type nat hook postrouting priority 100; ]; add rule inet x g snat IP to {10.2.0.1|fd00:2::1}`},
	{name: "ingress of a device", rules: `add table netdev x; add chain netdev x i [ type filter hook ingress device host1 priority 0; ]; add rule netdev x i tcp dport 8080 drop`},
	{name: "ingress of another", rules: `add table netdev x; add chain netdev x i [ type filter hook ingress device host3 priority 0; ]; add rule netdev x i tcp dport 8080 drop`},
	{name: "policy", rules: `add chain inet x g [ type filter hook forward priority 5; policy drop; ]; add rule inet x g ct state established accept`},

	{name: "as firewalld does, allowed", rules: `add table inet firewalld; add chain inet firewalld filter_FORWARD [ type filter hook forward priority filter + 10; policy accept; ]; add chain inet firewalld zone_in; add chain inet firewalld zone_allow; add rule inet firewalld filter_FORWARD ct state established,related accept; add rule inet firewalld filter_FORWARD ct status dnat accept; add rule inet firewalld filter_FORWARD iifname "lo" accept; add rule inet firewalld filter_FORWARD ct state invalid drop; add rule inet firewalld zone_in jump zone_allow; add rule inet firewalld zone_allow tcp dport 8080 ct state new,untracked accept; add rule inet firewalld filter_FORWARD iifname "host1" goto zone_in; add rule inet firewalld filter_FORWARD reject with tcp reset`},
	{name: "as firewalld does, not allowed", rules: `add table inet firewalld; add chain inet firewalld filter_FORWARD [ type filter hook forward priority filter + 10; policy accept; ]; add chain inet firewalld zone_in; add chain inet firewalld zone_allow; add rule inet firewalld filter_FORWARD ct state established,related accept; add rule inet firewalld filter_FORWARD ct status dnat accept; add rule inet firewalld filter_FORWARD iifname "lo" accept; add rule inet firewalld filter_FORWARD ct state invalid drop; add rule inet firewalld zone_in jump zone_allow;  add rule inet firewalld filter_FORWARD iifname "host1" goto zone_in; add rule inet firewalld filter_FORWARD reject with tcp reset`},
	{name: "as fail2ban does, banned", rules: `add table inet f2b-table; add set inet f2b-table banned [ type TYPE; ]; add element inet f2b-table banned [ C ]; add chain inet f2b-table f2b-chain [ type filter hook forward priority -1; policy accept; ]; add rule inet f2b-table f2b-chain tcp dport [ 22, 8080 ] IP saddr @banned reject with tcp reset`},
	{name: "as fail2ban does, another is banned", rules: `add table inet f2b-table; add set inet f2b-table banned [ type TYPE; ]; add element inet f2b-table banned [ S ]; add chain inet f2b-table f2b-chain [ type filter hook forward priority -1; policy accept; ]; add rule inet f2b-table f2b-chain tcp dport [ 22, 8080 ] IP saddr @banned reject with tcp reset`},
	{name: "as wg-quick does", rules: `add table IP wg-quick-wg0; add chain IP wg-quick-wg0 preraw [ type filter hook prerouting priority -300; ]; add chain IP wg-quick-wg0 premangle [ type filter hook prerouting priority -150; ]; add rule IP wg-quick-wg0 preraw iifname != "wg0" IP daddr {10.8.0.2|fd08::2} fib saddr type != local drop; add rule IP wg-quick-wg0 premangle meta l4proto udp meta mark set ct mark`},
	{name: "rate", rules: `add rule inet x f limit rate 1/second R`, maybe: true},
	{name: "above the rate", rules: `add rule inet x f tcp flags syn limit rate over 400/second burst 20 packets R`},
	{name: "within the rate", rules: `add rule inet x f tcp flags syn limit rate 400/second accept; add rule inet x f tcp flags syn R`},
	{name: "rate by a name", rules: `add limit inet x l [ rate over 100/second ]; add rule inet x f tcp flags syn limit name "l" R`},
	{name: "above a number of connections", rules: `add rule inet x f tcp flags syn ct state new ct count over 20 R`},
	{name: "above no connections", rules: `add rule inet x f tcp flags syn ct state new ct count over 0 R`},
	{name: "of each client", rules: `add set inet x s [ type TYPE; flags dynamic; ]; add rule inet x f tcp flags syn add @s [  IP saddr limit rate over 10/second burst 5 packets ] R`},
	{name: "of each client, accepted", rules: `add set inet x s [ type TYPE; flags dynamic; ]; add rule inet x f tcp flags syn update @s [  IP saddr limit rate 10/second burst 5 packets ] accept; add rule inet x f tcp flags syn R`},
	{name: "connections of each client", rules: `add set inet x s [ type TYPE; flags dynamic; ]; add rule inet x f tcp flags syn ct state new add @s [  IP saddr ct count over 20 ] R`},
	{name: "a quota that is used up", rules: `add rule inet x f quota over 10 bytes R`},
	{name: "a quota", rules: `add rule inet x f quota over 10 mbytes R`},
	{name: "a quota by a name", rules: `add quota inet x q [ over 10 mbytes ]; add rule inet x f quota name "q" R`},
	{name: "rate of others", rules: `add rule inet x f udp dport 1 limit rate 1/second R`},
}

// TestPredictsNFTables compares with the kernel what rules of nftables do.
func TestPredictsNFTables(t *testing.T) {
	for _, f := range service.Families {
		t.Run(f.String(), func(t *testing.T) {
			t.Parallel()
			s := newScene(t, f)
			to := netip.AddrPortFrom(s.Address(s.family, 2), 8080)
			for _, c := range native {
				s.nft("flush ruleset; add table inet x; add chain inet x f [ type filter hook forward priority 0; ];" + c.rules)
				predicted, _ := s.predict(s.read(), service.TCP, 1, to)
				if c.maybe != (predicted.Verdict == "maybe") {
					s.t.Errorf("%s: predicted %v, undecided: want %v", c.name, predicted, c.maybe)
				} else if !c.maybe {
					if diff := s.differs(predicted, to); diff != "" {
						s.t.Errorf("%s (-predicted +real):\n%s", c.name, diff)
					}
				}
			}
		})
	}
}

// nft gives commands to nft, in which [ and ] stand for { and }. Only the first
// packet is what is predicted, so that rejecting means original packets.
func (s *scene) nft(commands string) {
	s.t.Helper()
	family, typ := "ip", "ipv4_addr"
	if s.family == service.IPv6 {
		family, typ = "ip6", "ipv6_addr"
	}
	reject := "reject with tcp reset"
	if strings.Contains(commands, "udp") || strings.Contains(commands, "icmp") {
		reject = "drop" // which nft lets be for every protocol
	}
	text := strings.NewReplacer(" IP ", " "+family+" ", " R", " ct direction original ct state new,untracked,invalid "+reject, " TYPE", " "+typ, " [ ", " { ", " ]", " }").Replace(s.words(commands) + " ")
	cmd := exec.Command("nft", "-f", "-")
	cmd.Stdin = strings.NewReader(strings.ReplaceAll(text, "; add", "\nadd"))
	if out, err := cmd.CombinedOutput(); err != nil {
		s.t.Fatalf("%s: %v\n%s", text, err, out)
	}
}

// Chains, rules and sets of tables are written, and of a set some elements.
func TestWriteNFT(t *testing.T) {
	kerneltest.Namespace(t)
	run(t, `nft 'add table ip x; add set ip x small { type ipv4_addr . inet_service; elements = { 10.1.2.3 . 80 }; }
add set ip x ranges { type ipv4_addr; flags interval; elements = { 10.1.0.0-10.1.0.9 }; }; add map ip x names { type inet_service : verdict; elements = { 81 : drop }; }
add set ip x large { type inet_service; elements = { 1, 2, 3, 4, 5 }; }; add chain ip x c { type filter hook prerouting priority 7; }; add rule ip x c ip saddr . tcp dport @small drop'`)
	var b strings.Builder
	tables := read(t, service.IPv4, kernel.VariantNFT(), knownHost{})
	tables.WriteNFT(&b)
	if want := "table ip x\n  chain c\n    type filter hook prerouting priority 7 policy accept\n    ip saddr . tcp dport @small drop\n"; b.String() != want {
		t.Errorf("chains are\n%s\nwant\n%s", b.String(), want)
	}
	b.Reset()
	tables.WriteNFTSets(&b, 4)
	for _, want := range []string{
		"ip x small: 1 elements\n  10.1.2.3 . 80\n", "ip x ranges: 1 elements\n  10.1.0.0-10.1.0.9\n", "ip x names: 1 elements\n  81 : drop\n", "ip x large: 4 elements, and more\n",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("sets lack %q:\n%s", want, b.String())
		}
	}
}

// TestWritesRulesAsNFT: the text of a rule is nft's own.
func TestWritesRulesAsNFT(t *testing.T) {
	kerneltest.Namespace(t)
	rules := []string{
		"limit rate 10/second accept", "limit rate over 400/minute burst 20 packets drop", "limit rate over 10 mbytes/second drop", "limit rate 1 kbytes/hour burst 3 kbytes accept",
		"tcp dport 22 ct state new ct count over 20 drop", "quota over 25 mbytes drop", "limit name \"l\" accept", "quota name \"q\" drop", "ct helper set \"h\"",
		"tcp dport 22 add @s { ip saddr limit rate over 3/minute burst 5 packets } drop", "update @s { ip saddr ct count over 20 } drop", "update @s { ip saddr timeout 1m limit rate 5/second burst 5 packets } accept",
		"meta length > 1400 drop", "meta length 40-60 drop", "meta cpu 1 drop", "meta cgroup 5 drop", "meta rtclassid 7 drop", "iifgroup 4 drop",
		"ip ttl < 5 drop", "ip ttl set 64", "ip dscp af11 drop", "ip dscp != ef drop", "ip dscp set cs1", "ip length > 1000 drop",
		"tcp option maxseg size 1-536 drop", "tcp option maxseg size set 1200", "tcp option maxseg size set rt mtu", "tcp option sack-perm missing drop", "tcp option timestamp exists drop",
		"tcp flags syn tcp option maxseg size < 500 drop", "ct zone set 5", "ct original packets > 4 drop", "meta priority set 0x10001",
		"log prefix \"x \" level debug flags all", "log group 3", "reject with icmp port-unreachable", "reject with icmp admin-prohibited", "queue to 3", "ct bytes > 100000 drop",
		"tcp doff 5 drop", "masquerade random",
	}
	run(t, `nft 'add table ip x; add set ip x s { type ipv4_addr; flags dynamic, timeout; size 65535; }; add limit ip x l { rate 5/second; }; add quota ip x q { over 5 mbytes; }
add ct helper ip x h { type "ftp" protocol tcp; }; add chain ip x c { type filter hook prerouting priority 0; }; add chain ip x n { type nat hook postrouting priority 0; }'`)
	for _, r := range rules {
		chain := "c"
		if strings.HasPrefix(r, "masq") {
			chain = "n"
		}
		if out, err := exec.Command("nft", "add", "rule", "ip", "x", chain, r).CombinedOutput(); err != nil {
			t.Logf("this nft or kernel can't do %q: %s", r, out)
			continue
		}
		out, err := exec.Command("nft", "-s", "list", "chain", "ip", "x", chain).Output()
		if err != nil {
			t.Fatal(err)
		}
		lines := strings.Split(strings.TrimSpace(string(out)), "\n")
		want := strings.TrimSpace(lines[len(lines)-3])
		tables := read(t, service.IPv4, kernel.VariantNFT(), knownHost{})
		hook := map[string]netfilter.Hook{"c": netfilter.Prerouting, "n": netfilter.Postrouting}[chain]
		w := tables.Walk(netfilter.NewPacket(service.TCP, ap("10.1.0.2:40000"), ap("10.2.0.2:22"), "eth0"), hook, netfilter.Whole)
		if got := w.Steps[0].Text; got != want {
			t.Errorf("the text is\n\t%s\nnft's is\n\t%s", got, want)
		}
		run(t, "nft flush chain ip x "+chain)
	}
}
