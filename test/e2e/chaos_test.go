package e2e

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
)

// TestChaos: kproxy is taken over from, killed, stopped, its rules are flushed, the API server goes away and endpoints change,
// one after another and at once, at random, while clients hold connections and sessions and open new ones. None notices, but those
// whose bytes a killed loop was moving, at most one a loop each time, and those that are there while the rules that divert packets
// to userspace are gone.
//
// $KPROXY_CHAOS is how long that goes on in each mode, $KPROXY_CHAOS_SHARE the part of the clients that take part (all in `make soak`, 0.4 otherwise);
// $KPROXY_SEED repeats a run's order.
func TestChaos(t *testing.T) {
	lasts, share := 20*time.Second, 0.4
	if s := os.Getenv("KPROXY_CHAOS"); s != "" {
		var err error
		if lasts, err = time.ParseDuration(s); err != nil {
			t.Fatalf("KPROXY_CHAOS: %v", err)
		}
	}
	if s := os.Getenv("KPROXY_CHAOS_SHARE"); s != "" {
		var err error
		if share, err = strconv.ParseFloat(s, 64); err != nil {
			t.Fatalf("KPROXY_CHAOS_SHARE: %v", err)
		}
	}
	modes := []plan.Mode{plan.ModeUserspace, mode}
	if mode != plan.ModeIPTables {
		modes = modes[1:] // mode userspace is the same whatever else the kernel has
	}
	for _, m := range modes {
		t.Run(string(m), func(t *testing.T) {
			seed := cmp.Or(uint64(number(os.Getenv("KPROXY_SEED"))), rand.Uint64N(1e9))
			t.Logf("KPROXY_SEED=%d", seed)
			c := &chaos{world: newLoneWorld(t), mode: m, random: rand.New(rand.NewPCG(seed, 0)), lasts: lasting(lasts), share: share}
			c.run()
		})
	}
}

// chaos is a run of it.
type chaos struct {
	*world
	mode     plan.Mode
	random   *rand.Rand // of the events; the test's goroutine uses it
	lasts    time.Duration
	share    float64 // of 500 streams, 200 sessions and 200 new connections a second
	services []lab.Manifest
	all      []*lab.Process // every kproxy so far
	killed   []time.Time    // workers of the kproxy that runs
	told     map[string]int // events, by name

	mu       sync.Mutex      // clients and events
	streams  context.Context // ends when the long ones are to end
	renew    func()          // ends them, so that others begin
	windows  []window
	failures []failure
	counts   map[string]int // what clients did
}

// window says when kproxy's rules weren't what it had made them.
type window struct {
	from, to time.Time
	breaks   bool // connections
}

// failure describes what failed for a client, and when that began and ended.
type failure struct {
	from, to time.Time
	what     string
	err      error
}

// during reports whether any of it was in w.
func (f *failure) during(w window) bool { return f.from.Before(w.to) && f.to.After(w.from) }

func isReset(err error) bool {
	return errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
}

func (c *chaos) run() {
	ctx, cancel := context.WithTimeout(context.Background(), c.lasts+within(5*time.Minute))
	c.Cleanup(cancel)
	c.ctx, c.told, c.counts = ctx, map[string]int{}, map[string]int{}
	c.world.cluster = c.newCluster()
	var backends []lab.Manifest
	for _, b := range c.net.Backends {
		backends = append(backends, c.serveOn(b, "own", 1, echoHash))
	}
	stream := backends[0].Ports[0]
	stream.Port = 81
	for i, name := range []string{"kernel", "user", "moves", "sticky"} {
		m := newManifest(name, 10+i, c.net.Backends...)
		m.Ports = append(m.Ports, stream)
		m.DataPlane = []string{"kernel", "userspace", "", "userspace"}[i]
		if name == "sticky" {
			m.Affinity = time.Hour
		}
		c.services = append(c.services, m)
		c.must(c.cluster.set(m))
	}
	c.start("--supervise", "--mode", string(c.mode), "--alive-timeout", lasting(20*time.Second).String(), "--drain-timeout", within(2*time.Minute).String())
	c.all = append(c.all, c.proxy)
	c.ready()

	clients := c.clients()
	c.eventually(30*time.Second, "clients to be there", func() error { // without connections, a stop ends at once
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.counts["half-closed stream"] == 0 || c.counts["new connection"] == 0 {
			return fmt.Errorf("so far they had %v", c.counts)
		}
		return nil
	})
	for began := time.Now(); time.Since(began) < c.lasts && !c.Failed(); {
		c.next()
		time.Sleep(time.Duration(c.random.Int64N(int64(lasting(time.Second)))))
	}
	c.server(true)
	clients()
	c.judge()
}

// clients starts all of them, and returns what ends them.
func (c *chaos) clients() (stop func()) {
	ctx, cancel := context.WithCancel(c.ctx)
	end := func() {}
	c.renew = func() {
		end()
		c.streams, end = context.WithCancel(ctx)
	}
	c.renew()
	var all sync.WaitGroup
	repeat := func(f func()) {
		all.Go(func() {
			for ctx.Err() == nil {
				f()
			}
		})
	}
	at := func(i, port int) netip.AddrPort {
		m := c.services[i%len(c.services)]
		return netip.AddrPortFrom(m.ClusterIPs[i/len(c.services)%2], uint16(port))
	}
	for i := range int(thinned(500 * c.share)) {
		switch {
		case i%5 == 0:
			repeat(func() { c.halfClosedStream(at(i/5, 81)) })
		case i%50 == 1:
			repeat(func() { c.longStream("fast", at(i/50, 81), 64<<10, 20*time.Millisecond) })
		default:
			repeat(func() { c.longStream("slow", at(i, 81), 1000, 250*time.Millisecond) })
		}
	}
	for i := range int(thinned(200 * c.share)) {
		all.Go(func() { c.session(ctx, at(i, 80)) })
	}
	var traffic []*lab.Traffic
	for i := range 2 * len(c.services) {
		target := at(i, 80)
		tr, err := lab.StartTraffic(c.ctx, lab.TrafficConfig{
			From: c.net.Client, Network: "tcp", Target: target, Rate: thinned(25 * c.share), Count: int(30 * (c.lasts + within(5*time.Minute)).Seconds()),
			Timeout: within(time.Minute), Concurrency: 1024,
			OnResult: func(r lab.Result) { c.note("new connection to "+target.String(), r.Start, r.Err) },
		})
		c.must(err)
		traffic = append(traffic, tr)
	}
	random := rand.New(rand.NewPCG(c.random.Uint64(), 0))
	repeat(func() { c.endpoints(random) })
	return func() {
		cancel()
		for _, tr := range traffic {
			tr.Stop()
		}
		all.Wait()
	}
}

// note counts what a client has done.
func (c *chaos) note(what string, began time.Time, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	kind, _, _ := strings.Cut(what, " to ")
	if c.counts[kind]++; err != nil {
		c.failures = append(c.failures, failure{began, time.Now(), what, err})
	}
}

// longStream is a stream for as long as it goes on, until those of its time are to end.
func (c *chaos) longStream(kind string, target netip.AddrPort, chunk int, pause time.Duration) {
	c.mu.Lock()
	ctx := c.streams
	c.mu.Unlock()
	began := time.Now()
	s, err := c.openStream(c.ctx, kind, target, chunk, pause)
	if err != nil {
		c.note("connect of a stream", began, err)
		return
	}
	defer context.AfterFunc(ctx, func() { s.stop.Store(true) })()
	<-s.over
	if err = s.err; err != nil {
		err = fmt.Errorf("at %s: %w", s.failed.Format("15:04:05.000"), err)
	}
	c.note(kind+" stream to "+target.String(), began, err)
}

// halfClosedStream sends all at once, and takes its time to read it back.
func (c *chaos) halfClosedStream(target netip.AddrPort) {
	began := time.Now()
	s, err := c.openStream(c.ctx, "half-closed", target, 4<<10, 50*time.Millisecond)
	if err == nil {
		_ = s.conn.SetReadBuffer(4 << 10) // so that the rest waits on the way
		sleep(500 * time.Millisecond)
		err = s.end()
	}
	c.note("half-closed stream to "+target.String(), began, err)
}

// session asks from one port, one datagram after another, as a resolver does: it asks once more when it
// hears nothing for a second.
func (c *chaos) session(ctx context.Context, target netip.AddrPort) {
	began := time.Now()
	conn, err := c.net.Client.Dial(c.ctx, "udp", target.String())
	if err != nil {
		c.note("session", began, err)
		return
	}
	defer conn.Close()
	buf := make([]byte, 1500)
	for n := 0; ctx.Err() == nil; n++ {
		began, asked := time.Now(), 0
		for answered := false; !answered; asked++ {
			if err = conn.SetDeadline(time.Now().Add(within(time.Second))); err == nil {
				_, err = fmt.Fprintf(conn, "%d", n)
			}
			for err == nil && !answered {
				var size int
				if size, err = conn.Read(buf); err != nil {
					break
				}
				a, wrong := lab.ParseAnswer(string(buf[:size]))
				got, notNumber := strconv.Atoi(a.Payload)
				if wrong != nil || notNumber != nil || got > n {
					c.note("session", began, errWrongBytes)
					return
				}
				answered = got == n // else it is late
			}
			if err != nil && asked > 15 {
				c.note("session to "+target.String()+" from "+conn.LocalAddr().String(), began, err)
				return
			}
			if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
				sleep(100 * time.Millisecond) // an ICMP error
			}
		}
		c.note("datagram", began, nil)
		if asked > 1 {
			c.note("datagram that was sent again", began, nil)
		}
		sleep(500 * time.Millisecond)
	}
}

// endpoints takes an endpoint of a service away for a while: TCP connections to it go on.
func (c *chaos) endpoints(random *rand.Rand) {
	m := c.services[random.IntN(len(c.services))]
	e := m.Endpoints[random.IntN(len(m.Endpoints))]
	changed := m.Without(e.Name)
	if random.IntN(2) == 0 {
		changed = m.Edit(e.Name, func(e *lab.ManifestEndpoint) { e.NotReady, e.Terminating = true, true })
	}
	for _, m := range []lab.Manifest{changed, m} {
		if err := c.cluster.set(m); err != nil {
			c.note("endpoints", time.Now(), err)
		}
		time.Sleep(time.Duration(random.Int64N(int64(lasting(700 * time.Millisecond)))))
	}
}

// next is one event.
func (c *chaos) next() {
	events := map[string]func(){
		"takeover":                         c.takesOver,
		"takeover, one of them killed":     c.takesOverAndKills,
		"kill":                             func() { c.kill(syscall.SIGKILL) },
		"crash":                            func() { c.kill(syscall.SIGABRT) }, // as a panic ends a process of Go: it prints its stacks
		"stop":                             c.stopped,
		"parent killed":                    c.parentKilled,
		"flush":                            c.flush,
		"the API server goes, or comes":    func() { c.server(c.cluster.away()) },
		"the API server goes and takeover": func() { c.server(false); c.takesOver() },
		"the API server goes and kill":     func() { c.server(false); c.kill(syscall.SIGKILL) },
	}
	names := slices.Sorted(maps.Keys(events))
	name := names[c.random.IntN(len(names))]
	c.tell("%s", name)
	c.told[name]++
	events[name]()
}

// tell prints what isn't an error, without the place that errors have: a report finds these by it.
func (c *chaos) tell(format string, args ...any) {
	fmt.Fprintf(c.Output(), time.Now().Format("15:04:05.000 ")+format+"\n", args...)
}

func (c *cluster) away() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.server == nil
}

// server has the API server be there, or not.
func (c *chaos) server(there bool) {
	switch {
	case there && c.cluster.away():
		c.must(c.cluster.start())
	case !there:
		c.cluster.stop()
	}
}

// another starts a kproxy beside the one that runs.
func (c *chaos) another() (last, next *lab.Process) {
	last, next = c.proxy, c.newcomer()
	c.all = append(c.all, next)
	return last, next
}

// one waits until one of two is left, and serves.
func (c *chaos) one(last, next *lab.Process) {
	c.Helper()
	began := time.Now()
	c.eventually(2*time.Minute, "one kproxy to be left", func() error {
		if last.Running() && next.Running() && time.Since(began) > within(30*time.Second) {
			// The last one crashed while it was asked, and goes on; the next one waits for its end.
			c.must(next.Signal(syscall.SIGTERM))
		}
		if last.Running() == next.Running() {
			return fmt.Errorf("running: the last %v, the next %v", last.Running(), next.Running())
		}
		return nil
	})
	if next.Running() {
		c.proxy, c.killed = next, nil
	}
	c.serves()
}

// serves waits until kproxy does.
func (c *chaos) serves() {
	c.Helper()
	c.eventually(30*time.Second, "kproxy to serve", func() error {
		st, err := c.client.Status(c.ctx)
		if err == nil && !st.Alive {
			err = errors.New("not alive")
		}
		return err
	})
}

func (c *chaos) takesOver() { c.one(c.another()) }

// takesOverAndKills kills the process that works of either side, sometime.
func (c *chaos) takesOverAndKills() {
	old := c.worker(0)
	last, next := c.another()
	victim := func() int { return old }
	if c.random.IntN(2) == 0 {
		victim = func() int { return childOf(next.PID()) }
	} else if !c.mayKill() {
		victim = func() int { return 0 }
	}
	time.Sleep(time.Duration(c.random.Int64N(int64(lasting(600 * time.Millisecond)))))
	if pid := victim(); pid > 0 {
		_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended
	}
	c.one(last, next)
	c.killed = append(c.killed, time.Now())
}

// childOf is the process that works for one that supervises, 0 if there is none. The keeper is another child, without
// a program of its own.
func childOf(pid int) int {
	children, _ := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	for _, field := range strings.Fields(string(children)) {
		name, _ := os.ReadFile("/proc/" + field + "/comm")
		if n, err := strconv.Atoi(field); err == nil && strings.TrimSpace(string(name)) == "kproxy" {
			return n
		}
	}
	return 0
}

// mayKill reports whether a crash isn't one too many in a row, after which connections are lost.
func (c *chaos) mayKill() bool {
	c.killed = slices.DeleteFunc(c.killed, func(at time.Time) bool { return time.Since(at) > within(15*time.Second) })
	return len(c.killed) < 2
}

func (c *chaos) kill(s syscall.Signal) {
	if !c.mayKill() {
		return
	}
	pid := c.worker(0)
	c.killed = append(c.killed, time.Now())
	c.must(syscall.Kill(pid, s))
	c.worker(pid)
	c.serves()
}

// stopped has kproxy stop, and another one begin.
func (c *chaos) stopped() {
	c.must(c.proxy.Signal(syscall.SIGTERM))
	time.Sleep(time.Duration(c.random.Int64N(int64(lasting(300 * time.Millisecond)))))
	c.takesOver()
}

// parentKilled kills the process that supervises; another kproxy takes over from the one that works.
func (c *chaos) parentKilled() {
	worker := c.worker(0)
	c.must(syscall.Kill(c.proxy.PID(), syscall.SIGKILL))
	last, next := c.another()
	c.eventually(time.Minute, "a kproxy whose parent was killed to be taken over from", func() error {
		if syscall.Kill(worker, 0) == nil {
			return errors.New("it goes on")
		}
		return nil
	})
	c.one(last, next)
}

// flushes are harms by name. They cost no connection, but those with a command that shows whether they are mended: without the
// rules that divert packets to sockets, the node forwards endpoints' answers to clients, which answer by a reset: docs/limits.md. A
// service may be in userspace for a moment whichever data plane it asks for, and without table kproxy of nftables the kernel
// translates no connections either. A virtual server's connections end with it, at their next packet; without the dummy link or
// an address of it packets are lost, and sent again.
var flushes = map[string]string{
	"nat is flushed": "", "the jumps are deleted": "", "the map of services is flushed": "",
	"the userspace set is flushed": "", "the heartbeat's set is flushed": "",
	"mangle and filter chains are flushed":     "iptables -t mangle -S; ip6tables -t mangle -S",
	"the routing rule is deleted":              "ip -4 rule; ip -6 rule",
	"the routing table is flushed":             "ip -4 route show table 10249; ip -6 route show table 10249",
	"the chains that lead to IPVS are flushed": "", "the dummy link is deleted": "", "the dummy link is set down": "",
	"addresses are deleted from the dummy link": "", "weights are changed": "", "schedulers are changed": "",
	"the set of virtual servers is flushed": "", "the set of addresses is flushed": "", "the set of drains is destroyed": "",
	"virtual servers are deleted":     "ipvsadm -Sn | grep -c ^-A",
	"all virtual servers are deleted": "ipvsadm -Sn | grep -c ^-A",
	"the ruleset is flushed":          "nft list chain ip kproxy services; nft list chain ip6 kproxy services",
	"the tables are deleted":          "nft list chain ip kproxy services; nft list chain ip6 kproxy services",
}

// flush does to the kernel's rules what others may do, and waits until it is mended. Where that breaks connections, all end soon, so
// that those that have been through it excuse nothing else.
func (c *chaos) flush() {
	harms := slices.Concat(damage, damageOf[kernelPlane])
	if kernelPlane != plan.NFTables {
		harms = append(harms, damageOfIPTables...)
	}
	harms = slices.DeleteFunc(harms, func(h harm) bool { _, ok := flushes[h.name]; return !ok })
	h := harms[c.random.IntN(len(harms))]
	c.tell("%s", h.name)
	there := func() string {
		out, _ := c.net.Node.Command(c.ctx, "sh", "-c", flushes[h.name]).Output() // fails where it is gone
		return string(out)
	}
	before := there()
	w := window{from: time.Now(), breaks: before != ""}
	for _, line := range h.lines {
		_ = c.net.Node.Command(c.ctx, "sh", "-c", line).Run() // there may be nothing to remove
	}
	c.eventually(30*time.Second, h.name+", and mended", func() error {
		if now := there(); now != before {
			return fmt.Errorf("there is\n%s\nand was\n%s", now, before)
		}
		return nil
	})
	for i := range 2 * len(c.services) {
		at := netip.AddrPortFrom(c.services[i/2].ClusterIPs[i%2], 80)
		c.eventually(30*time.Second, fmt.Sprintf("%s to be served after %s", at, h.name), func() error {
			ctx, cancel := context.WithTimeout(c.ctx, time.Second)
			defer cancel()
			_, err := c.net.Client.Ask(ctx, "tcp", at, "mended")
			return err
		})
	}
	w.to = time.Now()
	c.mu.Lock()
	defer c.mu.Unlock()
	c.windows = append(c.windows, w)
	if w.breaks {
		c.renew()
	}
}

// judge says what was wrong.
func (c *chaos) judge() {
	allowed := 0 // resets, that logs tell of
	for _, p := range c.all {
		allowed += c.reset(p.Log())
	}
	for _, kind := range []string{"new connection", "datagram", "slow stream", "fast stream", "half-closed stream"} {
		if c.counts[kind] == 0 {
			c.Errorf("clients had no %s", kind)
		}
	}
	var mended time.Duration
	for _, w := range c.windows {
		mended += w.to.Sub(w.from)
	}
	const late = 200 * time.Millisecond // that a SYN may leave after its time was taken
	var broken []string
	flushed, diverted := 0, 0 // of those that began then, and of those that were there
	connects := func(err error) bool {
		var op *net.OpError
		return errors.As(err, &op) && op.Op == "dial"
	}
	for _, f := range c.failures {
		what := fmt.Sprintf("%s, from %s to %s: %v", f.what, f.from.Format("15:04:05.000"), f.to.Format("15:04:05.000"), f.err)
		switch {
		case (strings.HasPrefix(f.what, "new connection") || connects(f.err)) && slices.ContainsFunc(c.windows, func(w window) bool { return f.from.After(w.from.Add(-late)) && f.from.Before(w.to) }):
			flushed++
		case !strings.HasPrefix(f.what, "session") && (isReset(f.err) || !errors.Is(f.err, errWrongBytes)) && slices.ContainsFunc(c.windows, func(w window) bool { return w.breaks && f.during(w) }):
			diverted++
		case isReset(f.err):
			broken = append(broken, what)
		default:
			c.Error(what)
		}
	}
	if len(broken) > allowed {
		c.Errorf("%d connections were reset, and the logs say %d: %v", len(broken), allowed, strings.Join(broken[:min(20, len(broken))], "\n"))
	}
	c.Logf("%v; clients: %v; %d connections reset, %d by the logs; %d connects failed that began while rules were being mended, for %s in all, and %d connections broke that nothing diverted meanwhile",
		c.told, c.counts, len(broken), allowed, flushed, mended.Round(time.Millisecond), diverted)
}
