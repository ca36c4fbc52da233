package e2e

import (
	"net/netip"
	"testing"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/service"
)

// TestClientBesideTheEndpoint: a client on the endpoint's own network, to whom
// the endpoint would answer past the node, is served all the same, in every data
// plane, and the endpoint sees the node's address.
func TestClientBesideTheEndpoint(t *testing.T) {
	w := newWorld(t)
	// The endpoint is in the client's namespace, at another address of its network.
	beside := w.net.Config.ClientAddresses(2)
	echo := w.net.Backends[0]
	l, err := w.net.Client.Listen(w.ctx, "tcp", ":9100")
	w.must(err)
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			host := netip.MustParseAddrPort(c.RemoteAddr().String()).Addr().Unmap()
			go func() {
				defer c.Close()
				if _, err := c.Read(make([]byte, 100)); err == nil {
					_, _ = c.Write([]byte("beside " + host.String() + " hello\n"))
				}
			}()
		}
	}()
	m := newManifest("web", 10, echo)
	m.Ports = []lab.ManifestPort{{Name: "line", Protocol: "TCP", Port: 80, Target: 9100}}
	m.Endpoints[0].Addresses = beside
	w.must(m.Write(w.manifests))
	w.start("--health-check", "off")
	for _, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel} {
		w.pin("web", "line", plane)
		for i, target := range frontends(m) {
			a := w.ask(w.net.Client, "tcp", target)
			if want := w.net.Config.NodeAddresses()[i]; a.Peer != want {
				t.Errorf("%s: the endpoint saw %s, want the node's %s", plane, a.Peer, want)
			}
		}
	}
}
