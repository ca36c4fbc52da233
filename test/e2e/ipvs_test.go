package e2e

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// virtuals are the virtual servers and the addresses of dummy links, where
// kproxy works with IPVS. Without IPVS there are none.
func (w *world) virtuals() string {
	w.Helper()
	if w.plane != plan.IPVS {
		return ""
	}
	var addresses []string
	for _, line := range strings.Split(w.node("ip", "-o", "addr", "show", "type", "dummy"), "\n") {
		// A link has another address of its own each time it is made.
		if fields := strings.Fields(line); len(fields) > 3 && !strings.HasPrefix(fields[3], "fe80:") {
			addresses = append(addresses, strings.Join(fields[1:4], " "))
		}
	}
	links := dynamic.ReplaceAllString(w.node("ip", "-o", "link", "show", "type", "dummy"), "")
	return "ipvs:\n" + sortedLines(strings.Split(w.node("ipvsadm", "-Sn"), "\n")) + sortedLines(addresses) + links
}

// dynamic is what differs from one making of a link to another.
var dynamic = regexp.MustCompile(`(?m)^\d+: |link/ether [0-9a-f:]+ `)

// real is a line of `ipvsadm -Ln`: a real server and its connections.
type real struct {
	address          netip.AddrPort
	weight           int
	active, inactive int
}

// reals lists the real servers of a virtual server, which is told as ipvsadm's
// arguments tell it: "-t 10.96.0.10:80". There are none if it isn't there.
func (w *world) reals(virtual ...string) []real {
	w.Helper()
	out, err := w.net.Node.Output(w.ctx, "ipvsadm", append([]string{"-Ln"}, virtual...)...)
	if err != nil {
		if strings.Contains(string(out), "No such service") {
			return nil
		}
		w.Fatalf("ipvsadm -Ln %s: %v\n%s", strings.Join(virtual, " "), err, out)
	}
	var all []real
	for _, line := range strings.Split(string(out), "\n") {
		f := strings.Fields(line) // -> ADDRESS Masq WEIGHT ACTIVE INACTIVE
		if len(f) != 6 || f[0] != "->" || f[1] == "RemoteAddress:Port" {
			continue
		}
		r := real{address: netip.MustParseAddrPort(f[1])}
		for i, to := range []*int{&r.weight, &r.active, &r.inactive} {
			*to, err = strconv.Atoi(f[3+i])
			w.must(err)
		}
		all = append(all, r)
	}
	return all
}

// realAt returns one of them.
func (w *world) realAt(target, endpoint netip.AddrPort) (real, bool) {
	w.Helper()
	for _, r := range w.reals("-t", target.String()) {
		if r.address == endpoint {
			return r, true
		}
	}
	return real{}, false
}

// awaitReal waits until a real server of a TCP virtual server has a weight; -1
// stands for one that is gone.
func (w *world) awaitReal(target, endpoint netip.AddrPort, weight int) {
	w.Helper()
	w.eventually(20*time.Second, fmt.Sprintf("%s behind %s to have weight %d", endpoint, target, weight), func() error {
		r, ok := w.realAt(target, endpoint)
		if !ok {
			r.weight = -1
		}
		if r.weight != weight {
			return fmt.Errorf("it has %d", r.weight)
		}
		return nil
	})
}

// line is a connection that a test uses and ends as it likes.
type line struct {
	*world
	conn    net.Conn
	backend string
}

// line opens a connection, to whichever backend.
func (w *world) line(target netip.AddrPort) *line {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.ctx, patience(10*time.Second))
	defer cancel()
	c, err := w.net.Client.Dial(ctx, "tcp", target.String())
	w.must(err)
	w.Cleanup(func() { c.Close() })
	l := &line{world: w, conn: c}
	a, err := l.ask()
	w.must(err)
	l.backend = a.Backend
	return l
}

// lineTo opens connections until one comes to a backend, and closes the others.
func (w *world) lineTo(backend string, target netip.AddrPort) *line {
	w.Helper()
	for range 20 {
		l := w.line(target)
		if l.backend == backend {
			return l
		}
		l.reset()
	}
	w.Fatalf("20 connections to %s, and none came to %s", target, backend)
	return nil
}

// ask makes one exchange.
func (l *line) ask() (lab.Answer, error) {
	if err := l.conn.SetDeadline(time.Now().Add(patience(10 * time.Second))); err != nil {
		return lab.Answer{}, err
	}
	if _, err := l.conn.Write([]byte("hello\n")); err != nil {
		return lab.Answer{}, err
	}
	s, err := bufio.NewReader(l.conn).ReadString('\n')
	if err != nil {
		return lab.Answer{}, err
	}
	return lab.ParseAnswer(s)
}

// lives checks that it works and that the same backend answers.
func (l *line) lives(what string) {
	l.Helper()
	if a, err := l.ask(); err != nil || a.Backend != l.backend {
		l.Errorf("%s: the connection to %s is answered by %q, %v", what, l.backend, a.Backend, err)
	}
}

// reset ends it with a reset, which IPVS forgets after 10 seconds; it remembers a
// connection that ends as usual for 2 minutes (tcp_timeouts in
// net/netfilter/ipvs/ip_vs_proto_tcp.c).
func (l *line) reset() {
	l.Helper()
	l.must(l.conn.(*net.TCPConn).SetLinger(0))
	l.must(l.conn.Close())
}

// TestIPVSHeldAcrossMoves: connections of both families that were opened before
// and after each move live on across all of them.
func TestIPVSHeldAcrossMoves(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start()
	var held []*lab.Held
	for _, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel, service.PreferUserspace, service.PreferKernel} {
		w.pin("web", "line", plane)
		for _, target := range frontends(m) {
			held = append(held, w.hold(target))
		}
		sleep(500 * time.Millisecond) // some exchanges
	}
	w.unbroken("across three moves", held...)
	w.carriedBy([]*lab.Held{held[0], held[1], held[4], held[5]}, plan.Userspace)
	w.carriedBy([]*lab.Held{held[2], held[3], held[6], held[7]}, plan.IPVS)
	for i, h := range held {
		if h.Exchanges() < 2 {
			t.Errorf("connection %d made %d exchanges only", i+1, h.Exchanges())
		}
	}
}

// TestIPVSLeastConnections: where one endpoint keeps its connections, least connections sends few there, round robin a third.
// They come one after the other, as how many there are at once is the machine's business.
func TestIPVSLeastConnections(t *testing.T) {
	w := newWorld(t)
	least, robin := newManifest("least", 10, w.net.Backends...), newManifest("robin", 11, w.net.Backends...)
	least.Algorithm = string(service.LeastConnections)
	w.must(least.Write(w.manifests))
	w.must(robin.Write(w.manifests))
	w.start()
	w.pin("least", "line", service.PreferKernel)
	w.pin("robin", "line", service.PreferKernel)
	for f := range frontends(least) {
		by := [2]map[string]int{{}, {}}
		for i, m := range []lab.Manifest{least, robin} {
			for range 30 {
				l := w.line(frontends(m)[f])
				if by[i][l.backend]++; l.backend != "b1" {
					l.reset()
				}
			}
		}
		t.Logf("%s: least connections %v, round robin %v", frontends(least)[f], by[0], by[1])
		if by[1]["b1"] != 10 || by[0]["b1"] == 0 || by[0]["b1"] > 5 {
			t.Errorf("of 30 connections each, the endpoint that keeps them got %d by least connections and %d by round robin; want a few, and 10", by[0]["b1"], by[1]["b1"])
		}
	}
}

// TestIPVSScheduler: an annotation names any scheduler of the kernel; with one
// that the kernel lacks a service stays in userspace and says so.
func TestIPVSScheduler(t *testing.T) {
	w := newWorld(t)
	sed := newManifest("sed", 10, w.net.Backends...).Annotate("kproxy.dev/ipvs-scheduler", "sed")
	nosuch := newManifest("nosuch", 11, w.net.Backends...).Annotate("kproxy.dev/ipvs-scheduler", "nosuch")
	w.must(sed.Write(w.manifests))
	w.must(nosuch.Write(w.manifests))
	w.start("--offload-after", "0s", "--mode", "ipvs")
	w.pin("sed", "line", service.PreferKernel)
	if out := w.node("ipvsadm", "-Ln", "-t", "10.96.0.10:80"); !strings.Contains(out, " sed") {
		t.Errorf("its virtual server doesn't have the scheduler of the annotation:\n%s", out)
	}
	for _, target := range frontends(sed) {
		w.ask(w.net.Client, "tcp", target)
	}
	w.awaitBackends(nosuch, "b1", "b2", "b3")
	sleep(time.Second)
	s := w.service("nosuch", "line")
	if s.DataPlane != plan.Userspace || s.State != plan.StateUserspace || !strings.Contains(s.Reason, "nosuch") {
		t.Errorf("with a scheduler that there isn't, it is in %s, %s: %s; want userspace because of that", s.DataPlane, s.State, s.Reason)
	}
}

// TestIPVSBesideIPTables: in mode auto beside a firewall, services that IPVS can't express go to
// iptables, all others to IPVS, and the status says why.
func TestIPVSBesideIPTables(t *testing.T) {
	w := newWorld(t)
	w.node("iptables", "-P", "FORWARD", "DROP")
	planes := map[string]plan.DataPlane{}
	manifests := map[string]lab.Manifest{}
	for i, c := range []struct {
		algorithm service.Algorithm
		plane     plan.DataPlane
		reason    string
	}{
		{service.RoundRobin, plan.IPVS, "all that it asks for"},
		{service.LeastConnections, plan.IPVS, "all that it asks for"},
		{service.Random, plan.IPTables, "random"},
	} {
		name := string(c.algorithm)
		m := newManifest(name, 10+i, w.net.Backends...)
		m.Algorithm = name
		w.must(m.Write(w.manifests))
		planes[name], manifests[name] = c.plane, m
		t.Run(name, func(t *testing.T) {
			if w.proxy == nil {
				w.start("--mode", "auto")
			}
			w.await(name, "line", plan.Userspace, "")
			if s := w.service(name, "line"); s.Kernel != c.plane || !strings.Contains(s.KernelReason, c.reason) {
				t.Errorf("beneath %s is %s, because %q; want %s, because of %q", name, s.Kernel, s.KernelReason, c.plane, c.reason)
			}
		})
	}
	var held []*lab.Held
	for name, m := range manifests {
		for _, target := range frontends(m) {
			held = append(held, w.hold(target))
			w.ask(w.net.Node, "tcp", target)
		}
		w.await(name, "line", planes[name], plan.StateOffloaded)
		for _, target := range frontends(m) {
			w.eventuallyCarries(t, target, planes[name])
			w.ask(w.net.Node, "tcp", target)
			w.ask(w.net.Backends[0].Namespace, "tcp", target)
		}
	}
	w.unbroken("after their services were offloaded", held...)
}

// draining is a service in IPVS with a connection per family to b1, which is
// about to be removed.
type draining struct {
	*world
	m     lab.Manifest
	lines []*line // by family
}

func newDraining(t *testing.T, drain time.Duration) *draining {
	w := newWorld(t)
	d := &draining{world: w, m: newManifest("web", 10, w.net.Backends...)}
	w.must(d.m.Write(w.manifests))
	w.start("--drain-timeout", drain.String())
	w.pin("web", "line", service.PreferKernel)
	for _, target := range frontends(d.m) {
		d.lines = append(d.lines, w.lineTo("b1", target))
	}
	return d
}

// endpoint is that of b1 in a family.
func (d *draining) endpoint(family int) netip.AddrPort {
	return d.net.Backend("b1").Address(family == 1, lab.LinePort)
}

// awaitWeight waits until b1 has a weight in both families.
func (d *draining) awaitWeight(weight int) {
	d.Helper()
	for f, target := range frontends(d.m) {
		d.awaitReal(target, d.endpoint(f), weight)
	}
}

func (d *draining) live(what string) {
	d.Helper()
	for _, l := range d.lines {
		l.lives(what)
	}
}

func (d *draining) reset() {
	d.Helper()
	for _, l := range d.lines {
		l.reset()
	}
}

// TestIPVSDrain: an endpoint that is removed takes no new connection, and goes
// when its last one has ended.
func TestIPVSDrain(t *testing.T) {
	d := newDraining(t, within(time.Minute))
	d.must(d.m.Without("b1").Write(d.manifests))
	d.awaitWeight(0)
	d.awaitBackends(d.m, "b2", "b3")
	d.live("while its endpoint drains")
	sleep(2 * time.Second) // the drain is looked after every second
	d.live("while its endpoint drains")
	d.awaitWeight(0)
	d.reset()
	d.awaitWeight(-1)
	d.awaitBackends(d.m, "b2", "b3")
}

// TestIPVSDrainEnds: a drain ends when --drain-timeout has passed, counted from
// its begin, restarts or not.
func TestIPVSDrainEnds(t *testing.T) {
	t.Parallel()
	for _, restarts := range []bool{false, true} {
		t.Run(fmt.Sprintf("restarts %v", restarts), func(t *testing.T) {
			drain := lasting(5 * time.Second)
			if restarts {
				drain = within(8 * time.Second) // a restart is over before, on a slow machine too
			}
			d := newDraining(t, drain)
			began := time.Now()
			d.must(d.m.Without("b1").Write(d.manifests))
			d.awaitWeight(0)
			d.live("while its endpoint drains")
			if restarts {
				d.stop()
				d.live("while kproxy is down")
				d.awaitWeight(0)
				d.startAgain()
				d.live("after a restart")
			}
			d.awaitWeight(-1)
			if took := time.Since(began); took < drain-lasting(time.Second) { // how late a busy machine finds out says nothing
				t.Errorf("the drain took %s, want %s", took, drain)
			}
		})
	}
}

// TestIPVSDrainSurvivesRestarts: a kproxy that starts again goes on draining
// what an earlier one began to drain.
func TestIPVSDrainSurvivesRestarts(t *testing.T) {
	d := newDraining(t, within(time.Minute))
	d.must(d.m.Without("b1").Write(d.manifests))
	d.awaitWeight(0)
	d.must(d.proxy.Kill())
	d.live("after kill -9")
	d.startAgain()
	d.awaitWeight(0)
	d.stop()
	d.startAgain()
	d.awaitBackends(d.m, "b2", "b3")
	d.live("after two restarts")
	d.awaitWeight(0)
	d.reset()
	d.awaitWeight(-1)
}

// TestIPVSEndpointReturns: one that comes back while it drains takes new
// connections again and has lost none.
func TestIPVSEndpointReturns(t *testing.T) {
	d := newDraining(t, lasting(6*time.Second))
	d.must(d.m.Without("b1").Write(d.manifests))
	d.awaitWeight(0)
	d.must(d.m.Write(d.manifests))
	d.awaitWeight(1)
	d.awaitBackends(d.m, "b1", "b2", "b3")
	d.live("after its endpoint came back")
	sleep(8 * time.Second) // the drain would be over
	d.awaitWeight(1)
	d.live("after its endpoint came back for good")
}

// TestIPVSDeletedServiceDrains: connections of a service that is deleted live on,
// nobody new gets through to it, and with the last connection all of it goes.
func TestIPVSDeletedServiceDrains(t *testing.T) {
	d := newDraining(t, within(time.Minute))
	d.must(os.Remove(d.m.Path(d.manifests)))
	d.gone("web")
	d.awaitWeight(0)
	for _, target := range frontends(d.m) {
		d.unserved("tcp", target.String())
		d.unserved("udp", target.String())
	}
	sleep(2 * time.Second) // the drain is looked after every second
	d.live("after its service was deleted")
	d.stop()
	d.startAgain()
	d.live("after a restart")
	d.reset()
	d.eventually(20*time.Second, "all of the service to be gone", func() error {
		now := d.everything()
		for _, trace := range traces {
			if strings.Contains(now, trace) {
				return errors.New(trace + " is still in the kernel")
			}
		}
		return nil
	})
}

// TestIPVSServiceReturns: a service that is created again while it drains is
// served again and has lost no connection.
func TestIPVSServiceReturns(t *testing.T) {
	d := newDraining(t, lasting(6*time.Second))
	d.must(os.Remove(d.m.Path(d.manifests)))
	d.gone("web")
	d.awaitWeight(0)
	d.must(d.m.Write(d.manifests))
	d.awaitWeight(1)
	d.awaitBackends(d.m, "b1", "b2", "b3")
	sleep(8 * time.Second) // the drain would be over
	d.awaitWeight(1)
	d.live("after its service came back")
}

// TestIPVSForeignStays: virtual servers, real servers and sets that others made
// stay as they are, whatever kproxy does beside them; where one is at an address
// of a service, the service stays in userspace and says so, until it is gone.
func TestIPVSForeignStays(t *testing.T) {
	w := newWorld(t)
	for _, line := range append([]string{"ipset create others hash:ip", "ipset add others 203.0.113.7"}, foreignIPVS...) {
		w.inflict(variant, line)
	}
	w.inflict(variant, "ipvsadm -A -t 10.96.0.11:80 -s nq")
	w.inflict(variant, "ipvsadm -a -t 10.96.0.11:80 -r 10.2.0.2:8080 -m -w 5")
	foreign := strings.SplitAfter(strings.TrimSpace(w.node("ipvsadm", "-Sn"))+"\n", "\n")
	untouched := func(when string) {
		t.Helper()
		now := w.node("ipvsadm", "-Sn")
		for _, f := range foreign {
			if !strings.Contains(now, f) {
				t.Errorf("%s, %q is gone:\n%s", when, f, now)
			}
		}
		if out := w.node("ipset", "save", "others"); !strings.Contains(out, "add others 203.0.113.7") {
			t.Errorf("%s, others' set says\n%s", when, out)
		}
	}
	m, taken := newManifest("web", 10, w.net.Backends...), newManifest("taken", 11, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.must(taken.Write(w.manifests))
	w.start("--offload-after", "0s")
	w.pin("web", "line", service.PreferKernel)
	untouched("once kproxy runs")
	w.awaitBackends(taken, "b1", "b2", "b3") // in userspace
	w.eventually(10*time.Second, "the status to name the foreign virtual server", func() error {
		if s := w.service("taken", "line"); s.DataPlane != plan.Userspace || !strings.Contains(s.Reason, "10.96.0.11:80") {
			return fmt.Errorf("%s: %s", s.DataPlane, s.Reason)
		}
		return nil
	})

	// A foreign real server behind kproxy's virtual server.
	own, stranger := frontends(m)[0].String(), "203.0.113.10:9000"
	w.node("ipvsadm", "-a", "-t", own, "-r", stranger, "-m", "-w", "0")
	w.must(m.Without("b1").Write(w.manifests))
	w.awaitBackends(m, "b2", "b3")
	w.must(m.Write(w.manifests))
	w.awaitBackends(m, "b1", "b2", "b3")
	if now := w.node("ipvsadm", "-Sn"); !strings.Contains(now, "-r "+stranger) {
		t.Errorf("after changes of endpoints, somebody else's real server is gone:\n%s", now)
	}
	w.node("ipvsadm", "-d", "-t", own, "-r", stranger)

	w.node("ipvsadm", "-D", "-t", "10.96.0.11:80")
	foreign = slices.DeleteFunc(foreign, func(line string) bool { return strings.Contains(line, "10.96.0.11:80") })
	w.pin("taken", "line", service.PreferKernel)
	w.awaitBackends(taken, "b1", "b2", "b3")
	w.settled()

	// What is kproxy's is repaired, and the rest stays.
	before := w.everything()
	w.node("ip", "link", "del", "kproxy0")
	w.node("ipvsadm", "-D", "-t", own)
	w.repaired(t, before)
	untouched("after a repair")

	w.stop()
	w.kproxy("cleanup", "--state-dir", filepath.Join(w.dir, "state")).wants(t, 0, "gone")
	untouched("after cleanup")
	if now := w.everything(); strings.Contains(now, "KPROXY-") || strings.Contains(now, own) {
		t.Errorf("cleanup has left\n%s", now)
	}
}

// TestIPVSChangesNeedNoRules: while no rule of iptables can be written, because
// another program holds the lock, changes of endpoints take effect all the same,
// in the kernel.
func TestIPVSChangesNeedNoRules(t *testing.T) {
	w := newWorld(t)
	path := filepath.Join(w.dir, "xtables.lock")
	w.env = []string{"XTABLES_LOCKFILE=" + path}
	w.holdsRules("legacy") // the nft variant has no lock
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start()
	w.pin("web", "line", service.PreferKernel)
	held := w.hold(frontends(m)[0])
	lock, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	w.must(err)
	defer lock.Close()
	w.must(syscall.Flock(int(lock.Fd()), syscall.LOCK_EX))

	w.must(m.Without("b3").Write(w.manifests))
	w.awaitBackends(m, "b1", "b2")
	w.must(m.Write(w.manifests))
	w.awaitBackends(m, "b1", "b2", "b3")
	for _, target := range frontends(m) {
		w.eventuallyCarries(t, target, plan.IPVS)
	}
	if st, err := w.client.Status(w.ctx); err != nil || st.Sync.LastError != "" {
		t.Errorf("the status says %q, %v", st.Sync.LastError, err)
	}
	w.unbroken("while the lock was held", held)
}

// TestIPVSModeChanges: kproxy takes over what another mode left, whichever that
// is. No new connection fails on the way, those that each mode made live on, and
// the rules of a mode that isn't in use any more go.
func TestIPVSModeChanges(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	var lines []*line
	start := func(mode plan.Mode, plane plan.DataPlane) {
		w.plane = plane
		w.start("--mode", string(mode), "--drain-timeout", within(2*time.Minute).String())
		w.await("web", "line", plane, plan.StateOffloaded)
		for _, target := range frontends(m) {
			lines = append(lines, w.line(target))
		}
		for _, l := range lines {
			l.lives("in mode " + string(mode))
		}
	}
	begin := func() {
		for _, target := range frontends(m) {
			w.ask(w.net.Client, "tcp", target)
		}
	}
	w.plane = plan.IPVS
	w.start("--mode", "ipvs")
	begin()
	w.await("web", "line", plan.IPVS, plan.StateOffloaded)
	// IPVS remembers connections that ended in order for two minutes, in which virtual servers stay.
	tr, err := lab.StartTraffic(w.ctx, lab.TrafficConfig{
		From: w.net.Client, Network: "tcp", Target: frontends(m)[0], Rate: thinned(20), Count: 8000, Timeout: within(8 * time.Second), Reset: true,
	})
	w.must(err)
	w.Cleanup(func() { tr.Stop() })
	for _, next := range []struct {
		mode  plan.Mode
		plane plan.DataPlane
	}{
		{plan.ModeIPTables, plan.IPTables}, {plan.ModeIPVS, plan.IPVS}, {plan.ModeNFTables, plan.NFTables}, {plan.ModeIPVS, plan.IPVS},
		{plan.ModeAuto, plan.NFTables}, {plan.ModeIPTables, plan.IPTables},
	} {
		w.stop()
		start(next.mode, next.plane)
	}
	w.noneFailed("across changes of mode", tr.Stop())
	for _, l := range lines {
		l.reset()
	}
	w.printsNothing("virtual servers", 3*time.Minute, "ipvsadm", "-Sn")
	w.printsNothing("addresses of the dummy link", time.Minute, "ip", "-o", "addr", "show", "dev", "kproxy0")
	w.stop()
	w.start("--mode", "userspace")
	begin()
	w.printsNothing("rules beneath", time.Minute, "sh", "-c", "iptables-save | grep KPROXY-DISPATCH")
}

// printsNothing waits until a command on the node prints nothing.
func (w *world) printsNothing(what string, limit time.Duration, command ...string) {
	w.Helper()
	w.eventually(limit, what+" to be gone", func() error {
		out, _ := w.net.Node.Command(w.ctx, command[0], command[1:]...).Output() // fails where the link is gone
		if text := strings.TrimSpace(string(out)); text != "" {
			return fmt.Errorf("there is\n%s", text)
		}
		return nil
	})
}
