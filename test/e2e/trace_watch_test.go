package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/test/flows"
	"kproxy.dev/kproxy/trace"
)

// watching is a kproxy trace --watch.
type watching struct {
	command *exec.Cmd
	out     bytes.Buffer
}

// watch starts one on the node, and returns when it marks packets.
func (w *world) watch(args ...string) (*watching, error) {
	x := &watching{command: w.net.Node.Command(w.ctx, binary, append([]string{"trace", "--watch", "--socket", w.socket(), "-o", "json"}, args...)...)}
	x.command.Stdout = &x.out
	stderr, err := x.command.StderrPipe()
	if err == nil {
		err = x.command.Start()
	}
	if err != nil {
		return nil, err
	}
	said, _ := bufio.NewReader(stderr).ReadString('\n')
	if !strings.HasPrefix(said, "kproxy: watching ") {
		_, err := x.wait()
		return nil, fmt.Errorf("%q: %w", said, err)
	}
	return x, nil
}

func (x *watching) wait() (r trace.Watched, err error) {
	if err = x.command.Wait(); err == nil {
		err = json.Unmarshal(x.out.Bytes(), &r)
	}
	return r, err
}

// watched makes an attempt while its packets are watched: what one really meets must be what
// is predicted.
func (w *flowWorld) watched(a attempt) error {
	if variant == "legacy" { // watching takes nftables
		return a.client.Do(func() error { return w.try(a) })
	}
	req := a.request(w)
	args := []string{"--count", "1", "--timeout", within(20 * time.Second).String(), "--proto", a.network}
	if req.From.IsValid() {
		args = append(args, "--from", req.From.String())
	}
	x, err := w.watch(append(args, a.target.String())...)
	if err != nil {
		return fmt.Errorf("watch: %w", err)
	}
	err = a.client.Do(func() error { return w.try(a) })
	r, waitErr := x.wait()
	if err = errors.Join(err, waitErr); err != nil {
		return err
	}
	if len(r.Packets) != 1 {
		return fmt.Errorf("%d packets were watched, want 1", len(r.Packets))
	}
	p := &r.Packets[0]
	text := p.Text(trace.Look{Width: 120}, nil)
	switch served := a.Want.Verdict == flows.Serve; {
	case p.Verdict != trace.AsPredicted:
		return fmt.Errorf("watched: %s", text)
	case req.From.IsValid() && p.Client.Addr() != req.From:
		return fmt.Errorf("watched %s, want %s", p.Client, req.From)
	case served && p.Fate != trace.Sent && p.Fate != trace.Delivered, !served && p.Fate != trace.Stopped && p.Fate != trace.Lost:
		return fmt.Errorf("it was %s, want %s: %s", p.Fate, a.Want.Verdict, text)
	case served && !slices.ContainsFunc(p.Steps, func(s trace.MetStep) bool { return s.Met && s.Predicted }):
		return fmt.Errorf("it met nothing: %s", text)
	}
	return nil
}

// TestTraceWatch: a packet's steps are those predicted, in every data plane, by TCP and UDP, of
// pods and the node; where a rule has come and gone between packet and prediction, it is the
// difference; of a connection that was there nothing is predicted; and a watch that is killed
// leaves nothing behind.
func TestTraceWatch(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start("--health-check", "off")
	for _, plane := range preferences() {
		w.pin("web", "line", plane)
		w.pin("web", "datagram", plane)
		for i, at := range frontends(m) {
			for j, network := range []string{"tcp", "udp"} {
				if slow > 1 && i != j { // a trace takes seconds there
					continue
				}
				x := w.watching("--count", "4", "--proto", network, at.String())
				for range 2 {
					w.ask(w.net.Client, network, at)
					w.ask(w.net.Node, network, at)
				}
				r := x.seen(t, 4)
				for i := range r.Packets {
					if p := &r.Packets[i]; p.Verdict != trace.AsPredicted || p.State != "new" || (p.In == "") != (i%2 == 1) {
						t.Errorf("%s, %s %s: state %q, in by %q: %s", plane, network, at, p.State, p.In, p.Text(trace.Look{}, nil))
					}
				}
			}
		}
	}
	at := frontends(m)[0]
	w.watchedDiffers(at)
	w.watchedEstablished(at)
	w.watchedByIPVS(at)
	tables := w.node("nft", "list", "tables")
	x := w.watching(at.String())
	if now := w.node("nft", "list", "tables"); now == tables {
		t.Errorf("a watch without a table of its own: %s", now)
	}
	w.must(x.command.Process.Kill())
	_ = x.command.Wait()
	w.eventually(20*time.Second, "the table to be gone", func() error {
		if now := w.node("nft", "list", "tables"); now != tables {
			return fmt.Errorf("%s, want %s", now, tables)
		}
		return nil
	})
	if slow > 1 {
		return // the rest is the same on every kernel
	}
	w.kproxy("trace", "--watch", "--probe", at.String()).wants(t, 2, "--probe")
	w.kproxy("trace", "--count", "1", at.String()).wants(t, 2, "--watch")
	w.kproxy("trace", "--socket", w.socket(), "--watch", "--timeout", "1s", "--from", "10.1.0.77", at.String()).wants(t, 0, "0 packets", "10.1.0.77")
	finish(w.T, w.net.Node, asNobody(t, command(t, "trace", "--watch", at.String()))).wants(t, 3, "root")
}

func (w *world) watching(args ...string) *watching {
	w.Helper()
	x, err := w.watch(append([]string{"--timeout", within(30 * time.Second).String()}, args...)...)
	w.must(err)
	return x
}

// seen waits for the watch to end and returns what it saw, which must be n packets.
func (x *watching) seen(t testing.TB, n int) trace.Watched {
	t.Helper()
	r, err := x.wait()
	if err != nil || len(r.Packets) != n {
		t.Fatalf("%d packets, want %d: %v", len(r.Packets), n, err)
	}
	return r
}

// watchedDiffers: kproxy is stopped while a rule drops the packet, so that it predicts without it.
func (w *world) watchedDiffers(at netip.AddrPort) {
	w.Helper()
	x := w.watching("--count", "1", at.String())
	rule := []string{"PREROUTING", "-d", at.Addr().String(), "-j", "DROP"}
	w.node("iptables", append([]string{"-t", "raw", "-I"}, rule...)...)
	w.must(w.proxy.Signal(syscall.SIGSTOP))
	err := w.askFrom(netip.Addr{}, "tcp", at, lasting(700*time.Millisecond))
	w.node("iptables", append([]string{"-t", "raw", "-D"}, rule...)...)
	w.must(w.proxy.Signal(syscall.SIGCONT))
	if err == nil {
		w.Error("a rule in raw dropped nothing")
	}
	p := x.seen(w, 1).Packets[0]
	if p.Verdict != trace.Differs || p.Fate != trace.Stopped || !strings.Contains(p.Difference, "chain PREROUTING in table raw") {
		w.Errorf("%s, %s: %s", p.Verdict, p.Fate, p.Text(trace.Look{}, nil))
	}
}

// watchedEstablished: a packet in the middle of a connection.
func (w *world) watchedEstablished(at netip.AddrPort) {
	w.Helper()
	c, err := w.net.Client.Dial(w.ctx, "tcp", at.String())
	w.must(err)
	defer c.Close()
	buf := make([]byte, 100)
	var x *watching
	for i := range 2 {
		w.must(c.SetDeadline(time.Now().Add(within(20 * time.Second))))
		_, err = c.Write([]byte("hello\n"))
		w.must(err)
		_, err = c.Read(buf)
		w.must(err)
		if i == 0 {
			x = w.watching("--count", "1", at.String())
		}
	}
	if p := x.seen(w, 1).Packets[0]; p.Verdict != trace.NotPredicted || p.State != "established" || p.Client.Port() != netip.MustParseAddrPort(c.LocalAddr().String()).Port() {
		w.Errorf("%s, state %q: %s", p.Verdict, p.State, p.Text(trace.Look{}, nil))
	}
}

// TestIPTablesWatchLegacy: legacy rules don't tell which packets they meet, but what became of
// the packet is seen, and the counters of its rules grow.
func TestIPTablesWatchLegacy(t *testing.T) {
	w := newWorld(t)
	w.holdsRules("legacy")
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start("--health-check", "off")
	w.pin("web", "line", service.PreferKernel)
	for i, at := range frontends(m) {
		x := w.watching("--count", "1", "--from", w.net.Config.ClientAddresses(0)[i].String(), at.String())
		w.ask(w.net.Client, "tcp", at)
		r := x.seen(t, 1)
		p := &r.Packets[0]
		grows := slices.ContainsFunc(r.Counters, func(c trace.Counter) bool { return strings.Contains(c.Text, p.To.String()) && c.After > c.Before })
		if p.Verdict != trace.AsPredicted || p.Fate != trace.Sent || p.To == at || !grows || len(r.Notes) == 0 {
			t.Errorf("%s%s", p.Text(trace.Look{}, nil), r.Summary(trace.Look{}))
		}
	}
}

// watchedByIPVS: virtual servers don't say which packets they take; their counters are there.
func (w *world) watchedByIPVS(at netip.AddrPort) {
	w.Helper()
	if kernelPlane != plan.IPVS {
		return
	}
	x := w.watching("--count", "1", at.String())
	w.ask(w.net.Client, "tcp", at)
	r := x.seen(w, 1)
	if !slices.ContainsFunc(r.Counters, func(c trace.Counter) bool { return strings.Contains(c.Text, at.String()) && c.After > c.Before }) || len(r.Notes) == 0 {
		w.Errorf("counters %v, notes %q", r.Counters, r.Notes)
	}
}
