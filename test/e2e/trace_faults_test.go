package e2e

import (
	"cmp"
	big "encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace"
)

// fault is one thing that goes wrong on a packet's way.
type fault struct {
	name string
	in   []plan.DataPlane // in which it stops clients; all if none is named
	by   string           // the steering
	// stopped: kproxy is stopped meanwhile, or it would repair what is its own.
	stopped bool
	at      string // the service: one, with the one endpoint b1, if empty; two has b2
	six     bool   // by IPv6
	udp     bool
	probed  bool // with --probe, which costs seconds, so in mode nftables only
	// Lines are run on the node, or where a prefix says: "b1: ip link …". Of the words
	// {b1}, {b2} and {client} namespaces' paths are made, of {chain} the chain of default/web:line.
	plant, lift []string
	elsewhere   bool   // the remedy isn't a command for the node
	remedy      string // a command that is in the culprit, and is run before what lifts the fault

	fate     string // of real packets; empty for some of each
	verdict  trace.Verdict
	culprit  []string // words of it; none if nothing is to be stopped
	mismatch []string // words of one
	warning  []string // words of one
	unused   string   // backend that gets nothing
}

var (
	inUserspace = []plan.DataPlane{plan.Userspace}
	inKernel    = []plan.DataPlane{plan.IPTables, plan.IPVS, plan.NFTables}
	inDNAT      = []plan.DataPlane{plan.IPTables, plan.NFTables}
	inIPTables  = []plan.DataPlane{plan.IPTables}
	inIPVS      = []plan.DataPlane{plan.IPVS}
	inNFTables  = []plan.DataPlane{plan.NFTables}
)

// Whose steering fault is about; in any mode if nothing is said. By iptables, kproxy accepts what is its own
// before a firewall drops it, which nftables can't.
const (
	byIPTables = "iptables"
	byNFTables = "nftables"
)

var faults = []fault{
	// The client's own namespace.
	{
		name: "a mesh that is down", plant: []string{"client: iptables -t nat -A OUTPUT -d 10.96.0.20 -p tcp -j REDIRECT --to-ports 9"},
		lift: []string{"client: iptables -t nat -D OUTPUT 1"},
		fate: isRefused, verdict: trace.Refused, culprit: []string{"in network namespace {client}", "leads the packet to 127.0.0.1:9", "nothing listens", "rule 1 of chain OUTPUT in table nat"},
	},
	{
		name: "the client's firewall", plant: []string{"client: nft add table ip guard { chain in { type filter hook input priority 0 ; ip saddr 10.96.0.20 drop ; } ; }"},
		lift: []string{"client: nft delete table ip guard"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"in network namespace {client}", "the answer of 10.96.0.20:80", "chain in in nftables table ip guard"},
	},
	{
		name: "the client has no way out", plant: []string{"client: ip route del default"}, lift: []string{"client: ip route add default via 10.1.0.1"},
		fate: isRefused, verdict: trace.Refused, culprit: []string{"in network namespace {client}", "no way to 10.96.0.20: there is no route"},
	},
	{
		name: "the client's neighbour entry of its gateway is wrong", plant: []string{"client: ip neigh replace 10.1.0.1 lladdr 02:00:00:00:de:ad dev eth0 nud permanent"},
		remedy: "ip neigh del 10.1.0.1 dev eth0", lift: []string{"client: ip neigh del 10.1.0.1 dev eth0"}, elsewhere: true,
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"in network namespace {client}", "the neighbour entry of 10.1.0.1 on eth0 is wrong", "02:00:00:00:de:ad"},
	},
	{
		name: "the client drops what it sends later", plant: []string{"client: iptables -A OUTPUT -p tcp --dport 80 -m conntrack --ctstate ESTABLISHED -j DROP"}, lift: []string{"client: iptables -F OUTPUT"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"in network namespace {client}", "completes the handshake", "rule 1 of chain OUTPUT in table filter"},
	},
	// The endpoint's own namespace.
	{
		name: "the endpoint's firewall drops", probed: true, plant: []string{"b1: iptables -A INPUT -p tcp -j DROP"}, lift: []string{"b1: iptables -F INPUT"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"in network namespace {b1}, where endpoint 10.2.0.2:9000 is", "drops the packet", "rule 1 of chain INPUT in table filter", "in that network namespace, find out who made it"},
	},
	{
		name: "the endpoint's firewall resets", plant: []string{"b1: iptables -A INPUT -p tcp -j REJECT --reject-with tcp-reset"}, lift: []string{"b1: iptables -F INPUT"},
		fate: isRefused, verdict: trace.Refused, culprit: []string{"in network namespace {b1}", "refuses the packet", "rule 1 of chain INPUT in table filter"},
	},
	{
		name: "the endpoint's nftables drop", plant: []string{"b1: nft add table inet guard { chain in { type filter hook input priority 10 ; policy drop ; ct state established accept ; tcp dport 22 accept ; } ; }"},
		lift: []string{"b1: nft delete table inet guard"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"in network namespace {b1}", "the policy of chain in in nftables table inet guard"},
	},
	{
		name: "the endpoint's firewall drops answers", plant: []string{"b1: iptables -A OUTPUT -p tcp --sport 9000 -j DROP"}, lift: []string{"b1: iptables -F OUTPUT"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"in network namespace {b1}", "the answer of 10.2.0.2:9000", "rule 1 of chain OUTPUT in table filter"},
	},
	{
		name: "the endpoint's firewall drops later packets", probed: true, plant: []string{"b1: iptables -A INPUT -p tcp -m conntrack --ctstate ESTABLISHED -j DROP"}, lift: []string{"b1: iptables -F INPUT"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"in network namespace {b1}", "completes the handshake", "rule 1 of chain INPUT in table filter"},
	},
	{
		name: "the endpoint's firewall admits what it is for", probed: true, plant: []string{"b1: iptables -A INPUT -m conntrack --ctstate INVALID -j DROP", "b1: iptables -A INPUT -m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT", "b1: iptables -A INPUT -p tcp --dport 9000 -j ACCEPT",
			"b1: iptables -A INPUT -p tcp -j DROP", "b1: iptables -A OUTPUT -p tcp --dport 9000 -j DROP"}, lift: []string{"b1: iptables -F INPUT", "b1: iptables -F OUTPUT"},
		fate: isAnswered, verdict: trace.Forwarded,
	},
	{
		name: "the endpoint's gateway isn't there", plant: []string{"b1: ip route replace default via 10.2.0.77 dev eth0 onlink"}, lift: []string{"b1: ip route replace default via 10.2.0.1 dev eth0 onlink"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"in network namespace {b1}", "answers don't get to the client", "which doesn't have 10.2.0.77"},
	},
	{
		name: "the endpoint has the client's network on another link", plant: []string{"b1: ip link add docker0 type bridge", "b1: ip addr add 10.1.0.77/16 dev docker0", "b1: ip link set docker0 up"}, lift: []string{"b1: ip link del docker0"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"in network namespace {b1}", "answers don't get to the client", "link docker0"},
	},
	{
		name: "the endpoint's strict reverse path filter", plant: []string{"b1: sysctl -qw net.ipv4.conf.eth0.rp_filter=1", "b1: ip route add 10.1.0.2/32 dev lo"}, lift: []string{"b1: ip route del 10.1.0.2/32 dev lo", "b1: sysctl -qw net.ipv4.conf.eth0.rp_filter=0"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"in network namespace {b1}", "reverse path filter", "net.ipv4.conf.eth0.rp_filter = 1"},
	},
	{
		name: "ARP is off on the endpoint's link", plant: []string{"b1: ip link set eth0 arp off", "ip neigh flush dev b1"}, lift: []string{"b1: ip link set eth0 arp on", "b1: ip neigh flush dev eth0", "ip neigh flush dev b1"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"{b1}", "ARP is off on", "arp on"},
	},
	{
		name: "the endpoint answers no ARP", plant: []string{"b1: sysctl -qw net.ipv4.conf.eth0.arp_ignore=8", "ip neigh flush dev b1"}, lift: []string{"b1: sysctl -qw net.ipv4.conf.eth0.arp_ignore=0", "ip neigh flush dev b1"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"{b1} has 10.2.0.2, and doesn't answer for it", "arp_ignore is 8"},
	},
	// Packets after the first.
	{
		name: "later packets are dropped", probed: true, plant: []string{"iptables -t mangle -I PREROUTING 1 -s 10.1.0.0/16 -p tcp -m conntrack --ctstate ESTABLISHED -j DROP"},
		remedy: "iptables -t mangle -D PREROUTING 1",
		fate:   isSilent, verdict: trace.Dropped, culprit: []string{"completes the handshake", "rule 1 of chain PREROUTING in table mangle"},
	},
	{
		name: "later packets are reset", in: inDNAT, plant: []string{"iptables -I FORWARD 1 -d 10.2.0.0/16 -p tcp -m conntrack --ctstate ESTABLISHED -j REJECT --reject-with tcp-reset"},
		remedy: "iptables -t filter -D FORWARD 1",
		fate:   isRefused, verdict: trace.Refused, culprit: []string{"completes the handshake", "rule 1 of chain FORWARD in table filter"},
	},
	{
		name: "established connections are accepted first", plant: []string{"iptables -I FORWARD 1 -m conntrack --ctstate INVALID -j DROP", "iptables -I INPUT 1 -m conntrack --ctstate INVALID -j DROP", "iptables -t mangle -I PREROUTING 1 -p tcp ! --syn -m conntrack --ctstate NEW -j DROP"},
		lift: []string{"iptables -D FORWARD 1", "iptables -D INPUT 1", "iptables -t mangle -D PREROUTING 1"},
		fate: isAnswered, verdict: trace.Forwarded,
	},
	{
		name: "answers aren't tracked", in: inDNAT, plant: []string{"iptables -t raw -I PREROUTING 1 -s 10.2.0.0/16 -p tcp --sport 9000 -j CT --notrack"},
		remedy: "iptables -t raw -D PREROUTING 1",
		fate:   isSilent, verdict: trace.Dropped, culprit: []string{"the answer of 10.2.0.2:9000", "isn't translated to 10.96.0.20:80", "rule 1 of chain PREROUTING in table raw"},
	},
	{
		name: "kproxy's answers aren't tracked", in: inUserspace, plant: []string{"iptables -t raw -I OUTPUT 1 -p tcp --sport 10244 -j CT --notrack"},
		remedy: "iptables -t raw -D OUTPUT 1",
		fate:   isSilent, verdict: trace.Dropped, culprit: []string{"the answer of 169.254.102.49:10244", "rule 1 of chain OUTPUT in table raw"},
	},
	{
		name: "a zone for what the client sends", in: append(slices.Clone(inUserspace), inDNAT...), plant: []string{"iptables -t raw -I PREROUTING 1 -i client -j CT --zone 5"},
		remedy: "iptables -t raw -D PREROUTING 1",
		fate:   isSilent, verdict: trace.Dropped, culprit: []string{"conntrack doesn't find the connection of the answer", "--zone 5", "rule 1 of chain PREROUTING in table raw"},
	},
	{
		name: "a zone of nftables for what the client sends", in: append(slices.Clone(inUserspace), inDNAT...),
		plant: []string{"nft add table ip guard", "nft add chain ip guard pre {type filter hook prerouting priority raw; policy accept;}", `nft add rule ip guard pre iifname "client" ct zone set 5`}, lift: []string{"nft delete table ip guard"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"conntrack doesn't find the connection of the answer", "zone set", "chain pre"},
	},
	{
		name: "a zone for both ways", in: inDNAT, plant: []string{"iptables -t raw -I PREROUTING 1 -j CT --zone 5"}, remedy: "", lift: []string{"iptables -t raw -D PREROUTING 1"},
		fate: isAnswered, verdict: trace.Forwarded,
	},
	{
		name:  "what has the service's address is dropped on its way back",
		plant: []string{"nft add table ip guard", "nft add chain ip guard post {type filter hook postrouting priority 200; policy accept;}", "nft add rule ip guard post ip saddr 10.96.0.20 drop"}, lift: []string{"nft delete table ip guard"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"the answer of", "ip saddr 10.96.0.20 drop", "chain post"},
	},
	// Foreign rules.
	{
		name: "DNAT to where nothing listens", plant: []string{"iptables -t nat -I PREROUTING 1 -d 10.96.0.20 -p tcp --dport 80 -j DNAT --to-destination 10.2.0.3:7777"},
		remedy: "iptables -t nat -D PREROUTING 1",
		fate:   isRefused, verdict: trace.Refused, culprit: []string{"10.2.0.3:7777", "no endpoint of default/one:line", "-j DNAT --to-destination 10.2.0.3:7777", "rule 1 of chain PREROUTING in table nat"},
	},
	{
		name: "DNAT to where nobody is", plant: []string{"iptables -t nat -I PREROUTING 1 -d 10.96.0.20 -p tcp --dport 80 -j DNAT --to-destination 203.0.113.9:80"},
		remedy: "iptables -t nat -D PREROUTING 1",
		fate:   isSilent, verdict: trace.Undetermined, culprit: []string{"203.0.113.9:80", "leave by client", "neither has that address nor forwards", "rule 1 of chain PREROUTING in table nat"},
	},
	{
		name: "redirect to where nothing listens", plant: []string{"iptables -t nat -I PREROUTING 1 -d 10.96.0.20 -p tcp --dport 80 -j REDIRECT --to-ports 9"},
		remedy: "iptables -t nat -D PREROUTING 1",
		fate:   isRefused, verdict: trace.Refused, culprit: []string{"isn't kproxy's leads the packet to 10.1.0.1:9", "nothing listens", "REDIRECT --to-ports 9"},
	},
	{
		name: "redirect to another program", plant: []string{"iptables -t nat -I PREROUTING 1 -d 10.96.0.20 -p tcp --dport 80 -j REDIRECT --to-ports 10256"},
		remedy: "iptables -t nat -D PREROUTING 1",
		fate:   isRefused, verdict: trace.NotAService, culprit: []string{"isn't kproxy's leads the packet to 10.1.0.1:10256", "REDIRECT --to-ports 10256"},
	},
	{
		name: "TPROXY to where nothing listens", plant: []string{"iptables -t mangle -I PREROUTING 1 -d 10.96.0.20 -p tcp --dport 80 -j TPROXY --on-ip 127.0.0.1 --on-port 9 --tproxy-mark 0x1"},
		remedy: "iptables -t mangle -D PREROUTING 1",
		fate:   isSilent, verdict: trace.Dropped, culprit: []string{"TPROXY", "nothing listens"},
	},
	{
		name: "untracked", in: inDNAT, plant: []string{"iptables -t raw -I PREROUTING 1 -d 10.96.0.20 -j CT --notrack"},
		remedy: "iptables -t raw -D PREROUTING 1",
		fate:   isSilent, verdict: trace.NotAService, culprit: []string{"NOTRACK", "rule 1 of chain PREROUTING in table raw"},
	},
	{
		name: "a rule drops in raw PREROUTING", plant: []string{"iptables -t raw -I PREROUTING 1 -d 10.96.0.20 -j DROP"},
		remedy: "iptables -t raw -D PREROUTING 1",
		fate:   isSilent, verdict: trace.Dropped, culprit: []string{"rule 1 of chain PREROUTING in table raw"},
	},
	{
		name: "a rule drops in FORWARD", in: inDNAT, plant: []string{"iptables -I FORWARD 1 -d 10.2.0.0/16 -j DROP"},
		remedy: "iptables -t filter -D FORWARD 1",
		fate:   isSilent, verdict: trace.Dropped, culprit: []string{"-d 10.2.0.0/16", "rule 1 of chain FORWARD in table filter"},
	},
	{
		name: "a rule resets in FORWARD", in: inDNAT, plant: []string{"iptables -I FORWARD 1 -p tcp --dport 9000 -j REJECT --reject-with tcp-reset"},
		remedy: "iptables -t filter -D FORWARD 1",
		fate:   isRefused, verdict: trace.Refused, culprit: []string{"refuses the packet", "rule 1 of chain FORWARD in table filter"},
	},
	{
		name: "a rule drops answers in FORWARD", in: inKernel, plant: []string{"iptables -I FORWARD 1 -s 10.2.0.0/16 -j DROP"},
		remedy: "iptables -t filter -D FORWARD 1",
		fate:   isSilent, verdict: trace.Dropped, culprit: []string{"-s 10.2.0.0/16", "the answer of 10.2.0.", "rule 1 of chain FORWARD in table filter"},
	},
	{
		name: "a closing rule of FORWARD", in: inDNAT, by: byIPTables, plant: []string{"iptables -A FORWARD -j DROP"}, lift: []string{"iptables -D FORWARD -j DROP"},
		fate: isAnswered, verdict: trace.Forwarded, // kproxy accepts what is its own before
	},
	{
		name: "the policy of FORWARD", in: inKernel, by: byIPTables, plant: []string{"iptables -P FORWARD DROP"}, lift: []string{"iptables -P FORWARD ACCEPT"},
		fate: isAnswered, verdict: trace.Forwarded, // kproxy accepts what is its own
	},
	{
		name: "the policy of INPUT", by: byIPTables, plant: []string{"iptables -P INPUT DROP"}, lift: []string{"iptables -P INPUT ACCEPT"},
		fate: isAnswered, verdict: trace.Forwarded,
	},
	{
		name: "the policy of FORWARD, of another program", in: inNFTables, by: byNFTables, plant: []string{"iptables -P FORWARD DROP"},
		remedy: "iptables -t filter -A FORWARD -m conntrack --ctstate DNAT --ctorigdst 10.96.0.20 --ctorigdstport 80 -j ACCEPT",
		lift:   []string{"iptables -D FORWARD -m conntrack --ctstate DNAT --ctorigdst 10.96.0.20 --ctorigdstport 80 -j ACCEPT", "iptables -P FORWARD ACCEPT"},
		fate:   isSilent, verdict: trace.Dropped, culprit: []string{"the policy of chain FORWARD in table filter"},
	},
	{
		name: "a closing rule of FORWARD, of another program", in: inNFTables, by: byNFTables, plant: []string{"iptables -A FORWARD -j DROP"}, remedy: "iptables -t filter -D FORWARD 1",
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"rule 1 of chain FORWARD in table filter"},
	},
	{
		name: "the policy of INPUT, of another program", in: inUserspace, by: byNFTables, plant: []string{"iptables -P INPUT DROP"}, lift: []string{"iptables -P INPUT ACCEPT"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"the policy of chain INPUT in table filter"},
	},
	{
		name: "the policy of OUTPUT, of another program", in: inUserspace, by: byNFTables, plant: []string{"iptables -P OUTPUT DROP"}, lift: []string{"iptables -P OUTPUT ACCEPT"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"the policy of chain OUTPUT in table filter", "accept this, and no more"},
	},
	{
		name: "the policy of OUTPUT, for kproxy's answers", in: inUserspace, by: byIPTables, plant: []string{"iptables -P OUTPUT DROP"},
		remedy: "iptables -t filter -A OUTPUT -s 169.254.102.49 -p tcp --sport 10244 -m conntrack --ctstate ESTABLISHED -j ACCEPT", lift: []string{"iptables -P OUTPUT ACCEPT", "iptables -D OUTPUT -s 169.254.102.49 -p tcp --sport 10244 -m conntrack --ctstate ESTABLISHED -j ACCEPT"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"the policy of chain OUTPUT in table filter", "the answer of"},
	},
	{
		name: "the policy of OUTPUT", in: inKernel, probed: true, plant: []string{"iptables -P OUTPUT DROP"}, lift: []string{"iptables -P OUTPUT ACCEPT"},
		fate: isAnswered, verdict: trace.Forwarded,
	},
	{
		name: "a rule refuses in INPUT", in: inUserspace, probed: true, plant: []string{"iptables -I INPUT 1 -p tcp -j REJECT"},
		remedy: "iptables -t filter -D INPUT 1",
		fate:   isRefused, verdict: trace.Refused, culprit: []string{"-p tcp -j REJECT", "rule 1 of chain INPUT in table filter"},
	},
	{
		name: "a rule drops kproxy's connections in OUTPUT", in: inUserspace, plant: []string{"iptables -I OUTPUT 1 -p tcp --dport 9000 -j DROP"},
		remedy: "iptables -t filter -D OUTPUT 1",
		fate:   isSilent, verdict: trace.Dropped, culprit: []string{"--dport 9000", "rule 1 of chain OUTPUT in table filter"},
	},
	{
		name: "a rule drops kproxy's answers in OUTPUT", in: inUserspace, plant: []string{"iptables -I OUTPUT 1 -d 10.1.0.2 -j DROP"},
		remedy: "iptables -t filter -D OUTPUT 1",
		fate:   isSilent, verdict: trace.Dropped, culprit: []string{"-d 10.1.0.2/32 -j DROP", "the answer of", "rule 1 of chain OUTPUT in table filter"},
	},
	{
		name: "nftables drops in forward", in: inDNAT,
		plant: []string{"nft add table ip guard", "nft add chain ip guard fw {type filter hook forward priority 10; policy accept;}", "nft add rule ip guard fw tcp dport 9000 drop"},
		lift:  []string{"nft delete table ip guard"},
		fate:  isSilent, verdict: trace.Dropped, culprit: []string{"guard", "tcp dport 9000 drop", "nft -a list chain ip guard fw"},
	},
	{
		name: "the policy of a chain of nftables", in: inDNAT,
		plant:  []string{"nft add table inet guard", "nft add chain inet guard fw {type filter hook forward priority 10; policy drop;}"},
		remedy: "nft add rule inet guard fw meta l4proto tcp ct original ip daddr 10.96.0.20 ct original proto-dst 80 accept", lift: []string{"nft delete table inet guard"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"the policy of chain fw in nftables table inet guard"},
	},
	{
		name: "a program decides", in: inDNAT, plant: []string{"iptables -I FORWARD 1 -p tcp --dport 9000 -j NFQUEUE --queue-num 77"},
		remedy: "iptables -t filter -D FORWARD 1",
		fate:   isSilent, verdict: trace.Undetermined, culprit: []string{"decides by itself", "NFQUEUE", "rule 1 of chain FORWARD"},
	},
	// What administrators' tools write.
	{
		name:  "firewalld", // accepts what is translated
		plant: []string{"nft add table inet firewalld { chain filter_FORWARD { type filter hook forward priority filter + 10 ; policy accept ; ct state { established, related } accept ; ct status dnat accept ; iifname lo accept ; ct state invalid drop ; reject with icmpx admin-prohibited ; } ; }"},
		lift:  []string{"nft delete table inet firewalld"},
		fate:  isAnswered, verdict: trace.Forwarded,
	},
	{
		name: "firewalld with StrictForwardPorts", in: inDNAT,
		plant: []string{"nft add table inet firewalld { chain filter_FORWARD { type filter hook forward priority filter + 10 ; policy accept ; ct state { established, related } accept ; iifname lo accept ; ct state invalid drop ; reject with icmpx admin-prohibited ; } ; }"},
		lift:  []string{"nft delete table inet firewalld"},
		fate:  isRefused, verdict: trace.Refused, culprit: []string{"reject with icmpx", "admin-prohibited", "chain filter_FORWARD in nftables table inet firewalld"},
	},
	{
		name: "Docker, and an administrator's rule", in: inDNAT,
		plant: []string{"iptables -P FORWARD DROP", "iptables -N DOCKER", "iptables -N DOCKER-USER", "iptables -A DOCKER-USER -i client -j DROP", "iptables -A DOCKER-USER -j RETURN",
			"iptables -I FORWARD 1 -i docker0 ! -o docker0 -j ACCEPT", "iptables -I FORWARD 1 -o docker0 -j DOCKER", "iptables -I FORWARD 1 -o docker0 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", "iptables -I FORWARD 1 -j DOCKER-USER"},
		lift: []string{"iptables -P FORWARD ACCEPT", "iptables -D FORWARD 1", "iptables -D FORWARD 1", "iptables -D FORWARD 1", "iptables -D FORWARD 1",
			"iptables -F DOCKER-USER", "iptables -X DOCKER-USER", "iptables -X DOCKER"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"-i client -j DROP", "rule 1 of chain DOCKER-USER in table filter"},
	},
	{
		name: "fail2ban has banned the client", in: inUserspace,
		plant: []string{"iptables -N f2b-recidive", "iptables -A f2b-recidive -j RETURN", "iptables -I INPUT 1 -p tcp -j f2b-recidive", "iptables -I f2b-recidive 1 -s 10.1.0.2 -j REJECT --reject-with icmp-port-unreachable"},
		lift:  []string{"iptables -D INPUT 1", "iptables -F f2b-recidive", "iptables -X f2b-recidive"},
		fate:  isRefused, verdict: trace.Refused, culprit: []string{"-s 10.1.0.2/32 -j REJECT", "rule 1 of chain f2b-recidive in table filter"},
	},
	{
		name: "Calico's policy of the endpoint", in: inDNAT,
		plant: []string{"iptables -N cali-FORWARD", "iptables -N cali-to-wl-dispatch", "iptables -N cali-tw-b1", "iptables -N cali-pi-https",
			"iptables -A cali-FORWARD -j MARK --set-xmark 0x0/0xe0000", "iptables -A cali-FORWARD -o b+ -j cali-to-wl-dispatch", "iptables -A cali-FORWARD -m mark --mark 0x10000/0x10000 -j ACCEPT",
			"iptables -A cali-to-wl-dispatch -o b1 -g cali-tw-b1", "iptables -A cali-to-wl-dispatch -j DROP",
			"iptables -A cali-tw-b1 -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT", "iptables -A cali-tw-b1 -m conntrack --ctstate INVALID -j DROP", "iptables -A cali-tw-b1 -j MARK --set-xmark 0x0/0x10000",
			"iptables -A cali-tw-b1 -j MARK --set-xmark 0x0/0x20000", "iptables -A cali-tw-b1 -m mark --mark 0x0/0x20000 -j cali-pi-https", "iptables -A cali-tw-b1 -m mark --mark 0x10000/0x10000 -j RETURN",
			"iptables -A cali-tw-b1 -m mark --mark 0x0/0x20000 -j DROP",
			"iptables -A cali-pi-https -p tcp -m multiport --dports 443 -j MARK --set-xmark 0x10000/0x10000", "iptables -A cali-pi-https -m mark --mark 0x10000/0x10000 -j RETURN", "iptables -I FORWARD 1 -j cali-FORWARD"},
		lift: []string{"iptables -D FORWARD 1", "iptables -F cali-FORWARD", "iptables -F cali-to-wl-dispatch", "iptables -F cali-tw-b1",
			"iptables -X cali-FORWARD", "iptables -X cali-to-wl-dispatch", "iptables -X cali-tw-b1", "iptables -F cali-pi-https", "iptables -X cali-pi-https"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"-m mark --mark 0x0/0x20000 -j DROP", "rule 7 of chain cali-tw-b1 in table filter"},
	},
	// What packets carry, and how many there are.
	{
		name: "the hop limit is used up", in: inDNAT, plant: []string{"iptables -t mangle -I PREROUTING 1 -d 10.96.0.20 -p tcp -j TTL --ttl-set 1"}, remedy: "iptables -t mangle -D PREROUTING 1",
		verdict: trace.Refused, culprit: []string{"hop limit (TTL) is used up", "TTL --ttl-set 1", "rule 1 of chain PREROUTING in table mangle"},
	},
	{
		name: "the hop limit of what userspace carries", in: inUserspace, plant: []string{"iptables -t mangle -I PREROUTING 1 -d 10.96.0.20 -p tcp -j TTL --ttl-set 1"}, remedy: "iptables -t mangle -D PREROUTING 1",
		verdict: trace.Refused, culprit: []string{"hop limit (TTL) is used up", "TTL --ttl-set 1", "rule 1 of chain PREROUTING in table mangle"},
	},
	{
		name: "the answers' hop limit is used up", in: inDNAT, plant: []string{"nft add table ip guard { chain c { type filter hook prerouting priority -150 ; ip saddr 10.2.0.0/16 ip ttl set 1 ; } ; }"},
		lift: []string{"nft delete table ip guard"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"doesn't forward the answers of 10.2.0.2", "ip saddr 10.2.0.0/16 ip ttl set 1", "chain c in nftables table ip guard"},
	},
	{
		name: "hop limits that no client has", plant: []string{"iptables -t raw -I PREROUTING 1 -m ttl --ttl-lt 10 -j DROP"}, lift: []string{"iptables -t raw -D PREROUTING 1"},
		fate: isAnswered, verdict: trace.Forwarded,
	},
	{
		name: "the client's hop limit", plant: []string{"iptables -t raw -I PREROUTING 1 -i client -m ttl --ttl-eq 64 -j DROP"}, remedy: "iptables -t raw -D PREROUTING 1",
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"--ttl-eq 64", "rule 1 of chain PREROUTING in table raw"},
	},
	{
		name: "small MSS", plant: []string{"iptables -t raw -I PREROUTING 1 -p tcp --syn -m tcpmss --mss 1:500 -j DROP"}, lift: []string{"iptables -t raw -D PREROUTING 1"},
		fate: isAnswered, verdict: trace.Forwarded,
	},
	{
		name: "the client's MSS", plant: []string{"iptables -t raw -I PREROUTING 1 -p tcp --syn -m tcpmss ! --mss 536:1400 -j DROP"}, remedy: "iptables -t raw -D PREROUTING 1",
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"! --mss 536:1400", "rule 1 of chain PREROUTING in table raw"},
	},
	{
		name: "the length of a SYN", plant: []string{"nft add table ip guard { chain c { type filter hook prerouting priority -300 ; iifname client tcp flags syn meta length 60 drop ; } ; }"},
		lift: []string{"nft delete table ip guard"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"meta length 60 drop", "rule 1 of chain c in nftables table ip guard"},
	},
	{
		name: "generous limits of each client",
		plant: []string{
			"iptables -t mangle -I PREROUTING 1 -p tcp --syn -m hashlimit --hashlimit-name e2e --hashlimit-mode srcip --hashlimit-above 10000/s --hashlimit-burst 10000 -j DROP",
			"iptables -t mangle -I PREROUTING 1 -p tcp --syn -m connlimit --connlimit-above 5000 -j DROP",
			"nft add table ip guard { set s { type ipv4_addr ; flags dynamic ; } ; chain c { type filter hook prerouting priority -150 ; tcp flags syn add @s { ip saddr limit rate over 10000/second burst 10000 packets } drop ; } ; }",
		},
		lift: []string{"nft delete table ip guard", "iptables -t mangle -D PREROUTING 1", "iptables -t mangle -D PREROUTING 1"},
		fate: isAnswered, verdict: trace.Forwarded,
	},
	// The order of chains, and tables that aren't live.
	{
		name: "a dormant table", plant: []string{"nft add table ip guard { flags dormant ; chain c { type filter hook prerouting priority -300 ; policy drop ; } ; }"}, lift: []string{"nft delete table ip guard"},
		fate: isAnswered, verdict: trace.Forwarded,
	},
	{
		name: "a nat chain that was loaded later", plant: []string{"nft add table ip later { chain c { type nat hook prerouting priority dstnat ; ip daddr 10.96.0.20 tcp dport 80 dnat to 10.2.0.3:7777 ; } ; }"},
		lift: []string{"nft delete table ip later"},
		fate: isRefused, verdict: trace.Refused, culprit: []string{"10.2.0.3:7777", "no endpoint of default/one:line", "rule 1 of chain c in nftables table ip later"},
	},
	{
		name: "a rule accepts before kproxy's, of userspace", in: inUserspace, by: byIPTables, plant: []string{"iptables -t nat -I PREROUTING 1 -d 10.96.0.0/16 -j ACCEPT"},
		remedy: "iptables -t nat -D PREROUTING 1",
		fate:   isSilent, verdict: trace.Dropped, culprit: []string{"accepts the packet before kproxy's do", "-d 10.96.0.0/16 -j ACCEPT", "behind kproxy's jump"},
	},
	{
		name: "a rule accepts before kproxy's", in: inIPTables, plant: []string{"iptables -t nat -I PREROUTING 1 -d 10.96.0.0/16 -j ACCEPT"},
		remedy: "iptables -t nat -D PREROUTING 1",
		fate:   isSilent, verdict: trace.NotAService, culprit: []string{"accepts the packet before kproxy's do", "-d 10.96.0.0/16 -j ACCEPT", "behind kproxy's jump"},
	},
	{
		name: "untracked answers to kproxy", in: inUserspace, plant: []string{"iptables -t raw -I PREROUTING 1 -s 10.2.0.0/16 -p tcp --sport 9000 -j CT --notrack"}, lift: []string{"iptables -t raw -D PREROUTING 1"},
		fate: isAnswered, verdict: trace.Forwarded,
	},
	// Routes, links and neighbours.
	{
		name: "one endpoint's route is a blackhole", at: "web", in: inKernel, plant: []string{"ip route replace blackhole 10.2.0.2/32 metric 0"}, lift: []string{"ip route replace 10.2.0.2/32 dev b1 scope link metric 0"},
		verdict: trace.Forwarded, culprit: []string{"on the way to 10.2.0.2:9000", "no way to 10.2.0.2", "blackhole", "ip route get 10.2.0.2"},
	},
	{
		name: "the endpoint's route is a blackhole", in: inDNAT, plant: []string{"ip route replace blackhole 10.2.0.2/32 metric 0"}, lift: []string{"ip route replace 10.2.0.2/32 dev b1 scope link metric 0"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"no way to 10.2.0.2", "of type blackhole", "delete it"},
	},
	{
		name: "the endpoint's route is a blackhole, and the sender is told", in: append(slices.Clone(inUserspace), plan.IPVS), plant: []string{"ip route replace blackhole 10.2.0.2/32 metric 0"}, lift: []string{"ip route replace 10.2.0.2/32 dev b1 scope link metric 0"},
		fate: isRefused, verdict: trace.Refused, culprit: []string{"no way to 10.2.0.2", "of type blackhole", "delete it"},
	},
	{
		name: "a rule of routing is a blackhole", in: inDNAT, plant: []string{"ip rule add pref 5 to 10.2.0.2 blackhole"}, lift: []string{"ip rule delete pref 5"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"no way to 10.2.0.2", "blackhole", "ip rule show"},
	},
	{
		name: "the endpoint's route is unreachable", plant: []string{"ip route replace unreachable 10.2.0.2/32 metric 0"}, lift: []string{"ip route replace 10.2.0.2/32 dev b1 scope link metric 0"},
		fate: isRefused, verdict: trace.Refused, culprit: []string{"no way to 10.2.0.2", "of type unreachable", "delete it"},
	},
	{
		name: "the endpoint's route is prohibited", plant: []string{"ip route replace prohibit 10.2.0.2/32 metric 0"}, lift: []string{"ip route replace 10.2.0.2/32 dev b1 scope link metric 0"},
		fate: isRefused, verdict: trace.Refused, culprit: []string{"no way to 10.2.0.2", "of type prohibit", "delete it"},
	},
	{
		name: "the endpoint's route is missing", plant: []string{"ip route delete 10.2.0.2/32 dev b1"}, remedy: "ip route add 10.2.0.2/32 dev b1",
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"the route to 10.2.0.2 is missing", "the default route, on client"},
	},
	{
		name: "no route at all", plant: []string{"ip route delete 10.2.0.2/32 dev b1", "ip route delete default"}, remedy: "ip route add 10.2.0.2/32 dev b1", lift: []string{"ip route add default via 10.1.0.2"},
		fate: isRefused, verdict: trace.Refused, culprit: []string{"no way to 10.2.0.2: there is no route"},
	},
	{
		name: "the endpoint's link is down", plant: []string{"ip link set b1 down"}, remedy: "ip link set dev b1 up", lift: []string{"ip route add 10.2.0.2/32 dev b1"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"the route to 10.2.0.2 is missing", "down, and without the routes that went by them, is b1"},
	},
	{
		name: "the link's other end is down", plant: []string{"b1: ip link set eth0 down"}, remedy: "nsenter --net={b1} ip link set dev eth0 up", lift: []string{"b1: ip route add default via 10.2.0.1 dev eth0 onlink"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"link b1", "has no carrier"},
	},
	{
		name: "the endpoint's neighbour entry is wrong", plant: []string{"ip neigh replace 10.2.0.2 lladdr 02:00:00:00:de:ad dev b1 nud permanent"}, remedy: "ip neigh del 10.2.0.2 dev b1",
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"the neighbour entry of 10.2.0.2 on b1 is wrong", "02:00:00:00:de:ad", "PERMANENT"},
	},
	{
		name: "the client's neighbour entry is wrong", plant: []string{"ip neigh replace 10.1.0.2 lladdr 02:00:00:00:de:ad dev client nud permanent"}, remedy: "ip neigh del 10.1.0.2 dev client",
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"answers", "the neighbour entry of 10.1.0.2 on client is wrong", "02:00:00:00:de:ad"},
	},
	{
		name: "the endpoint's address is gone", plant: []string{"b1: ip addr delete 10.2.0.2/32 dev eth0", "ip neigh flush dev b1"}, lift: []string{"b1: ip addr add 10.2.0.2/32 dev eth0", "b1: ip route replace default via 10.2.0.1 dev eth0 onlink", "ip neigh flush dev b1"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"link b1 leads to network namespace {b1}, which doesn't have 10.2.0.2"},
	},
	{
		name: "the endpoint has no way back", plant: []string{"b1: ip route delete default"}, lift: []string{"b1: ip route add default via 10.2.0.1 dev eth0 onlink"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"in network namespace {b1}", "answers don't get to the client: no way to 10.1.0.2: there is no route"},
	},
	{
		name: "the path is narrower than the client's link", in: inKernel, plant: []string{"ip link set b1 mtu 500"}, remedy: "", lift: []string{"ip link set b1 mtu 1500"},
		fate: isAnswered, verdict: trace.Forwarded, warning: []string{"up to 1500 bytes", "only 500 pass", "link b1", "ip link set dev b1 mtu 1500"},
	},
	{
		name: "the way is narrower than the endpoint's link", in: inKernel, plant: []string{"ip link set client mtu 1300"}, lift: []string{"ip link set client mtu 1500"},
		fate: isAnswered, verdict: trace.Forwarded, warning: []string{"from the endpoint", "only 1300 pass on the way to 10.1.0.2", "link client"},
	},
	{
		name: "a rule of routing by the endpoint's port, behind IPVS", in: inIPVS, plant: []string{"ip rule add pref 5 ipproto tcp dport 9000 prohibit"}, lift: []string{"ip rule delete pref 5"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"no way to 10.2.0.2", "of type prohibit"},
	},
	{
		name: "a rule of routing prohibits what comes from the client, behind IPVS", in: inIPVS, plant: []string{"ip rule add pref 5 from 10.1.0.2 to 10.2.0.0/16 prohibit"}, lift: []string{"ip rule delete pref 5"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"no way to 10.2.0.2", "of type prohibit"},
	},
	{
		name: "a rule of routing by the endpoint's port", in: append(slices.Clone(inUserspace), inDNAT...), plant: []string{"ip rule add pref 5 ipproto tcp dport 9000 prohibit"}, lift: []string{"ip rule delete pref 5"},
		fate: isRefused, verdict: trace.Refused, culprit: []string{"no way to 10.2.0.2", "of type prohibit"},
	},
	{
		name: "a rule of routing by a port that is nobody's", plant: []string{"ip rule add pref 5 ipproto tcp dport 9001 prohibit"}, lift: []string{"ip rule delete pref 5"},
		fate: isAnswered, verdict: trace.Forwarded,
	},
	{
		name: "a rule of routing prohibits what comes from the client", in: append(slices.Clone(inUserspace), inDNAT...), plant: []string{"ip rule add pref 5 from 10.1.0.2 to 10.2.0.0/16 prohibit"}, lift: []string{"ip rule delete pref 5"},
		fate: isRefused, verdict: trace.Refused, culprit: []string{"no way to 10.2.0.2", "of type prohibit"},
	},
	{
		name: "another program's source, which no one has", in: inDNAT, plant: []string{"iptables -t nat -I POSTROUTING 1 -d 10.2.0.2 -p tcp -j SNAT --to-source 192.0.2.99"}, remedy: "", lift: []string{"iptables -t nat -D POSTROUTING 1"},
		fate: isAnswered, verdict: trace.Forwarded, // the pod answers by the node all the same
	},
	{
		name: "a rule of routing leads answers past kproxy", in: inUserspace,
		plant: []string{"ip rule add pref 5 fwmark 0x1000/0x1800 to 10.1.0.2 lookup main"}, lift: []string{"ip rule delete pref 5"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"don't reach kproxy", "10.1.0.2", "mark 0x1000", "ip rule"},
	},
	{
		name: "a rule of routing prohibits what the endpoint sends", in: append(slices.Clone(inUserspace), inDNAT...), plant: []string{"ip rule add pref 5 from 10.2.0.2 prohibit"}, lift: []string{"ip rule delete pref 5"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"the answers of 10.2.0.2 don't", "of type prohibit", "from 10.2.0.2"},
	},
	{
		name: "the endpoint's address is also this node's", in: append(slices.Clone(inUserspace), inDNAT...), plant: []string{"ip addr add 10.2.0.2/32 dev client"}, remedy: "ip addr del 10.2.0.2/32 dev client",
		fate: isRefused, verdict: trace.Refused, culprit: []string{"the endpoint's address 10.2.0.2 is also this node's, on link client"},
	},
	{
		name: "what a transparent proxy left", in: inDNAT, plant: []string{"ip route add local 0.0.0.0/0 dev lo table 77", "ip rule add pref 5 fwmark 0x40000000/0x40000000 lookup 77", "iptables -t mangle -I PREROUTING 1 -d 10.96.0.20 -j MARK --set-xmark 0x40000000/0x40000000"},
		lift: []string{"iptables -t mangle -D PREROUTING 1", "ip rule delete pref 5", "ip route flush table 77"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"a route delivers packets for 10.2.0.2 to this node", "ip route show table 77"},
	},
	{
		name: "ARP is off on the link to the endpoint", plant: []string{"ip link set b1 arp off", "ip neigh flush dev b1"}, remedy: "ip link set dev b1 arp on", lift: []string{"ip neigh flush dev b1"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"ARP is off on", "link b1"},
	},
	{
		name: "ARP is off on the link to the client", plant: []string{"ip link set client arp off", "ip neigh flush dev client"}, remedy: "ip link set dev client arp on", lift: []string{"ip neigh flush dev client"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"ARP is off on", "link client"},
	},
	// The same by IPv6, and by UDP. (A link that was down has lost what it had of IPv6: b2's was not.)
	{
		name: "IPv6: the endpoint's firewall drops", six: true, at: "two", plant: []string{"b2: ip6tables -A INPUT -p tcp -j DROP"}, lift: []string{"b2: ip6tables -F INPUT"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"in network namespace {b2}, where endpoint [fd00:2::3]:9000 is", "drops the packet", "rule 1 of chain INPUT in table filter", "ip6tables -t filter -D INPUT 1"},
	},
	{
		name: "IPv6: the endpoint's firewall drops answers", six: true, at: "two", plant: []string{"b2: ip6tables -A OUTPUT -p tcp --sport 9000 -j DROP"}, lift: []string{"b2: ip6tables -F OUTPUT"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"in network namespace {b2}", "the answer of [fd00:2::3]:9000", "rule 1 of chain OUTPUT in table filter"},
	},
	{
		name: "the endpoint's neighbour entry of its gateway is wrong", plant: []string{"b1: ip neigh replace 10.2.0.1 lladdr 02:00:00:00:de:ad dev eth0 nud permanent"},
		remedy: "ip neigh del 10.2.0.1 dev eth0", lift: []string{"b1: ip neigh del 10.2.0.1 dev eth0"}, elsewhere: true,
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"in network namespace {b1}", "the neighbour entry of 10.2.0.1 on eth0 is wrong", "02:00:00:00:de:ad"},
	},
	{
		name: "IPv6: the endpoint's neighbour entry of its gateway is wrong", six: true, at: "two", plant: []string{"b2: ip neigh replace fd00:2::1 lladdr 02:00:00:00:de:ad dev eth0 nud permanent"},
		remedy: "ip neigh del fd00:2::1 dev eth0", lift: []string{"b2: ip neigh del fd00:2::1 dev eth0"}, elsewhere: true,
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"in network namespace {b2}", "the neighbour entry of fd00:2::1 on eth0 is wrong", "02:00:00:00:de:ad"},
	},
	{
		name: "IPv6: later packets are dropped", six: true, at: "two", plant: []string{"ip6tables -t mangle -I PREROUTING 1 -s fd00:1::/64 -p tcp -m conntrack --ctstate ESTABLISHED -j DROP"},
		remedy: "ip6tables -t mangle -D PREROUTING 1",
		fate:   isSilent, verdict: trace.Dropped, culprit: []string{"completes the handshake", "rule 1 of chain PREROUTING in table mangle"},
	},
	{
		name: "IPv6: a zone for what the client sends", in: append(slices.Clone(inUserspace), inDNAT...), six: true, at: "two", plant: []string{"ip6tables -t raw -I PREROUTING 1 -i client -j CT --zone 5"},
		remedy: "ip6tables -t raw -D PREROUTING 1",
		fate:   isSilent, verdict: trace.Dropped, culprit: []string{"conntrack doesn't find the connection of the answer", "--zone 5", "rule 1 of chain PREROUTING in table raw"},
	},
	{
		name: "IPv6: the hop limit is used up", in: append(slices.Clone(inUserspace), inDNAT...), six: true, at: "two", plant: []string{"ip6tables -t mangle -I PREROUTING 1 -d fd00:96::16 -p tcp -j HL --hl-set 1"}, remedy: "ip6tables -t mangle -D PREROUTING 1",
		verdict: trace.Refused, culprit: []string{"hop limit (TTL) is used up", "HL --hl-set 1", "rule 1 of chain PREROUTING in table mangle"},
	},
	{
		name: "UDP: the endpoint's firewall drops", udp: true, probed: true, plant: []string{"b1: iptables -A INPUT -p udp -j DROP"}, lift: []string{"b1: iptables -F INPUT"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"in network namespace {b1}, where endpoint 10.2.0.2:9000 is", "drops the packet", "rule 1 of chain INPUT in table filter"},
	},
	{
		name: "UDP by IPv6: the endpoint's firewall refuses", in: inDNAT, six: true, at: "two", udp: true, plant: []string{"b2: ip6tables -A INPUT -p udp -j REJECT"}, lift: []string{"b2: ip6tables -F INPUT"},
		fate: isRefused, verdict: trace.Refused, culprit: []string{"in network namespace {b2}, where endpoint [fd00:2::3]:9000 is", "refuses the packet", "rule 1 of chain INPUT in table filter"},
	},
	{
		name: "UDP: answers are dropped", udp: true, plant: []string{"iptables -t mangle -I PREROUTING 1 -s 10.2.0.0/16 -p udp --sport 9000 -j DROP"},
		remedy: "iptables -t mangle -D PREROUTING 1",
		fate:   isSilent, verdict: trace.Dropped, culprit: []string{"the answer of 10.2.0.2:9000", "rule 1 of chain PREROUTING in table mangle"},
	},
	{
		name: "UDP: answers aren't tracked", in: inDNAT, udp: true, plant: []string{"iptables -t raw -I PREROUTING 1 -s 10.2.0.0/16 -p udp --sport 9000 -j CT --notrack"},
		remedy: "iptables -t raw -D PREROUTING 1",
		fate:   isSilent, verdict: trace.Dropped, culprit: []string{"the answer of 10.2.0.2:9000", "isn't translated to 10.96.0.20:80", "rule 1 of chain PREROUTING in table raw"},
	},
	{
		name: "UDP: a rule for what TCP sends", udp: true, plant: []string{"iptables -t raw -I PREROUTING 1 -p tcp -j DROP", "iptables -t mangle -I PREROUTING 1 -p udp --dport 81 -j DROP"},
		lift: []string{"iptables -t raw -D PREROUTING 1", "iptables -t mangle -D PREROUTING 1"},
		fate: isAnswered, verdict: trace.Forwarded,
	},
	// Settings.
	{
		name:  "strict reverse path filter, and another way back",
		plant: []string{"sysctl -qw net.ipv4.conf.client.rp_filter=1", "ip route add 10.1.0.2/32 dev b2"},
		lift:  []string{"sysctl -qw net.ipv4.conf.client.rp_filter=0", "ip route del 10.1.0.2/32 dev b2"},
		fate:  isSilent, verdict: trace.Dropped, culprit: []string{"reverse path filter", "comes in on client", "net.ipv4.conf.client.rp_filter = 1 (strict)", "sysctl -w net.ipv4.conf.client.rp_filter=2"},
	},
	{
		name: "sources are looked up by the mark", in: inUserspace, plant: []string{"sysctl -qw net.ipv4.conf.all.src_valid_mark=1"}, lift: []string{"sysctl -qw net.ipv4.conf.all.src_valid_mark=0"},
		fate: isAnswered, verdict: trace.Forwarded, // kproxy's rules of routing spare them
	},
	{
		name: "sources are looked up by the mark, and are this node's by it", in: inUserspace,
		plant:  []string{"sysctl -qw net.ipv4.conf.all.src_valid_mark=1", "ip rule add pref 5 iif lo fwmark 0x1000/0x1800 to 10.2.0.0/16 lookup 10249"},
		remedy: "sysctl -w net.ipv4.conf.all.src_valid_mark=0", lift: []string{"ip rule delete pref 5"},
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"the answers of 10.2.0.2", "net.ipv4.conf.all.src_valid_mark = 1"},
	},
	{
		name: "what the client's link brings isn't forwarded", in: inDNAT, plant: []string{"sysctl -qw net.ipv4.conf.client.forwarding=0"}, remedy: "sysctl -w net.ipv4.conf.client.forwarding=1",
		fate: isSilent, verdict: trace.Dropped, culprit: []string{"doesn't forward", "come in on client"},
	},
	// Endpoints.
	{
		name: "nothing listens at the target port", at: "closed",
		fate: isRefused, verdict: trace.Refused, culprit: []string{"nothing listens at tcp 10.2.0.2:9999", "{b1}", "targetPort"},
	},
	// What is kproxy's own.
	{
		name: "an entry is missing in the userspace set", in: inUserspace, by: byIPTables, stopped: true, at: "web",
		plant: []string{"ipset del KPROXY-USER-4 10.96.0.10,tcp:80"}, lift: []string{"ipset add KPROXY-USER-4 10.96.0.10,tcp:80"},
		verdict: trace.Forwarded, mismatch: []string{"entry 10.96.0.10,tcp:80 of set KPROXY-USER-4", "missing"}, fate: isAnswered,
	},
	{
		name: "an entry is in the userspace set that isn't to be there", in: inKernel, by: byIPTables, stopped: true, at: "web",
		plant: []string{"ipset add KPROXY-USER-4 10.96.0.10,tcp:80"}, lift: []string{"ipset del KPROXY-USER-4 10.96.0.10,tcp:80"},
		verdict: trace.Undetermined, mismatch: []string{"entry 10.96.0.10,tcp:80 of set KPROXY-USER-4", "not there"}, fate: isSilent,
	},
	{
		name: "the policy of FORWARD, and one of kproxy's entries is missing", in: inIPTables, stopped: true, at: "one",
		plant: []string{"iptables -P FORWARD DROP", "ipset del KPROXY-ENDPOINT-4 10.2.0.2,tcp:9000,10.2.0.2"},
		lift:  []string{"ipset add KPROXY-ENDPOINT-4 10.2.0.2,tcp:9000,10.2.0.2", "iptables -P FORWARD ACCEPT"},
		fate:  isSilent, verdict: trace.Dropped, culprit: []string{"kproxy's own rule doesn't accept", "entry 10.2.0.2,tcp:9000,10.2.0.2 of set KPROXY-ENDPOINT-4 is missing", "kproxy repairs"},
		mismatch: []string{"entry 10.2.0.2,tcp:9000,10.2.0.2 of set KPROXY-ENDPOINT-4", "missing"},
	},
	{
		name: "a DNAT rule is missing", in: inIPTables, stopped: true, at: "web",
		plant: []string{"iptables -t nat -D {chain} 2"}, lift: []string{"iptables -t nat -I {chain} 2 -p tcp -m statistic --mode nth --every 2 --packet 0 -j DNAT --to-destination 10.2.0.3:9000"},
		verdict: trace.Forwarded, mismatch: []string{"10.2.0.3:9000", "there", "missing"}, fate: isAnswered, unused: "b2",
	},
	{
		name: "a DNAT rule leads elsewhere", in: inIPTables, stopped: true, at: "web",
		plant:   []string{"iptables -t nat -R {chain} 2 -p tcp -m statistic --mode nth --every 2 --packet 0 -j DNAT --to-destination 10.2.0.2:9000"},
		lift:    []string{"iptables -t nat -R {chain} 2 -p tcp -m statistic --mode nth --every 2 --packet 0 -j DNAT --to-destination 10.2.0.3:9000"},
		verdict: trace.Forwarded, mismatch: []string{"10.2.0.3:9000", "there", "missing"}, fate: isAnswered, unused: "b2",
	},
	{
		name: "somebody else's rule is in a shared chain", in: inIPTables, stopped: true, at: "web",
		plant: []string{"iptables -t nat -I KPROXY-SERVICES 1 -p tcp -m tcp --dport 9 -j RETURN"}, lift: []string{"iptables -t nat -D KPROXY-SERVICES 1"},
		verdict: trace.Forwarded, mismatch: []string{"--dport 9 -j RETURN", "chain KPROXY-SERVICES in table nat", "not there", "rule 1"}, fate: isAnswered,
	},
	{
		name: "forwarding is off", in: inDNAT, stopped: true, at: "web",
		plant: []string{"sysctl -qw net.ipv4.ip_forward=0"}, lift: []string{"sysctl -qw net.ipv4.ip_forward=1"},
		verdict: trace.Dropped, culprit: []string{"doesn't forward", "net.ipv4.ip_forward", "sysctl -w"}, fate: isSilent,
	},
	{
		name: "forwarding is off, and answers don't come back", in: inIPVS, stopped: true, at: "web",
		plant: []string{"sysctl -qw net.ipv4.ip_forward=0"}, lift: []string{"sysctl -qw net.ipv4.ip_forward=1"},
		verdict: trace.Dropped, culprit: []string{"doesn't forward", "answers don't come back", "net.ipv4.ip_forward"}, fate: isSilent,
	},
	{
		name: "a real server is missing", in: inIPVS, stopped: true, at: "web",
		plant: []string{"ipvsadm -d -t 10.96.0.10:80 -r 10.2.0.3:9000"}, lift: []string{"ipvsadm -a -t 10.96.0.10:80 -r 10.2.0.3:9000 -m -w 1"},
		verdict: trace.Forwarded, mismatch: []string{"real server 10.2.0.3:9000", "weight 1", "missing"}, fate: isAnswered, unused: "b2",
	},
	{
		name: "a weight is another", in: inIPVS, stopped: true, at: "web",
		plant: []string{"ipvsadm -e -t 10.96.0.10:80 -r 10.2.0.3:9000 -m -w 0"}, lift: []string{"ipvsadm -e -t 10.96.0.10:80 -r 10.2.0.3:9000 -m -w 1"},
		verdict: trace.Forwarded, mismatch: []string{"real server 10.2.0.3:9000", "weight 1", "weight 0"}, fate: isAnswered, unused: "b2",
	},
	{
		name: "the address isn't on the link", in: inIPVS, stopped: true, at: "web",
		plant: []string{"ip addr del 10.96.0.10/32 dev kproxy0"}, lift: []string{"ip addr add 10.96.0.10/32 dev kproxy0"},
		verdict: trace.NotAService, culprit: []string{"address 10.96.0.10 on link kproxy0", "missing"}, fate: isSilent,
	},
	{
		name: "the virtual server is missing", in: inIPVS, stopped: true, at: "web",
		plant:   []string{"ipvsadm -D -t 10.96.0.10:80"},
		verdict: trace.Refused, mismatch: []string{"virtual server tcp 10.96.0.10:80", "missing"}, fate: "",
	},
	{
		name: "an element is missing in the set userspace", in: inUserspace, by: byNFTables, stopped: true, at: "web",
		plant: []string{"nft delete element ip kproxy userspace { 10.96.0.10 . tcp . 80 }"}, lift: []string{"nft add element ip kproxy userspace { 10.96.0.10 . tcp . 80 }"},
		verdict: trace.Forwarded, mismatch: []string{"element 10.96.0.10 . tcp . 80 of set userspace of table ip kproxy", "missing"}, fate: isAnswered,
	},
	{
		name: "an element is in the set userspace that isn't to be there", in: inNFTables, stopped: true, at: "web",
		plant: []string{"nft add element ip kproxy userspace { 10.96.0.10 . tcp . 80 }"}, lift: []string{"nft delete element ip kproxy userspace { 10.96.0.10 . tcp . 80 }"},
		verdict: trace.Undetermined, mismatch: []string{"element 10.96.0.10 . tcp . 80 of set userspace", "not there"}, fate: isSilent,
	},
	{
		name: "an endpoint's element is missing", in: inNFTables, stopped: true, at: "web",
		plant: []string{"nft delete element ip kproxy backends { 10.96.0.10 . tcp . 80 . 0x1 }"}, lift: []string{"nft add element ip kproxy backends { 10.96.0.10 . tcp . 80 . 0x1 : 10.2.0.3 . 9000 }"},
		verdict: trace.Forwarded, mismatch: []string{"10.96.0.10 . tcp . 80 . 0x00000001 : 10.2.0.3 . 9000 of set backends", "missing"}, unused: "",
	},
	{
		name: "a service's element is missing", in: inNFTables, stopped: true, at: "web",
		plant: []string{"nft delete element ip kproxy services { 10.96.0.10 . tcp . 80 }"}, lift: []string{"nft add element ip kproxy services { 10.96.0.10 . tcp . 80 : goto pick-3 }"},
		verdict: trace.Refused, culprit: []string{"leads packets for 10.96.0.10:80", "kproxy repairs"}, mismatch: []string{"10.96.0.10 . tcp . 80", "of set services", "missing"}, fate: isRefused,
	},
	{
		name: "a chain of kproxy's is empty", in: inNFTables, stopped: true, at: "web",
		plant:   []string{"nft flush chain ip kproxy services"},
		verdict: trace.Refused, culprit: []string{"leads packets for 10.96.0.10:80"}, mismatch: []string{"chain services of table ip kproxy", "0 rules"}, fate: isRefused,
	},
	{
		// The last one: kproxy repairs it when it goes on.
		name: "the jump is missing", in: inIPTables, stopped: true, at: "web",
		plant:   []string{"iptables -t nat -D PREROUTING 1"},
		verdict: trace.NotAService, culprit: []string{"KPROXY-SERVICES", "chain PREROUTING in table nat", "missing"}, fate: isSilent,
	},
}

func (f *fault) family() int {
	if f.six {
		return 1
	}
	return 0
}

func (f *fault) protocol() service.Protocol {
	if f.udp {
		return service.UDP
	}
	return service.TCP
}

// TestTraceNamesFaults: whatever goes wrong on a packet's way, real packets fare as trace
// says, trace names it, and once it is mended, by the remedy where that is a command, they
// are answered and trace says so.
func TestTraceNamesFaults(t *testing.T) {
	w := newWorld(t)
	services := map[string]lab.Manifest{
		"web": newManifest("web", 10, w.net.Backends...), "one": newManifest("one", 20, w.net.Backends[0]), "closed": newManifest("closed", 21, w.net.Backends[0]),
		"two": newManifest("two", 22, w.net.Backends[1]),
	}
	services["closed"].Ports[0].Target = 9999
	for _, m := range services {
		w.must(m.Write(w.manifests))
	}
	w.node("sysctl", "-qw", "net.ipv4.icmp_ratelimit=0") // or a client that is told too often would wait
	w.start("--health-check", "off", "--alive-timeout", within(4*time.Minute).String())
	for plane, preference := range map[plan.DataPlane]service.Preference{plan.Userspace: service.PreferUserspace, w.plane: service.PreferKernel} {
		for name := range services {
			w.pin(name, "line", preference)
			w.pin(name, "datagram", preference)
		}
		w.settled()
		var proxy *trace.Proxy
		for _, stopped := range []bool{false, true} {
			if stopped {
				w.must(w.net.Node.Do(func() (err error) {
					proxy, err = w.proxyOf(preference)
					return err
				}))
				w.must(w.proxy.Signal(syscall.SIGSTOP))
			}
			for _, f := range faults {
				steering := map[bool]string{true: byNFTables, false: byIPTables}[mode == plan.ModeNFTables]
				if f.stopped == stopped && (f.in == nil || slices.Contains(f.in, plane)) && (f.by == "" || f.by == steering) {
					f.at = frontends(services[cmp.Or(f.at, "one")])[f.family()].String()
					t.Run(string(plane)+"/"+f.name, func(t *testing.T) { w.faulty(t, proxy, f) })
				}
			}
		}
		w.must(w.proxy.Signal(syscall.SIGCONT))
	}
}

// faulty plants one fault, looks, and mends it. proxy is what a stopped kproxy knows.
func (w *world) faulty(t *testing.T, proxy *trace.Proxy, f fault) {
	client, at := w.net.Config.ClientAddresses(0)[f.family()], netip.MustParseAddrPort(f.at)
	look := func() trace.Result {
		req := trace.Request{Address: at, From: client, Protocol: f.protocol(), Probe: f.probed && mode == plan.ModeNFTables}
		if f.stopped {
			return w.tracedStopped(proxy, req)
		}
		return w.traced(req)
	}
	for _, line := range f.plant {
		w.at(line)
	}
	r := look()
	if f.fate != "" {
		wait := lasting(300 * time.Millisecond)
		if f.fate != isSilent { // an endpoint's first reset is kept from the client, until kproxy has asked the endpoint
			wait = patience(10 * time.Second)
		}
		got := fateOf(w.askFrom(client, f.protocol().String(), at, wait))
		t.Logf("planted: packets are %s; verdict %s: %s", got, r.Verdict, r.Culprit)
		if got != f.fate {
			t.Errorf("real packets: %s, want %s", got, f.fate)
		}
	}
	if r.Probe != nil {
		probeAgrees(t, r, f.fate)
	}
	if f.unused != "" {
		w.unused(t, &r, at, f.unused)
	}
	var words []string
	for _, word := range f.culprit {
		words = append(words, w.withPaths(word))
	}
	if f.remedy != "" {
		remedy := f.remedy
		if variant == "legacy" {
			remedy = strings.ReplaceAll(remedy, "tables ", "tables-legacy ")
		}
		words = append(words, w.withPaths(remedy))
	}
	if words != nil || f.mismatch == nil && f.warning == nil {
		names(t, r, f.verdict, words...)
	} else if r.Verdict != f.verdict {
		t.Errorf("verdict %s, want %s\n%s", r.Verdict, f.verdict, r.Text(trace.Look{}))
	}
	if strings.Contains(r.Culprit, "-P ") || strings.Contains(r.Culprit, " -F") {
		t.Errorf("the remedy opens the host: %s", r.Culprit)
	}
	if f.mismatch != nil {
		mismatched(t, r, f.mismatch...)
	}
	if f.warning != nil && !slices.ContainsFunc(r.Findings, func(x trace.Finding) bool {
		return x.Severity == trace.SeverityWarning && !slices.ContainsFunc(f.warning, func(word string) bool { return !strings.Contains(x.What+x.Where+x.Remedy, word) })
	}) {
		t.Errorf("no warning says %q\n%s", f.warning, r.Text(trace.Look{}))
	}
	w.mend(t, f, look)
}

// probeAgrees checks that a probe fares as real packets do, and says that it confirms the verdict.
func probeAgrees(t *testing.T, r trace.Result, fate string) {
	t.Helper()
	outcomes := map[string][]string{isAnswered: {"connected", "answered"}, isRefused: {"refused", "unreachable"}, isSilent: {"timeout", "no answer"}}[fate]
	if r.DataPlane == plan.Userspace && fate == isSilent {
		outcomes = append(outcomes, "refused") // once kproxy gives up
	}
	if says := "confirms that the packet is " + string(r.Verdict); !slices.Contains(outcomes, r.Probe.Outcome) || r.Probe.Says != says {
		t.Errorf("real packets are %s; the probe's outcome is %q (%s), and it %q, want it %q", fate, r.Probe.Outcome, r.Probe.Note, r.Probe.Says, says)
	}
}

// mend mends a fault, and sees that it is.
func (w *world) mend(t *testing.T, f fault, look func() trace.Result) {
	alone := f.remedy != "" && !strings.HasPrefix(f.remedy, "ip link") && !strings.HasPrefix(f.remedy, "nsenter") // or routes have to be mended as well
	if alone = alone && !f.elsewhere; f.remedy != "" && !f.elsewhere {
		w.at(w.withPaths(f.remedy))
	}
	good := func() {
		w.eventually(10*time.Second, "a good trace", func() error {
			r := look()
			if good := r.Verdict == trace.Forwarded || f.stopped && r.DataPlane == plan.Userspace; !good || r.Culprit != "" || len(r.Mismatches) > 0 {
				return errors.New(r.Text(trace.Look{}))
			}
			return nil
		})
		if !f.stopped {
			w.answered(f.protocol().String(), netip.MustParseAddrPort(f.at))
		}
	}
	if alone {
		good()
	}
	for _, line := range f.lift {
		w.at(line)
	}
	if len(f.plant) > 0 && len(f.lift) > 0 {
		good()
	}
	if t.Failed() {
		w.Errorf("%s failed", f.name)
	}
}

// at runs a line on the node, or in the namespace that it begins with.
func (w *world) at(line string) {
	w.Helper()
	name, rest, ok := strings.Cut(line, ": ")
	at := w.net.Client
	if b := w.net.Backend(name); b != nil {
		at = b.Namespace
	}
	if ok && (name == "client" || at != w.net.Client) {
		words := strings.Fields(rest)
		if out, err := at.Output(w.ctx, words[0], words[1:]...); err != nil {
			w.Fatalf("%s: %v\n%s", line, err, out)
		}
		return
	}
	w.inflict(variant, line)
}

// withPaths replaces the names of namespaces by their paths.
func (w *world) withPaths(text string) string {
	return strings.NewReplacer("{b1}", w.net.Backends[0].Namespace.Path(), "{b2}", w.net.Backends[1].Namespace.Path(), "{client}", w.net.Client.Path()).Replace(text)
}

// unused checks that a backend gets nothing, and that the trace says so.
func (w *world) unused(t *testing.T, r *trace.Result, at netip.AddrPort, name string) {
	if all := w.backendsOf(w.net.Client, at, 12); all[name] > 0 {
		t.Errorf("answered by %v, want nothing of %s", all, name)
	}
	for _, c := range r.Candidates {
		if c.Endpoint.Addr() == w.net.Backend(name).Addresses[0] && c.Probability > 0 {
			t.Errorf("%s has a probability of %v, and gets nothing", c.Endpoint, c.Probability)
		}
	}
}

// TestTraceNamesWhatTheServiceLacks: source ranges, traffic policies, endpoints
// that are dead, and none at all.
func TestTraceNamesWhatTheServiceLacks(t *testing.T) {
	w := newWorld(t)
	inside, outside := w.net.Config.ClientAddresses(0)[0], w.net.Config.ClientAddresses(1)[0]
	ranged := newManifest("ranged", 10, w.net.Backends...)
	ranged.Type, ranged.LoadBalancerIPs = "LoadBalancer", []netip.Addr{netip.MustParseAddr("192.0.2.11")}
	ranged.SourceRanges = []netip.Prefix{netip.PrefixFrom(inside, 32)}
	empty := newManifest("empty", 11)
	local := newManifest("local", 12, w.net.Backends...)
	local.Type, local.ExternalLocal, local.ExternalIPs = "NodePort", true, []netip.Addr{netip.MustParseAddr("192.0.2.12")}
	for i := range local.Endpoints {
		local.Endpoints[i].Node = "another"
	}
	for _, m := range []lab.Manifest{ranged, empty, local} {
		w.must(m.Write(w.manifests))
	}
	w.start("--health-check", "off")
	lb, none, ext := netip.MustParseAddrPort("192.0.2.11:80"), frontends(empty)[0], netip.MustParseAddrPort("192.0.2.12:80")
	for _, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel} {
		t.Run(string(plane), func(t *testing.T) {
			w.pin("ranged", "line", plane)
			for _, c := range []struct {
				at      netip.AddrPort
				from    netip.Addr
				fate    string
				verdict trace.Verdict
				culprit []string
			}{
				{lb, inside, isAnswered, trace.Forwarded, nil},
				{lb, outside, isSilent, trace.Dropped, []string{outside.String(), "source ranges", "default/ranged:line", "loadBalancerSourceRanges"}},
				{none, inside, isRefused, trace.Refused, []string{"default/empty:line", "has no endpoint", "no endpoints at all"}},
				{ext, inside, isSilent, trace.Dropped, []string{"default/local:line", "no endpoint on this node", "Local"}},
			} {
				names(t, w.traced(trace.Request{Address: c.at, From: c.from}), c.verdict, c.culprit...)
				if got := w.fate(c.from, c.at); got != c.fate {
					t.Errorf("real packets from %s to %s: %s, want %s", c.from, c.at, got, c.fate)
				}
			}
		})
	}
	w.Run("dead endpoint", func(t *testing.T) {
		w.net.Backends[0].Stop()
		r := w.traced(trace.Request{Address: frontends(ranged)[0], Probe: true})
		names(t, r, trace.Forwarded, "on the way to 10.2.0.2:9000", "nothing listens", "whether the program there runs")
		if !slices.ContainsFunc(r.Findings, func(x trace.Finding) bool { return strings.Contains(x.What, "endpoint 10.2.0.2:9000 is dead") }) {
			w.Errorf("the probe doesn't say that 10.2.0.2:9000 is dead: %q", r.Findings)
		}
	})
}

// TestTraceOfADeadKproxy: with kproxy killed, trace says what the kernel does by
// itself, and what it doesn't.
func TestTraceOfADeadKproxy(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		mode    plan.Mode
		verdict string
		culprit string
		fate    string
	}{
		{plan.ModeUserspace, "REFUSED", "kproxy isn't running, and the kernel has no rules of its own for it", isRefused},
		{mode, "FORWARDED", "", isAnswered},
	} {
		t.Run(string(c.mode), func(t *testing.T) {
			w := newWorld(t)
			m := newManifest("web", 10, w.net.Backends...)
			w.must(m.Write(w.manifests))
			w.start("--mode", string(c.mode))
			w.ready() // with the kernel's own rules
			at := frontends(m)[0]
			w.ask(w.net.Client, "tcp", at)
			w.must(w.proxy.Kill())
			w.heartbeatEnds(c.mode == plan.ModeNFTables)
			client := w.net.Config.ClientAddresses(0)[0]
			w.kproxy("trace", "--socket", w.socket(), "--from", client.String(), at.String()).wants(t, 1, "nothing was traced", "without --socket")
			out := w.node(binary, "trace", "--from", client.String(), at.String())
			for _, want := range []string{"reading the kernel alone", c.verdict + "  tcp " + at.String()} {
				if !strings.Contains(out, want) {
					t.Errorf("the output doesn't say %q:\n%s", want, out)
				}
			}
			if flat := strings.Join(strings.Fields(out), " "); !strings.Contains(flat, c.culprit) {
				t.Errorf("the output doesn't say %q:\n%s", c.culprit, out)
			}
			if err := w.askFrom(client, "tcp", at, lasting(1500*time.Millisecond)); fateOf(err) != c.fate {
				t.Errorf("real packets: %v, want %s; the trace:\n%s", err, c.fate, out)
			}
		})
	}
}

// heartbeatEnds waits until the kernel takes a kproxy that was killed or stopped for dead.
func (w *world) heartbeatEnds(byNFTables bool) {
	w.Helper()
	w.eventually(10*time.Second, "the heartbeat to expire", func() error {
		if byNFTables {
			return errors.Join(w.kproxyOnNode("nft list set ip kproxy alive", "tcp", false), w.kproxyOnNode("nft list set ip6 kproxy alive", "tcp", false))
		}
		return errors.Join(w.kproxyOnNode("ipset list KPROXY-ALIVE-4", "0.0.0.0/1", false), w.kproxyOnNode("ipset list KPROXY-ALIVE-6", "::/1", false))
	})
}

// intruder sits on a backend and answers every TCP packet that clients send to
// its line server with one more, far outside of the window, as if it came from
// the server. It counts the resets that come back. (What the sequence numbers
// are it sees; a reset with these ends the connection.)
type intruder struct {
	packets, raw [2]int // file descriptors, by family: to see, to send
	sent, resets atomic.Int64
	stop         atomic.Bool
	done         chan struct{}
}

// intrude starts an intruder on a backend until the test's end.
func (w *world) intrude(b *lab.Backend) *intruder {
	w.Helper()
	in := &intruder{done: make(chan struct{}, 2)}
	w.must(b.Namespace.Do(in.open))
	for f := range in.packets {
		go in.run(f)
	}
	w.Cleanup(func() {
		in.stop.Store(true)
		for range in.packets {
			<-in.done
		}
		for f := range in.packets {
			unix.Close(in.packets[f])
			unix.Close(in.raw[f])
		}
	})
	return in
}

func (in *intruder) open() (err error) {
	for f, family := range []int{unix.AF_INET, unix.AF_INET6} {
		ether := []uint16{unix.ETH_P_IP, unix.ETH_P_IPV6}[f]
		if in.packets[f], err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, int(ether>>8|ether<<8)); err != nil {
			return fmt.Errorf("open packet socket: %w", err)
		}
		if err := unix.SetsockoptTimeval(in.packets[f], unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 100_000}); err != nil {
			return fmt.Errorf("set time limit: %w", err)
		}
		if in.raw[f], err = unix.Socket(family, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_TCP); err != nil {
			return fmt.Errorf("open raw socket: %w", err)
		}
	}
	return nil
}

func (in *intruder) run(f int) {
	defer func() { in.done <- struct{}{} }()
	b := make([]byte, 65536)
	for !in.stop.Load() {
		n, _, err := unix.Recvfrom(in.packets[f], b, 0)
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return
		}
		in.take(f, b[:n])
	}
}

// take looks at an IP packet.
func (in *intruder) take(f int, b []byte) {
	src, dst, tcp, ok := addressesOf(f, b)
	if !ok || big.BigEndian.Uint16(tcp[2:]) != lab.LinePort {
		return
	}
	const fin, syn, rst = 1, 2, 4
	flags, header := tcp[13], int(tcp[12]>>4)*4
	switch {
	case flags&rst != 0:
		in.resets.Add(1)
		return
	case flags&(fin|syn) != 0:
		return
	}
	next := big.BigEndian.Uint32(tcp[4:]) + uint32(len(tcp)-header) // what the server expects of the client
	out := make([]byte, 20)
	copy(out, tcp[2:4])     // from the server's port
	copy(out[2:], tcp[0:2]) // to the client's
	big.BigEndian.PutUint32(out[4:], big.BigEndian.Uint32(tcp[8:])+1<<30)
	big.BigEndian.PutUint32(out[8:], next)
	out[12], out[13] = 5<<4, 16 // ACK
	big.BigEndian.PutUint16(out[14:], 512)
	big.BigEndian.PutUint16(out[16:], checksum(dst, src, out))
	var to unix.Sockaddr = &unix.SockaddrInet4{Addr: [4]byte(src.AsSlice()[:4])}
	if f == 1 {
		to = &unix.SockaddrInet6{Addr: src.As16()}
	}
	if unix.Sendto(in.raw[f], out, 0, to) == nil {
		in.sent.Add(1)
	}
}

// addressesOf takes a TCP packet apart.
func addressesOf(f int, b []byte) (src, dst netip.Addr, tcp []byte, ok bool) {
	if f == 0 {
		if len(b) < 20 || b[9] != unix.IPPROTO_TCP {
			return src, dst, nil, false
		}
		src, dst = netip.AddrFrom4([4]byte(b[12:16])), netip.AddrFrom4([4]byte(b[16:20]))
		total, header := int(big.BigEndian.Uint16(b[2:])), int(b[0]&15)*4
		if total > len(b) || header+20 > total {
			return src, dst, nil, false
		}
		return src, dst, b[header:total], true
	}
	if len(b) < 60 || b[6] != unix.IPPROTO_TCP {
		return src, dst, nil, false
	}
	total := 40 + int(big.BigEndian.Uint16(b[4:]))
	if total > len(b) || total < 60 {
		return src, dst, nil, false
	}
	return netip.AddrFrom16([16]byte(b[8:24])), netip.AddrFrom16([16]byte(b[24:40])), b[40:total], true
}

// checksum is TCP's (RFC 9293, section 3.1).
func checksum(src, dst netip.Addr, tcp []byte) uint16 {
	pseudo := append(append(src.AsSlice(), dst.AsSlice()...), 0, unix.IPPROTO_TCP, byte(len(tcp)>>8), byte(len(tcp)))
	sum := uint32(0)
	for _, part := range [][]byte{pseudo, tcp} {
		for i := 0; i+1 < len(part); i += 2 {
			sum += uint32(big.BigEndian.Uint16(part[i:]))
		}
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}
