package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
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

// TestReadyMeansReady: as soon as kproxy says that it is ready, or names a sync that
// succeeded, every service is carried, and the rules beneath are written.
func TestReadyMeansReady(t *testing.T) {
	const services = 100
	w := newWorld(t)
	var all []string
	for i := range services {
		m := newManifest(fmt.Sprintf("web-%d", i), 10+i, w.net.Backends...)
		w.must(m.Write(w.manifests))
		all = append(all, frontends(m)[0].String())
	}
	w.configure()
	w.must(w.proxy.Start())
	w.eventually(20*time.Second, "a sync that succeeded", func() error {
		st, err := w.client.Status(w.ctx)
		if err == nil && st.Ready != !st.Sync.LastSuccess.IsZero() {
			t.Errorf("ready %v, but the last success is %s", st.Ready, st.Sync.LastSuccess)
		}
		if err == nil && !st.Ready {
			err = fmt.Errorf("not ready: %s", st.NotReady)
		}
		return err
	})
	for _, address := range []string{all[0], all[services/2], all[services-1]} {
		c, err := w.net.Client.Dial(w.ctx, "tcp", address)
		if err != nil {
			t.Errorf("a connection to %s begun when kproxy said that it was ready: %v", address, err)
			continue
		}
		c.Close()
	}
	if w.plane == plan.IPTables {
		if rules := w.node("iptables-save", "-t", "nat"); strings.Count(rules, ":KPROXY-SVC-") < services {
			t.Errorf("%d chains of services are in the kernel when kproxy said that it was ready, want %d", strings.Count(rules, ":KPROXY-SVC-"), services)
		}
	}
	// A second one finds it ready at once, as the command does, which shows it then.
	var st plan.Status
	w.must(json.Unmarshal([]byte(w.ok(w.kproxy("status", "--wait", "-o", "json"))), &st))
	if !st.Ready {
		t.Errorf("kproxy status --wait showed one that isn't ready: %s", st.NotReady)
	}
	w.stop()
	w.kproxy("status", "--wait", "--timeout", "300ms").wants(t, 1)
}

// TestNothingArrives: while connections that rules send to userspace are dropped on
// their way, kproxy says that it isn't ready, and why; what it refuses is counted.
func TestNothingArrives(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	none := newManifest("none", 11)
	w.must(none.Write(w.manifests))
	w.start("--alive-timeout", "1s") // it compares every ten of these
	w.pin("web", "line", service.PreferUserspace)
	w.ask(w.net.Client, "tcp", frontends(m)[0])
	w.refuses(w.net.Client, "tcp", frontends(none)[0])
	w.metric("kproxy_refused_packets_total", func(v float64) bool { return v > 0 })
	w.metric("kproxy_ready", func(v float64) bool { return v == 1 })

	drop := []string{"INPUT", "!", "-i", "lo", "-p", "tcp", "--dport", "10244", "-j", "DROP"} // not the heartbeat
	w.node("iptables", append([]string{"-I"}, drop...)...)
	w.traffic("tcp", frontends(m)[0], 5)
	w.eventually(90*time.Second, "kproxy to notice", func() error {
		st, err := w.client.Status(w.ctx)
		if err == nil && (st.Ready || !strings.Contains(st.NotReady, "none arrived")) {
			err = fmt.Errorf("ready %v: %s", st.Ready, st.NotReady)
		}
		return err
	})
	w.node("iptables", append([]string{"-D"}, drop...)...)
	w.eventually(90*time.Second, "kproxy to be ready again", func() error {
		st, err := w.client.Status(w.ctx)
		if err == nil && !st.Ready {
			err = errors.New(st.NotReady)
		}
		return err
	})
}

// TestStoppedWhileStarting: whenever SIGTERM comes, kproxy ends in good order,
// also while it is still finding out what the host can do.
func TestStoppedWhileStarting(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	for i := range 20 {
		cmd := command(t, "run", "--mode", string(mode), "--manifests", w.manifests, "--socket", w.socket(),
			"--state-dir", w.dir+"/state"+strconv.Itoa(i), "--hostname-override", "node", "--drain-timeout", "100ms")
		var log bytes.Buffer
		cmd.Stderr = &log
		w.must(w.net.Node.Do(cmd.Start))
		w.eventually(10*time.Second, "the control socket, which is opened first", func() error {
			_, err := os.Stat(w.socket())
			return err
		})
		time.Sleep(time.Duration(i) * within(15*time.Millisecond))
		w.must(cmd.Process.Signal(syscall.SIGTERM))
		if err := cmd.Wait(); err != nil {
			t.Errorf("SIGTERM while kproxy starts: %v, want exit status 0\n%s", err, &log)
		}
	}
	// While it waits for an API, what the last kproxy has left remains for the next one.
	w.must(os.Mkdir(w.dir+"/state", 0o755))
	write(t, w.dir+"/state/flows.cbor", "left")
	waits := &lab.Process{Namespace: w.net.Node, Path: binary, Args: []string{"run", "--mode", string(mode), "--master", "http://127.0.0.1:1", "--socket", w.socket(), "--state-dir", w.dir + "/state", "--hostname-override", "node"}}
	w.must(waits.Start())
	w.eventually(10*time.Second, "it to wait for services", func() error {
		if !strings.Contains(waits.Log(), "waiting for services") {
			return errors.New(waits.Log())
		}
		return nil
	})
	w.must(waits.Stop(within(10 * time.Second)))
	if got, err := os.ReadFile(w.dir + "/state/flows.cbor"); string(got) != "left" {
		t.Errorf("a kproxy that has served nothing leaves %q of flows (%v)", got, err)
	}
}

// TestLeftoversOfKubeProxy: kproxy says at start what a kube-proxy has left on the
// node, leaves it alone, and removes it when asked, while it goes on serving; its
// own rules and others' stay. Where kube-proxy has come back, its own go when it ends.
func TestLeftoversOfKubeProxy(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	const rules = `*nat
:KUBE-KUBELET-CANARY - [0:0]
:KUBE-MARK-MASQ - [0:0]
:KUBE-SERVICES - [0:0]
:KUBE-SVC-AAAAAAAAAAAAAAA2 - [0:0]
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-MARK-MASQ -j MARK --set-xmark 0x4000/0x4000
-A KUBE-SERVICES -d 10.96.0.99/32 -p tcp -m comment --comment "shop/gone cluster IP" -m tcp --dport 80 -j KUBE-SVC-AAAAAAAAAAAAAAA2
COMMIT
`
	w.node("sh", "-c", "iptables-restore --noflush <<'EOF'\n"+rules+"EOF")
	before := w.node("iptables-save", "-t", "nat")
	w.start()
	told := ""
	w.eventually(10*time.Second, "the status to tell of kube-proxy", func() error {
		st, err := w.client.Status(w.ctx)
		for _, c := range st.Capabilities {
			if strings.HasPrefix(c.Name, "kube-proxy's rules") && !c.Supported {
				told = c.Reason
			}
		}
		if err == nil && told == "" {
			err = errors.New("it doesn't")
		}
		return err
	})
	for _, phrase := range []string{"3 chains", "kproxy cleanup --kube-proxy"} {
		if !strings.Contains(told, phrase) || strings.Count(w.proxy.Log(), "kube-proxy has left behind") != 1 {
			t.Errorf("status and log don't say %q: %q", phrase, told)
		}
	}
	if !strings.Contains(w.node("iptables-save", "-t", "nat"), "KUBE-SVC-AAAAAAAAAAAAAAA2") {
		t.Errorf("what kube-proxy left is gone although nobody asked; it was\n%s", before)
	}
	w.pin("web", "line", "kernel")
	tr := w.traffic("tcp", frontends(m)[0], 50)
	w.kproxy("cleanup", "--kube-proxy").wants(t, 0, "removed of kube-proxy:", "3 chains")
	sleep(500 * time.Millisecond)
	w.noneFailed("while it was removed", tr.Stop())
	after := w.node("iptables-save", "-t", "nat")
	if strings.Contains(after, "KUBE-S") || strings.Contains(after, "KUBE-MARK-MASQ") || !strings.Contains(after, ":KUBE-KUBELET-CANARY") || kernelPlane != plan.NFTables && !strings.Contains(after, "-j KPROXY-SERVICES") {
		t.Errorf("afterwards:\n%s", after)
	}
	w.kproxy("cleanup", "--kube-proxy").wants(t, 0, "removed of kube-proxy: nothing")

	// Where it comes back, a kproxy that ends leaves nothing of its own.
	w.eventually(time.Minute, "the status to be told that", func() error {
		st, err := w.client.Status(w.ctx)
		if err == nil && slices.ContainsFunc(st.Capabilities, func(c plan.Capability) bool { return strings.HasPrefix(c.Name, "kube-proxy's rules") }) {
			err = errors.New("it isn't")
		}
		return err
	})
	w.node("sh", "-c", "iptables-restore --noflush <<'EOF'\n"+rules+"EOF")
	w.stop()
	w.kproxy("cleanup", "--dry-run", "--state-dir", t.TempDir()).wants(t, 0, "nothing to remove")
}

// TestAutoTakesWhatThereIs: mode auto offloads to nftables; where a firewall would drop what
// that forwards, to the best of the others that this host has. It says why in its log, status and
// `check --host`, and a service changes from one to the other at a restart, with its connections.
func TestAutoTakesWhatThereIs(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	const drops = "chain FORWARD of nftables table ip filter drops what is forwarded"
	w.node("iptables-nft", "-A", "FORWARD", "-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED", "-j", "ACCEPT")
	var held []*lab.Held
	for _, firewall := range []bool{false, true, false} {
		policy, titles := map[bool]string{false: "ACCEPT", true: "DROP"}[firewall], "with nftables"
		w.plane = plan.NFTables
		if firewall {
			if w.plane, titles = plan.IPTables, "with iptables"; hasIPVS {
				w.plane, titles = plan.IPVS, "with IPVS and iptables"
			}
		}
		w.node("iptables-nft", "-P", "FORWARD", policy)
		checked := w.kproxy("check", "--host")
		checked.wants(t, 0, titles)
		w.start("--mode", "auto", "--drain-timeout", within(2*time.Minute).String())
		w.ask(w.net.Client, "tcp", frontends(m)[0])
		w.await("web", "line", w.plane, plan.StateOffloaded)
		w.ask(w.net.Client, "tcp", frontends(m)[0])
		c, s := w.capability("nftables"), w.service("web", "line")
		if firewall && (c.Supported || !strings.Contains(c.Reason, drops) || !strings.Contains(checked.stdout, drops) || !strings.Contains(w.proxy.Log(), drops)) || !firewall && !c.Supported {
			t.Errorf("policy %s: capability nftables: %+v; check --host:\n%s\nlog:\n%s", policy, c, checked.stdout, w.proxy.Log())
		}
		if s.Kernel != w.plane || firewall != strings.Contains(s.KernelReason, drops) || !firewall && s.KernelReason != "nftables does all that it asks for" {
			t.Errorf("policy %s: beneath lies %s, because %q; want %s", policy, s.Kernel, s.KernelReason, w.plane)
		}
		for _, target := range frontends(m) {
			held = append(held, w.hold(target))
		}
		w.unbroken("with policy "+policy, held...)
		w.stop()
	}
}

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
