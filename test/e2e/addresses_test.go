package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// hostPort is a port that the node itself serves, at all of its addresses.
const hostPort = 7000

// askHost sees that the node's own server answers at an address.
func (w *world) askHost(from *lab.Namespace, a netip.Addr) {
	w.Helper()
	target := netip.AddrPortFrom(a, hostPort)
	if got := w.ask(from, "tcp", target).Backend; got != "host" {
		w.Errorf("%s from %s is answered by %s; want the host's own server", target, from.Name, got)
	}
}

// TestHostPortsStayPrivate: the node's own ports can't be reached through the
// address of a service, in any data plane; at the node's own addresses they can.
func TestHostPortsStayPrivate(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.serve(w.net.Node, "host", hostPort)
	w.start()
	for _, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel} {
		w.pin("web", "line", plane)
		for f, a := range m.ClusterIPs {
			w.unserved("tcp", netip.AddrPortFrom(a, hostPort).String())
			if w.plane == plan.IPVS { // else the address isn't the node's, and goes who knows where
				w.refuses(w.net.Client, "tcp", netip.AddrPortFrom(a, hostPort))
				w.refuses(w.net.Node, "tcp", netip.AddrPortFrom(a, hostPort))
				w.refuses(w.net.Backends[0].Namespace, "tcp", netip.AddrPortFrom(a, hostPort))
			}
			w.askHost(w.net.Client, w.net.Config.NodeAddresses()[f])
			w.askHost(w.net.Node, w.net.Config.NodeAddresses()[f])
			w.ask(w.net.Client, "tcp", frontends(m)[f])
		}
	}
}

// ownAddresses gives the node a further address of each family on the client's
// network.
func (w *world) ownAddresses() []netip.Addr {
	w.Helper()
	own := []netip.Addr{netip.MustParseAddr("10.1.0.200"), netip.MustParseAddr("fd00:1::c8")}
	w.node("ip", "addr", "add", "10.1.0.200/24", "dev", "client")
	w.node("ip", "addr", "add", "fd00:1::c8/64", "dev", "client", "nodad")
	return own
}

// TestServiceAtHostAddress: an external address that is the node's own serves the
// service at its port, and the host at the host's ports; when the service goes,
// the address stays.
func TestServiceAtHostAddress(t *testing.T) {
	w := newWorld(t)
	own := w.ownAddresses()
	m := newManifest("web", 10, w.net.Backends...)
	m.ExternalIPs = own
	w.must(m.Write(w.manifests))
	w.serve(w.net.Node, "host", hostPort)
	w.start()
	for _, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel} {
		w.pin("web", "line", plane)
		for _, a := range own {
			w.ask(w.net.Client, "tcp", netip.AddrPortFrom(a, 80))
			w.ask(w.net.Node, "tcp", netip.AddrPortFrom(a, 80))
			w.askHost(w.net.Client, a)
			w.askHost(w.net.Node, a)
		}
	}
	w.must(os.Remove(m.Path(w.manifests)))
	w.gone("web")
	for _, a := range own {
		w.eventually(8*time.Second, a.String()+":80 to be served by nobody", func() error {
			if w.askFrom(netip.Addr{}, "tcp", netip.AddrPortFrom(a, 80), lasting(time.Second)) == nil {
				return errAnswered
			}
			return nil
		})
		w.askHost(w.net.Client, a)
	}
	if out := w.node("ip", "-o", "addr", "show", "dev", "client"); !strings.Contains(out, "10.1.0.200/24") || !strings.Contains(out, "fd00:1::c8/64") {
		t.Errorf("the node has lost its own addresses:\n%s", out)
	}
}

// TestNodePortAtEveryAddress of the node, also at one that it gets later.
func TestNodePortAtEveryAddress(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	m.Type = "NodePort"
	m.Ports[0].NodePort, m.Ports[1].NodePort = 30080, 30080
	w.must(m.Write(w.manifests))
	w.start()
	addresses := append(w.net.Config.NodeAddresses(), netip.MustParseAddr("10.2.0.1"), netip.MustParseAddr("fd00:2::1"))
	late := w.ownAddresses()
	for _, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel} {
		w.pin("web", "line", plane)
		w.pin("web", "datagram", plane)
		for _, a := range late {
			w.eventually(8*time.Second, "the node port at "+a.String(), func() error {
				return w.askFrom(netip.Addr{}, "tcp", netip.AddrPortFrom(a, 30080), within(2*time.Second))
			})
		}
		for _, a := range append(addresses, late...) {
			for _, network := range []string{"tcp", "udp"} {
				w.ask(w.net.Client, network, netip.AddrPortFrom(a, 30080))
				w.ask(w.net.Node, network, netip.AddrPortFrom(a, 30080))
			}
		}
	}
}

// TestIPVSManyAddresses: thousands of service addresses come onto the dummy link
// in one go, and leave it again.
func TestIPVSManyAddresses(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start()
	many := 5000
	if slow > 1 {
		many = 2000
	}
	file := filepath.Join(w.dir, "many.yaml")
	write(t, file, manyServices(many, w.net.Backends[0].Addresses[0]))
	start := time.Now()
	w.must(os.Rename(file, filepath.Join(w.manifests, "many.yaml")))
	w.awaitAddresses(many)
	t.Logf("%d addresses on the dummy link %s after their services", many, time.Since(start))
	w.ask(w.net.Client, "tcp", netip.AddrPortFrom(nthService(many-1), 80))
	held := w.hold(frontends(m)[0])
	start = time.Now()
	w.must(os.Remove(filepath.Join(w.manifests, "many.yaml")))
	w.awaitAddresses(0)
	t.Logf("%d addresses gone %s after their services", many, time.Since(start))
	w.unbroken("while addresses come and go", held)
}

// awaitAddresses waits until the dummy link has so many addresses of manyServices.
func (w *world) awaitAddresses(want int) {
	w.Helper()
	w.eventually(time.Minute, fmt.Sprintf("%d service addresses", want), func() error {
		sleep(300 * time.Millisecond)
		out := w.node("ip", "-4", "-o", "addr", "show", "dev", "kproxy0")
		if n := strings.Count(out, " 10.97."); n != want {
			return fmt.Errorf("there are %d", n)
		}
		return nil
	})
}

// nthService is the address of the n-th of many services, beside those of
// lab.NewManifest.
func nthService(n int) netip.Addr {
	return netip.AddrFrom4([4]byte{10, 97, 1 + byte(n>>8), byte(n)})
}

// manyServices are services with the same endpoints each.
func manyServices(n int, endpoints ...netip.Addr) string {
	var b, addresses strings.Builder
	for _, e := range endpoints {
		fmt.Fprintf(&addresses, "{addresses: [%s], nodeName: node, conditions: {ready: true}}, ", e)
	}
	for i := range n {
		fmt.Fprintf(&b, `---
apiVersion: v1
kind: Service
metadata: {name: many-%d, namespace: default, annotations: {kproxy.dev/health-check: "off"}}
spec: {clusterIP: %s, clusterIPs: [%[2]s], ports: [{name: line, port: 80, targetPort: %[3]d}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: many-%[1]d, namespace: default, labels: {kubernetes.io/service-name: many-%[1]d}}
addressType: IPv4
endpoints: [%[4]s]
ports: [{name: line, protocol: TCP, port: %[3]d}]
`, i, nthService(i), lab.LinePort, addresses.String())
	}
	return b.String()
}

// TestEndpointAtItsOwnNodePort: a process in the node's own network that listens
// on the very node port of its service is an endpoint like others, and nothing
// that is on its way there comes back to be shared out again.
func TestEndpointAtItsOwnNodePort(t *testing.T) {
	w := newWorld(t)
	w.serve(w.net.Node, "node", lab.LinePort)
	m := newManifest("web", 10, w.net.Backends[:1]...)
	m.Type, m.Ports, m.Algorithm = "NodePort", m.Ports[:1], string(service.RoundRobin)
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
	if kernelPlane != plan.IPVS {
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

// TestClientBesideTheEndpoint: a client on the endpoint's own network, which
// the endpoint would answer past the node, is served all the same, in every data
// plane, and the endpoint sees the node's address.
func TestClientBesideTheEndpoint(t *testing.T) {
	w := newWorld(t)
	// The endpoint is in the client's namespace, at another address of its network.
	beside := w.net.Config.ClientAddresses(2)
	echo := w.net.Backends[0]
	w.serve(w.net.Client, "beside", 9100)
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
		if out, err := w.net.Client.Output(w.ctx, command[0], command[1:]...); err != nil {
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
