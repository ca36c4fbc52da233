package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/web"
)

// demo plays a story and checks every observation on the way.
type demo struct {
	*labSession
	out     io.Writer
	mode    plan.Mode
	kernel  plan.DataPlane // that the service is offloaded to
	start   time.Time
	traffic *lab.Traffic
	held    []heldConn
	dies    time.Time // backend b2 begins to close what it has
	dead    time.Time // it has
	killed  time.Time // kill -9
	expired time.Time // the heartbeat's entries are gone
	bad     int       // observations that weren't what they should be
}

// heldConn is a connection that must survive the whole story.
type heldConn struct {
	name  string
	plane plan.DataPlane // that has to carry it
	conn  *lab.Held
	// ends is set when it is known to end with the process that carries it.
	ends bool
}

// labDemo plays the demo; it fails when any observation isn't as it should be.
func labDemo(c *cli.Context) (err error) {
	if err := checkLabFlags(c); err != nil {
		return err
	}
	slow := paceOf(c)
	ctx, cancel := context.WithTimeout(c.Context, slow.time(2*time.Minute))
	defer cancel()
	d := &demo{out: c.App.Writer, mode: plan.Mode(c.String("mode")), start: time.Now()}
	d.say("a client, a node and three backends, each in its own network namespace; kproxy runs on the node")
	d.labSession, err = startLab(ctx, string(d.mode), labConfig(3), slow, "--offload-after", offloadAfter.String(), "--offload-min-connections", strconv.Itoa(firstConnections+1))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.stop()) }()
	steps := []func(context.Context) error{d.userspace, d.offload, d.backendDies, d.powerCut, d.recall, d.kill, d.comeBack}
	if d.mode == plan.ModeUserspace {
		steps = []func(context.Context) error{d.userspace, d.backendDies}
	}
	for _, step := range steps {
		if err := step(ctx); err != nil {
			return fmt.Errorf("%w\nkproxy's log:\n%s", err, d.proxy.Log())
		}
	}
	if d.bad > 0 {
		return fmt.Errorf("%d observations weren't what they should be\nkproxy's log:\n%s", d.bad, d.proxy.Log())
	}
	d.say("everything was as it should be, in %s", time.Since(d.start).Round(time.Second))
	return nil
}

const (
	offloadAfter = 4 * time.Second
	// firstConnections are counted; one more, which is held, and the service
	// qualifies.
	firstConnections = 30
)

// clientTimeout returns how long a client of the demo waits.
func (p pace) clientTimeout() time.Duration { return p.time(5 * time.Second) }

func (d *demo) say(format string, args ...any) {
	fmt.Fprintf(d.out, "\n%5.1fs  %s\n", time.Since(d.start).Seconds(), fmt.Sprintf(format, args...))
}

// observe prints one observation and remembers whether it is as it should be.
func (d *demo) observe(ok bool, format string, args ...any) {
	mark := "ok "
	if !ok {
		mark, d.bad = "BAD", d.bad+1
	}
	fmt.Fprintf(d.out, "        %s %s\n", mark, fmt.Sprintf(format, args...))
}

// show prints what the kernel says.
func (d *demo) show(text string) {
	for line := range strings.Lines(text) {
		fmt.Fprintf(d.out, "              %s\n", strings.TrimSuffix(line, "\n"))
	}
}

// userspace: first connections, spread exactly, with the client's address.
func (d *demo) userspace(ctx context.Context) error {
	d.say("every service starts in userspace: kproxy accepts each connection and forwards it")
	counts, peers := map[string]int{}, map[string]int{}
	for range firstConnections {
		a, err := d.net.Client.Ask(ctx, "tcp", labService, "hello")
		if err != nil {
			return fmt.Errorf("connect to %s: %w", labService, err)
		}
		counts[a.Backend]++
		peers[a.Peer.String()]++
	}
	svc, err := d.service(ctx)
	if err != nil {
		return err
	}
	d.observe(counts["b1"] == 10 && counts["b2"] == 10 && counts["b3"] == 10, "%d connections over 3 backends, round robin: b1 %d, b2 %d, b3 %d", firstConnections, counts["b1"], counts["b2"], counts["b3"])
	client := d.net.Config.ClientAddresses(0)[0].String()
	d.observe(peers[client] == firstConnections, "the backends saw the client's own address %s in %d of them", client, peers[client])
	d.observe(svc.DataPlane == plan.Userspace, "data plane %s, state %s: %s", svc.DataPlane, svc.State, reasonTitle(&svc))
	udp, err := d.net.Client.Ask(ctx, "udp", labService, "hello")
	d.observe(err == nil, "UDP works too: %s answered a datagram%s", udp.Backend, because(err))
	if err := d.hold(ctx, "opened in userspace", plan.Userspace); err != nil {
		return err
	}
	d.kernel = svc.Kernel
	d.traffic, err = lab.StartTraffic(ctx, lab.TrafficConfig{
		From: d.net.Client, Network: "tcp", Target: labService, Rate: 50 / float64(d.pace), Count: 50 * 120, Timeout: d.pace.clientTimeout(),
	})
	return err
}

// because ends a sentence about what failed by the error, if it did.
func because(err error) string {
	if err == nil {
		return ""
	}
	return ": " + err.Error()
}

func allUsable(s plan.ServiceStatus) bool { return s.UsableEndpoints() == len(s.Endpoints) }

// hold opens one more connection that has to last.
func (d *demo) hold(ctx context.Context, name string, plane plan.DataPlane) error {
	h, err := lab.Hold(ctx, lab.HoldConfig{From: d.net.Client, Network: "tcp", Target: labService, Timeout: d.pace.clientTimeout()})
	if err != nil {
		return err
	}
	d.held = append(d.held, heldConn{name: name, plane: plane, conn: h})
	return nil
}

// checkHeld observes that connections made earlier still work.
func (d *demo) checkHeld() {
	for _, h := range d.held {
		if !h.ends {
			d.observe(h.conn.Err() == nil, "the connection %s lives on, %d exchanges so far%s", h.name, h.conn.Exchanges(), because(h.conn.Err()))
		}
	}
}

// checkTraffic observes that no new connection failed since t.
func (d *demo) checkTraffic(since time.Time) {
	results := d.traffic.Results().Since(since)
	d.observe(len(results) > 0 && len(results.Failed()) == 0, "new connections meanwhile: %s; slowest %s", results, slowest(results))
}

func slowest(r lab.Results) time.Duration {
	if len(r) == 0 {
		return 0
	}
	return slices.MaxFunc(r, func(a, b lab.Result) int { return int(a.Latency - b.Latency) }).Latency.Round(time.Millisecond)
}

// await polls the service's status until want holds; within is stretched.
func (d *demo) await(ctx context.Context, within time.Duration, what string, want func(plan.ServiceStatus) bool) (plan.ServiceStatus, error) {
	ctx, cancel := context.WithTimeout(ctx, d.pace.time(within))
	defer cancel()
	for {
		svc, err := d.service(ctx)
		if err == nil && want(svc) {
			return svc, nil
		}
		if !sleep(ctx, 50*time.Millisecond) {
			return svc, fmt.Errorf("waited up to %s for %s; data plane %s, state %s: %s%s", d.pace.time(within), what, svc.DataPlane, svc.State, svc.Reason, because(err))
		}
	}
}

// offload: the kernel takes over while connections stay open.
func (d *demo) offload(ctx context.Context) error {
	d.say("once it has been steady for %s and carried %d connections, the service is offloaded to %s", offloadAfter, firstConnections+1, d.kernel)
	t := time.Now()
	svc, err := d.awaitOffload(ctx)
	if err != nil {
		return err
	}
	if command := virtualServers(&svc); command != "" {
		servers, err := exec.CommandContext(ctx, "sh", "-c", command).Output()
		d.observe(err == nil, "the virtual servers%s:", because(err))
		d.show(string(servers))
	}
	return d.holdAndCheck(ctx, "opened in the kernel", d.kernel, t)
}

// awaitOffload waits until new connections go by the kernel's rules.
func (d *demo) awaitOffload(ctx context.Context) (plan.ServiceStatus, error) {
	svc, err := d.await(ctx, 20*time.Second, "the offload", func(s plan.ServiceStatus) bool {
		return s.State == plan.StateOffloaded && s.DataPlane != plan.Userspace
	})
	if err == nil {
		d.observe(svc.DataPlane == d.kernel, "data plane %s, state %s: %s", svc.DataPlane, svc.State, svc.Reason)
	}
	return svc, err
}

// holdAndCheck opens one more connection that has to last. A second later it observes that it
// and those before are where they were opened, and that no new connection failed since t.
func (d *demo) holdAndCheck(ctx context.Context, name string, plane plan.DataPlane, t time.Time) error {
	if err := d.hold(ctx, name, plane); err != nil {
		return err
	}
	sleep(ctx, time.Second)
	if err := d.checkPlanes(ctx); err != nil {
		return err
	}
	d.checkHeld()
	d.checkTraffic(t)
	return nil
}

// checkPlanes observes that every connection is where it was opened.
func (d *demo) checkPlanes(ctx context.Context) error {
	rows, err := d.client.Connections(ctx, "default/web:line")
	if err != nil {
		return err
	}
	for _, h := range d.held {
		i := slices.IndexFunc(rows, func(r plan.ConnectionStatus) bool { return r.Client == h.conn.LocalAddr() })
		if i < 0 {
			d.observe(false, "the connection %s is in `kproxy connections`", h.name)
			continue
		}
		d.observe(rows[i].DataPlane == h.plane, "the connection %s is carried by %s to %s", h.name, rows[i].DataPlane, rows[i].Endpoint)
	}
	return nil
}

// backendDies: no request fails because of a backend that refuses connections.
func (d *demo) backendDies(ctx context.Context) error {
	d.say("backend b2 dies: from now on it refuses connections")
	d.dies = time.Now()
	if err := d.net.Backend("b2").Fail(ctx, lab.Refuse); err != nil {
		return err
	}
	d.dead = time.Now()
	svc, err := d.await(ctx, 15*time.Second, "b2 to be down", func(s plan.ServiceStatus) bool {
		return slices.ContainsFunc(s.Endpoints, func(e plan.EndpointStatus) bool { return e.Health == "down" && !e.Usable })
	})
	if err != nil {
		return err
	}
	sleep(ctx, 2*time.Second)
	d.observe(true, "b2 is down and gets no more connections; data plane %s, state %s: %s", svc.DataPlane, svc.State, svc.Reason)
	d.checkTraffic(d.dead)
	t := time.Now()
	if err := d.net.Backend("b2").Fail(ctx, lab.Healthy); err != nil {
		return err
	}
	_, err = d.await(ctx, 15*time.Second, "b2 to be up", allUsable)
	if err != nil {
		return err
	}
	d.observe(true, "b2 is back and may be used again")
	d.checkTraffic(t)
	return nil
}

// powerCut: a backend that swallows everything costs those who connect at that moment a retransmission or two. Beside it
// are rules alone, as kube-proxy's: a service of the same backends that wants nothing of health checks.
func (d *demo) powerCut(ctx context.Context) error {
	plain := lab.NewManifest("rules", 20, d.net.Backends...).Annotate("kproxy.dev/health-check", "off").Annotate("kproxy.dev/dataplane", "kernel")
	if err := plain.Write(d.manifests); err != nil {
		return err
	}
	defer os.Remove(plain.Path(d.manifests))
	if _, err := d.await(ctx, 10*time.Second, "both services to be in "+string(d.kernel), func(s plan.ServiceStatus) bool {
		st, err := d.client.Status(ctx)
		return s.DataPlane == d.kernel && err == nil && slices.ContainsFunc(st.Services, func(p plan.ServiceStatus) bool {
			return p.Name == "rules" && p.Port == "line" && p.DataPlane == d.kernel
		})
	}); err != nil {
		return err
	}
	cut := d.net.Backends[slices.IndexFunc(d.net.Backends, func(b *lab.Backend) bool { // no connection that has to last is there
		return !slices.ContainsFunc(d.held, func(h heldConn) bool { return h.conn.First().Backend == b.Name })
	})]
	d.say("a power cut: backend %s swallows everything from now on. Beside it, service rules has the same backends and rules alone, as kube-proxy's", cut.Name)
	rules, err := lab.StartTraffic(ctx, lab.TrafficConfig{
		From: d.net.Client, Network: "tcp", Target: netip.AddrPortFrom(plain.ClusterIPs[0], labService.Port()), Rate: 20 / float64(d.pace), Count: 20 * 20, Timeout: d.pace.clientTimeout(),
	})
	if err != nil {
		return err
	}
	defer rules.Stop()
	swallow := func(verb string) error { // without a route, it answers nothing
		_, err := cut.Namespace.Output(ctx, "ip", "rule", verb, "pref", "1", "blackhole")
		return err
	}
	t := time.Now()
	if err := swallow("add"); err != nil {
		return err
	}
	svc, err := d.await(ctx, 15*time.Second, cut.Name+" to be ejected", func(s plan.ServiceStatus) bool {
		return slices.ContainsFunc(s.Endpoints, func(e plan.EndpointStatus) bool { return e.Ejected != nil && !e.Usable })
	})
	if err != nil {
		return err
	}
	ejected := time.Now()
	for _, e := range svc.Endpoints {
		if e.Ejected != nil {
			d.observe(true, "after %s, %s: %s", ejected.Sub(t).Round(10*time.Millisecond), e.Address, e.LastError)
		}
	}
	sleep(ctx, 3*time.Second)
	all := d.traffic.Results().Since(t)
	d.observe(len(all.Failed()) == 0, "connections meanwhile: %s; slowest %s", all, slowest(all))
	later := all.Since(ejected.Add(100 * time.Millisecond))
	d.observe(len(later) > 0 && slowest(later) < d.pace.time(500*time.Millisecond), "of those that began after that, %d, the slowest took %s", len(later), slowest(later))
	end := time.Now()
	if err := swallow("del"); err != nil {
		return err
	}
	if _, err := d.await(ctx, 20*time.Second, cut.Name+" to be back", allUsable); err != nil {
		return err
	}
	waited := 0
	for _, r := range rules.Stop().Since(t) {
		if r.Start.Before(end) && (r.Latency > d.pace.time(500*time.Millisecond) || r.Err != nil) {
			waited++
		}
	}
	d.observe(waited > 0, "with rules alone, every third client waited, to the end: %d", waited)
	d.observe(true, "%s is back %s after that", cut.Name, time.Since(end).Round(100*time.Millisecond))
	return nil
}

// recall: a user takes the service back to watch it, and lets it go again.
func (d *demo) recall(ctx context.Context) error {
	d.say("kproxy pin default/web:line userspace: recalled, to watch every connection")
	t := time.Now()
	if err := d.pin(ctx, service.PreferUserspace); err != nil {
		return err
	}
	svc, err := d.await(ctx, 5*time.Second, "the recall", func(s plan.ServiceStatus) bool { return s.DataPlane == plan.Userspace && s.State == plan.StatePinned })
	if err != nil {
		return err
	}
	d.observe(true, "after %s: data plane %s, state %s: %s", time.Since(t).Round(time.Millisecond), svc.DataPlane, svc.State, svc.Reason)
	if err := d.holdAndCheck(ctx, "opened after the recall", plan.Userspace, t); err != nil {
		return err
	}
	d.say("kproxy pin default/web:line auto: and back to %s", d.kernel)
	t = time.Now()
	if err := d.pin(ctx, service.PreferAuto); err != nil {
		return err
	}
	if _, err := d.awaitOffload(ctx); err != nil {
		return err
	}
	return d.holdAndCheck(ctx, "opened in the kernel again", d.kernel, t)
}

func (d *demo) pin(ctx context.Context, p service.Preference) error {
	_, err := d.client.Pin(ctx, web.PinRequest{Namespace: "default", Name: "web", Port: "line", Preference: p})
	return err
}

// kill: the proxy is gone, the traffic goes on.
func (d *demo) kill(ctx context.Context) error {
	alive := d.pace.aliveTimeout()
	d.say("kill -9 kproxy: its heartbeat stops, and after %s new connections go to the fallback rules, %s, and nothing else", alive, d.kernel)
	d.killed = time.Now()
	if err := d.proxy.Kill(); err != nil {
		return err
	}
	for i := range d.held {
		d.held[i].ends = d.held[i].plane == plan.Userspace // its sockets were kproxy's
	}
	sleep(ctx, alive+200*time.Millisecond)
	d.expired = time.Now()
	sleep(ctx, 3*time.Second)
	d.checkTraffic(d.expired)
	d.checkHeld()
	return nil
}

// comeBack: a new kproxy adopts what it finds.
func (d *demo) comeBack(ctx context.Context) error {
	d.say("kproxy starts again and adopts what is programmed")
	t := time.Now()
	if err := d.startProxy(ctx); err != nil {
		return err
	}
	if _, err := d.awaitOffload(ctx); err != nil {
		return err
	}
	sleep(ctx, time.Second)
	d.checkTraffic(t)
	d.checkHeld()
	all := d.traffic.Stop()
	failed := all.Failed()
	lost, outside := 0, []lab.Result{}
	for _, r := range failed {
		switch {
		case !r.Start.Before(d.killed) && r.Start.Before(d.expired):
			lost++
		case r.Start.Before(d.dead) && r.Start.Add(r.Latency).After(d.dies) && errors.Is(r.Err, syscall.ECONNRESET):
			// The kernel had led it to b2, whose queue it was in.
		default:
			outside = append(outside, r)
		}
	}
	d.say("in all %d connections; %d failed in the %s in which a dead kproxy still attracted them, %d with b2, in its queue when it died",
		len(all), lost, d.pace.aliveTimeout(), len(failed)-lost-len(outside))
	d.observe(len(outside) == 0, "%d failed at any other time", len(outside))
	for _, r := range outside {
		d.show(fmt.Sprintf("begun %.1fs after the start, for %s: %v", r.Start.Sub(d.start).Seconds(), r.Latency.Round(time.Millisecond), r.Err))
	}
	for _, h := range d.held {
		h.conn.Close()
	}
	return nil
}
