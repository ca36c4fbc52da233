package e2e

import (
	"net/netip"
	"testing"

	"kproxy.dev/kproxy/service"
)

// TestLoopbackNodePortsAreTheNodesOwn: a neighbour that sends packets to the
// node's loopback address isn't served, in any data plane, though the node itself
// is: redirected packets would escape the kernel's check (CVE-2020-8558).
func TestLoopbackNodePortsAreTheNodesOwn(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	m.Type, m.Ports[0].NodePort = "NodePort", 30080
	w.must(m.Write(w.manifests))
	w.start("--nodeport-addresses", "127.0.0.0/8")
	for _, command := range [][]string{
		{"sysctl", "-qw", "net.ipv4.conf.all.route_localnet=1"},
		{"ip", "address", "delete", "127.0.0.1/8", "dev", "lo"},
		{"ip", "route", "add", "127.0.0.1/32", "via", w.net.Config.NodeAddresses()[0].String()},
	} {
		if out, err := w.net.Client.Command(w.ctx, command[0], command[1:]...).CombinedOutput(); err != nil {
			t.Fatalf("%v: %v\n%s", command, err, out)
		}
	}
	at := netip.MustParseAddrPort("127.0.0.1:30080")
	for _, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel} {
		w.pin("web", "line", plane)
		w.ask(w.net.Node, "tcp", at)
		w.unserved("tcp", at.String())
	}
}
