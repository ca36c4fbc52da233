package e2e

import (
	"context"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// TestAnotherProxy: a service whose endpoints are in an excluded network is left
// to the proxy that serves them, which is a rule of the host's here; it becomes
// kproxy's and another proxy's again while connections go on, and UDP flows
// follow it.
func TestAnotherProxy(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		plan.Mode
		dataPlane service.Preference
	}{
		{"userspace", mode, service.PreferUserspace},
		{"kernel", mode, service.PreferKernel},
		{"mode userspace", plan.ModeUserspace, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := newWorld(t)
			m := newManifest("web", 10, w.net.Backends...)
			m.Type, m.DataPlane = "LoadBalancer", string(tt.dataPlane)
			m.LoadBalancerIPs = []netip.Addr{netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("2001:db8::11")}
			m.Ports[0].NodePort, m.Ports[1].NodePort = 30080, 30080
			// Connections are held while the service leaves twice: no drain may end them.
			args := []string{"--mode", string(tt.Mode), "--health-check", "off", "--drain-timeout", within(time.Minute).String()}
			theirs := w.net.Backend("b3")
			for _, a := range theirs.Addresses {
				args = append(args, "--exclude-cluster-cidr", netip.PrefixFrom(a, a.BitLen()).String())
			}
			w.anotherProxy("-A", m, theirs)
			w.must(m.Without("b1", "b2").Write(w.manifests))
			w.start(args...)
			for f := range w.net.Config.NodeAddresses() {
				w.leavesAndComesBack(m, theirs, service.Family(f))
			}
			w.must(m.Write(w.manifests)) // some of them are another proxy's
			w.anotherProxy("-D", m, theirs)
			w.servedBy("some endpoints are kproxy's", frontends(m), "b1", "b2")
		})
	}
}

// anotherProxy leads everything that m asks for to one backend, by rules of the
// host's, which come (-A) and go (-D).
func (w *world) anotherProxy(verb string, m lab.Manifest, to *lab.Backend) {
	w.Helper()
	for f, program := range []string{"iptables-restore", "ip6tables-restore"} {
		target := to.Address(service.Family(f) == service.IPv6, lab.LinePort)
		rules := []string{"*nat"}
		for _, chain := range []string{"PREROUTING", "OUTPUT"} {
			for _, network := range []string{"tcp", "udp"} {
				for _, at := range []string{
					fmt.Sprintf("-d %s -p %s --dport 80", m.ClusterIPs[f], network),
					fmt.Sprintf("-d %s -p %s --dport 80", m.LoadBalancerIPs[f], network),
					fmt.Sprintf("-p %s --dport 30080 -m addrtype --dst-type LOCAL", network),
				} {
					rules = append(rules, fmt.Sprintf("%s %s %s -j DNAT --to-destination %s", verb, chain, at, target))
				}
			}
		}
		cmd := w.net.Node.Command(w.ctx, program, "-w", "--noflush")
		cmd.Stdin = strings.NewReader(strings.Join(append(rules, "COMMIT\n"), "\n"))
		if out, err := cmd.CombinedOutput(); err != nil {
			w.Fatalf("%s: %v\n%s", program, err, out)
		}
	}
}

// leavesAndComesBack ends where it begins: with b3 alone, which is another proxy's.
func (w *world) leavesAndComesBack(m lab.Manifest, theirs *lab.Backend, f service.Family) {
	w.Helper()
	targets := []netip.AddrPort{
		netip.AddrPortFrom(m.ClusterIPs[f], 80), netip.AddrPortFrom(m.LoadBalancerIPs[f], 80), netip.AddrPortFrom(w.net.Config.NodeAddresses()[f], 30080),
	}
	w.await("web", "line", plan.None, plan.StateExcluded)
	w.untouched("another proxy's", targets)
	held := []*lab.Held{w.hold(targets[0]), w.hold(targets[1])}
	flow := w.talk(targets[1])
	flow.becomes("another proxy's, an answer", by("b3"))

	w.must(m.Without("b2", "b3").Write(w.manifests))
	w.anotherProxy("-D", m, theirs)
	w.servedBy("kproxy's", targets, "b1")
	flow.becomes("kproxy's, an answer", by("b1"))
	held = append(held, w.hold(targets[0]), w.hold(targets[1]))

	w.must(m.Without("b1", "b2").Write(w.manifests))
	w.anotherProxy("-A", m, theirs)
	w.await("web", "line", plan.None, plan.StateExcluded)
	w.untouched("another proxy's again", targets)
	flow.becomes("another proxy's again, an answer", by("b3"))
	w.unbroken("while the service moved", held...)
	for _, h := range held {
		h.Close()
	}
}

// untouched: clients meet b3, which sees their own address, as nobody but that
// proxy's rule has a hand in it, once kproxy's are gone.
func (w *world) untouched(when string, targets []netip.AddrPort) {
	w.Helper()
	for _, target := range targets {
		for _, network := range []string{"tcp", "udp"} {
			for _, from := range []*lab.Namespace{w.net.Client, w.net.Node} {
				w.eventually(20*time.Second, fmt.Sprintf("%s: b3 to answer %s %s from %s", when, network, target, from.Name), func() error {
					a, err := from.Ask(w.ctx, network, target, "hello")
					if err == nil && (a.Backend != "b3" || from == w.net.Client && !w.addressOf(from, a.Peer)) {
						err = fmt.Errorf("%s answered and saw the client as %s; want b3, and a client's own address", a.Backend, a.Peer)
					}
					return err
				})
			}
		}
	}
	for _, target := range targets { // and so it stays
		for _, network := range []string{"tcp", "udp"} {
			a := w.ask(w.net.Client, network, target)
			if a.Backend != "b3" || !w.addressOf(w.net.Client, a.Peer) {
				w.Errorf("%s, %s %s: %s answered and saw the client as %s; want b3, and the client's own address", when, network, target, a.Backend, a.Peer)
			}
			if a = w.ask(w.net.Node, network, target); a.Backend != "b3" {
				w.Errorf("%s, %s %s from the node: %s answered, want b3", when, network, target, a.Backend)
			}
		}
	}
}

// servedBy waits until all targets are served by the backends named.
func (w *world) servedBy(when string, targets []netip.AddrPort, backends ...string) {
	w.Helper()
	for _, target := range targets {
		w.eventually(20*time.Second, fmt.Sprintf("%s: %v to answer at %s", when, backends, target), func() error {
			ctx, cancel := context.WithTimeout(w.ctx, within(2*time.Second)) // a SYN that came while nobody served goes on being nobody's
			defer cancel()
			a, err := w.net.Client.Ask(ctx, "tcp", target, "hello")
			if !by(backends...)(a, err) {
				return fmt.Errorf("it was answered by %q, %v", a.Backend, err)
			}
			return nil
		})
	}
}
