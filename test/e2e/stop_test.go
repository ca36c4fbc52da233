package e2e

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"kproxy.dev/kproxy/plan"
)

// TestStopInModeUserspace: while connections drain, new ones are served, TCP and UDP; then they are
// refused at once. The log says how many are left.
func TestStopInModeUserspace(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	drain := within(time.Minute)
	w.start("--mode", "userspace", "--drain-timeout", drain.String(), "--alive-timeout", lasting(20*time.Second).String())
	at := frontends(m)[0]
	held := w.hold(at)
	began := time.Now()
	w.must(w.proxy.Signal(syscall.SIGTERM))
	w.eventually(5*time.Second, "kproxy to say that it is being stopped", func() error {
		st, err := w.client.Status(w.ctx)
		if err == nil && st.NotReady != "kproxy is being stopped" {
			err = fmt.Errorf("ready %v: %q", st.Ready, st.NotReady)
		}
		return err
	})
	for range 20 {
		w.ask(w.net.Client, "tcp", at)
		w.ask(w.net.Client, "udp", at)
		sleep(50 * time.Millisecond)
	}
	w.unbroken("while kproxy stops", held)
	if !w.proxy.Running() {
		t.Fatal("kproxy has ended before its connections")
	}
	if !strings.Contains(w.proxy.Log(), "left=1") {
		t.Error("the log doesn't say how many connections are left")
	}
	w.must(held.Close())
	ctx, cancel := context.WithTimeout(w.ctx, drain/2)
	defer cancel()
	w.must(w.proxy.Wait(ctx)) // with status 0
	t.Logf("it ended %s after the signal", time.Since(began).Round(10*time.Millisecond))
	w.refuses(w.net.Client, "tcp", at)
	w.refuses(w.net.Client, "udp", at)
}

// TestRestartInModeUserspace: clients of UDP and those with affinity have their endpoints after a stop and a start, where nothing in the
// kernel keeps them.
func TestRestartInModeUserspace(t *testing.T) {
	w := newWorld(t)
	sticky := newManifest("sticky", 11, w.net.Backends...)
	sticky.Affinity = time.Hour
	w.must(sticky.Write(w.manifests))
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start("--mode", "userspace")
	sticks := func() (out []string) {
		for c := range 3 {
			for f, address := range w.net.Config.ClientAddresses(c) {
				a, err := w.net.Client.AskFrom(w.ctx, address, "tcp", frontends(sticky)[f], "hello")
				w.must(err)
				out = append(out, a.Backend)
			}
		}
		return out
	}
	flows, had, stuck := make([]*talker, 8), make([]string, 8), sticks()
	for i := range flows {
		flows[i] = w.talk(frontends(m)[i%2])
		a, err := flows[i].ask(5 * time.Second)
		w.must(err)
		had[i] = a.Backend
	}
	w.stop()
	w.startAgain()
	for i, f := range slices.Backward(flows) { // in another order, as they had them by turns
		f.becomes("a client of before", by(had[i]))
	}
	if got := sticks(); !slices.Equal(got, stuck) {
		t.Errorf("clients with affinity have %v, and had %v", got, stuck)
	}
}

// TestStopServesWhatTheKernelLacks: while connections drain, new ones of a service that the kernel can't serve go on being served, and
// those of others are the kernel's. The next kproxy takes none for offloaded because of that.
func TestStopServesWhatTheKernelLacks(t *testing.T) {
	w := newWorld(t)
	own := w.serveOn(w.net.Backends[0], "own", 10, func(c *net.TCPConn) {
		if _, err := bufio.NewReader(c).ReadString('\n'); err == nil { // "PROXY …"
			_, _ = c.Write([]byte("x"))
		}
	})
	w.must(own.Annotate("kproxy.dev/proxy-protocol", "v1").Write(w.manifests))
	m := newManifest("web", 11, w.net.Backends...)
	w.must(m.Write(w.manifests))
	args := []string{"--health-check", "off", "--offload-after", "1h", "--drain-timeout", within(time.Minute).String()}
	w.start(args...)
	held := w.hold(frontends(m)[0])
	w.must(w.proxy.Signal(syscall.SIGTERM))
	w.await("web", "line", w.plane, plan.StatePinned)
	for i := range 20 {
		at := frontends(own)[i%2]
		c, err := w.net.Client.Dial(w.ctx, "tcp", at.String())
		if err == nil {
			w.must(c.SetDeadline(time.Now().Add(within(5 * time.Second))))
			_, err = io.ReadFull(c, make([]byte, 1))
			c.Close()
		}
		if err != nil {
			t.Errorf("a connection to %s while kproxy stops: %v", at, err)
		}
		w.ask(w.net.Client, "tcp", frontends(m)[i%2])
		w.ask(w.net.Client, "udp", frontends(m)[i%2])
		sleep(50 * time.Millisecond)
	}
	w.unbroken("while kproxy stops", held)
	if !w.proxy.Running() {
		t.Fatal("kproxy has ended before its connections")
	}
	w.must(held.Close())
	w.must(w.proxy.Wait(w.ctx))
	w.ask(w.net.Client, "tcp", frontends(m)[0])
	w.start(args...)
	w.await("web", "line", plan.Userspace, plan.StateQualifying)
}

// TestDrain: a drained node is left out by load balancers, and new connections go to the kernel at once; those that there are go
// on. It stays so when another kproxy takes over, until it is undone.
func TestDrain(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	m.DataPlane = "userspace"
	w.must(m.Write(w.manifests))
	w.start("--offload-after", "1h")
	at := frontends(m)[0]
	held := w.hold(at)
	drain := func(args ...string) string {
		return w.node(binary, append([]string{"drain", "--socket", w.socket()}, args...)...)
	}
	healthz := func(want int) {
		t.Helper()
		resp, err := w.net.Node.HTTPClient(within(5 * time.Second)).Get("http://127.0.0.1:10256/healthz")
		w.must(err)
		resp.Body.Close()
		if resp.StatusCode != want {
			t.Errorf("/healthz answers %d, want %d", resp.StatusCode, want)
		}
	}
	healthz(http.StatusOK)
	if said := drain(); !strings.Contains(said, "1 TCP connections left") {
		t.Errorf("kproxy drain said %q", said)
	}
	w.await("web", "line", w.plane, plan.StatePinned)
	healthz(http.StatusServiceUnavailable)
	w.ask(w.net.Client, "tcp", at)
	w.takeOver("--offload-after", "1h")
	w.await("web", "line", w.plane, plan.StatePinned)
	healthz(http.StatusServiceUnavailable)
	if st, err := w.client.Status(w.ctx); err != nil || st.Drain == nil || st.Drain.Left != 1 {
		t.Errorf("the status says %+v of the drain (%v), want 1 connection left", st.Drain, err)
	}
	w.unbroken("while drained", held)
	w.must(held.Close())
	drain("--wait")
	drain("--undo")
	w.await("web", "line", plan.Userspace, plan.StatePinned)
	healthz(http.StatusOK)
}

// TestStopWithoutEnd: a connection that never ends keeps kproxy for --drain-timeout, and others are served for
// most of it.
func TestStopWithoutEnd(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	drain := lasting(5 * time.Second)
	w.start("--mode", "userspace", "--drain-timeout", drain.String())
	w.hold(frontends(m)[0])
	began := time.Now()
	w.must(w.proxy.Signal(syscall.SIGTERM))
	served := 0
	for w.proxy.Running() {
		asked := time.Since(began)
		ctx, cancel := context.WithTimeout(w.ctx, patience(10*time.Second))
		_, err := w.net.Client.Ask(ctx, "tcp", frontends(m)[0], "hello")
		cancel()
		switch {
		case err == nil:
			served++
		case asked < drain/2 && time.Since(began) < drain*3/4:
			t.Errorf("%s after the signal a connection wasn't served: %v", asked.Round(time.Millisecond), err)
		case !strings.Contains(err.Error(), "refused") && !strings.Contains(err.Error(), "reset"):
			t.Errorf("%s after the signal a connection wasn't refused: %v", time.Since(began).Round(time.Millisecond), err)
		}
		sleep(50 * time.Millisecond)
	}
	ended := time.Since(began)
	if ended < drain || ended > drain+patience(10*time.Second) {
		t.Errorf("it ended %s after the signal, want %s", ended, drain)
	}
	if served == 0 {
		t.Error("no connection was served meanwhile")
	}
	w.must(w.proxy.Wait(w.ctx))
	if !strings.Contains(w.proxy.Log(), "connections were cut short") {
		t.Error("the log doesn't say that a connection was ended")
	}
	w.refuses(w.net.Client, "tcp", frontends(m)[0])
}

// TestServiceManagerIsNotified: systemd is told that kproxy is ready when it is, not before, and that it stops.
func TestServiceManagerIsNotified(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.configure()
	socket := filepath.Join(w.dir, "notify")
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	w.must(err)
	defer l.Close()
	w.proxy.Env = append(w.proxy.Env, "NOTIFY_SOCKET="+socket)
	w.must(w.proxy.Start())
	told := func() string {
		buf := make([]byte, 4096)
		w.must(l.SetReadDeadline(time.Now().Add(within(20 * time.Second))))
		n, err := l.Read(buf)
		w.must(err)
		return string(buf[:n])
	}
	var before []string
	for state := told(); !strings.HasPrefix(state, "READY=1\n"); state = told() {
		before = append(before, state)
	}
	if len(before) == 0 || !strings.HasPrefix(before[0], "STATUS=not ready: kproxy is still setting up") {
		t.Errorf("before it was ready it said %q", before)
	}
	st, err := w.client.Status(w.ctx)
	w.must(err)
	if !st.Ready {
		t.Errorf("systemd takes it for ready, and it isn't: %s", st.NotReady)
	}
	w.ask(w.net.Client, "tcp", frontends(m)[0])
	w.stop()
	state := told()
	for strings.HasPrefix(state, "STATUS=") {
		state = told()
	}
	if state != "STOPPING=1\nSTATUS=draining" {
		t.Errorf("at the end it said %q", state)
	}
}
