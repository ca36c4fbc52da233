package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// askFrom makes an exchange from a client's address, or gives up.
func (w *world) askFrom(local netip.Addr, network string, target netip.AddrPort, patience time.Duration) error {
	ctx, cancel := context.WithTimeout(w.ctx, patience)
	defer cancel()
	_, err := w.net.Client.AskFrom(ctx, local, network, target, "hello")
	return err
}

// TestSharesAreExact: connections are shared out by weight, exactly, in both data
// planes; an endpoint of weight 0 gets none.
func TestSharesAreExact(t *testing.T) {
	t.Parallel()
	for algorithm, weights := range map[service.Algorithm]map[string]int{
		service.RoundRobin:         {"b1": 1, "b2": 1, "b3": 1},
		service.WeightedRoundRobin: {"b1": 3, "b2": 1, "b3": 0},
	} {
		t.Run(string(algorithm), func(t *testing.T) {
			w := newWorld(t)
			m := newManifest("web", 10, w.net.Backends...)
			m.Algorithm = string(algorithm)
			each, want := 7, map[string]int{}
			for b, weight := range weights {
				m = m.Edit(b, func(e *lab.ManifestEndpoint) { e.Weight = weight })
				if weight > 0 {
					want[b] = each * weight
				}
			}
			w.must(m.Write(w.manifests))
			w.start()
			for _, plane := range preferences() {
				w.pin("web", "line", plane)
				for _, target := range frontends(m) {
					got := map[string]int{}
					for range each * (weights["b1"] + weights["b2"] + weights["b3"]) {
						got[w.ask(w.net.Client, "tcp", target).Backend]++
					}
					if !maps.Equal(got, want) {
						t.Errorf("%s to %s: connections went %v, want %v", plane, target, got, want)
					}
				}
			}
		})
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

// healthAnswer holds what a load balancer learns at a health-check node port.
type healthAnswer struct {
	status int
	weight string
	body   struct {
		Service struct {
			Namespace, Name string
		}
		LocalEndpoints      int
		ServiceProxyHealthy bool
	}
}

// askHealth asks as a load balancer does, from another host.
func (w *world) askHealth(from *lab.Namespace, at netip.AddrPort) (a healthAnswer, err error) {
	resp, err := from.HTTPClient(within(2 * time.Second)).Get("http://" + at.String() + "/healthz")
	if err != nil {
		return a, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		return a, err
	}
	a.status, a.weight = resp.StatusCode, resp.Header.Get("X-Load-Balancing-Endpoint-Weight")
	return a, json.Unmarshal(b, &a.body)
}

// TestHealthCheckNodePort: load balancers learn from every node how many
// endpoints it has, in both families, also where the host's firewall lets
// nothing in; and a Service whose port is taken says so, and gets it later.
func TestHealthCheckNodePort(t *testing.T) {
	w := newWorld(t)
	for tables, icmp := range map[string]string{"iptables": "icmp", "ip6tables": "ipv6-icmp"} {
		if kernelPlane == plan.NFTables {
			break // no rule of nftables lifts the drop of another table's
		}
		w.node(tables, "-P", "INPUT", "DROP")
		w.node(tables, "-A", "INPUT", "-p", icmp, "-j", "ACCEPT")
	}
	const port = 32100
	m := newManifest("web", 10, w.net.Backends...)
	m.Type, m.ExternalLocal, m.HealthCheckNodePort = "LoadBalancer", true, port
	m.LoadBalancerIPs = []netip.Addr{netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("2001:db8::11")}
	m = m.Edit("b3", func(e *lab.ManifestEndpoint) { e.Node = "another" })
	w.must(m.Write(w.manifests))
	w.start()
	says := func(status, endpoints int) {
		t.Helper()
		for _, node := range w.net.Config.NodeAddresses() {
			at := netip.AddrPortFrom(node, port)
			w.eventually(10*time.Second, fmt.Sprintf("%s to say %d, %d endpoints", at, status, endpoints), func() error {
				a, err := w.askHealth(w.net.Client, at)
				if err != nil {
					return err
				}
				if a.status != status || a.weight != fmt.Sprint(endpoints) || a.body.LocalEndpoints != endpoints ||
					!a.body.ServiceProxyHealthy || a.body.Service.Namespace != "default" || a.body.Service.Name != "web" {
					return fmt.Errorf("%+v", a)
				}
				return nil
			})
		}
	}
	says(200, 2)
	m = m.Edit("b2", func(e *lab.ManifestEndpoint) { e.NotReady, e.Terminating = true, true })
	w.must(m.Write(w.manifests))
	says(200, 1)
	m = m.Edit("b1", func(e *lab.ManifestEndpoint) { e.Node = "another" })
	w.must(m.Write(w.manifests))
	says(503, 0)

	m.HealthCheckNodePort = 0
	w.must(m.Write(w.manifests))
	for _, node := range w.net.Config.NodeAddresses() {
		w.eventually(10*time.Second, "nobody to answer", func() error {
			if _, err := w.askHealth(w.net.Client, netip.AddrPortFrom(node, port)); err == nil {
				return errAnswered
			}
			return nil
		})
	}

	taken, err := w.net.Node.Listen(w.ctx, "tcp4", fmt.Sprintf("0.0.0.0:%d", port))
	w.must(err)
	m.HealthCheckNodePort = port
	w.must(m.Write(w.manifests))
	w.eventually(10*time.Second, "the status to say that the port is taken", func() error {
		for _, p := range w.service("web", "line").Problems {
			if strings.Contains(p, "is taken by another program") {
				return nil
			}
		}
		return errors.New("it doesn't")
	})
	taken.Close()
	says(503, 0)
}

// TestLastLocalEndpointGoesElsewhere: with traffic policies Local, new connections end
// when the last endpoint of this node moves to another, and succeed once it is back, in
// userspace and in the kernel.
func TestLastLocalEndpointGoesElsewhere(t *testing.T) {
	w := newWorld(t)
	if mode == plan.ModeAuto {
		w.plane = plan.IPTables // IPVS can't choose endpoints by client
	}
	m := newManifest("web", 10, w.net.Backends[0])
	m.Type, m.ExternalLocal, m.InternalLocal = "NodePort", true, true
	m.Ports[0].NodePort = 30080
	w.must(m.Write(w.manifests))
	w.start()
	targets := frontends(m)
	for _, node := range w.net.Config.NodeAddresses() {
		targets = append(targets, netip.AddrPortFrom(node, 30080))
	}
	answers := func(want bool) {
		t.Helper()
		for _, target := range targets {
			client := w.net.Config.ClientAddresses(0)[service.FamilyOf(target.Addr())]
			w.eventually(8*time.Second, fmt.Sprintf("an answer from %s: %t", target, want), func() error {
				err := w.askFrom(client, "tcp", target, lasting(700*time.Millisecond))
				if err == nil && !want {
					return errAnswered
				}
				if !want {
					return nil
				}
				return err
			})
		}
	}
	for _, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel} {
		if plane == service.PreferKernel && mode == plan.ModeUserspace {
			continue
		}
		w.pin("web", "line", plane)
		answers(true)
		w.must(m.Edit("b1", func(e *lab.ManifestEndpoint) { e.Node = "another" }).Write(w.manifests))
		answers(false)
		w.must(m.Write(w.manifests))
		answers(true)
	}
}

// TestRefusedClientsAreListed: who is refused or dropped by rules of the kernel's is listed with the client, the
// service and the reason: without endpoints, outside the source ranges, and by a traffic policy. A client that tries
// again with the same packet is listed once.
func TestRefusedClientsAreListed(t *testing.T) {
	w := newWorld(t)
	inside := []netip.Prefix{netip.MustParsePrefix("10.9.0.0/24"), netip.MustParsePrefix("fd00:9::/64")}
	ranged := newManifest("ranged", 10, w.net.Backends...)
	ranged.Type, ranged.SourceRanges = "LoadBalancer", inside
	ranged.LoadBalancerIPs = []netip.Addr{netip.MustParseAddr("192.0.2.11"), netip.MustParseAddr("2001:db8::11")}
	empty := newManifest("empty", 11, w.net.Backends...)
	empty.Endpoints = nil
	local := newManifest("local", 12, w.net.Backends...)
	local.Type, local.ExternalLocal, local.Ports[0].NodePort, local.Ports[1].NodePort = "NodePort", true, 30080, 30080
	local.ExternalIPs = []netip.Addr{netip.MustParseAddr("192.0.2.12"), netip.MustParseAddr("2001:db8::12")}
	for i := range local.Endpoints {
		local.Endpoints[i].Node = "another"
	}
	for _, m := range []lab.Manifest{ranged, empty, local} {
		w.must(m.Write(w.manifests))
	}
	w.start()
	type refusal struct{ protocol, service, client, address, reason string }
	want := map[refusal]bool{}
	var asking sync.WaitGroup // at once, as most wait for the time in which a client tries again
	for _, network := range []string{"tcp", "udp"} {
		port := map[string]string{"tcp": "line", "udp": "datagram"}[network]
		for f := range empty.ClusterIPs {
			client, node := w.net.Config.ClientAddresses(0)[f], w.net.Config.NodeAddresses()[f]
			for _, c := range []struct {
				service string
				at      netip.AddrPort
				reason  string
			}{
				{"ranged", netip.AddrPortFrom(ranged.LoadBalancerIPs[f], 80), kernel.ReasonOutside},
				{"empty", frontends(empty)[f], kernel.ReasonNoEndpoint},
				{"local", netip.AddrPortFrom(local.ExternalIPs[f], 80), kernel.ReasonElsewhere},
				{"local", netip.AddrPortFrom(node, 30080), kernel.ReasonElsewhere},
			} {
				asking.Go(func() {
					if err := w.askFrom(client, network, c.at, lasting(1500*time.Millisecond)); err == nil {
						t.Errorf("%s to %s is answered", network, c.at)
					}
				})
				want[refusal{network, "default/" + c.service + ":" + port, client.String(), c.at.String(), c.reason}] = true
			}
		}
	}
	asking.Wait()
	var list struct{ Refused []plan.Ended }
	w.eventually(10*time.Second, "everybody who was refused to be listed", func() error {
		if err := w.json("/api/v1/refused", &list); err != nil {
			return err
		}
		got, tcp := map[refusal]bool{}, 0
		for _, e := range list.Refused {
			got[refusal{e.Protocol, e.Service, e.Client.Addr().String(), e.Address.String(), e.Refused}] = true
			if e.Protocol == "tcp" {
				tcp++
			}
		}
		if !maps.Equal(got, want) {
			return fmt.Errorf("listed are %v, want %v", slices.Collect(maps.Keys(got)), slices.Collect(maps.Keys(want)))
		}
		if tcp != len(want)/2 {
			return fmt.Errorf("%d connections of TCP are listed, want %d: each once", tcp, len(want)/2)
		}
		return nil
	})
	var clients plan.Recent
	w.must(w.json("/api/v1/clients?service=default/empty:line", &clients))
	if len(clients.Refused) != len(empty.ClusterIPs) || len(clients.Talks) != len(empty.ClusterIPs) || clients.Talks[0].Refused != 1 {
		t.Errorf("the service's own page has %d who were refused and the talks %+v", len(clients.Refused), clients.Talks)
	}
}

// TestClientsOfAHungKproxyAreListed: who is refused while kproxy hangs, in mode userspace, is listed with that as the
// reason once it goes on.
func TestClientsOfAHungKproxyAreListed(t *testing.T) {
	w := newWorld(t)
	if mode == plan.ModeNFTables {
		w.env = append(w.env, "PATH=") // without iptables, rules of nftables lead to userspace
	}
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start("--mode", string(plan.ModeUserspace))
	w.must(w.proxy.Signal(syscall.SIGSTOP))
	w.heartbeatEnds(mode == plan.ModeNFTables)
	type refusal struct{ protocol, service, address, reason string }
	want := map[refusal]bool{}
	for network, port := range map[string]string{"tcp": "line", "udp": "datagram"} {
		for _, at := range frontends(m) {
			w.refuses(w.net.Client, network, at)
			want[refusal{network, "default/web:" + port, at.String(), kernel.ReasonNoKproxy}] = true
		}
	}
	w.must(w.proxy.Signal(syscall.SIGCONT))
	w.eventually(10*time.Second, "everybody who was refused to be listed", func() error {
		var list struct{ Refused []plan.Ended }
		if err := w.json("/api/v1/refused", &list); err != nil {
			return err
		}
		got := map[refusal]bool{}
		for _, e := range list.Refused {
			got[refusal{e.Protocol, e.Service, e.Address.String(), e.Refused}] = true
		}
		if !maps.Equal(got, want) {
			return fmt.Errorf("listed are %v, want %v", slices.Collect(maps.Keys(got)), slices.Collect(maps.Keys(want)))
		}
		return nil
	})
}

// json reads what the dashboard reads.
func (w *world) json(path string, into any) error {
	resp, err := w.net.Node.HTTPClient(within(5 * time.Second)).Get("http://127.0.0.1:10249" + path)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	return json.NewDecoder(resp.Body).Decode(into)
}
