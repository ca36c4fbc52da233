package e2e

import (
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace/handover"
	"kproxy.dev/kproxy/web"
)

// newcomer starts another kproxy like the one that runs, with further arguments.
func (w *world) newcomer(args ...string) *lab.Process {
	w.Helper()
	next := &lab.Process{Namespace: w.net.Node, Path: w.binary, Env: w.proxy.Env, Args: append(w.proxy.Args[:len(w.proxy.Args):len(w.proxy.Args)], args...)}
	w.Cleanup(func() {
		if next.Running() {
			w.must(next.Kill())
		}
		if w.Failed() {
			w.Logf("the log of a later kproxy:\n%s", next.Log())
		}
	})
	w.must(next.Start())
	return next
}

// takeOver has a new kproxy take over from the one that runs, which ends with status 0.
func (w *world) takeOver(args ...string) {
	w.Helper()
	last := w.proxy
	w.proxy = w.newcomer(args...)
	ctx, cancel := context.WithTimeout(w.ctx, within(30*time.Second))
	defer cancel()
	if err := last.Wait(ctx); err != nil {
		w.Fatalf("the kproxy that another one took over from: %v", err)
	}
	w.ready()
}

func (w *world) ready() {
	w.Helper()
	w.eventually(20*time.Second, "kproxy to be ready", func() error {
		st, err := w.client.Status(w.ctx)
		if err == nil && !st.Ready {
			err = errors.New(st.NotReady)
		}
		return err
	})
}

// stream is a TCP connection on which a client sends without end, at a pace, and the backend sends all of it back and, when
// it has ended, its hash.
type stream struct {
	name string
	conn *net.TCPConn
	stop atomic.Bool
	sent chan []byte // the hash of all that was written

	over   chan struct{} // closed when both directions have ended
	err    error         // of both
	failed time.Time     // the first of them
}

// streamPatience is how long a stream may move nothing.
const streamPatience = 30 * time.Second

// echoHash is the backend's side of a stream.
func echoHash(c *net.TCPConn) {
	h := sha256.New()
	if _, err := io.Copy(io.MultiWriter(c, h), c); err == nil {
		_, _ = c.Write(h.Sum(nil)) // if it fails, the client sees
	}
}

// stream begins one: chunks of so many bytes with pauses between them, read with pauses as well.
func (w *world) stream(name string, target netip.AddrPort, chunk int, pause time.Duration) *stream {
	w.Helper()
	s, err := w.openStream(w.ctx, name, target, chunk, pause)
	w.must(err)
	w.Cleanup(func() { s.conn.Close() })
	return s
}

// openStream is stream for any goroutine.
func (w *world) openStream(ctx context.Context, name string, target netip.AddrPort, chunk int, pause time.Duration) (*stream, error) {
	c, err := w.net.Client.Dial(ctx, "tcp", target.String())
	if err != nil {
		return nil, err
	}
	s := &stream{name: name, conn: c.(*net.TCPConn), sent: make(chan []byte, 1), over: make(chan struct{})}
	ends := make(chan error)
	go func() { ends <- s.write(chunk, pause) }()
	go func() { ends <- s.read(max(chunk, 4096), pause) }()
	go func() {
		defer close(s.over)
		defer s.conn.Close()
		for range 2 {
			if err := <-ends; err != nil {
				s.err, s.failed = errors.Join(s.err, err), cmp.Or(s.failed, time.Now())
			}
		}
	}()
	return s, nil
}

func (s *stream) write(chunk int, pause time.Duration) (err error) {
	h, random, buf := sha256.New(), rand.NewChaCha8([32]byte{}), make([]byte, chunk)
	for !s.stop.Load() && err == nil {
		_, _ = random.Read(buf)
		h.Write(buf)
		if err = s.conn.SetWriteDeadline(time.Now().Add(within(streamPatience))); err == nil {
			_, err = s.conn.Write(buf)
		}
		sleep(pause)
	}
	s.sent <- h.Sum(nil)
	if err != nil {
		return fmt.Errorf("write: %w", err)
	}
	return s.conn.CloseWrite()
}

// read checks what comes back. All but the last bytes are what was sent; these are its hash.
func (s *stream) read(size int, pause time.Duration) error {
	h, tail, buf := sha256.New(), []byte(nil), make([]byte, size)
	for {
		err := s.conn.SetReadDeadline(time.Now().Add(within(streamPatience)))
		n := 0
		if err == nil {
			n, err = s.conn.Read(buf)
		}
		tail = append(tail, buf[:n]...)
		if more := len(tail) - sha256.Size; more > 0 {
			h.Write(tail[:more])
			tail = bytes.Clone(tail[more:])
		}
		switch {
		case err == io.EOF:
			s.stop.Store(true) // where it wasn't asked to end
			if sent := <-s.sent; !bytes.Equal(tail, sent) || !bytes.Equal(h.Sum(nil), sent) {
				return errWrongBytes
			}
			return nil
		case err != nil:
			s.stop.Store(true)
			return fmt.Errorf("read: %w", err)
		}
		sleep(pause)
	}
}

var errWrongBytes = errors.New("what arrived, or what came back, isn't what was sent")

// end has the client send no more, and waits for the rest to come back.
func (s *stream) end() error {
	s.stop.Store(true)
	<-s.over
	return s.err
}

// halfClosed is a stream whose client has sent all, of which much is on its way still.
func (w *world) halfClosed(target netip.AddrPort) *stream {
	w.Helper()
	s := w.stream("half-closed", target, 64<<10, 10*time.Millisecond)
	sleep(300 * time.Millisecond)
	s.stop.Store(true)
	return s
}

// whole ends streams and checks that nothing was lost or changed on the way.
func (w *world) whole(streams ...*stream) {
	w.Helper()
	for _, s := range streams {
		s.stop.Store(true)
	}
	for _, s := range streams {
		if err := s.end(); err != nil {
			w.Errorf("%s stream: %v", s.name, err)
		}
	}
}

// asking asks for a page on the node, on one connection after another, until the function that it returns is called: that
// says whether two in a row weren't answered with 200.
func (w *world) asking(url string) (stop func() error) {
	ctx, cancel := context.WithCancel(w.ctx)
	w.Cleanup(cancel)
	client, done := w.net.Node.HTTPClient(0), make(chan error, 1)
	go func() {
		asked, lost := 0, false
		for ; ctx.Err() == nil; asked++ {
			one, end := context.WithTimeout(w.ctx, patience(5*time.Second))
			req, err := http.NewRequestWithContext(one, http.MethodGet, url, nil)
			if err != nil {
				done <- err
				end()
				return
			}
			resp, err := client.Do(req)
			if err == nil {
				_, err = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
				if resp.StatusCode != http.StatusOK {
					err = errors.Join(err, errors.New(resp.Status))
				}
			}
			end()
			// An answer that the old process hadn't begun may be lost; the next one, from the other, isn't.
			if lost = err != nil && !lost; err != nil && !lost {
				done <- fmt.Errorf("%s, after %d answers, twice: %w", url, asked, err)
				return
			}
			sleep(5 * time.Millisecond)
		}
		done <- nil
	}()
	return func() error { cancel(); return <-done }
}

// TestTakeover: one kproxy takes over from another, again and again, and no client notices: streams are whole, sessions and
// connections go on with their endpoints, none fails; services stay where they are, and counters go on.
func TestTakeover(t *testing.T) {
	takeovers(newWorld(t), slices.Repeat([]string{binary}, 5))
}

// TestTakeoverInModeUserspace is TestTakeover where nothing else serves meanwhile.
func TestTakeoverInModeUserspace(t *testing.T) {
	takeovers(newWorld(t), slices.Repeat([]string{binary}, 5), "--mode", "userspace", "--alive-timeout", lasting(20*time.Second).String())
}

// TestTakeoverBetweenReleases is TestTakeover from the last release's kproxy to today's, back, and again: each writes its own rules.
func TestTakeoverBetweenReleases(t *testing.T) {
	w := newWorld(t)
	last := lastRelease(w)
	takeovers(w, []string{last, binary, last, binary}, "--listen-tcp-port", "10270", "--listen-udp-port", "10271")
}

// lastRelease builds the kproxy that today's takes over from (test/last.sh).
func lastRelease(w *world) (path string) {
	w.Helper()
	path = filepath.Join(w.dir, "last")
	script := `commit=$(../last.sh) && mkdir "$0.tree" && git -C ../.. archive "$commit" | tar -x -C "$0.tree" &&
		cd "$0.tree" && CGO_ENABLED=0 go build -buildvcs=false -trimpath -o "$0" ./cmd/kproxy`
	out, err := exec.CommandContext(w.ctx, "bash", "-o", "pipefail", "-c", script, path).CombinedOutput()
	if err != nil {
		w.Fatalf("build the last release's kproxy: %v\n%s", err, out)
	}
	return path
}

// takeovers has each of some kproxys take over from the one before it.
func takeovers(w *world, binaries []string, args ...string) {
	w.Helper()
	onlyUserspace := slices.Contains(args, "userspace")
	web, kernel := newManifest("web", 10, w.net.Backends...), newManifest("kernel", 11, w.net.Backends...)
	kernel.Affinity = time.Hour
	kernel.Type, kernel.ExternalLocal, kernel.HealthCheckNodePort = "LoadBalancer", true, 32100
	kernel.LoadBalancerIPs = []netip.Addr{netip.MustParseAddr("192.0.2.11")}
	own := w.serveOn(w.net.Backends[0], "own", 12, echoHash)
	// UDP sessions stay with endpoints that nothing calls dead, as probes may on a busy machine, and are kept until they are asked again.
	w.node("sysctl", "--write", "net.netfilter.nf_conntrack_udp_timeout=600")
	calm := newManifest("calm", 13, w.net.Backends...).Annotate("kproxy.dev/health-check", "off").Annotate("kproxy.dev/idle-timeout", "10m")
	calmKernel := newManifest("calm-kernel", 14, w.net.Backends...).Annotate("kproxy.dev/health-check", "off")
	for _, m := range []lab.Manifest{web, kernel, own, calm, calmKernel} {
		w.must(m.Write(w.manifests))
	}
	w.binary = binaries[0]
	w.start(args...)
	pinned := func() {
		for _, port := range []string{"line", "datagram"} {
			w.pin("web", port, service.PreferUserspace)
			w.pin("calm", port, service.PreferUserspace)
			if !onlyUserspace {
				w.pin("kernel", port, service.PreferKernel)
				w.pin("calm-kernel", port, service.PreferKernel)
			}
		}
		w.pin("own", "own", service.PreferUserspace)
	}
	pinned()
	rules := map[string]string{} // of each when nothing goes on
	for _, b := range slices.Backward(binaries) {
		if rules[b] != "" {
			continue
		}
		if b != w.binary {
			w.stop()
			w.binary, w.proxy.Path = b, b
			w.startAgain()
			pinned()
		}
		w.settled()
		rules[b] = w.everything()
	}
	var held []*lab.Held
	var streams []*stream
	var traffic []*lab.Traffic
	for _, at := range frontends(web) {
		held = append(held, w.hold(at), w.holdBy("udp", at))
		traffic = append(traffic, w.traffic("tcp", at, 50))
	}
	for _, at := range frontends(kernel) {
		held = append(held, w.hold(at), w.holdBy("udp", at))
		traffic = append(traffic, w.traffic("tcp", at, 50))
	}
	for _, at := range frontends(own) {
		streams = append(streams, w.stream("fast", at, 64<<10, 5*time.Millisecond), w.stream("slow", at, 1000, 20*time.Millisecond))
	}
	traffic = append(traffic, w.traffic("udp", frontends(web)[0], 20))
	pages := []func() error{
		w.asking("http://127.0.0.1:10256/livez"), w.asking("http://127.0.0.1:10249/proxyMode"), w.asking("http://127.0.0.1:32100/"),
	}
	keeps := w.ask(w.net.Client, "tcp", frontends(kernel)[0]).Backend
	var talkers []*talker
	for _, at := range append(frontends(calm), frontends(calmKernel)...) {
		talkers = append(talkers, w.talk(at))
	}
	origins := func() (all []string) {
		for _, k := range talkers {
			var a lab.Answer
			w.eventually(10*time.Second, "an answer by UDP", func() (err error) {
				a, err = k.ask(time.Second)
				return err
			})
			all = append(all, fmt.Sprint(k.target, " by ", a.Backend, ", seen as ", a.Peer))
		}
		return all
	}
	for _, w.binary = range binaries[1:] {
		for _, at := range frontends(own) {
			streams = append(streams, w.halfClosed(at))
		}
		before, offloaded, sessions := w.service("web", "line"), w.service("kernel", "line"), origins()
		w.takeOver()
		after := w.service("web", "line")
		for _, c := range [][2]plan.Connections{{before.Connections, after.Connections}, {offloaded.Connections, w.service("kernel", "line").Connections}} {
			if was, is := c[0], c[1]; is.Total < was.Total || is.BytesIn < was.BytesIn || is.Active == 0 {
				w.Errorf("counted were %+v before a takeover, %+v after", was, is)
			}
		}
		events, err := w.client.Timeline(w.ctx, "", 2000)
		w.must(err)
		added := 0
		for _, e := range events {
			if e.Service == "default/web:line" && strings.HasPrefix(e.Message, "added") {
				added++
			}
		}
		if added != 1 {
			w.Errorf("after a takeover there are %d events that a service was added, want the one of the start", added)
		}
		if s := w.service("kernel", "line"); !onlyUserspace && s.DataPlane != w.plane {
			w.Errorf("after a takeover the kernel's service is in %s: %s", s.DataPlane, s.Reason)
		}
		if got := w.ask(w.net.Client, "tcp", frontends(kernel)[0]).Backend; got != keeps {
			w.Errorf("after a takeover a client of a service with affinity gets %s, and had %s", got, keeps)
		}
		if again := origins(); !slices.Equal(again, sessions) {
			w.Errorf("after a takeover UDP sessions are %q, and were %q", again, sessions)
		}
		w.eventually(20*time.Second, "rules as after a fresh start", func() error {
			if diff := difference(rules[w.binary], w.everything()); diff != "" {
				return errors.New(diff)
			}
			return nil
		})
		for _, e := range after.Endpoints {
			if e.Health != before.Endpoints[0].Health {
				w.Errorf("after a takeover an endpoint is %s, before they were %s", e.Health, before.Endpoints[0].Health)
			}
		}
	}
	for _, tr := range traffic {
		w.noneFailed("during takeovers", tr.Stop())
	}
	for _, stop := range pages {
		if err := stop(); err != nil {
			w.Errorf("during takeovers: %v", err)
		}
	}
	w.unbroken("during takeovers", held...)
	w.whole(streams...)
	for _, h := range held {
		w.must(h.Close())
	}
	w.stop()
	if left, err := filepath.Glob(filepath.Join(w.dir, "kproxy.sock*")); err != nil || len(left) > 0 {
		w.Errorf("after the end %v are left (%v)", left, err)
	}
}

// TestTakeoverThatFails: a successor ends, is silent or talks nonsense at every step. The kproxy that runs says so, and goes on.
func TestTakeoverThatFails(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	own := w.serveOn(w.net.Backends[0], "own", 12, echoHash)
	w.must(m.Write(w.manifests))
	w.must(own.Write(w.manifests))
	w.start("--mode", "userspace")
	at := frontends(m)[0]
	held := []*lab.Held{w.hold(at), w.holdBy("udp", at)}
	streams := []*stream{w.stream("fast", frontends(own)[0], 64<<10, 5*time.Millisecond)}
	tr := w.traffic("tcp", at, 20)

	hello := &handover.Hello{Version: handover.Version, Network: inode(w, w.net.Node.Path())}
	patience := within(20 * time.Second)
	ask := func(s handover.Step) handover.Message { return &handover.Ask{Step: s} }
	steps := []struct {
		send, answer handover.Message
	}{
		{hello, &handover.Welcome{}}, {ask(handover.Pause), &handover.Paused{}}, {ask(handover.Give), &handover.Given{}},
	}
	faults := map[string]func(net.Conn, *handover.Conn){
		"ends":                   func(c net.Conn, _ *handover.Conn) { c.Close() },
		"sends half a message":   func(c net.Conn, _ *handover.Conn) { _, _ = c.Write([]byte{0, 0, 0, 9, 0, 0}); c.Close() },
		"sends nonsense":         func(c net.Conn, _ *handover.Conn) { _, _ = c.Write(bytes.Repeat([]byte("nonsense"), 100)); c.Close() },
		"asks for no known step": func(_ net.Conn, h *handover.Conn) { _ = h.Send(patience, ask(99)) },
		"is silent":              func(net.Conn, *handover.Conn) {}, // where it may be for seconds only
	}
	for n := 0; n <= len(steps); n++ {
		for name, fault := range faults {
			if name == "is silent" && n < len(steps) || name == "asks for no known step" && n == 0 {
				continue
			}
			what := fmt.Sprintf("a successor that %s after %d steps", name, n)
			var c *net.UnixConn
			w.must(w.net.Node.Do(func() (err error) {
				c, err = web.AskToTakeOver(w.ctx, w.socket())
				return err
			}))
			conn := handover.NewConn(c)
			for _, s := range steps[:n] {
				w.must(conn.Send(patience, s.send))
				files, err := conn.Receive(patience, s.answer)
				if err != nil || refusal(s.answer) != "" {
					t.Fatalf("%s: %v %s", what, err, refusal(s.answer))
				}
				handover.CloseFiles(files)
			}
			if n == 2 { // it has read the pins
				_, pinned := w.client.Pin(w.ctx, web.PinRequest{Namespace: "default", Name: "web", Port: "line", Preference: service.PreferUserspace})
				for _, err := range []error{pinned, w.client.Drain(w.ctx, true)} {
					if err == nil || !strings.Contains(err.Error(), "another kproxy is taking over") {
						t.Errorf("what the successor would miss is answered %v", err)
					}
				}
			}
			said := strings.Count(w.proxy.Log(), "this one goes on")
			fault(c, conn)
			w.eventually(20*time.Second, "kproxy to notice "+what, func() error {
				if strings.Count(w.proxy.Log(), "this one goes on") == said {
					return errors.New("it says nothing")
				}
				return nil
			})
			// A successor that confirms too late is told so.
			if err := conn.Send(patience, ask(handover.Confirm)); err == nil {
				t.Errorf("%s could confirm", what)
			}
			c.Close()
			w.ask(w.net.Client, "tcp", at)
		}
	}
	for name, h := range map[string]*handover.Hello{
		"version":           {Version: handover.Version + 1, Network: hello.Network},
		"network namespace": {Version: handover.Version, Network: hello.Network + 1},
	} {
		c, err := web.AskToTakeOver(w.ctx, w.socket())
		w.must(err)
		var answer handover.Welcome
		conn := handover.NewConn(c)
		w.must(conn.Send(patience, h))
		if _, err := conn.Receive(patience, &answer); err != nil || !strings.Contains(answer.Refused, name) {
			t.Errorf("another %s is answered %q (%v)", name, answer.Refused, err)
		}
		conn.Close()
	}
	if !w.proxy.Running() {
		t.Error("kproxy has ended")
	}
	w.pin("web", "line", service.PreferUserspace) // which isn't refused any more
	w.takeOver()                                  // nothing of all that keeps a good one away
	w.noneFailed("during takeovers that failed", tr.Stop())
	w.unbroken("during takeovers that failed", held...)
	w.whole(streams...)
}

// TestStopDuringTakeover: a kproxy that is told to stop, and has no connection to wait for, hands its sessions to the one that is
// taking over; where that fails it ends.
func TestStopDuringTakeover(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start("--mode", "userspace", "--drain-timeout", within(2*time.Minute).String())
	w.holdBy("udp", frontends(m)[0])
	var c *net.UnixConn
	w.must(w.net.Node.Do(func() (err error) {
		c, err = web.AskToTakeOver(w.ctx, w.socket())
		return err
	}))
	conn := handover.NewConn(c)
	defer conn.Close()
	patience := within(20 * time.Second)
	next := func(send, answer handover.Message) {
		t.Helper()
		w.must(conn.Send(patience, send))
		files, err := conn.Receive(patience, answer)
		handover.CloseFiles(files)
		if err != nil || refusal(answer) != "" {
			t.Fatalf("to %T it answers %v %s", send, err, refusal(answer))
		}
	}
	next(&handover.Hello{Version: handover.Version, Network: inode(w, w.net.Node.Path())}, &handover.Welcome{})
	w.must(w.proxy.Signal(syscall.SIGTERM))
	w.eventually(10*time.Second, "kproxy to stop", func() error {
		st, err := w.client.Status(w.ctx)
		if err == nil && st.NotReady != "kproxy is being stopped" {
			err = fmt.Errorf("not ready: %q", st.NotReady)
		}
		return err
	})
	sleep(time.Second) // in which it would end
	next(&handover.Ask{Step: handover.Pause}, &handover.Paused{})
	given := &handover.Given{}
	next(&handover.Ask{Step: handover.Give}, given)
	if n := len(given.Userspace.Sessions); n != 1 {
		t.Errorf("it gives %d sessions, want 1", n)
	}
	conn.Close()
	w.must(w.proxy.Wait(w.ctx))
}

// refusal returns why an answer refuses; empty if it doesn't.
func refusal(answer handover.Message) string {
	return reflect.ValueOf(answer).Elem().FieldByName("Refused").String()
}

// inode is the inode number of a file.
func inode(w *world, path string) uint64 {
	w.Helper()
	info, err := os.Stat(path)
	w.must(err)
	return info.Sys().(*syscall.Stat_t).Ino
}

// TestTakeoverWithTooFewDescriptors: the newcomer says so and ends, and connections go on where they were.
func TestTakeoverWithTooFewDescriptors(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start("--mode", "userspace", "--drain-timeout", "1s")
	var held []*lab.Held
	for range 120 {
		h, err := lab.Hold(w.ctx, lab.HoldConfig{From: w.net.Client, Network: "tcp", Target: frontends(m)[0], Every: time.Second, Timeout: within(5 * time.Second)})
		w.must(err)
		defer h.Close()
		held = append(held, h)
	}
	args := append([]string{"--nofile=300:300", binary}, w.proxy.Args...)
	next := &lab.Process{Namespace: w.net.Node, Path: "prlimit", Args: args}
	w.must(next.Start())
	ctx, cancel := context.WithTimeout(w.ctx, within(30*time.Second))
	defer cancel()
	var exit *exec.ExitError
	if err := next.Wait(ctx); !errors.As(err, &exit) || exit.ExitCode() != 1 || !strings.Contains(next.Log(), "ulimit -n") && !strings.Contains(next.Log(), "too many open files") {
		t.Errorf("it ends with %v:\n%s", err, next.Log())
	}
	sleep(1200 * time.Millisecond)
	w.unbroken("after a newcomer with too few descriptors", held...)
	w.takeOver()
	sleep(1200 * time.Millisecond)
	w.unbroken("after one with enough", held...)
}

// TestTakeoverFromOneThatHangs: the newcomer doesn't wait for long, and takes nothing from one that may go on; when that
// is killed, it serves.
func TestTakeoverFromOneThatHangs(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start("--drain-timeout", within(time.Minute).String())
	w.must(w.proxy.Signal(syscall.SIGSTOP))
	next := w.newcomer()
	w.eventually(time.Minute, "the newcomer to give up", func() error {
		if !strings.Contains(next.Log(), "can't take over") {
			return errors.New("it doesn't say so")
		}
		return nil
	})
	w.must(w.proxy.Signal(syscall.SIGCONT))
	w.ready()
	w.ask(w.net.Client, "tcp", frontends(m)[0])
	if !next.Running() || !w.proxy.Running() {
		t.Errorf("running are the newcomer: %v, the other one: %v; want both, of which the newcomer waits", next.Running(), w.proxy.Running())
	}
	w.must(w.proxy.Kill())
	w.proxy = next
	w.ready()
	w.ask(w.net.Client, "tcp", frontends(m)[0])
}

// TestTakeoverFromOneThatHasOnlyBegun: as after a crash, while the API server is away.
func TestTakeoverFromOneThatHasOnlyBegun(t *testing.T) {
	w := newWorld(t)
	w.cluster = w.newCluster()
	m := newManifest("web", 10, w.net.Backends...)
	w.must(w.cluster.set(m))
	w.cluster.stop()
	w.configure()
	w.must(w.proxy.Start())
	w.eventually(20*time.Second, "kproxy to answer", func() error {
		_, err := w.client.Status(w.ctx)
		return err
	})
	next := w.newcomer()
	w.eventually(20*time.Second, "the newcomer to ask", func() error {
		if !strings.Contains(next.Log(), "the other kproxy") && !strings.Contains(next.Log(), "trying again") {
			return errors.New("it doesn't say so")
		}
		return nil
	})
	w.must(w.cluster.start())
	w.must(w.proxy.Wait(w.ctx))
	w.proxy = next
	w.ready()
	w.ask(w.net.Client, "tcp", frontends(m)[0])
}

// TestTwoNewcomers: one of two takes over, the other one after it, or waits; one is left.
func TestTwoNewcomers(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start("--mode", "userspace", "--drain-timeout", "1s", "--alive-timeout", lasting(20*time.Second).String())
	at := frontends(m)[0]
	held := w.hold(at)
	tr := w.traffic("tcp", at, 20)
	all := []*lab.Process{w.proxy, w.newcomer(), w.newcomer()}
	w.eventually(30*time.Second, "one to be left", func() error {
		n := 0
		for _, p := range all {
			if p.Running() {
				n++
				w.proxy = p
			}
		}
		if n != 1 {
			return fmt.Errorf("%d run", n)
		}
		return nil
	})
	w.ready()
	w.noneFailed("with two newcomers", tr.Stop())
	w.unbroken("with two newcomers", held)
}

// TestTakeoverInAnotherMode: where the rules that lead to userspace are others, the one that runs drains and ends, and
// the newcomer begins with its move between modes.
func TestTakeoverInAnotherMode(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	first, then := "nftables", "userspace" // by iptables' rules
	w.start("--mode", first, "--drain-timeout", within(2*time.Second).String())
	w.plane = plan.NFTables
	w.ask(w.net.Client, "tcp", frontends(m)[0])
	w.await("web", "line", w.plane, plan.StateOffloaded)
	tr := w.traffic("tcp", frontends(m)[0], 20)
	w.takeOver("--mode", then, "--drain-timeout", within(10*time.Second).String())
	if st, err := w.client.Status(w.ctx); err != nil || string(st.Mode) != then {
		t.Errorf("it runs in mode %s (%v)", st.Mode, err)
	}
	w.noneFailed("during a move to another mode", tr.Stop())
}

// TestTakeoverInAPod: the kubelet starts a container again that ends, so the one that was taken over from stays, idle, until it
// is told to end, or its successor ends and leaves the node to it.
func TestTakeoverInAPod(t *testing.T) {
	w := newWorld(t)
	w.env = []string{"KUBERNETES_SERVICE_HOST=192.0.2.1"}
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start("--mode", "userspace", "--drain-timeout", "1m") // it drains until it is taken over from
	for _, end := range []func(last, next *lab.Process){
		func(last, next *lab.Process) {
			began := time.Now()
			w.must(last.Stop(within(5 * time.Second)))
			t.Logf("it ended %s after the signal", time.Since(began).Round(time.Millisecond))
			w.ask(w.net.Client, "tcp", frontends(m)[0])
			w.proxy = next
		},
		func(last, next *lab.Process) {
			held := w.hold(frontends(m)[0])
			w.must(next.Signal(syscall.SIGTERM)) // it drains
			ctx, cancel := context.WithTimeout(w.ctx, within(5*time.Second))
			defer cancel()
			w.must(last.Wait(ctx))
			w.must(last.Start()) // as the kubelet does
			w.proxy = last
			w.must(next.Wait(w.ctx))
			w.ready()
			w.unbroken("after the way back", held)
		},
	} {
		last := w.proxy
		next := w.newcomer()
		w.eventually(20*time.Second, "the newcomer to take over", func() error {
			if !strings.Contains(next.Log(), "took over from the kproxy that ran\" \"connections were at rest for\"=") {
				return errors.New("it hasn't")
			}
			return nil
		})
		w.ready()
		sleep(300 * time.Millisecond)
		if !last.Running() {
			t.Fatalf("the last one has ended:\n%s", last.Log())
		}
		end(last, next)
	}
}
