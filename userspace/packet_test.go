package userspace

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Endpoints see the address the plan wants them to see, wherever they and the
// client are.
func TestSourceAddress(t *testing.T) {
	p := newPackets(t)
	for _, f := range service.Families {
		onHost, onNode := addressIn(f, endpointNet, 2), addressIn(f, endpointNet, 1)
		client, nearClient, nearHost := addressIn(f, clientNet, 2), addressIn(f, clientNet, 1), addressIn(f, endpointNet, 1)
		tests := []struct {
			name       string
			client     *namespace // nil: the node
			endpoint   *namespace
			masquerade plan.Masquerade
			want       netip.Addr // zero: any address of the node
		}{
			{"kept", &p.client, &p.host, plan.MasqueradeNever, client},
			{"kept, endpoint on the node", &p.client, nil, plan.MasqueradeNever, client},
			{"masqueraded", &p.client, &p.host, plan.MasqueradeAlways, nearHost},
			{"masqueraded, endpoint on the node", &p.client, nil, plan.MasqueradeAlways, onNode},
			{"client on the node", nil, &p.host, plan.MasqueradeNever, netip.Addr{}},
			{"both on the node", nil, nil, plan.MasqueradeNever, netip.Addr{}},
			{"hairpin", &p.host, &p.host, plan.MasqueradeNever, nearHost},
		}
		for i, tt := range tests {
			a := onNode
			if tt.endpoint != nil {
				a = onHost
			}
			vip := serviceAddress(f, 10+i)
			front := func(f *plan.Frontend) { f.Masquerade = tt.masquerade }
			pl := testPlan(
				testService{name: "t", vip: vip, eps: []netip.AddrPort{p.serveTCP(t, tt.endpoint, a)}, front: front},
				testService{name: "u", vip: vip, proto: service.UDP, eps: []netip.AddrPort{p.serveUDP(t, tt.endpoint, a, "")}, front: front},
			)
			serve(p.server, pl)
			ok := func(got string) bool {
				if tt.want.IsValid() {
					return got == tt.want.String()
				}
				return got == nearClient.String() || got == nearHost.String()
			}
			t.Run(f.String()+"/tcp/"+tt.name, func(t *testing.T) {
				c, err := dialFrom(tt.client, t, vip)
				if err != nil {
					t.Fatal(err)
				}
				defer c.Close()
				if got, end := readEnd(c); !ok(got) || end != "eof" {
					t.Errorf("endpoint saw %q, want %s; the connection ended with %s", got, tt.want, end)
				}
			})
			t.Run(f.String()+"/udp/"+tt.name, func(t *testing.T) {
				if got := askTo(t, udpFrom(tt.client, t, f), vip); !ok(got) {
					t.Errorf("endpoint saw %q, want %s", got, tt.want)
				}
			})
		}
	}
}

// The replies of transparent sockets come back although the kernel checks
// that packets come in where their source is routed (rp_filter).
func TestSourceAddressWithReversePathFilter(t *testing.T) {
	p := newPackets(t)
	for _, i := range []string{"all", "default", "lo", "kpus-1", "kpus-2"} {
		run(t, "sysctl", "-qw", "net.ipv4.conf."+i+".rp_filter=1")
		t.Cleanup(func() { run(t, "sysctl", "-qw", "net.ipv4.conf."+i+".rp_filter=0") })
	}
	for name, on := range map[string]*namespace{"host": &p.host, "node": nil} {
		a := addressIn(service.IPv4, endpointNet, 2)
		if on == nil {
			a = addressIn(service.IPv4, endpointNet, 1)
		}
		vip := serviceAddress(service.IPv4, 1)
		pl := testPlan(testService{name: "t", vip: vip, eps: []netip.AddrPort{p.serveTCP(t, on, a)}, front: func(f *plan.Frontend) { f.Masquerade = plan.MasqueradeNever }})
		serve(p.server, pl)
		c, err := dialFrom(&p.client, t, vip)
		if err != nil {
			t.Fatal(name, err)
		}
		if got, _ := readEnd(c); got != addressIn(service.IPv4, clientNet, 2).String() {
			t.Errorf("endpoint on the %s saw %q", name, got)
		}
		c.Close()
	}
}

// A client that connects to the listener itself is refused, from outside and
// from the node, and so is one whose redirect leads to no service.
func TestDirectConnectionIsRefused(t *testing.T) {
	p := newPackets(t)
	tcp, udp := p.server.Ports()
	for _, f := range service.Families {
		node := addressIn(f, clientNet, 1)
		for _, on := range []*namespace{&p.client, nil} {
			for _, to := range []netip.AddrPort{netip.AddrPortFrom(node, tcp), serviceAddress(f, 99)} {
				c, err := dialFrom(on, t, to)
				if err == nil {
					_, end := readEnd(c)
					c.Close()
					if end == "reset" {
						continue
					}
					err = errors.New(end)
				}
				if !errors.Is(err, syscall.ECONNRESET) {
					t.Errorf("connect to %s: %v, want a reset", to, err)
				}
			}
			c := udpFrom(on, t, f)
			c.WriteToUDPAddrPort([]byte("x"), netip.AddrPortFrom(node, udp))
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := p.server.Probe(ctx); err != nil {
		t.Errorf("Probe() = %v among redirect rules", err)
	}
	eventually(t, "no session came of it", func() bool { return sessionsOf(p.server) == 0 })
}

// An endpoint's host that is gone is found out by ICMP as well.
func TestUDPHostUnreachable(t *testing.T) {
	p := newPackets(t)
	for _, family := range []string{"ipv4", "ipv6"} { // or looking for the host takes 3 s
		must(t, os.WriteFile("/proc/sys/net/"+family+"/neigh/kpus-2/mcast_solicit", []byte("1"), 0))
	}
	for _, f := range service.Families {
		gone := netip.AddrPortFrom(addressIn(f, endpointNet, 77), 53)
		ep := p.serveUDP(t, &p.host, addressIn(f, endpointNet, 2), "alive ")
		pl := testPlan(testService{name: "u", proto: service.UDP, vip: serviceAddress(f, 1), eps: []netip.AddrPort{gone, ep}})
		serve(p.server, pl)
		for range 2 {
			askTo(t, udpFrom(&p.client, t, f), serviceAddress(f, 1))
		}
	}
}

// Moving a service and back leaves its connections alone; a deleted service's
// go on until they end.
func TestConnectionsOutliveTheirService(t *testing.T) {
	s := start(t, Config{}, testPlan(testService{name: "s", eps: []netip.AddrPort{tcpEndpoint(t, named("a"))}}))
	c := connect(t, s)
	ask(t, c, "x")
	empty := testPlan()
	prepare(s, empty)
	if got := ask(t, connect(t, s), "x"); got != "a x" {
		t.Errorf("between Prepare and Commit: answer %q", got)
	}
	s.Commit()
	if got := ask(t, c, "x"); got != "a x" {
		t.Errorf("answer %q on the old connection", got)
	}
	wantRefused(t, s)
	c.SetDeadline(time.Now().Add(patience))
}
