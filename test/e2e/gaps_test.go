package e2e

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// sender sends datagrams from one port all the time, like a resolver or a
// statistics client: to the kernel, that is one flow as long as it lasts.
func (w *world) sender(target netip.AddrPort) (answered func() error) {
	w.Helper()
	c, err := w.net.Client.Dial(w.ctx, "udp", target.String())
	w.must(err)
	ctx, cancel := context.WithCancel(w.ctx)
	w.Cleanup(func() { cancel(); c.Close() })
	go func() {
		for ctx.Err() == nil {
			_, _ = c.Write([]byte("hello"))
			sleep(50 * time.Millisecond)
		}
	}()
	return func() error {
		if err := c.SetReadDeadline(time.Now().Add(100 * time.Millisecond)); err != nil {
			return err
		}
		_, err := c.Read(make([]byte, 100))
		return err
	}
}

// connecting begins to connect and says when that has come to an end.
func (w *world) connecting(target netip.AddrPort) (connected func() error) {
	done := make(chan error, 1)
	go func() {
		c, err := w.net.Client.Dial(w.ctx, "tcp", target.String())
		if err == nil {
			c.Close()
		}
		done <- err
	}()
	return func() error {
		select {
		case err := <-done:
			done <- err
			return err
		default:
			return errors.New("it goes on")
		}
	}
}

// TestFlowsThatBeganWithoutRules: a UDP client that was sending before kproxy
// started, or while somebody had flushed its rules, gets answers once they are
// there, although its flow never ends. A TCP client that was connecting is connected.
func TestFlowsThatBeganWithoutRules(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	// Without any rule of conntrack's, nothing would be tracked before the start.
	w.node("iptables", "-t", "nat", "-A", "PREROUTING", "-m", "comment", "--comment", "foreign")
	early, connecting := w.sender(frontends(m)[0]), w.connecting(frontends(m)[0])
	sleep(300 * time.Millisecond)
	w.start()
	w.eventually(10*time.Second, "an answer to who sent before the start", early)
	w.eventually(10*time.Second, "a connection of who tried before the start", connecting)
	w.pin("web", "datagram", service.PreferKernel)

	w.node("iptables", "-t", "nat", "-F")
	meanwhile, trying := w.sender(frontends(m)[0]), w.connecting(frontends(m)[0])
	w.eventually(10*time.Second, "an answer to who began after the flush", meanwhile)
	w.eventually(10*time.Second, "a connection of who tried after the flush", trying)
}

// TestManifestsThatAreLate: a path that isn't there at start, on a disk that is
// mounted late, is refused and doesn't look like one whose services were deleted:
// the kernel serves on.
func TestManifestsThatAreLate(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start()
	w.ask(w.net.Client, "tcp", frontends(m)[0])
	w.await("web", "line", w.plane, plan.StateOffloaded)
	w.stop()
	away := filepath.Join(w.dir, "away")
	w.must(os.Rename(w.manifests, away))
	w.must(w.proxy.Start())
	var exit *exec.ExitError
	if err := w.proxy.Wait(w.ctx); !errors.As(err, &exit) || exit.ExitCode() != 2 || !strings.Contains(w.proxy.Log(), "--manifests: stat "+w.manifests) {
		t.Errorf("kproxy ends with %v", err)
	}
	for _, target := range frontends(m) {
		w.ask(w.net.Client, "tcp", target)
	}
	w.must(os.Rename(away, w.manifests))
	w.startAgain()
	w.await("web", "line", w.plane, plan.StateOffloaded)
}
