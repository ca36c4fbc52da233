package conntrack

import (
	"net"
	"net/netip"
	"slices"
	"testing"
	"time"

	"kproxy.dev/kproxy/service"
)

// TestListTo: flows to one endpoint, and the kernel hands over no others.
func TestListTo(t *testing.T) {
	c := inNamespace(t)
	for _, f := range service.Families {
		one, other, dst, dst2, client := at(f, pods, 2, 5353), at(f, pods, 3, 5354), at(f, services, 10, 53), at(f, services, 11, 53), at(f, clients, 2, 5000)
		server(t, one)
		server(t, other)
		rewrite(t, dst, one)
		rewrite(t, dst2, other)
		again(t, ask(t, client, dst))
		again(t, ask(t, at(f, clients, 3, 5000), dst2))
		for name, list := range map[string]func() ([]Flow, error){
			"List": func() ([]Flow, error) { return c.List(Wanted{Protocol: service.UDP, From: one}) },
			"the kernel alone": func() ([]Flow, error) {
				return c.dump(nil, walk{family: f.Number(), filter: Wanted{Protocol: service.UDP, From: one}})
			},
		} {
			flows, err := list()
			if err != nil || len(flows) != 1 || flows[0].ReplySrc != one || flows[0].OrigDst != dst {
				t.Errorf("%s: %s: got %v, %v, want the flow to %s", f, name, flows, err, one)
			}
		}
		if flows, err := c.List(Wanted{Protocol: service.TCP, From: one}); err != nil || len(flows) != 0 {
			t.Errorf("%s: TCP: got %v, %v, want none", f, flows, err)
		}
	}
}

// TestListOfSeveral: what several wants have is found in one walk of a short table, and in those of a long one.
func TestListOfSeveral(t *testing.T) {
	c := inNamespace(t)
	var want []netip.AddrPort // clients
	for _, f := range service.Families {
		server(t, at(f, pods, 2, 5353))
		again(t, ask(t, at(f, clients, 2, 5000), at(f, pods, 2, 5353)))
		served, silent := at(f, pods, 2, 80), at(f, pods, 2, 81)
		l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(served))
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		answered, err := net.DialTCP("tcp", net.TCPAddrFromAddrPort(at(f, clients, 2, 5001)), l.Addr().(*net.TCPAddr))
		if err != nil {
			t.Fatal(err)
		}
		defer answered.Close()
		command(t, map[service.Family]string{service.IPv4: "iptables", service.IPv6: "ip6tables"}[f], "-w", "-t", "raw", "-A", "PREROUTING", "-p", "tcp", "--dport", "81", "-j", "DROP")
		d := net.Dialer{Timeout: 50 * time.Millisecond, LocalAddr: net.TCPAddrFromAddrPort(at(f, clients, 2, 5002))}
		if c, err := d.Dial("tcp", silent.String()); err == nil {
			c.Close()
			t.Fatalf("%s answers", silent)
		}
		want = append(want, at(f, clients, 2, 5000), at(f, clients, 2, 5002))
	}
	which := []Wanted{{Protocol: service.UDP}, {Protocol: service.TCP, Unanswered: true}}
	once, err := c.List(which...)
	if err != nil {
		t.Fatal(err)
	}
	var each []Flow
	for _, w := range walks(which) {
		if each, err = c.list(each, w); err != nil {
			t.Fatal(err)
		}
	}
	for name, flows := range map[string][]Flow{"one walk": once, "walks": each} {
		var got []netip.AddrPort
		for _, f := range flows {
			got = append(got, f.OrigSrc)
		}
		slices.SortFunc(got, netip.AddrPort.Compare)
		if !slices.Equal(got, want) {
			t.Errorf("%s: flows of %v, want %v", name, got, want)
		}
	}
}
