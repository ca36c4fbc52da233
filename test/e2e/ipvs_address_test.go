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

// serveHost makes the node say "host" to everybody who connects to hostPort.
func (w *world) serveHost() {
	w.Helper()
	l, err := w.net.Node.Listen(w.ctx, "tcp", fmt.Sprintf(":%d", hostPort))
	w.must(err)
	w.Cleanup(func() { l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte("host\n")) // if it fails, the client sees
			c.Close()
		}
	}()
}

// askHost reads what the node says at an address.
func (w *world) askHost(from *lab.Namespace, a netip.Addr) {
	w.Helper()
	target := netip.AddrPortFrom(a, hostPort)
	c, err := from.Dial(w.ctx, "tcp", target.String())
	w.must(err)
	defer c.Close()
	w.must(c.SetDeadline(time.Now().Add(within(5 * time.Second))))
	buf := make([]byte, 100)
	if n, err := c.Read(buf); string(buf[:n]) != "host\n" {
		w.Errorf("%s from %s says %q, %v; want the host's own server", target, from.Name, buf[:n], err)
	}
}

// TestHostPortsStayPrivate: the node's own ports can't be reached through the
// address of a service, in any data plane; at the node's own addresses they can.
func TestHostPortsStayPrivate(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.serveHost()
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
	w.serveHost()
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

// TestExternalLocalElsewhere: where external traffic policy Local finds no
// endpoint on this node, outsiders get no answer at all at external addresses and
// node ports, and are not sent to endpoints elsewhere; cluster addresses, and
// clients on this node, have every endpoint.
func TestExternalLocalElsewhere(t *testing.T) {
	w := newWorld(t)
	if mode == plan.ModeAuto {
		w.plane = plan.IPTables // IPVS can't tell apart whom the policy is for
	}
	m := newManifest("web", 10, w.net.Backends...)
	m.Type, m.ExternalLocal = "LoadBalancer", true
	m.ExternalIPs = []netip.Addr{netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("2001:db8::10")}
	m.LoadBalancerIPs = []netip.Addr{netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("2001:db8::11")}
	m.Ports[0].NodePort = 30080
	for _, b := range []string{"b1", "b2", "b3"} {
		m = m.Edit(b, func(e *lab.ManifestEndpoint) { e.Node = "another" })
	}
	w.must(m.Write(w.manifests))
	w.start()
	for _, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel} {
		w.pin("web", "line", plane)
		for f, node := range w.net.Config.NodeAddresses() {
			w.ask(w.net.Client, "tcp", netip.AddrPortFrom(m.ClusterIPs[f], 80))
			for _, target := range []netip.AddrPort{
				netip.AddrPortFrom(m.ExternalIPs[f], 80), netip.AddrPortFrom(m.LoadBalancerIPs[f], 80), netip.AddrPortFrom(node, 30080),
			} {
				err := w.askFrom(netip.Addr{}, "tcp", target, lasting(700*time.Millisecond))
				if err == nil || strings.Contains(err.Error(), "refused") || strings.Contains(err.Error(), "reset") {
					t.Errorf("%s, %s: an outsider got %v, want no answer", plane, target, err)
				}
				w.ask(w.net.Node, "tcp", target)
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
	const many = 5000
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
