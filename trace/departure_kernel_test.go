package trace

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// TestDeparture: a client's own network namespace is followed first, and decides what becomes of a packet that doesn't leave it.
func TestDeparture(t *testing.T) {
	const mesh = "iptables -t nat -A OUTPUT -m owner --uid-owner 1337 -j RETURN && iptables -t nat -A OUTPUT -p tcp -j REDIRECT --to-ports 15001"
	for _, tt := range []struct {
		name, setup string
		listening   bool
		verdict     Verdict
		first       Verdict
		culprit     []string
	}{
		{"plain", "true", false, Forwarded, Leaves, nil},
		{"the mesh's own user", "iptables -t nat -A OUTPUT -p tcp -m owner --uid-owner 1337 -j REDIRECT --to-ports 15001", false, Forwarded, Leaves, nil},
		{"a mesh", mesh, true, NotAService, NotAService, []string{"in network namespace /proc/", "leads the packet to 127.0.0.1:15001", "service mesh", "rule 2 of chain OUTPUT"}},
		{"a mesh that is down", mesh, false, Refused, Refused, []string{"127.0.0.1:15001", "nothing listens there", "in that network namespace, start", "iptables -t nat -D OUTPUT 2"}},
		{"another destination", "iptables -t nat -A OUTPUT -d 10.96.0.10 -p tcp -j DNAT --to-destination 10.9.9.9:90", false, NotAService, NotAService, []string{"sends the packet to 10.9.9.9:90 instead of 10.96.0.10:80", "rule 1 of chain OUTPUT"}},
		{"dropped", "nft add table ip guard && nft add chain ip guard out { type filter hook output priority 0 ; } && nft add rule ip guard out meta skuid 1337 accept && nft add rule ip guard out tcp dport 80 drop", false, Dropped, Dropped, []string{"drops the packet", "chain out"}},
		{"the answer is dropped", "iptables -A INPUT -p tcp --sport 80 -j DROP", false, Dropped, Dropped, []string{"drops the packet", "the answer of 10.96.0.10:80", "rule 1 of chain INPUT"}},
		{"some are dropped", "iptables -A OUTPUT -m statistic --mode random --probability 0.25 -j DROP", false, Forwarded, Leaves, []string{"25 % of new connections: a rule"}},
		{"no route", "ip route del default", false, Refused, Refused, []string{"no way to 10.96.0.10: there is no route"}},
		{"its link is down", "ip link set eth0 down", false, Refused, Refused, []string{"there is no route", "down"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := kerneltest.NewNetwork(t, 2)
			sh(t, "iptables -t nat -A PREROUTING -d 10.96.0.10 -p tcp --dport 80 -j DNAT --to-destination 10.2.0.2:9000")
			n.Serve(2, "b", 9000)
			var client string
			n.On(1, func() {
				space, err := os.Open(ownSpace)
				if err != nil {
					t.Fatal(err)
				}
				t.Cleanup(func() { space.Close() })
				client = fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), space.Fd())
				if tt.listening {
					l, err := net.Listen("tcp", "127.0.0.1:15001")
					if err != nil {
						t.Fatal(err)
					}
					t.Cleanup(func() { l.Close() })
				}
				for line := range strings.SplitSeq(tt.setup, " && ") {
					sh(t, line)
				}
			})
			req := Request{Address: netip.MustParseAddrPort("10.96.0.10:80"), Protocol: service.TCP, Netns: client}
			r, err := Run(t.Context(), req, nil)
			if err != nil {
				t.Fatal(err)
			}
			text := r.Text(Look{Width: 200})
			if r.Verdict != tt.verdict || r.Departure == nil || r.Departure.Verdict != tt.first {
				t.Errorf("verdict %s, departure %+v, want %s and %s:\n%s", r.Verdict, r.Departure, tt.verdict, tt.first, text)
			}
			if (len(tt.culprit) == 0) != (r.Culprit == "") {
				t.Errorf("culprit %q", r.Culprit)
			}
			for _, words := range tt.culprit {
				if !strings.Contains(r.Culprit, words) {
					t.Errorf("culprit %q doesn't say %q", r.Culprit, words)
				}
			}
			if on := strings.Contains(text, "On the node:"); on != (tt.first == Leaves) || !strings.Contains(text, fmt.Sprintf("In network namespace %s, where the client is:", client)) {
				t.Errorf("the way in the namespace isn't told, or one on the node although the packet doesn't come there:\n%s", text)
			}
		})
	}
}

// TestHairpin: where a bridge shows packets to netfilter, a pod reaches itself by the kernel's rules only if its port sends packets back.
func TestHairpin(t *testing.T) {
	if _, err := os.Stat("/proc/sys/net/bridge"); err != nil {
		t.Skipf("needs the module br_netfilter: %v", err)
	}
	n := kerneltest.NewNetwork(t, 1)
	n.Serve(1, "b", 9000)
	sh(t, "ip link add cni0 type bridge", "ip link set cni0 up", "ip addr del 10.1.0.1/24 dev host1", "ip link set host1 master cni0", "ip addr add 10.1.0.1/24 dev cni0",
		"iptables -t nat -A PREROUTING -d 10.96.0.10 -p tcp --dport 80 -j DNAT --to-destination 10.1.0.2:9000",
		"iptables -t nat -A POSTROUTING -s 10.1.0.2 -d 10.1.0.2 -j MASQUERADE")
	n.On(1, func() { sh(t, "ip neigh flush dev eth0") })
	req := Request{Address: netip.MustParseAddrPort("10.96.0.10:80"), Protocol: service.TCP, From: n.Address(service.IPv4, 1)}
	for _, tt := range []struct {
		setup   string
		verdict Verdict
		culprit string
	}{
		{"sysctl -qw net.bridge.bridge-nf-call-iptables=1", Dropped, "port host1 of bridge cni0 doesn't send packets back"},
		{"ip link set dev host1 type bridge_slave hairpin on", Forwarded, ""},
		{"ip link set dev host1 type bridge_slave hairpin off", Dropped, "ip link set dev host1 type bridge_slave hairpin on"},
		{"sysctl -qw net.bridge.bridge-nf-call-iptables=0", Forwarded, ""},
	} {
		sh(t, tt.setup)
		_, _, err := n.Ask(1, service.TCP, req.Address, tt.verdict == Forwarded)
		r, runErr := Run(t.Context(), req, nil)
		if (err == nil) != (tt.verdict == Forwarded) || runErr != nil {
			t.Errorf("%s: packets: %v, trace: %v", tt.setup, err, runErr)
		}
		if r.Verdict != tt.verdict || !strings.Contains(r.Culprit, tt.culprit) || tt.culprit == "" && r.Culprit != "" {
			t.Errorf("%s: verdict %s, culprit %q, want %s and %q", tt.setup, r.Verdict, r.Culprit, tt.verdict, tt.culprit)
		}
	}
}

// TestOtherWays: where rules and hops of routing lead some packets astray, the trace says so, and real ones do.
func TestOtherWays(t *testing.T) {
	n := kerneltest.NewNetwork(t, 2)
	n.Serve(2, "b", 9000)
	seen(t, n, 2)
	sh(t, "iptables -t nat -A PREROUTING -d 10.96.0.10 -p tcp --dport 80 -j DNAT --to-destination 10.2.0.2:9000", "ip link add vpn type veth peer name far",
		"ip link set vpn up arp off", "ip link set far up", "ip route replace default via 10.1.0.2", "sysctl -qw net.ipv4.fib_multipath_hash_policy=1")
	outside := netip.MustParseAddr("203.0.113.5")
	n.On(1, func() { sh(t, "ip addr add 203.0.113.5/32 dev lo") })
	ask := func() (answered int) {
		n.On(1, func() {
			for range 8 {
				d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(outside, 0)), Timeout: 150 * time.Millisecond}
				if c, err := d.Dial("tcp", "10.96.0.10:80"); err == nil {
					c.Close()
					answered++
				}
			}
		})
		return answered
	}
	for _, tt := range []struct {
		name, plant, lift string
		least, most       int // of 8 connections are answered
		verdict           Verdict
		culprit           []string
	}{
		{"nothing is planted", "true", "true", 8, 8, Forwarded, nil},
		{"a VPN's default route", "ip route add default dev vpn table 51820 && ip rule add pref 100 not fwmark 0xca6c lookup 51820 && ip rule add pref 99 lookup main suppress_prefixlength 0",
			"ip rule del pref 100 && ip rule del pref 99", 0, 0, Undetermined, []string{"the answers of 10.2.0.2 leave by vpn, and not by host1", "203.0.113.5", "lookup main"}},
		{"a rule of routing by ports", "ip rule add pref 100 ipproto tcp dport 9000 prohibit", "ip rule del pref 100", 0, 0, Refused, []string{"no way to 10.2.0.2", "prohibit"}},
		{"a rule of routing by other ports", "ip rule add pref 100 ipproto tcp dport 9001 prohibit", "ip rule del pref 100", 8, 8, Forwarded, nil},
		{"a rule of routing for answers by their port", "ip rule add pref 100 ipproto tcp sport 9000 blackhole", "ip rule del pref 100", 0, 0, Dropped, []string{"the answers of 10.2.0.2 don't", "ipproto tcp sport 9000"}},
		{"one of two hops is dead", "ip route replace 10.2.0.2/32 nexthop dev host2 nexthop via 10.1.0.99 dev host1", "ip route del 10.2.0.2/32", 1, 7, Forwarded,
			[]string{"50 % of new connections", "no host on host1 answers for 10.1.0.99"}},
	} {
		for line := range strings.SplitSeq(tt.plant, " && ") {
			sh(t, line)
		}
		got := ask()
		for range 3 { // of two hops, chance may take one every time
			if got < tt.least || got > tt.most {
				got = ask()
			}
		}
		if got < tt.least || got > tt.most {
			t.Errorf("%s: %d of 8 connections are answered, want %d to %d", tt.name, got, tt.least, tt.most)
		}
		r, err := Run(t.Context(), Request{Address: netip.MustParseAddrPort("10.96.0.10:80"), Protocol: service.TCP, From: outside}, nil)
		if err != nil || r.Verdict != tt.verdict || len(tt.culprit) == 0 && r.Culprit != "" {
			t.Errorf("%s: %v, verdict %s, want %s:\n%s", tt.name, err, r.Verdict, tt.verdict, r.Text(Look{Width: 200}))
		}
		for _, words := range tt.culprit {
			if !strings.Contains(r.Culprit, words) {
				t.Errorf("%s: culprit %q doesn't say %q", tt.name, r.Culprit, words)
			}
		}
		for line := range strings.SplitSeq(tt.lift, " && ") {
			sh(t, line)
		}
	}
}

// TestNobodyAnswersARP: of a pod that is there, and whose firewall drops what asks for it, the kernel's own attempts tell.
func TestNobodyAnswersARP(t *testing.T) {
	n := kerneltest.NewNetwork(t, 2)
	n.Serve(2, "b", 9000)
	seen(t, n, 2)
	n.On(2, func() {
		sh(t, "nft add table netdev guard { chain c { type filter hook ingress device eth0 priority 0 ; meta protocol arp drop ; } ; }")
	})
	sh(t, "iptables -t nat -A PREROUTING -d 10.96.0.10 -p tcp --dport 80 -j DNAT --to-destination 10.2.0.2:9000", "ip neigh flush dev host2")
	req := Request{Address: netip.MustParseAddrPort("10.96.0.10:80"), Protocol: service.TCP, From: n.Address(service.IPv4, 1)}
	n.On(1, func() {
		if c, err := net.DialTimeout("tcp", "10.96.0.10:80", 100*time.Millisecond); err == nil {
			c.Close()
			t.Error("the endpoint is reached")
		}
	})
	if r, err := Run(t.Context(), req, nil); err != nil || r.Verdict != Dropped || !strings.Contains(r.Culprit, "no host on host2 answers for 10.2.0.2") {
		t.Errorf("while the kernel asks: %v, verdict %s, culprit %q", err, r.Verdict, r.Culprit)
	}
	to := route{query: query{to: n.Address(service.IPv4, 2)}, link: "host2"}
	for began := time.Now(); time.Since(began) < time.Minute; time.Sleep(100 * time.Millisecond) {
		if h, err := readHop(&to); err != nil || h.neighbour == unix.NUD_FAILED {
			break
		}
	}
	r, err := Run(t.Context(), req, nil)
	if err != nil || r.Verdict != Undetermined || !strings.Contains(r.Culprit, "has asked for 10.2.0.2 on host2 in vain") || !strings.Contains(r.Culprit, "ebtables") {
		t.Errorf("when it has given up: %v, verdict %s:\n%s", err, r.Verdict, r.Text(Look{}))
	}
}

// TestNextDatagrams: what stops a client's datagrams once the first has been answered is warned of.
func TestNextDatagrams(t *testing.T) {
	n := kerneltest.NewNetwork(t, 2)
	n.Serve(2, "b", 9000)
	sh(t, "iptables -t nat -A PREROUTING -d 10.96.0.10 -p udp --dport 80 -j DNAT --to-destination 10.2.0.2:9000")
	to := netip.MustParseAddrPort("10.96.0.10:80")
	for _, tt := range []struct {
		plant    string
		answered int // of two datagrams
	}{
		{"iptables -t mangle -A PREROUTING -p udp --dport 81 -m conntrack --ctstate ESTABLISHED -j DROP", 2},
		{"iptables -t mangle -A PREROUTING -i host1 -p udp -m conntrack --ctstate ESTABLISHED -j DROP", 1},
	} {
		sh(t, tt.plant)
		answered := 0
		n.On(1, func() {
			c, err := net.Dial("udp", to.String())
			if err != nil {
				t.Error(err)
				return
			}
			defer c.Close()
			for i := range 2 {
				limit := 300 * time.Millisecond
				if i < tt.answered {
					limit = 20 * time.Second
				}
				if _, err := c.Write([]byte("x")); err != nil || c.SetReadDeadline(time.Now().Add(limit)) != nil {
					t.Error(err)
				}
				if _, err := c.Read(make([]byte, 100)); err == nil {
					answered++
				}
			}
		})
		r, err := Run(t.Context(), Request{Address: to, Protocol: service.UDP, From: n.Address(service.IPv4, 1)}, nil)
		warned := slices.ContainsFunc(r.Findings, func(f Finding) bool {
			return f.Severity == SeverityWarning && strings.Contains(f.What, "the client's next datagram to "+to.String())
		})
		if err != nil || answered != tt.answered || r.Verdict != Forwarded || warned != (tt.answered == 1) {
			t.Errorf("%s: %v, %d of 2 answered, verdict %s, warned %t\n%s", tt.plant, err, answered, r.Verdict, warned, r.Text(Look{}))
		}
	}
}

// TestTrafficControlIsNamed: filters of tc and netem are named, at the link where they are, and what drops all decides. Where the
// kernel has none, the VM's has.
func TestTrafficControlIsNamed(t *testing.T) {
	for name, tt := range map[string]struct {
		command, what string
		verdict       Verdict
	}{
		"ingress":      {"tc qdisc add dev host1 clsact && tc filter add dev host1 ingress protocol ip matchall action drop", "a filter of tc (ingress) ", Dropped},
		"egress":       {"tc qdisc add dev host2 clsact && tc filter add dev host2 egress protocol ip matchall action drop", "a filter of tc (egress) ", Dropped},
		"netem":        {"tc qdisc add dev host2 root netem loss 100%", "netem ", Dropped},
		"other family": {"tc qdisc add dev host2 clsact && tc filter add dev host2 egress protocol ipv6 matchall action drop", "a filter of tc (egress) ", Forwarded},
		"passes first": {"tc qdisc add dev host2 clsact && tc filter add dev host2 egress prio 1 protocol ip matchall action pass && tc filter add dev host2 egress prio 2 protocol ip matchall action drop", "a filter of tc (egress) ", Forwarded},
		"delay":        {"tc qdisc add dev host2 root netem delay 1ms", "netem ", Forwarded},
	} {
		t.Run(name, func(t *testing.T) {
			n := kerneltest.NewNetwork(t, 2)
			n.Serve(2, "b", 9000)
			sh(t, "iptables -t nat -A PREROUTING -d 10.96.0.10 -p tcp --dport 80 -j DNAT --to-destination 10.2.0.2:9000")
			to := netip.MustParseAddrPort("10.96.0.10:80")
			named := func(want Verdict) bool {
				r, err := Run(t.Context(), Request{Address: to, Protocol: service.TCP, From: n.Address(service.IPv4, 1)}, nil)
				if err != nil || r.Verdict != want {
					t.Fatalf("%v, verdict %s, want %s", err, r.Verdict, want)
				}
				return slices.ContainsFunc(r.Findings, func(f Finding) bool { return strings.HasPrefix(f.What, tt.what) })
			}
			if _, _, err := n.Ask(1, service.TCP, to, true); err != nil || named(Forwarded) {
				t.Errorf("without: %v, or it is named", err)
			}
			if out, err := exec.Command("sh", "-c", tt.command).CombinedOutput(); err != nil {
				t.Skipf("this kernel has none: %v: %s", err, out)
			}
			if _, _, err := n.Ask(1, service.TCP, to, tt.verdict == Forwarded); (err == nil) != (tt.verdict == Forwarded) {
				t.Errorf("packets: %v", err)
			}
			if !named(tt.verdict) {
				t.Error("it isn't named")
			}
		})
	}
}

// TestXDPIsNamed: a program that drops what netfilter doesn't see is named, at the link where it is.
func TestXDPIsNamed(t *testing.T) {
	n := kerneltest.NewNetwork(t, 2)
	n.Serve(2, "b", 9000)
	sh(t, "iptables -t nat -A PREROUTING -d 10.96.0.10 -p tcp --dport 80 -j DNAT --to-destination 10.2.0.2:9000")
	drops := []byte{0xb7, 0, 0, 0, 1, 0, 0, 0, 0x95, 0, 0, 0, 0, 0, 0, 0} // r0 = XDP_DROP; exit
	license := []byte("GPL\x00")
	load := struct {
		kind, size     uint32
		code, license  unsafe.Pointer
		_, _           uint32
		_              uint64
		version, flags uint32
	}{unix.BPF_PROG_TYPE_XDP, uint32(len(drops) / 8), unsafe.Pointer(&drops[0]), unsafe.Pointer(&license[0]), 0, 0, 0, 0, 0} // union bpf_attr
	fd, _, errno := unix.Syscall(unix.SYS_BPF, unix.BPF_PROG_LOAD, uintptr(unsafe.Pointer(&load)), unsafe.Sizeof(load))
	if errno != 0 {
		t.Fatal(errno)
	}
	defer unix.Close(int(fd))
	link, err := netlink.LinkByName("host1")
	if err != nil {
		t.Fatal(err)
	}
	to := netip.MustParseAddrPort("10.96.0.10:80")
	look := func(what string) (noted bool) {
		r, err := Run(t.Context(), Request{Address: to, Protocol: service.TCP, From: n.Address(service.IPv4, 1)}, nil)
		if err != nil {
			t.Fatal(what, err)
		}
		return slices.ContainsFunc(r.Findings, func(f Finding) bool { return strings.HasPrefix(f.What, "XDP program ") && f.Where == "link host1" })
	}
	if _, _, err := n.Ask(1, service.TCP, to, true); err != nil || look("without") {
		t.Errorf("without a program: %v, or one is named", err)
	}
	if err := netlink.LinkSetXdpFdWithFlags(link, int(fd), unix.XDP_FLAGS_SKB_MODE); err != nil {
		t.Fatal(err)
	}
	n.On(1, func() {
		if c, err := net.DialTimeout("tcp", to.String(), 200*time.Millisecond); err == nil {
			c.Close()
			t.Error("the program drops nothing")
		}
	})
	if !look("with") {
		t.Error("the program isn't named")
	}
}
