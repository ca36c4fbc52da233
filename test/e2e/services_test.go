package e2e

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// answered waits until new connections to target are answered.
func (w *world) answered(network string, target netip.AddrPort) {
	w.Helper()
	local := w.net.Config.ClientAddresses(0)[service.FamilyOf(target.Addr())]
	w.eventually(10*time.Second, fmt.Sprintf("%s %s to answer", network, target), func() error {
		return w.askFrom(local, network, target, within(2*time.Second))
	})
}

// unanswered waits until they no longer are, by refusal or by silence.
func (w *world) unanswered(network string, target netip.AddrPort) {
	w.Helper()
	local := w.net.Config.ClientAddresses(0)[service.FamilyOf(target.Addr())]
	w.eventually(10*time.Second, fmt.Sprintf("%s %s not to answer", network, target), func() error {
		if w.askFrom(local, network, target, lasting(500*time.Millisecond)) == nil {
			return errAnswered
		}
		return nil
	})
}

// TestProtocolsAndPortsAreDistinct: two services share an address and a port, one by
// TCP and one by UDP; neither answers for the other, nor at a port it doesn't have.
func TestProtocolsAndPortsAreDistinct(t *testing.T) {
	w := newWorld(t)
	shared := []netip.Addr{netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("2001:db8::10")}
	stream, datagram := newManifest("stream", 10, w.net.Backends[0]), newManifest("datagram", 11, w.net.Backends[1])
	stream.Ports, datagram.Ports = stream.Ports[:1], datagram.Ports[1:2]
	stream.ExternalIPs, datagram.ExternalIPs = shared, shared
	w.must(stream.Write(w.manifests))
	w.must(datagram.Write(w.manifests))
	w.start("--health-check", "off")
	for _, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel} {
		w.pin("stream", "line", plane)
		w.pin("datagram", "datagram", plane)
		for family, address := range shared {
			target := netip.AddrPortFrom(address, 80)
			for range 3 {
				if a := w.ask(w.net.Client, "tcp", target); a.Backend != "b1" {
					t.Errorf("%s, tcp to %s: answered by %s, want b1", plane, target, a.Backend)
				}
				if a := w.ask(w.net.Client, "udp", target); a.Backend != "b2" {
					t.Errorf("%s, udp to %s: answered by %s, want b2", plane, target, a.Backend)
				}
			}
			w.unanswered("udp", frontends(stream)[family])
			w.unanswered("tcp", frontends(datagram)[family])
			w.unanswered("tcp", netip.AddrPortFrom(address, 81))
			w.unanswered("tcp", netip.AddrPortFrom(stream.ClusterIPs[family], 9000))
		}
	}
}

// TestServiceIsEdited takes a service through whatever can be changed in it: what it
// has answers, and what it no longer has doesn't, in every data plane.
func TestServiceIsEdited(t *testing.T) {
	t.Parallel()
	for _, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel} {
		t.Run(string(plane), func(t *testing.T) {
			w := newWorld(t)
			m := newManifest("web", 10, w.net.Backends...)
			m.Ports, m.DataPlane = m.Ports[:1], string(plane)
			w.must(m.Write(w.manifests))
			w.start("--health-check", "off")
			w.editPorts(m)
			w.editType(m)
			w.editAffinity(m)
			// Deleted, and made anew at another address.
			w.must(os.Remove(m.Path(w.manifests)))
			w.unanswered("tcp", frontends(m)[0])
			again := newManifest("web", 12, w.net.Backends...)
			w.must(again.Write(w.manifests))
			for family := range m.ClusterIPs {
				w.answered("tcp", frontends(again)[family])
				w.unanswered("tcp", frontends(m)[family])
			}
		})
	}
}

// editPorts adds, changes and removes ports and node ports, and leaves m as it was.
func (w *world) editPorts(m lab.Manifest) {
	w.Helper()
	for family, node := range w.net.Config.NodeAddresses() {
		at := func(port uint16) netip.AddrPort { return netip.AddrPortFrom(node, port) }
		cluster := frontends(m)[family]
		w.answered("tcp", cluster)
		more := m
		more.Type = "NodePort"
		more.Ports = []lab.ManifestPort{m.Ports[0], {Name: "more", Port: 81, Target: lab.LinePort, NodePort: 30081}}
		more.Ports[0].NodePort = 30080
		w.must(more.Write(w.manifests))
		w.answered("tcp", at(30080))
		w.answered("tcp", at(30081))
		w.answered("tcp", netip.AddrPortFrom(cluster.Addr(), 81))
		changed := m
		changed.Type, changed.Ports = "NodePort", []lab.ManifestPort{m.Ports[0]}
		changed.Ports[0].NodePort = 30082
		w.must(changed.Write(w.manifests))
		w.answered("tcp", at(30082))
		w.unanswered("tcp", at(30080))
		w.unanswered("tcp", at(30081))
		w.unanswered("tcp", netip.AddrPortFrom(cluster.Addr(), 81))
		w.must(m.Write(w.manifests))
		w.unanswered("tcp", at(30082))
		w.answered("tcp", cluster)
	}
}

// editType makes m into what kproxy doesn't serve, and back.
func (w *world) editType(m lab.Manifest) {
	w.Helper()
	headless := m
	headless.Headless = true
	for what, yaml := range map[string]string{
		"a headless service":          headless.YAML(),
		"a name of something outside": "apiVersion: v1\nkind: Service\nmetadata:\n  name: web\nspec:\n  type: ExternalName\n  externalName: example.com\n",
		"another proxy's service":     strings.Replace(m.YAML(), "metadata:\n  name: web\n", "metadata:\n  name: web\n  labels:\n    service.kubernetes.io/service-proxy-name: other\n", 1),
	} {
		w.Logf("the service becomes %s", what)
		write(w.T, m.Path(w.manifests), yaml)
		for _, target := range frontends(m) {
			w.unanswered("tcp", target)
		}
		w.must(m.Write(w.manifests))
		for _, target := range frontends(m) {
			w.answered("tcp", target)
		}
	}
}

// editAffinity switches session affinity on and off.
func (w *world) editAffinity(m lab.Manifest) {
	w.Helper()
	sticky := m
	sticky.Affinity = time.Hour
	for _, c := range []struct {
		manifest lab.Manifest
		backends int
	}{{sticky, 1}, {m, 3}} {
		w.must(c.manifest.Write(w.manifests))
		for _, target := range frontends(m) {
			w.eventually(10*time.Second, fmt.Sprintf("%d backends to answer one client at %s", c.backends, target), func() error {
				seen := map[string]bool{}
				for range 9 {
					a, err := w.net.Client.Ask(w.ctx, "tcp", target, "hello")
					if err != nil {
						return err
					}
					seen[a.Backend] = true
				}
				if len(seen) != c.backends {
					return fmt.Errorf("%v did", seen)
				}
				return nil
			})
		}
	}
}

// TestAskedTooEarly: a connection that was begun while nothing answered at a service's
// address succeeds once something does, by its client's next SYN, although conntrack
// remembers where the first one went.
func TestAskedTooEarly(t *testing.T) {
	t.Parallel()
	for _, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel} {
		if plane == service.PreferKernel && kernelPlane == plan.IPVS {
			break // it doesn't rewrite what conntrack knows already (ip_vs_update_conntrack): docs/limits.md
		}
		t.Run(string(plane), func(t *testing.T) {
			w := newWorld(t)
			w.must(newManifest("other", 11, w.net.Backends...).Write(w.manifests))
			w.start("--health-check", "off")
			m := newManifest("web", 10, w.net.Backends...)
			m.DataPlane = string(plane)
			early := m
			early.ExternalIPs = []netip.Addr{netip.MustParseAddr("192.0.2.10"), netip.MustParseAddr("2001:db8::10")}
			for _, c := range []struct {
				what     string
				manifest lab.Manifest
				targets  []netip.AddrPort
			}{
				{"before the service existed", m, frontends(m)},
				{"before the service had that address", early, []netip.AddrPort{netip.AddrPortFrom(early.ExternalIPs[0], 80), netip.AddrPortFrom(early.ExternalIPs[1], 80)}},
			} {
				answers := make(chan error, len(c.targets))
				for _, target := range c.targets {
					go func() {
						ctx, cancel := context.WithTimeout(w.ctx, within(70*time.Second))
						defer cancel()
						_, err := w.net.Client.Ask(ctx, "tcp", target, "hello")
						answers <- err
					}()
					w.eventually(10*time.Second, "the node to have seen a SYN to "+target.String(), func() error {
						if !strings.Contains(w.node("conntrack", "-L", "-p", "tcp", "-f", []string{"ipv4", "ipv6"}[service.FamilyOf(target.Addr())], "-d", target.Addr().String()), "SYN_SENT") {
							return errors.New("no entry")
						}
						return nil
					})
				}
				w.must(c.manifest.Write(w.manifests))
				for range c.targets {
					if err := <-answers; err != nil {
						t.Errorf("a connection begun %s: %v", c.what, err)
					}
				}
			}
		})
	}
}

// TestIPTablesAffinityEnds: a client keeps its endpoint as long as it comes again in
// time, and may get another after that. (IPVS keeps it longer: as long as it
// remembers a connection, which is a matter of minutes.)
func TestIPTablesAffinityEnds(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	timeout := lasting(2 * time.Second)
	m.Affinity = timeout
	w.must(m.Write(w.manifests))
	w.start()
	targets := frontends(m)
	ask := func(i int) string { return w.ask(w.net.Client, "tcp", targets[i]).Backend }
	for _, plane := range preferences() {
		w.pin("web", "line", plane)
		var first [2]string
		var last [2]time.Time
		var inTime [2]int
		for i := range targets {
			last[i], first[i] = time.Now(), ask(i)
		}
		for range 5 { // longer than the time-out altogether
			time.Sleep(timeout / 4)
			for i, target := range targets {
				began := time.Now()
				now := ask(i)
				// A machine that stood still may have asked too late.
				if time.Since(last[i]) < timeout {
					if inTime[i]++; now != first[i] {
						t.Errorf("%s to %s: answered by %s in time, want still %s", plane, target, now, first[i])
					}
				}
				last[i], first[i] = began, now
			}
		}
		stay := []int{0, 1}
		for tries := 0; tries < 10 && len(stay) > 0; tries++ {
			time.Sleep(timeout + time.Second)
			stay = slices.DeleteFunc(stay, func(i int) bool { return ask(i) != first[i] })
		}
		for _, i := range stay {
			t.Errorf("%s to %s, after the time-out: answered by %s again, ten times", plane, targets[i], first[i])
		}
		for i, target := range targets {
			if inTime[i] == 0 {
				t.Errorf("%s to %s: never asked in time", plane, target)
			}
		}
	}
}

// TestTargetPortsDiffer: a named target port is another number on another endpoint.
// And one of the endpoints is a process of this node itself (hostNetwork).
func TestTargetPortsDiffer(t *testing.T) {
	w := newWorld(t)
	node := w.net.Config.NodeAddresses()
	w.serve(w.net.Node, "node", 9001)
	m := newManifest("web", 10, w.net.Backends[0])
	m.Ports = m.Ports[:1]
	yaml := m.YAML()
	for family, a := range node {
		yaml += fmt.Sprintf(`---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: web-node-%d
  namespace: default
  labels:
    kubernetes.io/service-name: web
addressType: %s
endpoints:
- addresses: ["%s"]
  nodeName: node
ports:
- name: line
  port: 9001
`, family, []string{"IPv4", "IPv6"}[family], a)
	}
	write(t, m.Path(w.manifests), yaml)
	w.start("--health-check", "off")
	for _, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel} {
		w.pin("web", "line", plane)
		for _, target := range frontends(m) {
			for _, from := range []*lab.Namespace{w.net.Client, w.net.Node, w.net.Backends[1].Namespace} {
				seen := map[string]bool{}
				for i := 0; i < 4 || i < 64 && len(seen) < 2; i++ { // a data plane may choose at random
					seen[w.ask(from, "tcp", target).Backend] = true
				}
				if len(seen) != 2 || !seen["b1"] || !seen["node"] {
					t.Errorf("%s, from %s to %s: answered by %v, want b1 and node", plane, from.Name, target, seen)
				}
			}
		}
	}
}
