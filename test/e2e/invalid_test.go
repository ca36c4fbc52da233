package e2e

import (
	"fmt"
	"net/netip"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/service"
)

// TestInvalidPackets: packets of an endpoint that conntrack can't place, because
// they are outside of the TCP window, reach no client, which would answer with a
// reset that ends the connection: neither one elsewhere, nor one that is
// masqueraded, nor the node itself, whatever carries the connection. That holds
// for an endpoint that gets no new connections too. (kubernetes/kubernetes#74839,
// #117924)
func TestInvalidPackets(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends[0], w.net.Backends[1])
	m.Type, m.Ports[0].NodePort = "NodePort", 30080
	w.must(m.Write(w.manifests))
	w.start("--health-check", "off")
	var intruders []*intruder
	for _, b := range w.net.Backends[:2] {
		intruders = append(intruders, w.intrude(b))
	}
	var held []*lab.Held
	hold := func(from *lab.Namespace, target netip.AddrPort) {
		t.Helper()
		h, err := lab.Hold(w.ctx, lab.HoldConfig{From: from, Network: "tcp", Target: target, Every: within(50 * time.Millisecond), Timeout: within(5 * time.Second)})
		w.must(err)
		t.Cleanup(func() { h.Close() })
		held = append(held, h)
	}
	unharmed := func(when string) {
		t.Helper()
		var before []int
		for _, h := range held {
			before = append(before, h.Exchanges())
		}
		sleep(time.Second)
		w.unbroken(when, held...)
		for i, h := range held {
			if h.Exchanges() == before[i] && h.Err() == nil {
				t.Errorf("%s: connection %d of %d stands still", when, i+1, len(held))
			}
		}
		for i, in := range intruders {
			if in.sent.Load() == 0 || in.resets.Load() > 0 {
				t.Errorf("%s: %d packets of endpoint %d were answered with %d resets, want none", when, in.sent.Load(), i+1, in.resets.Load())
			}
		}
	}
	for _, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel} {
		w.pin("web", "line", plane)
		for f, target := range frontends(m) {
			nodePort := netip.AddrPortFrom(w.net.Config.NodeAddresses()[f], 30080)
			for range 2 { // one for each endpoint
				hold(w.net.Client, target)
				hold(w.net.Client, nodePort)
				hold(w.net.Node, target)
			}
		}
		unharmed(string(plane))
	}
	w.metric("kubeproxy_iptables_ct_state_invalid_dropped_packets_total", func(v float64) bool { return v > 0 })
	m = m.Edit("b2", func(e *lab.ManifestEndpoint) { e.NotReady, e.Terminating = true, true })
	w.must(m.Write(w.manifests))
	w.eventually(10*time.Second, "b2 to get no new connection", func() error {
		for _, e := range w.service("web", "line").Endpoints {
			if e.Terminating && !e.Usable {
				return nil
			}
		}
		return fmt.Errorf("it does: %+v", w.service("web", "line").Endpoints)
	})
	unharmed("an endpoint on its way out")
}
