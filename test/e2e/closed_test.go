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

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// closedPort is where the host outside answers that has the cluster's addresses as well.
const closedPort = 8001

// TestClusterIPsAreClosed: a host outside has addresses of the cluster's, and the node's routes lead there. With
// --close-cluster-ips=false it is reached: from a pod, the node and another host, by TCP and UDP, in both families. Else
// what is to a cluster IP by another port is refused, and what is to an address that no service has is dropped, and both are
// listed, until the service or the network is another; but connections that had begun go on, and addresses of the node's
// own and of its pods are reached.
func TestClusterIPsAreClosed(t *testing.T) {
	t.Parallel()
	for _, m := range []plan.Mode{mode, plan.ModeUserspace} {
		t.Run(string(m), func(t *testing.T) {
			w := newWorld(t)
			if m == plan.ModeUserspace && mode == plan.ModeNFTables {
				w.env = append(w.env, "PATH=") // without iptables, rules of nftables lead to userspace
			}
			web := newManifest("web", 10, w.net.Backends[0])
			w.must(web.Write(w.manifests))
			w.testClosed(m, web)
		})
	}
}

// closedAddresses are of the lab's ServiceCIDRs, and no service's.
func closedAddresses(n byte) [2]netip.Addr {
	return [2]netip.Addr{netip.AddrFrom4([4]byte{10, 96, 200, n}), netip.MustParseAddr(fmt.Sprintf("fd00:96::c8%02x", n))}
}

func (w *world) testClosed(m plan.Mode, web lab.Manifest) {
	outside, own := w.net.Backends[2], closedAddresses(2)
	w.serve(outside.Namespace, "outside", closedPort)
	w.serve(w.net.Node, "node", closedPort)
	free := closedAddresses(1)
	for f, ip := range []string{"ip", "ip -6"} {
		w.node("sh", "-ec", fmt.Sprintf("%s addr add %s dev lo", ip, own[f]))
		for _, a := range []netip.Addr{free[f], web.ClusterIPs[f]} {
			w.node("sh", "-ec", fmt.Sprintf("%s route add %s via %s dev b3 onlink", ip, a, outside.Addresses[f]))
			if out, err := outside.Namespace.Output(w.ctx, "sh", "-ec", fmt.Sprintf("%s addr add %s dev lo", ip, a)); err != nil {
				w.Fatalf("%v: %s", err, out)
			}
		}
	}
	networks := []string{"--service-cidr", lab.ServiceCIDR4.String(), "--service-cidr", lab.ServiceCIDR6.String()}
	base := append([]string{"--mode", string(m), "--health-check", "off"}, networks...)

	w.start(append(base, "--close-cluster-ips=false")...)
	w.closed("not closed", web, free, "outside", "outside")
	var held []*lab.Held
	for _, f := range service.Families {
		h, err := lab.Hold(w.ctx, lab.HoldConfig{From: w.net.Backends[1].Namespace, Network: "tcp", Target: netip.AddrPortFrom(free[f], closedPort), Timeout: within(5 * time.Second)})
		w.must(err)
		w.Cleanup(func() { h.Close() })
		held = append(held, h)
	}
	w.stop()

	w.start(base...)
	w.closed("closed", web, free, "refused", "dropped")
	w.closed("the node's own", web, own, "refused", "node")
	w.refusalsAreListed(web, free)
	for f, client := range w.net.Backends[1].Addresses {
		for at, words := range map[netip.Addr][]string{
			free[f]:           {"DROPPED", fmt.Sprintf("no Service has %s", free[f])},
			web.ClusterIPs[f]: {"REFUSED", fmt.Sprintf("%s is a cluster IP, and no Service has port %d", web.ClusterIPs[f], closedPort)},
		} {
			out := w.node(binary, "trace", "--socket", w.socket(), "--from", client.String(), netip.AddrPortFrom(at, closedPort).String())
			text := strings.Join(strings.Fields(out), " ")
			for _, word := range words {
				if !strings.Contains(text, word) {
					w.Errorf("trace doesn't say %q:\n%s", word, out)
				}
			}
		}
	}
	another := newManifest("another", 11, w.net.Backends[0])
	another.ClusterIPs = free[:]
	w.must(another.Write(w.manifests))
	w.eventually(10*time.Second, "another service", func() error {
		_, err := w.net.Client.Ask(w.ctx, "tcp", netip.AddrPortFrom(free[0], 80), "hello")
		return err
	})
	w.closed("a service has it", web, free, "refused", "refused")
	w.must(os.Remove(another.Path(w.manifests)))
	w.eventually(10*time.Second, "the service to be gone", func() error {
		st, err := w.client.Status(w.ctx)
		if err == nil && slices.ContainsFunc(st.Services, func(s plan.ServiceStatus) bool { return s.Name == "another" }) {
			err = errors.New("it is there")
		}
		return err
	})
	w.closed("no service has it any more", web, free, "refused", "dropped")
	w.unbroken("begun before", held...)
	w.stop()

	w.start("--mode", string(m), "--health-check", "off")
	w.closed("without networks", web, free, "refused", "outside")
	w.stop()
	w.start(append(base, "--detect-local-mode", "InterfaceNamePrefix", "--pod-interface-name-prefix", "b")...)
	w.closed("a pod's", web, free, "refused", "outside")
}

// closed checks what becomes of connections to web's cluster IPs by another port, and to others: which server answers, or
// "refused" or "dropped".
func (w *world) closed(when string, web lab.Manifest, others [2]netip.Addr, port, address string) {
	w.Helper()
	for _, from := range []*lab.Namespace{w.net.Backends[1].Namespace, w.net.Node, w.net.Client} {
		for f := range service.Families {
			for _, network := range []string{"tcp", "udp"} {
				for at, want := range map[netip.Addr]string{web.ClusterIPs[f]: port, others[f]: address} {
					at := netip.AddrPortFrom(at, closedPort)
					w.eventually(10*time.Second, fmt.Sprintf("%s, %s from %s to %s: %s", when, network, from.Name, at, want), func() error {
						if got := w.fateOf(from, network, at); got != want {
							return errors.New(got)
						}
						return nil
					})
				}
			}
		}
	}
}

// fateOf says which server answers, or that the connection is refused or dropped.
func (w *world) fateOf(from *lab.Namespace, network string, at netip.AddrPort) string {
	ctx, cancel := context.WithTimeout(w.ctx, lasting(700*time.Millisecond))
	defer cancel()
	var a lab.Answer
	err := from.Do(func() (err error) {
		a, err = attempt{network: network, client: from, target: at}.ask(ctx)
		return err
	})
	switch {
	case err == nil:
		return a.Backend
	case strings.Contains(err.Error(), "refused"):
		return "refused"
	case errors.Is(err, os.ErrDeadlineExceeded), strings.Contains(err.Error(), "timeout"):
		return "dropped"
	}
	return err.Error()
}

func (w *world) refusalsAreListed(web lab.Manifest, others [2]netip.Addr) {
	w.Helper()
	pod := w.net.Backends[1]
	type refusal struct{ protocol, client, address, reason string }
	w.eventually(10*time.Second, "refusals to be listed", func() error {
		var list struct{ Refused []plan.Ended }
		if err := w.json("/api/v1/refused", &list); err != nil {
			return err
		}
		got := map[refusal]bool{}
		for _, e := range list.Refused {
			got[refusal{e.Protocol, e.Client.Addr().String(), e.Address.String(), e.Refused}] = true
		}
		for f, client := range pod.Addresses {
			for _, protocol := range []string{"tcp", "udp"} {
				for a, reason := range map[netip.Addr]string{web.ClusterIPs[f]: kernel.ReasonNoPort, others[f]: kernel.ReasonNoService} {
					if want := (refusal{protocol, client.String(), netip.AddrPortFrom(a, closedPort).String(), reason}); !got[want] {
						return fmt.Errorf("%+v isn't in %v", want, got)
					}
				}
			}
		}
		return nil
	})
}
