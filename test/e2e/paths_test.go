package e2e

import (
	"net/netip"
	"testing"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
)

// path is one way to reach a service.
type path struct {
	name   string
	from   *lab.Namespace
	target netip.AddrPort
	// keeps: the endpoint sees an address of the client, else the node's.
	keeps bool
}

// paths lists every way to the service of m, in both families.
func (w *world) paths(m lab.Manifest) []path {
	var out []path
	for i, node := range w.net.Config.NodeAddresses() {
		cluster := netip.AddrPortFrom(m.ClusterIPs[i], 80)
		external := netip.AddrPortFrom(m.ExternalIPs[i], 80)
		nodePort := netip.AddrPortFrom(node, 30080)
		loopback := netip.AddrPortFrom(netip.MustParseAddr([]string{"127.0.0.1", "::1"}[i]), 30080)
		out = append(out,
			path{"client to cluster IP", w.net.Client, cluster, true},
			path{"client to external IP", w.net.Client, external, false},
			path{"client to node port", w.net.Client, nodePort, false},
			path{"backend to cluster IP", w.net.Backends[0].Namespace, cluster, true},
			path{"node to cluster IP", w.net.Node, cluster, false},
			path{"node to external IP", w.net.Node, external, false},
			path{"node to its node port", w.net.Node, nodePort, false},
			path{"node to its node port on loopback", w.net.Node, loopback, false},
		)
	}
	return out
}

func (w *world) onPath(t *testing.T, network string, p path) {
	seen := map[string]bool{}
	for range 6 {
		a, err := p.from.Ask(w.ctx, network, p.target, "hello")
		if err != nil {
			t.Fatal(err)
		}
		seen[a.Backend] = true
		if a.Backend == "b1" && p.from == w.net.Backends[0].Namespace {
			continue // hairpin: the endpoint's own address can't be kept
		}
		if own := w.addressOf(p.from, a.Peer); own != p.keeps && p.from != w.net.Node {
			t.Errorf("%s saw the client as %s, want the client's own address: %v", a.Backend, a.Peer, p.keeps)
		}
	}
	if len(seen) != 3 && network == "tcp" {
		t.Errorf("6 connections reached %v, want all three backends", seen)
	}
}

// addressOf reports whether a is an address of the namespace.
func (w *world) addressOf(ns *lab.Namespace, a netip.Addr) bool {
	switch ns {
	case w.net.Client:
		for i := range w.net.Config.Clients {
			for _, c := range w.net.Config.ClientAddresses(i) {
				if c == a {
					return true
				}
			}
		}
	default:
		for _, b := range w.net.Backends {
			if b.Namespace != ns {
				continue
			}
			for _, c := range b.Addresses {
				if c == a {
					return true
				}
			}
		}
	}
	return false
}

// TestUnservedIsRefused: services without endpoints, and the listener's own
// port, refuse at once.
func TestUnservedIsRefused(t *testing.T) {
	w := newWorld(t)
	empty := newManifest("empty", 20)
	empty.IPv6 = true
	empty.ClusterIPs = append(empty.ClusterIPs, netip.MustParseAddr("fd00:96::20"))
	empty.Type = "NodePort"
	empty.Ports[0].NodePort = 30020
	w.must(empty.Write(w.manifests))
	w.must(newManifest("web", 10, w.net.Backends...).Write(w.manifests))
	w.start()
	if s := w.service("empty", "line"); s.DataPlane != plan.None || s.State != plan.StateRejecting {
		t.Errorf("a service without endpoints is in %s, %s; want none, rejecting", s.DataPlane, s.State)
	}
	for i, node := range w.net.Config.NodeAddresses() {
		for _, target := range []netip.AddrPort{
			netip.AddrPortFrom(empty.ClusterIPs[i], 80),
			netip.AddrPortFrom(node, 30020),
			netip.AddrPortFrom(node, 10244), // straight to the shared listener: no open relay
		} {
			w.refuses(w.net.Client, "tcp", target)
			w.refuses(w.net.Node, "tcp", target)
		}
		w.refuses(w.net.Client, "udp", netip.AddrPortFrom(empty.ClusterIPs[i], 80))
	}
}
