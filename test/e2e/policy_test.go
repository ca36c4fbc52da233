package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// TestSourceRanges: a load balancer address is for the clients in its ranges
// only, in both data planes; other addresses of the service are for all.
func TestSourceRanges(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	m.Type = "LoadBalancer"
	m.LoadBalancerIPs = []netip.Addr{netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("2001:db8::11")}
	inside, outside := w.net.Config.ClientAddresses(0), w.net.Config.ClientAddresses(1)
	for _, a := range inside {
		m.SourceRanges = append(m.SourceRanges, netip.PrefixFrom(a, a.BitLen()))
	}
	w.must(m.Write(w.manifests))
	w.start()
	for _, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel} {
		w.pin("web", "line", plane)
		w.pin("web", "datagram", plane)
		for f, address := range m.LoadBalancerIPs {
			target := netip.AddrPortFrom(address, 80)
			for _, network := range []string{"tcp", "udp"} {
				if err := w.askFrom(inside[f], network, target, within(5*time.Second)); err != nil {
					t.Errorf("%s, %s from %s, which is in the ranges: %v", plane, network, inside[f], err)
				}
				if err := w.askFrom(outside[f], network, target, lasting(700*time.Millisecond)); err == nil {
					t.Errorf("%s, %s from %s, which isn't in the ranges, is answered", plane, network, outside[f])
				}
				if err := w.askFrom(outside[f], network, frontends(m)[f], within(5*time.Second)); err != nil {
					t.Errorf("%s, %s from %s to the cluster address: %v", plane, network, outside[f], err)
				}
			}
		}
	}
}

// askFrom makes an exchange from a client's address, or gives up.
func (w *world) askFrom(local netip.Addr, network string, target netip.AddrPort, patience time.Duration) error {
	ctx, cancel := context.WithTimeout(w.ctx, patience)
	defer cancel()
	_, err := w.net.Client.AskFrom(ctx, local, network, target, "hello")
	return err
}

// TestLocalPolicies: with traffic policy Local only this node's endpoints take
// connections, those from outside keep the client's address, and where the
// node has none, outsiders get no answer.
func TestLocalPolicies(t *testing.T) {
	w := newWorld(t)
	if mode == plan.ModeAuto {
		w.plane = plan.IPTables // IPVS can't tell apart whom the policy is for
	}
	external := netip.MustParseAddr("192.0.2.10")
	m := newManifest("web", 10, w.net.Backends...)
	m.Type, m.ExternalLocal, m.InternalLocal = "NodePort", true, true
	m.ExternalIPs = []netip.Addr{external, netip.MustParseAddr("2001:db8::10")}
	m.Ports[0].NodePort = 30080
	for _, elsewhere := range []string{"b2", "b3"} {
		m = m.Edit(elsewhere, func(e *lab.ManifestEndpoint) { e.Node = "another" })
	}
	w.must(m.Write(w.manifests))
	w.start()
	targets := append(frontends(m), netip.AddrPortFrom(external, 80), netip.AddrPortFrom(m.ExternalIPs[1], 80))
	for _, node := range w.net.Config.NodeAddresses() {
		targets = append(targets, netip.AddrPortFrom(node, 30080))
	}
	for _, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel} {
		w.pin("web", "line", plane)
		for _, target := range targets {
			for range 3 {
				a := w.ask(w.net.Client, "tcp", target)
				if a.Backend != "b1" || !w.addressOf(w.net.Client, a.Peer) {
					t.Errorf("%s, %s: %s answered and saw the client as %s; want b1, and the client's own address", plane, target, a.Backend, a.Peer)
				}
			}
		}
	}
	m = m.Edit("b1", func(e *lab.ManifestEndpoint) { e.Node = "another" })
	w.must(m.Write(w.manifests))
	for _, target := range targets {
		w.eventually(8*time.Second, target.String()+" to serve nobody", func() error {
			if err := w.askFrom(w.net.Config.ClientAddresses(0)[service.FamilyOf(target.Addr())], "tcp", target, lasting(700*time.Millisecond)); err == nil {
				return errAnswered
			}
			return nil
		})
	}
}

// TestWeights: connections are shared out by weight, exactly, in both data
// planes; an endpoint of weight 0 gets none.
func TestWeights(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	m.Algorithm = string(service.WeightedRoundRobin)
	for b, weight := range map[string]int{"b1": 3, "b2": 1, "b3": 0} {
		m = m.Edit(b, func(e *lab.ManifestEndpoint) { e.Weight = weight })
	}
	w.must(m.Write(w.manifests))
	w.start()
	for _, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel} {
		w.pin("web", "line", plane)
		for _, target := range frontends(m) {
			got := map[string]int{}
			for range 20 {
				got[w.ask(w.net.Client, "tcp", target).Backend]++
			}
			if got["b1"] != 15 || got["b2"] != 5 || got["b3"] != 0 {
				t.Errorf("%s to %s: 20 connections went %v, want 15, 5 and none", plane, target, got)
			}
		}
	}
}

// TestFigures: the status counts connections and bytes per service and per
// endpoint, in every data plane alike.
func TestFigures(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start("--health-check", "off")
	for i, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel} {
		w.pin("web", "line", plane)
		before := w.service("web", "line").Connections
		for _, target := range frontends(m) {
			for range 15 {
				w.ask(w.net.Client, "tcp", target)
			}
		}
		held := w.hold(frontends(m)[0])
		// The kernel tells of a connection when it has ended for good, or is asked.
		w.eventually(20*time.Second, "the figures of "+string(plane), func() error {
			s := w.service("web", "line")
			total := uint64(0)
			for _, e := range s.Endpoints {
				total += e.TotalConnections
			}
			want := uint64(31 * (i + 1))
			c := s.Connections
			if c.Total != want || total != want || c.Active < 1 || c.BytesIn <= before.BytesIn || c.BytesOut <= before.BytesOut || c.Failed != 0 {
				return fmtFigures(c, total, want)
			}
			return nil
		})
		held.Close()
	}
}

var errAnswered = errors.New("somebody answered")

func fmtFigures(c plan.Connections, endpoints, want uint64) error {
	return fmt.Errorf("%+v, %d at the endpoints; want %d", c, endpoints, want)
}
