package e2e

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace"
)

// filter changes the rules of a namespace, in both families: "-I INPUT -j DROP".
func (w *world) filter(ns *lab.Namespace, rules ...string) {
	w.Helper()
	for _, r := range rules {
		for _, program := range []string{"iptables", "ip6tables"} {
			if out, err := ns.Output(w.ctx, program, append([]string{"-w"}, strings.Fields(r)...)...); err != nil {
				w.Fatalf("%s %s in %s: %v\n%s", program, r, ns.Name, err, out)
			}
		}
	}
}

// cutOff has a backend swallow everything, as one whose node has lost its power; mend ends that.
func (w *world) cutOff(names ...string) (mend func()) {
	w.Helper()
	for _, name := range names {
		w.filter(w.net.Backend(name).Namespace, "-I INPUT ! -i lo -j DROP", "-I OUTPUT ! -o lo -j DROP")
	}
	return func() {
		w.Helper()
		for _, name := range names {
			w.filter(w.net.Backend(name).Namespace, "-D INPUT ! -i lo -j DROP", "-D OUTPUT ! -o lo -j DROP")
		}
	}
}

// awaitUsed waits until an address's endpoint gets new connections.
func (w *world) awaitUsed(name, port, address string) {
	w.Helper()
	w.eventually(30*time.Second, address+" to get connections again", func() error {
		for _, e := range w.service(name, port).Endpoints {
			if e.Address.Addr().String() == address && !e.Usable {
				return errors.New(e.LastError)
			}
		}
		return nil
	})
}

// ejections counts the endpoints that were ejected so far.
func (w *world) ejections() float64 {
	w.Helper()
	n, _ := w.sumOf("kproxy_endpoint_ejections_total")
	return n
}

// late are the results that took longer than a SYN that comes twice.
func late(r lab.Results, bound time.Duration) (out []string) {
	bound = patience(bound)
	for _, x := range r {
		if x.Err != nil || x.Latency > bound {
			out = append(out, fmt.Sprintf("%s: %s %v", x.Start.Format("15:04:05.000"), x.Latency, x.Err))
		}
	}
	return out
}

// heldBy opens connections until each backend has one, and n have been opened.
func (w *world) heldBy(target netip.AddrPort, n int) map[string][]*lab.Held {
	w.Helper()
	out := map[string][]*lab.Held{}
	for i := 0; i < n || len(out) < len(w.net.Backends) && i < 10*n; i++ {
		h, err := lab.Hold(w.ctx, lab.HoldConfig{From: w.net.Client, Network: "tcp", Target: target, Every: within(100 * time.Millisecond), Timeout: within(time.Minute)})
		w.must(err)
		w.Cleanup(func() { h.Close() })
		out[h.First().Backend] = append(out[h.First().Backend], h)
	}
	return out
}

// TestDeadEndpoint: an endpoint that falls silent, with no health check anywhere, costs those who connect at that moment
// a retransmission or two, and later ones nothing. What had been connected is reset when it has left the API. It gets
// connections again soon after it answers, and while nothing is wrong nothing is probed.
func TestDeadEndpoint(t *testing.T) {
	t.Parallel()
	for _, plane := range preferences() {
		t.Run(string(plane), func(t *testing.T) {
			w := newWorld(t)
			m := newManifest("web", 10, w.net.Backends...)
			w.must(m.Write(w.manifests))
			w.start("--health-check", "off")
			w.pin("web", "line", plane)
			dead := w.net.Backend("b1")
			count := []string{"-w", "-I", "INPUT", "-p", "tcp", "--syn", "-s", "10.2.0.1,10.1.0.1"} // the node's own
			if out, err := dead.Namespace.Output(w.ctx, "iptables", count...); err != nil {
				t.Fatalf("%v\n%s", err, out)
			}
			held := w.heldBy(frontends(m)[0], 6)
			traffic := []*lab.Traffic{w.traffic("tcp", frontends(m)[0], 10), w.traffic("tcp", frontends(m)[1], 10)}
			sleep(2 * time.Second)
			out, err := dead.Namespace.Output(w.ctx, "iptables", "-w", "-S", "INPUT", "-v")
			w.must(err)
			for line := range strings.Lines(string(out)) {
				if strings.Contains(line, "--tcp-flags") && !strings.Contains(line, "-c 0 0") {
					t.Errorf("nothing is wrong, and the node has connected to an endpoint: %s", line)
				}
			}
			mend := w.cutOff("b1")
			silent := time.Now()
			w.awaitUnused("web", "line", "10.2.0.2", "fd00:2::2")
			after := time.Now()
			sleep(2 * time.Second)
			for i, tr := range traffic {
				all := tr.Stop().Since(silent)
				if l := late(all, 8*time.Second); len(l) > 0 {
					t.Errorf("family %d: connections that began when it fell silent: %v", i, l)
				}
				if l := late(all.Since(after.Add(within(200*time.Millisecond))), time.Second); len(l) > 0 {
					t.Errorf("family %d: connections after it was ejected: %v", i, l)
				}
			}
			for _, e := range w.service("web", "line").Endpoints {
				if e.Address.Addr().String() != "10.2.0.2" {
					continue
				}
				if e.Health != "down" || e.Ejected == nil || !strings.HasPrefix(e.LastError, "ejected: silent to 4 probes after unanswered ") {
					t.Errorf("the status says %s: %q (%+v)", e.Health, e.LastError, e.Ejected)
				}
			}
			r := w.traced(trace.Request{Address: frontends(m)[0], From: netip.MustParseAddr("10.1.0.2")})
			if !slices.ContainsFunc(r.Candidates, func(c trace.Candidate) bool {
				return c.Endpoint.Addr().String() == "10.2.0.2" && c.Probability == 0 && strings.HasPrefix(c.Why, "would be used, but is ejected: silent to 4 probes")
			}) {
				t.Errorf("a trace doesn't say that a packet would have gone there: %+v", r.Candidates)
			}
			w.must(m.Without("b1").Write(w.manifests))
			w.eventually(20*time.Second, "its connections to be reset", func() error {
				for _, h := range held["b1"] {
					if err := h.Err(); !errors.Is(err, unix.ECONNRESET) {
						return fmt.Errorf("a connection says %v", err)
					}
				}
				return nil
			})
			w.unbroken("to others", append(held["b2"], held["b3"]...)...)
			w.must(m.Write(w.manifests))
			mend()
			w.awaitUsed("web", "line", "10.2.0.2")
			w.eventually(10*time.Second, "it to answer", func() error {
				if by := w.burst(frontends(m)[0], 12).ByBackend(); by["b1"] == 0 {
					return fmt.Errorf("connections went %v", by)
				}
				return nil
			})
		})
	}
}

// TestDeadEndpointOfUDP: clients that ask again from other ports are answered once the endpoint's silence is found.
func TestDeadEndpointOfUDP(t *testing.T) {
	t.Parallel()
	for _, plane := range preferences() {
		t.Run(string(plane), func(t *testing.T) {
			w := newWorld(t)
			m := newManifest("web", 10, w.net.Backends...)
			w.must(m.Write(w.manifests))
			w.start("--health-check", "off")
			w.pin("web", "datagram", plane)
			tr := w.traffic("udp", frontends(m)[0], 20)
			sleep(time.Second)
			w.cutOff("b1")
			w.awaitUnused("web", "datagram", "10.2.0.2")
			after := time.Now()
			sleep(2 * time.Second)
			w.noneFailed("after it was ejected", tr.Stop().Since(after.Add(within(200*time.Millisecond))))
		})
	}
}

// TestDepartedEndpoints: connections to an endpoint that drains go on, and so do those to one that is cut off for some seconds.
func TestDepartedEndpoints(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start("--health-check", "off", "--drain-timeout", "2m")
	for _, plane := range preferences() {
		w.pin("web", "line", plane)
		held := w.heldBy(frontends(m)[0], 6)
		drains := func(e *lab.ManifestEndpoint) { e.NotReady, e.NotServing, e.Terminating = true, true, true }
		w.must(m.Edit("b1", drains).Write(w.manifests))
		w.awaitUnused("web", "line", "10.2.0.2")
		sleep(8 * time.Second)
		w.unbroken("to an endpoint that drains", held["b1"]...)
		w.must(m.Write(w.manifests))
		w.awaitUsed("web", "line", "10.2.0.2")
		time.Sleep(time.Until(time.Now().Add(time.Second).Truncate(5 * time.Second).Add(4 * time.Second))) // a second before kproxy looks
		mend := w.cutOff("b1")
		w.must(m.Without("b1").Write(w.manifests))
		time.Sleep(3 * time.Second)
		mend()
		sleep(8 * time.Second)
		w.unbroken("to an endpoint that was cut off for a moment", held["b1"]...)
		w.must(m.Write(w.manifests))
		for _, hs := range held {
			for _, h := range hs {
				h.Close()
			}
		}
	}
	if n, _ := w.sumOf("kproxy_dead_connections_reset_total"); n != 0 {
		t.Errorf("%g connections were reset", n)
	}
}

// TestInnocentEndpoints: an endpoint that answers some client isn't ejected for what others complain of.
func TestInnocentEndpoints(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		hinder []string // rules of b1
		// complains: the second of the clients isn't answered
		complains bool
	}{
		"a policy forbids one client": {[]string{"-I INPUT -p tcp -s %s -j DROP"}, true},
		"it forbids this node as well": {[]string{
			"-I INPUT -p tcp -s %s -j DROP", "-I INPUT -s 10.2.0.1,10.1.0.1 -j DROP", "-I OUTPUT -d 10.2.0.1,10.1.0.1 -j DROP",
		}, true},
		"a fifth of the packets is lost": {[]string{
			"-I INPUT ! -i lo -m statistic --mode random --probability 0.2 -j DROP", "-I OUTPUT ! -o lo -m statistic --mode random --probability 0.2 -j DROP",
		}, false},
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t)
			m := newManifest("web", 10, w.net.Backends...)
			w.must(m.Write(w.manifests))
			w.start("--health-check", "off")
			w.pin("web", "line", service.PreferKernel)
			b1, other := w.net.Backend("b1"), w.net.Config.ClientAddresses(1)[0]
			for _, rule := range c.hinder {
				rule = strings.ReplaceAll(rule, "%s", other.String())
				if out, err := b1.Namespace.Output(w.ctx, "iptables", append([]string{"-w"}, strings.Fields(rule)...)...); err != nil {
					t.Fatalf("%v\n%s", err, out)
				}
			}
			tr := w.traffic("tcp", frontends(m)[0], 60)
			if c.complains {
				complaints, err := lab.StartTraffic(w.ctx, lab.TrafficConfig{
					From: w.net.Client, Local: other, Network: "tcp", Target: frontends(m)[0], Rate: 10, Count: 100, Timeout: 5 * time.Second,
				})
				w.must(err)
				complaints.Wait()
			} else {
				sleep(10 * time.Second)
			}
			if by := tr.Stop().ByBackend(); by["b1"] == 0 {
				t.Errorf("connections went %v", by)
			}
			if n := w.ejections(); n != 0 {
				t.Errorf("%g ejections", n)
			}
		})
	}
}

// TestManyDeadEndpoints: never the last one, and when all are silent all are used; one that comes and goes is no burden.
func TestManyDeadEndpoints(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start("--health-check", "off")
	w.pin("web", "line", service.PreferKernel)
	tr := w.traffic("tcp", frontends(m)[0], 30)
	mend := w.cutOff("b1", "b2")
	w.awaitUnused("web", "line", "10.2.0.2", "10.2.0.3")
	w.noneFailed("two of three are silent", w.burst(frontends(m)[0], 12))
	mendLast := w.cutOff("b3")
	w.eventually(20*time.Second, "all to be used", func() error {
		s := w.service("web", "line")
		for _, e := range s.Endpoints {
			if e.Address.Addr().Is4() && (!e.Usable || e.Ejected == nil) {
				return fmt.Errorf("%s: usable %v, %s", e.Address, e.Usable, e.LastError)
			}
		}
		return nil
	})
	mend()
	mendLast()
	for _, a := range []string{"10.2.0.2", "10.2.0.3", "10.2.0.4"} {
		w.awaitUsed("web", "line", a)
	}
	for range 5 { // it flaps
		mend := w.cutOff("b1")
		sleep(time.Second)
		mend()
		sleep(time.Second)
	}
	w.awaitUsed("web", "line", "10.2.0.2")
	tr.Stop()
	w.noneFailed("after all of it", w.burst(frontends(m)[0], 30))
	w.must(w.net.Backend("b1").Fail(w.ctx, lab.Hang)) // its accept queue is full
	tr = w.traffic("tcp", frontends(m)[0], 30)
	w.awaitUnused("web", "line", "10.2.0.2")
	w.must(w.net.Backend("b1").Fail(w.ctx, lab.Healthy))
	w.awaitUsed("web", "line", "10.2.0.2")
	tr.Stop()
}

// TestDeadNode: silence of two of a node's endpoints tells of the others there; that of most of other nodes' endpoints tells of this node.
func TestDeadNode(t *testing.T) {
	t.Parallel()
	w := buildWorld(t, func(c *lab.Config) { c.Backends = 6 })
	on := func(m lab.Manifest) lab.Manifest {
		for b, node := range map[string]string{"b1": "n1", "b2": "n1", "b3": "n2", "b4": "n2", "b5": "n3", "b6": "n4"} {
			m = m.Edit(b, func(e *lab.ManifestEndpoint) { e.Node = node })
		}
		return m
	}
	m := on(newManifest("web", 10, w.net.Backends...))
	w.must(m.Write(w.manifests))
	w.start("--health-check", "off", "--healthz-isolated")
	w.pin("web", "line", service.PreferKernel)
	tr := w.traffic("tcp", frontends(m)[0], 60)
	sleep(time.Second)
	mend := w.cutOff("b1", "b2")
	w.awaitUnused("web", "line", "10.2.0.2", "10.2.0.3")
	w.awaitUnused("web", "http", "10.2.0.2", "10.2.0.3") // to which no client has connected
	st, err := w.client.Status(w.ctx)
	w.must(err)
	if n := st.PassiveHealth.Nodes; len(n) != 1 || n[0].Name != "n1" || n[0].Silent < 4 {
		t.Errorf("silent nodes are %+v, want n1", n)
	}
	if l := w.service("web", "http").Endpoints[0].LastError; !strings.Contains(l, "its node n1: ") {
		t.Errorf("the status says %q, want its node's silence", l)
	}
	mend()
	for _, a := range []string{"10.2.0.2", "10.2.0.3"} {
		w.awaitUsed("web", "line", a)
		w.awaitUsed("web", "http", a)
	}
	before := w.ejections()
	healthz := func(want int) {
		w.eventually(20*time.Second, fmt.Sprintf("/healthz to say %d", want), func() error {
			if code, body := w.get("http://127.0.0.1:10256/healthz"); code != want {
				return fmt.Errorf("%d: %s", code, body)
			}
			return nil
		})
	}
	healthz(200)
	uplink := func(verb string) {
		for program, pods := range map[string]string{"iptables": "10.2.0.0/24", "ip6tables": "fd00:2::/64"} {
			w.node(program, "-w", "-t", "raw", verb, "PREROUTING", "-s", pods, "-j", "DROP")
		}
	}
	uplink("-I")
	w.eventually(20*time.Second, "the node to know that it is cut off", func() error {
		st, err := w.client.Status(w.ctx)
		if err == nil && st.PassiveHealth.Isolated == nil {
			err = fmt.Errorf("%+v", st.PassiveHealth)
		}
		return err
	})
	healthz(503)
	sleep(20 * time.Second)
	for _, e := range w.service("web", "line").Endpoints {
		if !e.Usable {
			t.Errorf("%s isn't used: %s", e.Address, e.LastError)
		}
	}
	uplink("-D")
	healthz(200)
	tr.Stop()
	w.noneFailed("after the uplink is back", w.burst(frontends(m)[0], 30))
	t.Logf("%g ejections by this node's own silence", w.ejections()-before)
}

// TestEjectionsOutliveKproxy: whichever way the next kproxy begins, it doesn't put back what is silent; nor does what the API
// takes away and gives again stay ejected.
func TestEjectionsOutliveKproxy(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start("--health-check", "off")
	w.pin("web", "line", service.PreferKernel)
	tr := w.traffic("tcp", frontends(m)[0], 30)
	w.cutOff("b1")
	w.awaitUnused("web", "line", "10.2.0.2")
	w.eventually(10*time.Second, "it to be saved", func() error {
		raw, err := os.ReadFile(filepath.Join(w.dir, "state", "ejected.json"))
		if err == nil && !strings.Contains(string(raw), "10.2.0.2") {
			err = errors.New(string(raw))
		}
		return err
	})
	since := time.Now()
	for name, next := range map[string]func(){
		"takeover": func() { w.takeOver() },
		"restart":  func() { w.stop(); w.startAgain() },
		"kill":     func() { w.must(w.proxy.Kill()); w.startAgain() },
	} {
		next()
		w.await("web", "line", w.plane, plan.StatePinned)
		for _, e := range w.service("web", "line").Endpoints {
			if e.Address.Addr().String() == "10.2.0.2" && e.Usable {
				t.Errorf("%s: the endpoint gets connections", name)
			}
		}
	}
	if l := late(tr.Stop().Since(since), 8*time.Second); len(l) > 0 {
		t.Errorf("meanwhile: %v", l)
	}
	w.must(m.Without("b1").Write(w.manifests))
	w.eventually(10*time.Second, "it to be gone", func() error {
		if n := len(w.service("web", "line").Endpoints); n != 4 {
			return fmt.Errorf("%d endpoints", n)
		}
		return nil
	})
	w.must(m.Write(w.manifests))
	w.awaitUsed("web", "line", "10.2.0.2") // which is as silent as before, but may be another one for all that is known
}

// TestDeadEndpointEverywhere: whatever way leads to a dead endpoint, clients get away from it: node ports, masqueraded clients, a
// policy of Local, an endpoint that reaches its own service, and clients with affinity to it.
func TestDeadEndpointEverywhere(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	m.Type, m.Ports[0].NodePort, m.ExternalLocal = "NodePort", 30080, true
	w.must(m.Write(w.manifests))
	affine := newManifest("affine", 11, w.net.Backends...)
	affine.Affinity = time.Hour
	w.must(affine.Write(w.manifests))
	w.start("--health-check", "off", "--masquerade-all")
	w.pin("web", "line", service.PreferKernel)
	w.pin("affine", "line", service.PreferKernel)
	stays := w.ask(w.net.Client, "tcp", frontends(affine)[0]).Backend
	w.cutOff(stays)
	dead := w.net.Backend(stays).Addresses[0].String()
	nodePort := netip.AddrPortFrom(w.net.Config.NodeAddresses()[0], 30080)
	traffic := []*lab.Traffic{w.traffic("tcp", frontends(affine)[0], 5), w.traffic("tcp", nodePort, 20)}
	w.awaitUnused("affine", "line", dead)
	w.awaitUnused("web", "line", dead)
	after := time.Now()
	for _, b := range w.net.Backends { // through their own service, itself among the endpoints
		if b.Name != stays {
			for range 3 {
				w.ask(b.Namespace, "tcp", frontends(m)[0])
			}
		}
	}
	sleep(2 * time.Second)
	for _, tr := range traffic {
		all := tr.Stop()
		if l := late(all, 8*time.Second); len(l) > 0 {
			t.Errorf("when it fell silent: %v", l)
		}
		w.noneFailed("after it was ejected", all.Since(after))
	}
}

// TestManyEndpointsOfADeadNode: five hundred endpoints go at once.
func TestManyEndpointsOfADeadNode(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	for i := range m.Endpoints {
		m.Endpoints[i].Node = "n" + m.Endpoints[i].Name
	}
	b1 := w.net.Backend("b1")
	w.node("ip", "route", "add", "10.3.0.0/23", "via", b1.Addresses[0].String(), "onlink", "dev", "b1")
	if out, err := b1.Namespace.Output(w.ctx, "ip", "route", "add", "local", "10.3.0.0/23", "dev", "lo"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	a := netip.MustParseAddr("10.3.0.1")
	for i := range 500 {
		m.Endpoints = append(m.Endpoints, lab.ManifestEndpoint{Name: fmt.Sprint("x", i), Addresses: []netip.Addr{a}, Node: "nb1", Weight: 1})
		a = a.Next()
	}
	w.must(m.Write(w.manifests))
	w.start("--health-check", "off")
	w.pin("web", "line", service.PreferKernel)
	w.noneFailed("all are well", w.burst(frontends(m)[0], 30))
	tr := w.traffic("tcp", frontends(m)[0], 60)
	w.cutOff("b1")
	w.eventually(30*time.Second, "all of them to be ejected", func() error {
		n := 0
		for _, e := range w.service("web", "line").Endpoints {
			if e.Usable && e.Node == "nb1" && e.Address.Addr().Is4() {
				n++
			}
		}
		if n > 0 {
			return fmt.Errorf("%d are used", n)
		}
		return nil
	})
	after := time.Now()
	sleep(2 * time.Second)
	w.noneFailed("after that", tr.Stop().Since(after.Add(within(200*time.Millisecond))))
}

// TestLogTaken: where another program reads the log, that is said, and userspace's own connects and refusals still tell.
func TestLogTaken(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	var other *kernel.RefusalLog
	w.must(w.net.Node.Do(func() (err error) { other, err = kernel.OpenRefusalLog(); return err }))
	defer other.Close()
	w.start("--health-check", "off")
	w.pin("web", "line", service.PreferUserspace)
	tr := w.traffic("tcp", frontends(m)[0], 20)
	w.cutOff("b1")
	w.awaitUnused("web", "line", "10.2.0.2")
	tr.Stop()
	w.eventually(60*time.Second, "the status to say so", func() error {
		st, err := w.client.Status(w.ctx)
		if err == nil && !strings.Contains(st.PassiveHealth.Reason, "another program reads") {
			err = fmt.Errorf("%+v", st.PassiveHealth)
		}
		return err
	})
}

// TestKernelWithoutLog: on a kernel that can't log packets kproxy says so once, and connects and refusals in userspace still
// tell of a dead endpoint. One that can log has nothing to say.
func TestKernelWithoutLog(t *testing.T) {
	w := newWorld(t)
	m := lab.NewManifest("web", 10, w.net.Backends...) // a dial gives up after a second, on a slow machine too
	w.must(m.Write(w.manifests))
	w.start("--health-check", "off")
	w.pin("web", "line", service.PreferUserspace)
	tr := w.traffic("tcp", frontends(m)[0], 20)
	if out, err := w.net.Backend("b1").Namespace.Output(w.ctx, "ip", "rule", "add", "pref", "1", "blackhole"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	cut := time.Now() // what was asked before is lost
	w.awaitUnused("web", "line", "10.2.0.2")
	w.noneFailed("meanwhile", tr.Stop().Since(cut))
	w.pin("web", "line", service.PreferKernel)
	w.noneFailed("in the kernel, which leaves it out", w.burst(frontends(m)[0], 12))
	st, err := w.client.Status(w.ctx)
	w.must(err)
	i := slices.IndexFunc(st.Capabilities, func(c plan.Capability) bool { return c.Name == "log of refusals" })
	if i < 0 {
		t.Fatalf("no capability tells of the log: %+v", st.Capabilities)
	}
	if os.Getenv("KPROXY_E2E_LOG") == "none" && st.Capabilities[i].Supported {
		t.Error("this kernel can log, and was to be one that can't")
	}
	want := 0
	if !st.Capabilities[i].Supported {
		want = 1
	}
	if n := strings.Count(w.proxy.Log(), "the kernel has no log of refusals"); n != want || strings.Contains(st.PassiveHealth.Reason, "has no log") != (want == 1) {
		t.Errorf("the log is possible: %v; it is said %d times that there is none, the status says %q", want == 0, n, st.PassiveHealth.Reason)
	}
}
