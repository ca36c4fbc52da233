package userspace

import (
	"net/netip"
	"testing"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

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
