// Package e2e sends real packets through the real binary, in network
// namespaces that each test makes for itself.
package e2e

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/kerneltest"
	"kproxy.dev/kproxy/test/program"
	"kproxy.dev/kproxy/web"
)

// binary is the kproxy under test.
var binary string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	flag.Parse()
	if kernelPlane == "" {
		fmt.Fprintf(os.Stderr, "KPROXY_E2E_MODE: %q is none of iptables, ipvs, nftables and auto\n", mode)
		return 2
	}
	if err := errors.Join(selectTests(), setParallel()); err != nil {
		fmt.Fprintln(os.Stderr, "set flags of tests:", err)
		return 1
	}
	kerneltest.LockPerNamespace() // tests run side by side
	return program.Run(func(kproxy, _ string) error {
		binary = kproxy
		return nil
	}, m.Run)
}

// worlds numbers the labs of this process, so that their namespaces differ.
var worlds atomic.Int32

// world is a lab with kproxy on its node.
type world struct {
	*testing.T
	ctx       context.Context
	net       *lab.Network
	dir       string
	manifests string
	cluster   *cluster       // where services come from instead; may be nil
	plane     plan.DataPlane // where the service of this test goes when it is offloaded
	binary    string         // the kproxy that is started next
	env       []string       // of it, besides this process's
	proxy     *lab.Process
	client    *web.Client
}

// newWorld builds a lab with three backends; kproxy doesn't run yet. Worlds
// share nothing, so their tests run in parallel.
func newWorld(t *testing.T) *world {
	t.Helper()
	t.Parallel()
	return newLoneWorld(t)
}

// newLoneWorld is newWorld for a test that takes the whole machine, or is parallel to others already.
func newLoneWorld(t *testing.T) *world {
	t.Helper()
	return buildWorld(t, func(*lab.Config) {})
}

// buildWorld is newLoneWorld with a lab that change describes further.
func buildWorld(t *testing.T, change func(*lab.Config)) *world {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root to make network namespaces")
	}
	ctx, cancel := context.WithTimeout(context.Background(), lasting(10*time.Minute))
	t.Cleanup(cancel)
	cfg := lab.DefaultConfig()
	cfg.Prefix = fmt.Sprintf("kpe-%d-%d", os.Getpid(), worlds.Add(1))
	cfg.Clients = 3
	change(&cfg)
	w := &world{T: t, ctx: ctx, net: lab.New(cfg), dir: t.TempDir(), plane: kernelPlane, binary: binary}
	w.manifests = filepath.Join(w.dir, "manifests")
	w.must(os.Mkdir(w.manifests, 0o755))
	w.must(w.net.Up(ctx))
	t.Cleanup(func() {
		if err := w.net.Down(); err != nil {
			t.Errorf("take the lab down: %v", err)
		}
	})
	return w
}

func (w *world) must(err error) {
	w.Helper()
	if err != nil {
		w.Fatal(err)
	}
}

// start runs kproxy on the node in the mode under test, with a short
// offload-after, and waits until it is alive. Further arguments win over the
// usual ones.
func (w *world) start(args ...string) {
	w.Helper()
	w.configure(args...)
	w.startAgain()
}

// configure says how kproxy is to run, without starting it.
func (w *world) configure(args ...string) {
	w.Helper()
	socket := filepath.Join(w.dir, "kproxy.sock")
	w.client = web.NewClient(socket)
	from := []string{"--manifests", w.manifests}
	if w.cluster != nil {
		from = []string{"--master", "http://" + w.cluster.address}
	}
	w.proxy = &lab.Process{
		Namespace: w.net.Node, Path: w.binary, Env: w.env,
		Args: slices.Concat([]string{"run"}, from, []string{
			"--mode", string(mode), "--socket", socket,
			"--state-dir", filepath.Join(w.dir, "state"), "--hostname-override", "node", "--v", "debug",
			"--offload-after", "1s", "--alive-timeout", lasting(3 * time.Second).String(), "--drain-timeout", lasting(5 * time.Second).String(),
			"--health-interval", within(300 * time.Millisecond).String(), "--health-timeout", within(250 * time.Millisecond).String(),
		}, args),
	}
	w.Cleanup(func() {
		if w.proxy.Running() {
			w.must(w.proxy.Kill())
		}
		if w.Failed() {
			w.Logf("kproxy's log:\n%s", w.proxy.Log())
		}
	})
}

// stop ends kproxy as an operator does.
func (w *world) stop() {
	w.Helper()
	w.must(w.proxy.Stop(patience(20 * time.Second)))
}

// startAgain starts the same kproxy once more.
func (w *world) startAgain() {
	w.Helper()
	w.must(w.proxy.Start())
	w.eventually(20*time.Second, "kproxy to be alive", func() error {
		st, err := w.client.Status(w.ctx)
		if err == nil && !st.Alive {
			err = errors.New("not alive")
		}
		return err
	})
}

// eventually polls until f returns nil. limit is for a machine of usual speed with no load besides. It asks less often
// the longer it waits, and where f runs programs and takes long: what it looks for needs the processor too.
func (w *world) eventually(limit time.Duration, what string, f func() error) {
	w.Helper()
	start := time.Now()
	for poll := 20 * time.Millisecond; ; poll = min(poll*5/4, within(100*time.Millisecond)) {
		began := time.Now()
		err := f()
		if err == nil {
			return
		}
		if waited := time.Since(start); waited > patience(limit) {
			w.Fatalf("waited %s for %s: %v", waited, what, err)
		}
		time.Sleep(max(poll, min(2*time.Since(began), time.Second)))
	}
}

// service returns the status of default/<name>:<port>.
func (w *world) service(name, port string) plan.ServiceStatus {
	w.Helper()
	st, err := w.client.Status(w.ctx)
	w.must(err)
	for _, s := range st.Services {
		if s.Name == name && s.Port == port {
			return s
		}
	}
	w.Fatalf("service %s:%s isn't in the status", name, port)
	return plan.ServiceStatus{}
}

// await waits until the service port is in a data plane and a state; an empty
// state means any.
func (w *world) await(name, port string, plane plan.DataPlane, state plan.State) {
	w.Helper()
	w.eventually(20*time.Second, fmt.Sprintf("%s:%s in %s %s", name, port, plane, state), func() error {
		st, err := w.client.Status(w.ctx)
		if err != nil {
			return err
		}
		for _, s := range st.Services {
			if s.Name == name && s.Port == port {
				if s.DataPlane == plane && (state == "" || s.State == state) {
					return nil
				}
				return fmt.Errorf("%s, %s: %s %v", s.DataPlane, s.State, s.Reason, s.Problems)
			}
		}
		return errors.New("no such service")
	})
}

// pin holds a service's ports in a data plane and waits until they are there.
func (w *world) pin(name, port string, p service.Preference) {
	w.Helper()
	_, err := w.client.Pin(w.ctx, web.PinRequest{Namespace: "default", Name: name, Port: port, Preference: p})
	w.must(err)
	switch p {
	case service.PreferUserspace:
		w.await(name, port, plan.Userspace, plan.StatePinned)
	case service.PreferKernel:
		w.await(name, port, w.plane, plan.StatePinned)
	}
}

// ask makes one exchange from a namespace and fails the test if that fails.
func (w *world) ask(from *lab.Namespace, network string, target netip.AddrPort) lab.Answer {
	w.Helper()
	a, err := from.Ask(w.ctx, network, target, "hello")
	if err != nil {
		w.Fatalf("%s from %s to %s: %v", network, from.Name, target, err)
	}
	return a
}

// refuses checks that an exchange fails, and that it fails fast: refused, not
// timed out. The refusal of a datagram may get lost (hosts limit the rate of
// ICMP), so there are three of them.
func (w *world) refuses(from *lab.Namespace, network string, target netip.AddrPort) {
	w.Helper()
	var a lab.Answer
	var err error
	for range map[string]int{"tcp": 1, "udp": 3}[network] {
		ctx, cancel := context.WithTimeout(w.ctx, patience(5*time.Second))
		a, err = from.Ask(ctx, network, target, "hello")
		cancel()
		if err == nil || !errors.Is(err, os.ErrDeadlineExceeded) {
			break
		}
	}
	if err == nil {
		w.Fatalf("%s from %s to %s: answered by %s, want it refused", network, from.Name, target, a.Backend)
	}
	if !strings.Contains(err.Error(), "refused") && !strings.Contains(err.Error(), "reset") {
		w.Fatalf("%s from %s to %s: %v, want it refused", network, from.Name, target, err)
	}
}

// node runs a command on the node and returns what it printed.
func (w *world) node(name string, args ...string) string {
	w.Helper()
	out, err := w.net.Node.Output(w.ctx, name, args...)
	if err != nil {
		w.Fatalf("%s %s on the node: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return string(out)
}

// traffic keeps new connections to target coming, until the test or its Stop.
//
// UDP has no connections: to the kernel, a datagram from a port that was used
// before belongs to the flow of then. So each exchange has a port of its own.
func (w *world) traffic(network string, target netip.AddrPort, rate float64) *lab.Traffic {
	w.Helper()
	c := lab.TrafficConfig{
		From: w.net.Client, Network: network, Target: target, Rate: thinned(rate), Count: int(rate * 400), Timeout: patience(8 * time.Second),
		Concurrency: 1024, // time-outs of one moment must not thin out the next
	}
	if network == "udp" {
		// The kernel chooses from 32768 on, and kproxy, for its own sockets with the client's address, from 10240 on: IPVS would take
		// answers to those for answers to flows from the same port that it remembers (docs/limits.md).
		c.FirstPort = 1024
		c.Count = min(c.Count, 9000)
	}
	tr, err := lab.StartTraffic(w.ctx, c)
	w.must(err)
	w.Cleanup(func() { tr.Stop() })
	return tr
}

// noneFailed checks a stretch of traffic.
func (w *world) noneFailed(what string, r lab.Results) {
	w.Helper()
	if err := r.Err(); err != nil {
		w.Errorf("%s: %v\n%s", what, err, w.remembered(r.Failed()))
	}
}

// remembered returns what the node's kernel still has of the first three connections that
// failed: in conntrack, and in IPVS's table, which has ports in hexadecimal.
func (w *world) remembered(failed lab.Results) string {
	w.Helper()
	var out strings.Builder
	for _, x := range failed[:min(3, len(failed))] {
		var e *net.OpError
		if !errors.As(x.Err, &e) || e.Source == nil {
			continue
		}
		port := netip.MustParseAddrPort(e.Source.String()).Port()
		script := fmt.Sprintf("for f in ipv4 ipv6; do conntrack -L -f $f 2>/dev/null | grep -w 'sport=%d'; done; grep -wi '%04X' /proc/net/ip_vs_conn; true", port, port)
		fmt.Fprintf(&out, "the node's kernel of port %d:\n%s", port, w.node("sh", "-c", script))
	}
	return out.String()
}

// hold opens a connection that must last until the test's end.
func (w *world) hold(target netip.AddrPort) *lab.Held {
	w.Helper()
	return w.holdBy("tcp", target)
}

// holdBy is hold by a protocol: a UDP session from one port.
func (w *world) holdBy(network string, target netip.AddrPort) *lab.Held {
	w.Helper()
	h, err := lab.Hold(w.ctx, lab.HoldConfig{
		From: w.net.Client, Network: network, Target: target, Every: within(50 * time.Millisecond), Timeout: patience(5 * time.Second),
	})
	w.must(err)
	w.Cleanup(func() { h.Close() })
	return h
}

// unbroken checks held connections.
func (w *world) unbroken(what string, held ...*lab.Held) {
	w.Helper()
	for i, h := range held {
		if err := h.Err(); err != nil {
			w.Errorf("%s: connection %d of %d broke after %d exchanges: %v", what, i+1, len(held), h.Exchanges(), err)
		}
	}
}

// serve has a namespace answer at a port as the lab's backends do, by a name, until the test ends; with addresses, SCTP at those.
func (w *world) serve(at *lab.Namespace, name string, port uint16, sctp ...netip.Addr) {
	w.Helper()
	b := lab.NewBackend(name, at, port, sctp...)
	w.must(b.Start(w.ctx))
	w.Cleanup(b.Stop)
}

// newManifest is lab.NewManifest for a machine like this one: on a slow one,
// userspace gives endpoints more time to accept.
func newManifest(name string, number int, backends ...*lab.Backend) lab.Manifest {
	m := lab.NewManifest(name, number, backends...)
	if slow > 1 {
		m = m.Annotate("kproxy.dev/connect-timeout", within(time.Second).String())
	}
	return m
}

// addresses of the service that manifest m describes, for its TCP and UDP port 80.
func frontends(m lab.Manifest) []netip.AddrPort {
	var out []netip.AddrPort
	for _, a := range m.ClusterIPs {
		out = append(out, netip.AddrPortFrom(a, 80))
	}
	return out
}
