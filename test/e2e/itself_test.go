package e2e

import (
	"bufio"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
)

// TestEndpointAtItsOwnNodePort: a process in the node's own network that listens
// on the very node port of its service is an endpoint like others, and nothing
// that is on its way there comes back to be shared out again.
func TestEndpointAtItsOwnNodePort(t *testing.T) {
	w := newWorld(t)
	for _, address := range w.net.Config.NodeAddresses() {
		w.serveOnNode(netip.AddrPortFrom(address, lab.LinePort))
	}
	m := newManifest("web", 10, w.net.Backends[:1]...)
	m.Type, m.Ports = "NodePort", m.Ports[:1]
	m.Ports[0].NodePort = lab.LinePort
	m.Endpoints = append(m.Endpoints, lab.ManifestEndpoint{Name: "node", Addresses: w.net.Config.NodeAddresses(), Weight: 1})
	w.must(m.Write(w.manifests))
	w.start("--health-check", "off")
	targets := frontends(m)
	for _, address := range w.net.Config.NodeAddresses() {
		targets = append(targets, netip.AddrPortFrom(address, lab.LinePort))
	}
	round := func(when string) {
		for _, target := range targets {
			got := map[string]int{}
			for range 4 {
				got[w.ask(w.net.Client, "tcp", target).Backend]++
			}
			if got["b1"] != 2 || got["node"] != 2 {
				t.Errorf("%s, %s: %v, want 2 each of b1 and node", when, target, got)
			}
		}
	}
	round("at first")
	if kernelPlane == plan.IPTables {
		w.await("web", "line", w.plane, plan.StateOffloaded)
		round("offloaded")
		return
	}
	w.eventually(20*time.Second, "the reason to be told", func() error {
		if s := w.service("web", "line"); s.DataPlane != plan.Userspace || !strings.Contains(s.Reason, "where the service itself answers") {
			return fmt.Errorf("in %s: %s", s.DataPlane, s.Reason)
		}
		return nil
	})
	round("not offloaded")
}

// serveOnNode answers lines on the node as a lab's backends do.
func (w *world) serveOnNode(at netip.AddrPort) {
	w.Helper()
	l, err := w.net.Node.Listen(w.ctx, "tcp", at.String())
	w.must(err)
	w.Cleanup(func() { l.Close() })
	go func() {
		for c, err := l.Accept(); err == nil; c, err = l.Accept() {
			go func(c net.Conn) {
				defer c.Close()
				peer := c.RemoteAddr().(*net.TCPAddr).AddrPort().Addr()
				for in := bufio.NewScanner(c); in.Scan(); {
					fmt.Fprintf(c, "node %s %s\n", peer, in.Text())
				}
			}(c)
		}
	}()
}
