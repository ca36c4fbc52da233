package trace

import (
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
)

// planted keeps the client, host 1, from the endpoint, host 2, or seems to. Commands have the addresses of the hosts, and what
// the family calls things, in variables.
type planted struct {
	name        string
	on          int // the host that it is planted on; 0 is the node
	plant, lift string
	answered    bool
	verdict     Verdict
	culprit     string
}

// words lists the variables of what is planted.
var words = [2][]string{
	service.IPv4: {"IP=ip -4", "TABLES=iptables", "SERVICE=10.96.0.10", "CLIENT=10.1.0.2", "ENDPOINT=10.2.0.2", "OTHER=10.3.0.2", "BITS=32", "TTL=TTL --ttl", "FORWARDING=net.ipv4.ip_forward", "ACK=52"},
	service.IPv6: {"IP=ip -6", "TABLES=ip6tables", "SERVICE=fd00:96::10", "CLIENT=fd00:1::2", "ENDPOINT=fd00:2::2", "OTHER=fd00:3::2", "BITS=128", "TTL=HL --hl", "FORWARDING=net.ipv6.conf.all.forwarding", "ACK=72"},
}

// compareClients compares traces with what becomes of the client's connections, in some families.
func compareClients(t *testing.T, families []service.Family, all ...planted) {
	t.Helper()
	n := kerneltest.NewNetwork(t, 3)
	n.Serve(2, "b", 9000)
	n.Serve(3, "c", 9000)
	for i := range 3 {
		seen(t, n, i+1)
	}
	sh(t, "iptables -t nat -A PREROUTING -d 10.96.0.10 -p tcp --dport 80 -j DNAT --to-destination 10.2.0.2:9000",
		"ip6tables -t nat -A PREROUTING -d fd00:96::10 -p tcp --dport 80 -j DNAT --to-destination [fd00:2::2]:9000")
	for _, f := range families {
		run := func(on int, script string) {
			t.Helper()
			n.On(on, func() {
				c := exec.Command("sh", "-ec", script)
				c.Env = append(os.Environ(), words[f]...)
				if out, err := c.CombinedOutput(); err != nil {
					t.Errorf("%s: %s: %v\n%s", f, script, err, out)
				}
			})
		}
		for _, tt := range all {
			run(tt.on, tt.plant)
			to := netip.MustParseAddrPort([2]string{service.IPv4: "10.96.0.10:80", service.IPv6: "[fd00:96::10]:80"}[f])
			_, _, failed := n.Ask(1, service.TCP, to, tt.answered)
			r, err := Run(t.Context(), Request{Address: to, Protocol: service.TCP, From: n.Address(f, 1)}, nil)
			if (failed == nil) != tt.answered || err != nil || r.Verdict != tt.verdict || !strings.Contains(r.Culprit, tt.culprit) || (tt.culprit == "") != (r.Culprit == "") {
				t.Errorf("%s, %s: packets: %v; trace: %v, %s, %q, want %s and %q", f, tt.name, failed, err, r.Verdict, r.Culprit, tt.verdict, tt.culprit)
			}
			run(tt.on, tt.lift)
			run(0, "conntrack -F 2>&1; ip neigh flush all; ip -6 neigh flush all")
		}
	}
}

// TestNextHopIsAnotherPod: a route may lead to a network namespace that doesn't have the address.
func TestNextHopIsAnotherPod(t *testing.T) {
	compareClients(t, service.Families[:],
		planted{"to the client", 0, "$IP route replace $CLIENT/$BITS via $OTHER dev host3", "$IP route del $CLIENT/$BITS", false, Dropped, "answers of"},
		planted{"to the endpoint", 0, "$IP route replace $ENDPOINT/$BITS via $OTHER dev host3", "true", false, Dropped, "which neither has"},
		planted{"that forwards", 3, "sysctl -qw $FORWARDING=1", "sysctl -qw $FORWARDING=0", false, Undetermined, "leave by host3"},
		planted{"that has it, too", 3, "$IP addr add $ENDPOINT/$BITS dev lo", "$IP addr del $ENDPOINT/$BITS dev lo", true, Forwarded, ""},
		planted{"none", 0, "$IP route del $ENDPOINT/$BITS", "true", true, Forwarded, ""},
	)
}

// TestNeighbourWithoutAsking: an entry that the kernel doesn't check (NUD_NOARP) may be wrong as well.
func TestNeighbourWithoutAsking(t *testing.T) {
	compareClients(t, service.Families[:],
		planted{"wrong", 0, "$IP neigh replace $ENDPOINT lladdr 02:00:00:00:00:99 dev host2 nud noarp", "$IP neigh del $ENDPOINT dev host2", false, Dropped, "the neighbour entry of"},
		planted{"right", 0, "ping -c 1 -W 2 $ENDPOINT >/dev/null; $IP neigh change $ENDPOINT dev host2 nud noarp", "$IP neigh del $ENDPOINT dev host2", true, Forwarded, ""},
	)
}

// TestIPv6IsOff: a link on which IPv6 is off has no routes, and packets for what is behind it leave by the default route.
func TestIPv6IsOff(t *testing.T) {
	compareClients(t, []service.Family{service.IPv6},
		planted{"on the endpoint's link", 0, "sysctl -qw net.ipv6.conf.host2.disable_ipv6=1", "sysctl -qw net.ipv6.conf.host2.disable_ipv6=0; ip -6 addr add fd00:2::1/64 dev host2 nodad", false, Dropped,
			"IPv6 is off: net.ipv6.conf.host2.disable_ipv6 = 1"},
		planted{"no more", 0, "true", "true", true, Forwarded, ""},
	)
}

// TestForeignSource: a rule gives packets a source that isn't the node's, and the endpoint's network may lead answers to it elsewhere.
func TestForeignSource(t *testing.T) {
	compareClients(t, []service.Family{service.IPv4},
		planted{"the node gets the answers", 0, "iptables -t nat -A POSTROUTING -o host2 -j SNAT --to-source 192.0.2.9", "true", true, Forwarded, ""},
		planted{"nobody gets them", 2, "ip route add blackhole 192.0.2.9", "true", false, Dropped, "no way to 192.0.2.9"},
	)
	n := kerneltest.NewNetwork(t, 2) // where the endpoint's namespace isn't seen
	n.Serve(2, "b", 9000)
	n.On(2, func() { sh(t, "ip route add blackhole 192.0.2.9") })
	sh(t, "iptables -t nat -A PREROUTING -d 10.96.0.10 -p tcp --dport 80 -j DNAT --to-destination 10.2.0.2:9000", "iptables -t nat -A POSTROUTING -o host2 -j SNAT --to-source 192.0.2.9")
	to := netip.MustParseAddrPort("10.96.0.10:80")
	_, _, failed := n.Ask(1, service.TCP, to, false)
	r, err := Run(t.Context(), Request{Address: to, Protocol: service.TCP, From: n.Address(service.IPv4, 1)}, nil)
	if failed == nil || err != nil || r.Verdict != Undetermined || !strings.Contains(r.Culprit, "whether answers to it come back here isn't known") {
		t.Errorf("packets: %v; trace: %v, %s, %q", failed, err, r.Verdict, r.Culprit)
	}
}

// TestHairpinIsMasqueraded: a pod reaches itself by a service, unless a rule accepts the packet before the one that masquerades it.
func TestHairpinIsMasqueraded(t *testing.T) {
	n := kerneltest.NewNetwork(t, 1)
	n.Serve(1, "b", 9000)
	seen(t, n, 1)
	sh(t, "iptables -t nat -A PREROUTING -d 10.96.0.10 -p tcp --dport 80 -j DNAT --to-destination 10.1.0.2:9000", "iptables -t nat -A POSTROUTING -s 10.1.0.2 -d 10.1.0.2 -j MASQUERADE")
	to := netip.MustParseAddrPort("10.96.0.10:80")
	for _, want := range []struct {
		verdict Verdict
		culprit string
	}{{Forwarded, ""}, {Dropped, "accepts the packet before kproxy's do: -A POSTROUTING -s 10.1.0.0/16 -j ACCEPT"}} {
		_, _, failed := n.Ask(1, service.TCP, to, want.verdict == Forwarded)
		r, err := Run(t.Context(), Request{Address: to, Protocol: service.TCP, From: n.Address(service.IPv4, 1)}, nil)
		if (failed == nil) != (want.verdict == Forwarded) || err != nil || r.Verdict != want.verdict || !strings.Contains(r.Culprit, want.culprit) {
			t.Errorf("packets: %v; trace: %v, %s, %q, want %s", failed, err, r.Verdict, r.Culprit, want.verdict)
		}
		sh(t, "iptables -t nat -I POSTROUTING -s 10.1.0.0/16 -j ACCEPT")
	}
}

// TestUsedUpTTL: packets end at the node whose TTL, or hop limit, is used up by a rule of their sender's.
func TestUsedUpTTL(t *testing.T) {
	lift := "$TABLES -t mangle -F OUTPUT"
	compareClients(t, service.Families[:],
		planted{"the endpoint's", 2, "$TABLES -t mangle -A OUTPUT -p tcp -j $TTL-set 1", lift, false, Dropped, "its hop limit (TTL) is used up"},
		planted{"the endpoint's, lowered", 2, "$TABLES -t mangle -A OUTPUT -p tcp -j $TTL-dec 63", lift, false, Dropped, "its hop limit (TTL) is used up"},
		planted{"the endpoint's, which suffices", 2, "$TABLES -t mangle -A OUTPUT -p tcp -j $TTL-set 2", lift, true, Forwarded, ""},
		planted{"the client's", 1, "$TABLES -t mangle -A OUTPUT -p tcp -j $TTL-set 1", lift, false, Refused, "its hop limit (TTL) is used up"},
		planted{"the client's, which suffices", 1, "$TABLES -t mangle -A OUTPUT -p tcp -j $TTL-set 2", lift, true, Forwarded, ""},
	)
}

// TestStoppedProgram: a program that is stopped (SIGSTOP) takes connections, and answers nothing.
func TestStoppedProgram(t *testing.T) {
	n := kerneltest.NewNetwork(t, 2)
	seen(t, n, 1)
	sh(t, "iptables -t nat -A PREROUTING -d 10.96.0.10 -p tcp --dport 80 -j DNAT --to-destination 10.2.0.2:9000")
	var program *exec.Cmd
	n.On(2, func() {
		program = exec.Command("socat", "TCP-LISTEN:9000,reuseaddr,fork", "EXEC:cat")
		if err := program.Start(); err != nil {
			t.Fatal(err)
		}
	})
	t.Cleanup(func() {
		_ = program.Process.Kill()
		_ = program.Wait()
	})
	to := netip.MustParseAddrPort("10.96.0.10:80")
	answered := func() (yes bool) {
		n.On(1, func() {
			for began := time.Now(); time.Since(began) < 5*time.Second; time.Sleep(50 * time.Millisecond) {
				c, err := net.DialTimeout("tcp", to.String(), time.Second)
				if err != nil {
					continue // it doesn't listen yet
				}
				defer c.Close()
				_, _ = c.Write([]byte("x\n"))
				_ = c.SetReadDeadline(time.Now().Add(time.Second))
				got, err := c.Read(make([]byte, 2))
				yes = got > 0 && err == nil
				return
			}
			t.Error("nothing takes a connection")
		})
		return yes
	}
	for _, tt := range []struct {
		signal  unix.Signal
		verdict Verdict
		culprit string
	}{{unix.SIGCONT, Forwarded, ""}, {unix.SIGSTOP, Dropped, "takes connections, but is stopped and answers nothing"}, {unix.SIGCONT, Forwarded, ""}} {
		if err := program.Process.Signal(tt.signal); err != nil {
			t.Fatal(err)
		}
		got := answered()
		r, err := Run(t.Context(), Request{Address: to, Protocol: service.TCP, From: n.Address(service.IPv4, 1)}, nil)
		if err != nil || got != (tt.verdict == Forwarded) || r.Verdict != tt.verdict || !strings.Contains(r.Culprit, tt.culprit) || tt.culprit == "" && r.Culprit != "" {
			t.Errorf("%s: answered %t; trace: %v, %s, %q", tt.signal, got, err, r.Verdict, r.Culprit)
		}
	}
}

// TestBareAcknowledgement: a client that sends first acknowledges the answer by its data, so that a rule for packets without doesn't keep it out.
func TestBareAcknowledgement(t *testing.T) {
	lift := "$TABLES -t mangle -F PREROUTING"
	compareClients(t, service.Families[:],
		planted{"by its length", 0, "$TABLES -t mangle -A PREROUTING -i host1 -p tcp -m length --length $ACK -j DROP", lift, true, Undetermined, "data"},
		planted{"by its flags", 0, "$TABLES -t mangle -A PREROUTING -i host1 -p tcp --tcp-flags ALL ACK -j DROP", lift, true, Undetermined, "data"},
		planted{"any", 0, "$TABLES -t mangle -A PREROUTING -i host1 -p tcp ! --syn -j DROP", lift, false, Dropped, "completes the handshake"},
	)
}
