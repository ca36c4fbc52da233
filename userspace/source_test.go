package userspace

import (
	"errors"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

func TestSource(t *testing.T) {
	s := New(Config{})
	p := testPlan(testService{name: "s"})
	p.Policy.BridgedLinks = []netip.Prefix{netip.MustParsePrefix("10.2.0.0/24")}
	serve(s, p)
	s.Ruled(&p.Policy)
	f, _ := s.table.lookup(6, vip, func(netip.Addr) bool { return false })
	backend := netip.MustParseAddr("10.2.0.2")
	tests := []struct {
		name       string
		client     string
		node       bool
		masquerade plan.Masquerade
		want       string // empty: the kernel chooses
	}{
		{"kept", "192.0.2.1", false, plan.MasqueradeNever, "192.0.2.1 transparent"},
		{"kept, IPv6", "2001:db8::1", false, plan.MasqueradeNever, "2001:db8::1 transparent"},
		{"masqueraded", "192.0.2.1", false, plan.MasqueradeAlways, ""},
		{"the node's", "192.0.2.1", true, plan.MasqueradeNever, "192.0.2.1"},
		{"the node's, masqueraded", "192.0.2.1", true, plan.MasqueradeNodeLocal, ""},
		{"loopback", "127.0.0.1", true, plan.MasqueradeNever, ""},
		{"IPv6 loopback", "::1", true, plan.MasqueradeNever, ""},
		{"link-local", "fe80::1", false, plan.MasqueradeNever, ""},
		{"a service's, on this node", vip.Addr().String(), true, plan.MasqueradeNever, ""},
		{"hairpin", backend.String(), false, plan.MasqueradeNever, ""},
		{"on the backend's bridge", "10.2.0.3", false, plan.MasqueradeNever, "250.2.0.3 transparent"},
		{"on the backend's bridge, masqueraded", "10.2.0.3", false, plan.MasqueradeAlways, ""},
		{"the node's, on the backend's bridge", "10.2.0.1", true, plan.MasqueradeNever, "10.2.0.1"},
	}
	for _, tt := range tests {
		fr := *f.Frontend
		fr.Masquerade = tt.masquerade
		got := s.table.source(front{&fr, f.view}, plan.Client{Address: netip.MustParseAddr(tt.client), Node: tt.node}, backend)
		text := ""
		if got.addr.IsValid() {
			text = got.addr.String()
		}
		if got.transparent {
			text += " transparent"
		}
		if text != tt.want {
			t.Errorf("%s: source is %q, want %q", tt.name, text, tt.want)
		}
	}
	neighbour := plan.Client{Address: netip.MustParseAddr("10.2.0.3")}
	for name, policy := range map[string]plan.Policy{"that host has none": {NoStandIns: true}, "none is written yet": {}} {
		s.Ruled(&policy)
		if got := s.table.source(f, neighbour, backend); got.addr.IsValid() {
			t.Errorf("rules for stand-ins: %s; source is %s, want the node's", name, got.addr)
		}
	}
}

func TestLocals(t *testing.T) {
	l := locals{list: func() ([]netip.Addr, error) { return []netip.Addr{netip.MustParseAddr("192.0.2.1")}, nil }, ask: isLocal}
	for a, want := range map[string]bool{"192.0.2.1": true, "192.0.2.2": false, "127.8.8.8": true, "::1": true} {
		if got := l.contains(netip.MustParseAddr(a)); got != want {
			t.Errorf("contains(%s) = %t", a, got)
		}
	}
}

// An address that was added is found at once, and one that isn't this node's isn't,
// though its addresses take long to list.
func TestLocalsDontWait(t *testing.T) {
	listing, done := make(chan bool, 1), make(chan bool)
	defer close(done)
	l := locals{ask: isLocal, list: func() ([]netip.Addr, error) {
		listing <- true
		<-done
		return nil, nil
	}}
	l.current.Store(&localSet{read: time.Now().Add(-2 * localsMaxAge)})
	for _, f := range service.Families {
		own, other := addressIn(f, 7, 1), addressIn(f, 7, 2)
		link, err := netlink.LinkByName("lo")
		must(t, err)
		addr := &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(own, own.BitLen())), Flags: unix.IFA_F_NODAD}
		if l.mustContain(own) {
			t.Errorf("%s is local before it is added", own)
		}
		must(t, netlink.AddrAdd(link, addr))
		defer netlink.AddrDel(link, addr)
		if !l.mustContain(own) {
			t.Errorf("%s isn't local, though it is there", own)
		}
		if l.mustContain(other) {
			t.Errorf("%s is local", other)
		}
	}
	<-listing // they were being listed all the time
}

// Control messages come from the kernel, but what reads bytes by hand is
// fuzzed.
func FuzzPacketDestination(f *testing.F) {
	v4, v6 := netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")
	f.Add(unix.PktInfo4(&unix.Inet4Pktinfo{Addr: v4.As4()}))
	f.Add(unix.PktInfo6(&unix.Inet6Pktinfo{Addr: v6.As16()}))
	f.Add(append(unix.UnixRights(1, 2, 3), unix.PktInfo4(&unix.Inet4Pktinfo{Addr: v4.As4()})...))
	f.Fuzz(func(t *testing.T, oob []byte) {
		info, _ := findPacketInfo(oob)
		var got netip.Addr
		switch len(info) {
		case unix.SizeofInet4Pktinfo:
			got = netip.AddrFrom4([4]byte(info[8:12]))
		case unix.SizeofInet6Pktinfo:
			got = netip.AddrFrom16([16]byte(info[:16]))
		}
		messages, err := unix.ParseSocketControlMessage(oob)
		if err != nil {
			return
		}
		for _, m := range messages {
			switch {
			case m.Header.Level == unix.SOL_IP && m.Header.Type == unix.IP_PKTINFO && len(m.Data) >= unix.SizeofInet4Pktinfo:
				if want := netip.AddrFrom4([4]byte(m.Data[8:12])); got != want {
					t.Errorf("found %s, want %s", got, want)
				}
				return
			case m.Header.Level == unix.SOL_IPV6 && m.Header.Type == unix.IPV6_PKTINFO && len(m.Data) >= unix.SizeofInet6Pktinfo:
				if want := netip.AddrFrom16([16]byte(m.Data[:16])); got != want {
					t.Errorf("found %s, want %s", got, want)
				}
				return
			}
		}
		if info != nil {
			t.Errorf("found %s where there is none", got)
		}
	})
}

// Pods are told by the interface that they come in on, for TCP and UDP, whichever
// way leads back to them.
func TestPodsByInterface(t *testing.T) {
	p := newPackets(t)
	for _, f := range service.Families {
		a := addressIn(f, endpointNet, 2)
		vip := serviceAddress(f, 1)
		unlessPod := func(f *plan.Frontend) { f.Masquerade = plan.MasqueradeUnlessPod }
		services := []testService{
			{name: "t", vip: vip, eps: []netip.AddrPort{p.serveTCP(t, &p.host, a)}, front: unlessPod},
			{name: "u", vip: vip, proto: service.UDP, eps: []netip.AddrPort{p.serveUDP(t, &p.host, a, "")}, front: unlessPod},
		}
		client, node := addressIn(f, clientNet, 2).String(), addressIn(f, endpointNet, 1).String()
		for _, tt := range []struct {
			name string
			plan.Policy
			want string
		}{
			{"bridge", plan.Policy{PodBridge: "kpus-1"}, client},
			{"another bridge", plan.Policy{PodBridge: "kpus-2"}, node},
			{"part of the bridge's name", plan.Policy{PodBridge: "kpus-"}, node},
			{"prefix", plan.Policy{PodInterfacePrefix: "kpus-"}, client},
			{"another prefix", plan.Policy{PodInterfacePrefix: "pus-"}, node},
		} {
			pl := testPlan(services...)
			pl.Policy = tt.Policy
			serve(p.server, pl)
			t.Run(f.String()+"/tcp/"+tt.name, func(t *testing.T) {
				c, err := dialFrom(&p.client, t, vip)
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				if got, end := readEnd(c); got != tt.want || end != "eof" {
					t.Errorf("endpoint saw %q, want %s; the connection ended with %s", got, tt.want, end)
				}
			})
			t.Run(f.String()+"/udp/"+tt.name, func(t *testing.T) {
				if got := askTo(t, udpFrom(&p.client, t, f), vip); got != tt.want {
					t.Errorf("endpoint saw %q, want %s", got, tt.want)
				}
			})
		}
	}
}

func TestSourcePortsAreTriedUntilOneIsFree(t *testing.T) {
	p := ports{20000, 20003}
	client := netip.MustParseAddr("10.1.0.2")
	for _, taken := range []error{unix.EADDRINUSE, &net.OpError{Op: "dial", Err: unix.EADDRNOTAVAIL}} {
		var tried []netip.AddrPort
		err := p.from(client, func(a netip.AddrPort) error {
			tried = append(tried, a)
			if len(tried) < 3 {
				return taken
			}
			return nil
		})
		if err != nil || len(tried) != 3 {
			t.Errorf("%v: %v after %d tries, want success after 3", taken, err, len(tried))
		}
		for _, a := range tried {
			if a.Addr() != client || a.Port() < p.low || a.Port() > p.high {
				t.Errorf("tried %s, want a port from %d to %d of %s", a, p.low, p.high, client)
			}
		}
	}
}

func TestTheKernelChoosesWhereNoSourcePortIsFree(t *testing.T) {
	var last netip.AddrPort
	err := ports{20000, 20003}.from(netip.MustParseAddr("10.1.0.2"), func(a netip.AddrPort) error {
		if last = a; a.Port() != 0 {
			return unix.EADDRINUSE
		}
		return nil
	})
	if err != nil || last.Port() != 0 {
		t.Errorf("last tried %s, %v; want port 0 and success", last, err)
	}
}

func TestOtherFailuresOfAConnectAreFinal(t *testing.T) {
	tries := 0
	err := ports{20000, 20003}.from(netip.MustParseAddr("10.1.0.2"), func(netip.AddrPort) error { tries++; return unix.ECONNREFUSED })
	if !errors.Is(err, unix.ECONNREFUSED) || tries != 1 {
		t.Errorf("%v after %d tries, want the refusal after one", err, tries)
	}
}

func TestSourcePortsAreNotThoseOfClients(t *testing.T) {
	if p := belowClients(); p.high > 0 && (p.low < lowestPort || p.high-p.low < fewestPorts-1) {
		t.Errorf("ports from %d to %d, want some thousands", p.low, p.high)
	}
}
