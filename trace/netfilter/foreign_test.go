package netfilter_test

import (
	"net/netip"
	"strings"
	"testing"

	"kproxy.dev/kproxy/service"
)

// foreign are rules of others for connections from host 1 to port 8080 of host 2,
// which are forwarded. What they do is for the kernel to say. {v4|v6} is one of
// the two by family; C is the client, S the server, R rejects.
var foreign = []struct {
	name  string
	rules string // of the table filter; each -A, -N or -P is a command's arguments; others are the shell's
	maybe bool   // it can't be decided
}{
	{name: "nothing", rules: ``},
	{name: "source", rules: `-A FORWARD -s C -j R`},
	{name: "not source", rules: `-A FORWARD ! -s C -j R`},
	{name: "source network", rules: `-A FORWARD -s {10.1.0.0/16|fd00:1::/32} -j R`},
	{name: "other source", rules: `-A FORWARD -s {10.2.0.0/16|fd00:2::/32} -j R`},
	{name: "odd mask", rules: `-A FORWARD -d {10.0.0.2/255.0.0.255|fd00::2/ffff::ffff} -j R`},
	{name: "destination and port", rules: `-A FORWARD -d S -p tcp --dport 8080 -j R`},
	{name: "other port", rules: `-A FORWARD -d S -p tcp --dport 8081:9000 -j R`},
	{name: "source port", rules: `-A FORWARD -p tcp --sport 1:1023 -j R`},
	{name: "UDP", rules: `-A FORWARD -p udp -j R`},
	{name: "ICMP", rules: `-A FORWARD -p {icmp|icmpv6} -j R`},
	{name: "not TCP", rules: `-A FORWARD ! -p tcp -j R`},
	{name: "protocol by number", rules: `-A FORWARD -p 132 -j R`},
	{name: "in", rules: `-A FORWARD -i host1 -j R`},
	{name: "in by prefix", rules: `-A FORWARD -i hos+ -o host2 -j R`},
	{name: "not in", rules: `-A FORWARD ! -i host1 -j R`},
	{name: "out", rules: `-A FORWARD -o host3 -j R`},
	{name: "ports", rules: `-A FORWARD -p tcp -m multiport --dports 80,8000:8080 -j R`},
	{name: "not ports", rules: `-A FORWARD -p tcp -m multiport ! --dports 80,443 -j R`},
	{name: "either port", rules: `-A FORWARD -p tcp -m multiport --ports 8080 -j R`},
	{name: "range", rules: `-A FORWARD -m iprange --src-range {10.1.0.1-10.1.0.9|fd00:1::1-fd00:1::9} -j R`},
	{name: "not range", rules: `-A FORWARD -m iprange ! --dst-range {10.2.0.3-10.2.0.9|fd00:2::3-fd00:2::9} -j R`},
	{name: "new", rules: `-A FORWARD -m conntrack --ctstate NEW -j R`},
	{name: "established", rules: `-A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT; -A FORWARD -j R`},
	{name: "old state match", rules: `-A FORWARD -m state --state NEW -j R`},
	{name: "invalid", rules: `-A FORWARD -m conntrack --ctstate INVALID -j R`},
	{name: "not rewritten", rules: `-A FORWARD -m conntrack ! --ctstate DNAT -j R`},
	{name: "original destination", rules: `-A FORWARD -p tcp -m conntrack --ctorigdst S --ctorigdstport 8080 -j R`},
	{name: "direction", rules: `-A FORWARD -m conntrack --ctdir REPLY -j R`},
	{name: "status", rules: `-A FORWARD -m conntrack --ctstatus ASSURED -j R`},
	{name: "SYN", rules: `-A FORWARD -p tcp --syn -j R`},
	{name: "not SYN", rules: `-A FORWARD -p tcp ! --syn -j R`},
	{name: "Christmas", rules: `-A FORWARD -p tcp --tcp-flags ALL ALL -j R; -A FORWARD -p tcp --tcp-flags ALL NONE -j R; -A FORWARD -p tcp --tcp-flags SYN,RST SYN,RST -j R`},
	{name: "all flags", rules: `-A FORWARD -p tcp --tcp-flags ALL SYN -j R`},
	{name: "local source", rules: `-A FORWARD -m addrtype --src-type LOCAL -j R`},
	{name: "no local destination", rules: `-A FORWARD -m addrtype ! --dst-type LOCAL -j R`},
	{name: "mark", rules: `-t mangle -A PREROUTING -s C -j MARK --set-mark 0x5; -A FORWARD -m mark --mark 0x4/0x4 -j R`},
	{name: "mark by parts", rules: `-t mangle -A PREROUTING -j MARK --or-mark 0x6; -t mangle -A PREROUTING -j MARK --and-mark 0xd; -A FORWARD -m mark --mark 0x4 -j R`},
	{name: "exclusive mark", rules: `-t mangle -A PREROUTING -j MARK --xor-mark 0x6; -t mangle -A PREROUTING -j MARK --xor-mark 0x2; -A FORWARD -m mark ! --mark 0x4 -j R`},
	{name: "connection's mark", rules: `-t mangle -A PREROUTING -j MARK --set-mark 7; -t mangle -A PREROUTING -j CONNMARK --save-mark; -A FORWARD -m connmark --mark 7 -j R`},
	{name: "restored mark", rules: `-t mangle -A PREROUTING -j CONNMARK --set-mark 9; -t mangle -A FORWARD -j CONNMARK --restore-mark --nfmask 0xf --ctmask 0x8; -A FORWARD -m mark --mark 8 -j R`},
	{name: "chains", rules: `-N A; -N B; -A FORWARD -j A; -A FORWARD -j R; -A A -s {10.9.0.0/16|fd00:9::/32} -j ACCEPT; -A A -j B; -A B -p tcp -j RETURN; -A B -j ACCEPT`},
	{name: "go to", rules: `-N A; -N B; -A FORWARD -j A; -A FORWARD -j R; -A A -g B; -A A -j ACCEPT; -A B -p udp -j ACCEPT`},
	{name: "accepted before", rules: `-N A; -A FORWARD -j A; -A FORWARD -j R; -A A -p tcp -j ACCEPT`},
	{name: "return at the top", rules: `-A FORWARD -p tcp -j RETURN; -A FORWARD -j R`},
	{name: "log, then refuse", rules: `-A FORWARD -m limit --limit 1/s -j LOG; -A FORWARD -j R`},
	{name: "accepted in another table only", rules: `-t mangle -A FORWARD -j ACCEPT; -A FORWARD -j R`},
	{name: "set", rules: `ipset create X hash:ip family {inet|inet6}; ipset add X C; -A FORWARD -m set --match-set X src -j R`},
	{name: "not in set", rules: `ipset create X hash:ip family {inet|inet6}; ipset add X C; -A FORWARD -m set ! --match-set X dst -j R`},
	{name: "network of ports", rules: `ipset create X hash:net,port family {inet|inet6}; ipset add X {10.2.0.0/16|fd00:2::/32},tcp:8000-8100; -A FORWARD -m set --match-set X dst,dst -j R`},
	{name: "list of sets", rules: `ipset create Y hash:net family {inet|inet6}; ipset add Y {10.1.0.0/16|fd00:1::/32}; ipset create X list:set; ipset add X Y; -A FORWARD -m set --match-set X src -j R`},
	{name: "exception", rules: `ipset create X hash:net family {inet|inet6}; ipset add X {10.0.0.0/8|fd00::/16}; ipset add X {10.1.0.0/16|fd00:1::/32} nomatch; -A FORWARD -m set --match-set X src -j R`},
	{name: "exceptions only", rules: `ipset create X hash:net family {inet|inet6}; ipset add X {10.0.0.0/8|fd00::/16}; ipset add X {10.1.0.0/16|fd00:1::/32} nomatch; -A FORWARD -m set --return-nomatch --match-set X src -j R`},
	{name: "set of interfaces", rules: `ipset create X hash:net,iface family {inet|inet6}; ipset add X {10.1.0.0/16|fd00:1::/32},host1; -A FORWARD -m set --match-set X src,src -j R`},
	{name: "ports of a bitmap", rules: `ipset create X bitmap:port range 8000-9000; ipset add X 8080; -A FORWARD -p tcp -m set --match-set X dst -j R`},
	{name: "set with lengths", rules: `ipset create X hash:ip family {inet netmask 24|inet6 netmask 64}; ipset add X C; -A FORWARD -m set --match-set X src -j R`},
	{name: "too few directions", rules: `ipset create X hash:ip,port family {inet|inet6}; ipset add X S,tcp:8080; -A FORWARD -m set --match-set X dst -j R`},
	{name: "untracked", rules: `-t raw -A PREROUTING -j CT --notrack; -A FORWARD -m conntrack --ctstate UNTRACKED -j R`},
	{name: "state before conntrack", rules: `-t raw -A PREROUTING -m conntrack --ctstate INVALID -j MARK --set-mark 3; -A FORWARD -m mark --mark 3 -j R`},
	{name: "entry before conntrack", rules: `-t raw -A PREROUTING -m conntrack --ctorigdst S -j DROP; -t raw -A PREROUTING -m conntrack --ctdir ORIGINAL -j DROP`},
	{name: "entry and state before conntrack", rules: `-t raw -A PREROUTING -m conntrack --ctstate INVALID --ctorigdst C -j MARK --set-mark 3; -A FORWARD -m mark --mark 3 -j R`},
	{name: "entry of the untracked", rules: `-t raw -A PREROUTING -j CT --notrack; -A FORWARD -m conntrack --ctorigdst S -j R`},
	{name: "connection's mark before conntrack", rules: `-t raw -A PREROUTING -m connmark ! --mark 7 -j MARK --set-mark 3; -A FORWARD -m mark --mark 3 -j R`},
	{name: "connection's mark of the untracked", rules: `-t raw -A PREROUTING -j CT --notrack; -A FORWARD -m connmark ! --mark 7 -j R`},
	{name: "security table", rules: `-t security -A FORWARD -j DROP`},
	{name: "mangle drops", rules: `-t mangle -A POSTROUTING -o host2 -j DROP`},
	{name: "certainly at random", rules: `-A FORWARD -m statistic --mode random --probability 1 -j R`},
	{name: "every one", rules: `-A FORWARD -m statistic --mode nth --every 1 --packet 0 -j R`},
	{name: "none of every one", rules: `-A FORWARD -m statistic --mode nth ! --every 1 --packet 0 -j R`},
	{name: "published port", rules: `-t nat -A PREROUTING -p tcp --dport 8080 -j DNAT --to-destination {10.3.0.2:8080|[fd00:3::2]:8080}`},
	{name: "published without a port", rules: `-t nat -A PREROUTING -p tcp -j DNAT --to-destination {10.3.0.2|fd00:3::2}`},
	{name: "first published counts", rules: `-t nat -A PREROUTING -p tcp -j DNAT --to-destination {10.3.0.2|fd00:3::2}; -t nat -A PREROUTING -p tcp -j DNAT --to-destination {10.4.0.2|fd00:4::2}`},
	{name: "masquerade", rules: `-t nat -A POSTROUTING -o host2 -j MASQUERADE`},
	{name: "masquerade others", rules: `-t nat -A POSTROUTING ! -o host2 -j MASQUERADE`},
	{name: "own source", rules: `-t nat -A POSTROUTING -s C -j SNAT --to-source {10.2.0.1|fd00:2::1}`},
	{name: "own network", rules: `-t nat -A POSTROUTING -s C -j NETMAP --to {10.244.7.0/24|fd00:7::/64}`},
	{name: "another network", rules: `-t nat -A PREROUTING -p tcp -j NETMAP --to {10.3.0.0/24|fd00:3::/64}`},
	{name: "policy", rules: `-P FORWARD DROP`},
	{name: "policy with replies", rules: `-P FORWARD DROP; -A FORWARD -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT; -A FORWARD -i host1 -p tcp -j ACCEPT`},

	{name: "no routing header", rules: `-A FORWARD {-p icmp -m icmp --icmp-type 8|-m rt --rt-type 0} -j R`},
	{name: "recently", rules: `-A FORWARD -m recent --name y --set -j R`},

	{name: "hop limit here", rules: `-t mangle -A PREROUTING -m {ttl --ttl-eq 64|hl --hl-eq 64} -j MARK --set-mark 3; -A FORWARD -m mark --mark 3 -j R`},
	{name: "hop limit, forwarded", rules: `-A FORWARD -m {ttl --ttl-eq 63|hl --hl-eq 63} -j R`},
	{name: "hop limit below", rules: `-A FORWARD -m {ttl --ttl-lt 63|hl --hl-lt 63} -j R`},
	{name: "hop limit above", rules: `-A FORWARD -m {ttl --ttl-gt 62|hl --hl-gt 62} -j R`},
	{name: "not the hop limit", rules: `-A FORWARD -m {ttl ! --ttl-eq 63|hl ! --hl-eq 63} -j R`},
	{name: "hop limit set", rules: `-t mangle -A PREROUTING -p tcp -j {TTL --ttl-set 1|HL --hl-set 1}; -A OUTPUT -p {icmp|icmpv6 -m icmp6 --icmpv6-type time-exceeded} -j DROP`},
	{name: "hop limit lowered", rules: `-t mangle -A PREROUTING -p tcp -j {TTL --ttl-dec 62|HL --hl-dec 62}; -A FORWARD -m {ttl --ttl-eq 1|hl --hl-eq 1} -j R`},
	{name: "hop limit raised", rules: `-t mangle -A PREROUTING -p tcp -j {TTL --ttl-inc 5|HL --hl-inc 5}; -A FORWARD -m {ttl --ttl-eq 68|hl --hl-eq 68} -j R`},
	{name: "hop limit used up", rules: `-t mangle -A PREROUTING -p tcp -j {TTL --ttl-dec 64|HL --hl-dec 64}; -A OUTPUT -p {icmp|icmpv6 -m icmp6 --icmpv6-type time-exceeded} -j DROP`},
	{name: "length", rules: `-A FORWARD -p tcp -m length --length {60|80} -j R`},
	{name: "short", rules: `-A FORWARD -p tcp -m length --length {0:59|0:79} -j R`},
	{name: "not long", rules: `-A FORWARD -p tcp -m length ! --length {61:65535|81:65535} -j R`},
	{name: "has an MSS", rules: `-A FORWARD -p tcp --tcp-option 2 -j R`},
	{name: "has timestamps", rules: `-A FORWARD -p tcp --tcp-option 8 -j R`},
	{name: "has no MPTCP", rules: `-A FORWARD -p tcp --tcp-option 30 -j R`},
	{name: "isn't without SACK", rules: `-A FORWARD -p tcp ! --tcp-option 4 -j R`},
	{name: "stripped", rules: `-t mangle -A PREROUTING -p tcp -j TCPOPTSTRIP --strip-options timestamp,4; -A FORWARD -p tcp --tcp-option 8 -j R`},
	{name: "stripped, as long", rules: `-t mangle -A PREROUTING -p tcp -j TCPOPTSTRIP --strip-options timestamp,4; -A FORWARD -p tcp ! --tcp-option 4 -m length --length {60|80} -j R`},
	{name: "MSS", rules: `-A FORWARD -p tcp --syn -m tcpmss --mss {1460|1440} -j R`},
	{name: "small MSS", rules: `-A FORWARD -p tcp --syn -m tcpmss --mss 1:536 -j R`},
	{name: "not that MSS", rules: `-A FORWARD -p tcp --syn -m tcpmss ! --mss 536:65535 -j R`},
	{name: "MSS lowered", rules: `-t mangle -A PREROUTING -p tcp --syn -j TCPMSS --set-mss 500; -A FORWARD -p tcp --syn -m tcpmss --mss 1:536 -j R`},
	{name: "MSS isn't raised", rules: `-t mangle -A PREROUTING -p tcp --syn -j TCPMSS --set-mss 9000; -A FORWARD -p tcp --syn -m tcpmss --mss 1461:65535 -j R`},
	{name: "MSS of the path", rules: `-t mangle -A FORWARD -p tcp --syn -j TCPMSS --clamp-mss-to-pmtu; -A FORWARD -p tcp --syn -m tcpmss --mss 1:536 -j R`, maybe: true},
	{name: "MSS of the path, innocent", rules: `-t mangle -A FORWARD -p tcp --syn -j TCPMSS --clamp-mss-to-pmtu`},
	{name: "class", rules: `-A FORWARD -m dscp --dscp-class CS0 -j R`},
	{name: "other class", rules: `-A FORWARD -m dscp --dscp-class EF -j R`},
	{name: "class set", rules: `-t mangle -A PREROUTING -j DSCP --set-dscp-class AF11; -A FORWARD -m dscp --dscp 10 -j R`},
	{name: "TOS", rules: `-A FORWARD -m tos --tos 0x10/0x3f -j R`},
	{name: "no TOS", rules: `-A FORWARD -m tos --tos 0/0xff -j R`},
	{name: "TOS set", rules: `-t mangle -A PREROUTING -j TOS --set-tos 0x10/0xff; -A FORWARD -m tos ! --tos 0x10/0x10 -j DROP; -A FORWARD -m dscp --dscp 4 -j R`},

	{name: "as Calico does, allowed", rules: `-t mangle -A PREROUTING -i host1 -j MARK --set-xmark 0x10000/0x10000; -N cali-FORWARD; -N cali-from; -N cali-pi; -A FORWARD -j cali-FORWARD; -A cali-FORWARD -j MARK --set-xmark 0/0xe0000; -A cali-FORWARD -i host+ -j cali-from; -A cali-FORWARD -m mark --mark 0x20000/0x20000 -j ACCEPT; -A cali-from -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT; -A cali-from -m conntrack --ctstate INVALID -j DROP; -A cali-from -j cali-pi; -A cali-from -m mark --mark 0x20000/0x20000 -j RETURN; -A cali-from -m comment --comment "Drop if no policies passed packet" -j DROP; -A cali-pi -p tcp -m multiport --dports 80,8080 -j MARK --set-xmark 0x20000/0x20000`},
	{name: "as Calico does, not allowed", rules: `-t mangle -A PREROUTING -i host1 -j MARK --set-xmark 0x10000/0x10000; -N cali-FORWARD; -N cali-from; -N cali-pi; -A FORWARD -j cali-FORWARD; -A cali-FORWARD -j MARK --set-xmark 0/0xe0000; -A cali-FORWARD -i host+ -j cali-from; -A cali-FORWARD -m mark --mark 0x20000/0x20000 -j ACCEPT; -A cali-from -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT; -A cali-from -m conntrack --ctstate INVALID -j DROP; -A cali-from -j cali-pi; -A cali-from -m mark --mark 0x20000/0x20000 -j RETURN; -A cali-from -m comment --comment "Drop if no policies passed packet" -j DROP; -A cali-pi -p tcp -m multiport --dports 80,443 -j MARK --set-xmark 0x20000/0x20000`},
	{name: "as Docker does, isolated", rules: `-N DOCKER-USER; -N STAGE-1; -N STAGE-2; -A FORWARD -j DOCKER-USER; -A FORWARD -j STAGE-1; -A STAGE-1 -i host1 ! -o host1 -j STAGE-2; -A STAGE-1 -j RETURN; -A STAGE-2 -o host2 -j DROP; -A STAGE-2 -j RETURN; -A DOCKER-USER -j RETURN`},
	{name: "as Docker does, its own only", rules: `-N DOCKER-USER; -N STAGE-1; -N STAGE-2; -A FORWARD -j DOCKER-USER; -A FORWARD -j STAGE-1; -A STAGE-1 -i host3 ! -o host3 -j STAGE-2; -A STAGE-1 -j RETURN; -A STAGE-2 -o host2 -j DROP; -A STAGE-2 -j RETURN; -A DOCKER-USER -j RETURN`},
	{name: "as ufw does, limited", rules: `-N ufw-limit; -P FORWARD DROP; -A FORWARD -p tcp --dport 8080 -m conntrack --ctstate NEW -m recent --set --name ufw; -A FORWARD -p tcp --dport 8080 -m conntrack --ctstate NEW -m recent --update --seconds 30 --hitcount 6 --name ufw -j ufw-limit; -A FORWARD -p tcp --dport 8080 -j ACCEPT; -A ufw-limit -m limit --limit 3/min -j LOG; -A ufw-limit -j REJECT`},
	{name: "as Cilium does, its own only", rules: `-t mangle -N CILIUM_PRE_mangle; -t mangle -A PREROUTING -j CILIUM_PRE_mangle; -t mangle -A CILIUM_PRE_mangle ! -o lo -m socket --transparent -m mark ! --mark 0xe00/0xf00 -j MARK --set-xmark 0x200/0xffffffff; -t mangle -A CILIUM_PRE_mangle -p tcp -m mark --mark 0x200 -j MARK --set-xmark 0x0; -N CILIUM_FORWARD; -A FORWARD -j CILIUM_FORWARD; -A CILIUM_FORWARD -o cilium_host -j ACCEPT; -A CILIUM_FORWARD -i lxc+ -j ACCEPT; -A FORWARD -m mark --mark 0x200/0xf00 -j R`},
	{name: "as Cilium does, and a policy behind it", rules: `-N CILIUM_FORWARD; -P FORWARD DROP; -A FORWARD -j CILIUM_FORWARD; -A CILIUM_FORWARD -o cilium_host -m comment --comment "cilium: any->cluster on cilium_host forward accept" -j ACCEPT; -A CILIUM_FORWARD -i lxc+ -j ACCEPT`},
	{name: "as NetworkManager does, a shared network", rules: `-N nm-sh-fw-host2; -A FORWARD -j nm-sh-fw-host2; -A nm-sh-fw-host2 -d {10.2.0.0/24|fd00:2::/64} -o host2 -m state --state ESTABLISHED,RELATED -j ACCEPT; -A nm-sh-fw-host2 -s {10.2.0.0/24|fd00:2::/64} -i host2 -j ACCEPT; -A nm-sh-fw-host2 -i host2 -o host2 -j ACCEPT; -A nm-sh-fw-host2 -o host2 -j R; -A nm-sh-fw-host2 -i host2 -j R`},
	{name: "as wg-quick does, another's address", rules: `-t raw -A PREROUTING ! -i wg0 -d S -m addrtype ! --src-type LOCAL -j DROP; -t mangle -A POSTROUTING -p udp -m mark --mark 0xca6c -j CONNMARK --save-mark`},
	{name: "as wg-quick does, its own", rules: `-t raw -A PREROUTING ! -i wg0 -d {10.9.0.1|fd00:9::1} -m addrtype ! --src-type LOCAL -j DROP; -t mangle -A PREROUTING -p udp -j CONNMARK --restore-mark`},
	{name: "rate", rules: `-A FORWARD -m limit --limit 1/s -j R`, maybe: true},
	{name: "accepted within the rate", rules: `-A FORWARD -p tcp --syn -m limit --limit 10/s --limit-burst 3 -j ACCEPT; -A FORWARD -p tcp --syn -j R`},
	{name: "a flood", rules: `-N FLOOD; -A FORWARD -p tcp --syn -j FLOOD; -A FLOOD -m limit --limit 50/s -j RETURN; -A FLOOD -j DROP`},
	{name: "rate of each client", rules: `-A FORWARD -p tcp --syn -m hashlimit --hashlimit-name h --hashlimit-mode srcip --hashlimit-above 100/s --hashlimit-burst 20 -j R`},
	{name: "rate of each client, accepted", rules: `-A FORWARD -p tcp --syn -m hashlimit --hashlimit-name h2 --hashlimit-mode srcip --hashlimit-upto 100/s -j ACCEPT; -A FORWARD -p tcp --syn -j DROP`},

	{name: "connections of each client", rules: `-A FORWARD -p tcp --syn -m connlimit --connlimit-above 20 -j R`},
	{name: "connections up to a number", rules: `-A FORWARD -p tcp --syn -m connlimit --connlimit-upto 20 -j ACCEPT; -A FORWARD -p tcp --syn -j DROP`},
	{name: "no connections", rules: `-A FORWARD -p tcp --syn -m connlimit --connlimit-above 0 -j R`},
	{name: "much carried", rules: `-A FORWARD -p tcp -m connbytes --connbytes 1000000: --connbytes-dir both --connbytes-mode bytes -j R`},
	{name: "never seen", rules: `-A FORWARD -m recent --name seen --rcheck --seconds 60 -j R`},
	{name: "seldom seen", rules: `-A FORWARD -p tcp --syn -m recent --name seldom --set; -A FORWARD -p tcp --syn -m recent --name seldom --update --seconds 30 --hitcount 6 -j R`},
	{name: "seen", rules: `-A FORWARD -p tcp --syn -m recent --name met --set; -A FORWARD -p tcp --syn -m recent --name met --rcheck --seconds 60 -j R`, maybe: true},
	{name: "limit, after what doesn't match", rules: `-A FORWARD -p udp -m limit --limit 1/s -j R`},
}

// TestPredictsForeignRules compares with the kernel what every kind of rule does.
func TestPredictsForeignRules(t *testing.T) {
	onEachKernel(t, func(s *scene) {
		to := netip.AddrPortFrom(s.Address(s.family, 2), 8080)
		for _, c := range foreign {
			run(s.t, s.script(c.rules))
			predicted, _ := s.predict(s.read(), service.TCP, 1, to)
			if c.maybe != (predicted.Verdict == "maybe") {
				s.t.Errorf("%s: predicted %v, undecided: want %v", c.name, predicted, c.maybe)
			} else if !c.maybe {
				if diff := s.differs(predicted, to); diff != "" {
					s.t.Errorf("%s (-predicted +real):\n%s", c.name, diff)
				}
			}
			run(s.t, s.script("flush"))
		}
	})
}

// TestPredictsUsedUp: limits of each client, and lists of clients, tell what they have seen.
func TestPredictsUsedUp(t *testing.T) {
	onEachKernel(t, func(s *scene) {
		to := netip.AddrPortFrom(s.Address(s.family, 2), 8080)
		for _, rules := range []string{
			`-A FORWARD -p tcp --syn -m hashlimit --hashlimit-name used --hashlimit-mode srcip --hashlimit-upto 1/hour --hashlimit-burst 1 -j ACCEPT; -A FORWARD -p tcp --syn -j R`,
			`-A FORWARD -p tcp --syn -m recent --name often --set; -A FORWARD -p tcp --syn -m recent --name often --update --seconds 600 --hitcount 2 -j R`,
		} {
			run(s.t, s.script(rules))
			for _, want := range []string{"answered", "maybe"} {
				if predicted, _ := s.predict(s.read(), service.TCP, 1, to); predicted.Verdict != want {
					s.t.Errorf("%s: predicted %v, want %s", rules, predicted, want)
				}
				real := map[string]string{"maybe": "refused"}[want]
				if got := s.measure(1, service.TCP, 1, to, true).Verdict; got != real && got != want {
					s.t.Errorf("%s: real packets: %s", rules, got)
				}
			}
			run(s.t, s.script("flush"))
		}
	})
}

// script makes a shell script of a case's rules.
func (s *scene) script(rules string) string {
	program := s.variant.Program[s.family] + " -w 5"
	if rules == "flush" {
		// A table that is restored without chains has none but its own, which are empty.
		script := "printf '*filter\\n:FORWARD ACCEPT\\nCOMMIT\\n"
		for _, table := range []string{"raw", "mangle", "nat", "security"} {
			script += "*" + table + "\\nCOMMIT\\n"
		}
		script += "' | " + s.variant.Program[s.family] + "-restore -w 5; "
		// The nft variant lets go of sets a moment after its rules.
		return script + "ipset flush; for i in 1 2 3 4 5 6 7 8 9 10; do ipset destroy && break; sleep 0.02; done; " +
			"conntrack -F 2>/dev/null || true"
	}
	rules = s.words(rules)
	var out []string
	for part := range strings.SplitSeq(rules, ";") {
		part = strings.TrimSpace(part)
		if rest, ok := strings.CutSuffix(part, "-j R"); ok {
			// With a reset where it can be: not every client is told by ICMP.
			switch {
			case !strings.Contains(rest, "-p "):
				part = rest + "-p tcp -j REJECT --reject-with tcp-reset"
			case strings.Contains(rest, " -p tcp") && !strings.Contains(rest, "! -p tcp"):
				part = rest + "-j REJECT --reject-with tcp-reset"
			default:
				part = rest + "-j REJECT"
			}
		}
		if strings.HasPrefix(part, "-") {
			part = program + " " + part
		}
		out = append(out, part)
	}
	// Only the first packet is what is predicted. (A rule for untracked ones would
	// meet its answers.)
	out = append(out, program+" -I FORWARD -m conntrack ! --ctstate NEW,INVALID,UNTRACKED -j ACCEPT")
	return strings.Join(out, "\n")
}

// words fills in what depends on the family.
func (s *scene) words(text string) string {
	for {
		before, rest, ok := strings.Cut(text, "{")
		if !ok {
			break
		}
		choice, after, _ := strings.Cut(rest, "}")
		v4, v6, _ := strings.Cut(choice, "|")
		text = before + map[service.Family]string{service.IPv4: v4, service.IPv6: v6}[s.family] + after
	}
	text += " "
	client, server := s.Address(s.family, 1).String(), s.Address(s.family, 2).String()
	return strings.NewReplacer(" C ", " "+client+" ", " C,", " "+client+",", " C;", " "+client+";",
		" S ", " "+server+" ", " S,", " "+server+",").Replace(text)
}
