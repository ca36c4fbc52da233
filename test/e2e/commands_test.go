package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
	"unicode"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace"
)

// TestCommandsThatLook: what a person sees of a running kproxy, in every form.
func TestCommandsThatLook(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.must(newManifest("other", 11, w.net.Backends[0]).Write(w.manifests))
	w.start()
	w.pin("web", "line", service.PreferUserspace)
	inUserspace := w.hold(frontends(m)[0])
	w.pin("web", "line", service.PreferKernel)
	inKernel := w.hold(frontends(m)[1])

	t.Run("status", func(t *testing.T) { w.statusForms(t) })
	t.Run("connections", func(t *testing.T) { w.connectionForms(t, inUserspace, inKernel) })
	t.Run("connections, watched", func(t *testing.T) { w.connectionScreen(t, inUserspace, inKernel) })
	t.Run("connections, limited", func(t *testing.T) { w.connectionLimits(t) })
	t.Run("pin", func(t *testing.T) { w.pinForms(t) })
	t.Run("metrics address", func(t *testing.T) { w.metricsAddress(t, inUserspace, inKernel) })
	t.Run("healthz address", func(t *testing.T) { w.healthzAddress(t) })
	t.Run("hostile names", func(t *testing.T) { w.hostileNames(t) })
}

func (w *world) statusForms(t *testing.T) {
	table := w.kproxy("status")
	table.wants(t, 0, "mode "+string(mode)+", alive", "SERVICE", "DATA PLANE", "default/web:line", "default/other:http", "10.96.0.10:80/tcp +1", "pinned to the kernel")
	if strings.Contains(table.stdout, "10.2.0.2:9000") {
		t.Errorf("the table lists endpoints, which only wide should:\n%s", table.stdout)
	}
	w.kproxy("status", "-o", "wide").wants(t, 0, "default/web:line", "10.2.0.2:9000", "[fd00:2::4]:9000", "in use", "up")
	w.kproxy("status", "--output", "toml").wants(t, 2, "toml", "table, wide, json, yaml, name")

	one := w.kproxy("status", "default/other")
	one.wants(t, 0, "default/other:line")
	if strings.Contains(one.stdout, "default/web") {
		t.Errorf("status of one service shows another:\n%s", one.stdout)
	}
	w.kproxy("status", "default/nosuch").wants(t, 1, "default/nosuch")
	w.kproxy("status", "other").wants(t, 2, "NAMESPACE/NAME")

	var st plan.Status
	if err := json.Unmarshal([]byte(w.ok(w.kproxy("status", "-o", "json"))), &st); err != nil {
		t.Fatal(err)
	}
	if !st.Alive || st.Node != "node" || st.Mode != mode || len(st.Services) != 6 || st.Sync.LastSuccess.IsZero() {
		t.Errorf("as JSON: alive %v, node %q, mode %q, %d services, last success %s", st.Alive, st.Node, st.Mode, len(st.Services), st.Sync.LastSuccess)
	}
	if len(st.Sources) != 1 || !st.Sources[0].Synced || st.Sources[0].Error != "" || len(st.Capabilities) == 0 {
		t.Errorf("as JSON: sources %v, %d capabilities", st.Sources, len(st.Capabilities))
	}
}

func (w *world) connectionForms(t *testing.T, inUserspace, inKernel *lab.Held) {
	table := w.ok(w.kproxy("connections", "default/web:line"))
	for held, plane := range map[*lab.Held]plan.DataPlane{inUserspace: plan.Userspace, inKernel: w.plane} {
		row := regexp.MustCompile(`(?m)^tcp .*` + regexp.QuoteMeta(held.LocalAddr().String()) + ` .*default/web:line .*` + string(plane))
		if !row.MatchString(table) {
			t.Errorf("no row for the connection from %s in %s:\n%s", held.LocalAddr(), plane, table)
		}
	}
	var rows []plan.ConnectionStatus
	if err := json.Unmarshal([]byte(w.ok(w.kproxy("connections", "-o", "json", "default/web"))), &rows); err != nil {
		t.Fatal(err)
	}
	found := map[string]plan.ConnectionStatus{}
	for _, r := range rows {
		found[r.Client.String()] = r
	}
	for _, h := range []*lab.Held{inUserspace, inKernel} {
		r := found[h.LocalAddr().String()]
		if r.Service != "default/web:line" || r.Address.Port() != 80 || r.Endpoint.Port() != lab.LinePort || r.BytesIn == 0 || r.BytesOut == 0 {
			t.Errorf("as JSON, the connection from %s is %+v", h.LocalAddr(), r)
		}
	}
	if out := w.ok(w.kproxy("connections", "default/other")); strings.Contains(out, "default/web") {
		t.Errorf("connections of one service show another's:\n%s", out)
	}
	w.kproxy("connections", "web").wants(t, 2, "NAMESPACE/NAME")
}

func (w *world) pinForms(t *testing.T) {
	w.kproxy("pin", "default/web:line", "userspace").wants(t, 0, "default/web:line", "userspace")
	w.await("web", "line", plan.Userspace, plan.StatePinned)
	w.kproxy("pin", "default/web:line", "kernel").wants(t, 0, "kernel")
	w.await("web", "line", w.plane, plan.StatePinned)
	w.kproxy("pin", "default/web", "userspace").wants(t, 0, "default/web:datagram", "default/web:http")
	w.await("web", "http", plan.Userspace, plan.StatePinned)
	w.kproxy("pin", "default/web", "auto").wants(t, 0, "auto")
	w.await("web", "line", w.plane, plan.StateOffloaded) // it has carried connections
	w.kproxy("pin", "default/web:nosuch", "userspace").wants(t, 1, "nosuch")
	w.kproxy("pin", "default/nosuch", "userspace").wants(t, 1, "default/nosuch")
	w.kproxy("pin", "default/web", "sideways").wants(t, 2, "sideways", "userspace, kernel, auto")
	w.kproxy("pin", "default/web").wants(t, 2)
	w.pin("web", "line", service.PreferKernel) // as the other subtests have it
}

func (w *world) metricsAddress(t *testing.T, inUserspace, inKernel *lab.Held) {
	const at = "http://127.0.0.1:10249"
	code, body := w.get(at + "/api/v1/status")
	var st plan.Status
	if err := json.Unmarshal([]byte(body), &st); err != nil || code != http.StatusOK || !st.Alive || len(st.Services) != 6 {
		t.Errorf("/api/v1/status: %d, %v, alive %v, %d services", code, err, st.Alive, len(st.Services))
	}
	code, body = w.get(at + "/api/v1/connections?service=default/web:line")
	if code != http.StatusOK || !strings.Contains(body, inUserspace.LocalAddr().String()) || !strings.Contains(body, inKernel.LocalAddr().String()) {
		t.Errorf("/api/v1/connections: %d, without the held connections:\n%s", code, body)
	}
	code, body = w.get(at + "/metrics")
	for _, want := range []string{
		`kproxy_alive 1`, `kproxy_services{dataplane="` + string(w.plane) + `"} `, `kproxy_source_errors{source="` + w.manifests + `"} 0`,
		`kproxy_service_connections_active{namespace="default",port="line",protocol="TCP",service="web"} 2`,
		"kubeproxy_sync_proxy_rules_duration_seconds_count", `kubeproxy_sync_proxy_rules_last_timestamp_seconds{ip_family="IPv6"}`, "go_goroutines",
	} {
		if code != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("/metrics: %d, without %s", code, want)
		}
	}
	for path, want := range map[string]string{"/proxyMode": string(mode), "/configz": w.manifests, "/healthz": "ok", "/": "kproxy"} {
		if code, body := w.get(at + path); code != http.StatusOK || !strings.Contains(body, want) {
			t.Errorf("%s: %d, without %q:\n%s", path, code, want, body)
		}
	}
}

func (w *world) healthzAddress(t *testing.T) {
	for _, address := range []string{"127.0.0.1:10256", "10.1.0.1:10256"} {
		for path, want := range map[string]string{"/healthz": `"healthy": true`, "/livez": `"healthy": true`, "/readyz": "ok"} {
			code, body := w.get("http://" + address + path)
			if flat := strings.ReplaceAll(body, `":true`, `": true`); code != http.StatusOK || !strings.Contains(flat, want) {
				t.Errorf("%s%s: %d %s, want 200 with %s", address, path, code, body, want)
			}
		}
	}
}

// hostileNames: control characters in what others name don't reach the terminal, annotations of a quarter of a megabyte don't
// reach the status, and a path to trace from that is no network namespace costs nothing.
func (w *world) hostileNames(t *testing.T) {
	write(t, filepath.Join(w.manifests, "bad\x1b[31m\nname.yaml"), "kind: Service\nmetadata: {name: \"\\e[2J\"}\n")
	big := newManifest("other", 11, w.net.Backends[0])
	for _, name := range []string{"algorithm", "dataplane", "health-check", "health-path", "health-interval", "health-port", "health-timeout", "health-rise", "health-fall", "ipvs-scheduler", "proxy-protocol", "connect-timeout"} {
		big = big.Annotate("kproxy.dev/"+name, strings.Repeat("x", 21000))
	}
	w.must(big.Write(w.manifests))
	w.awaitSourceError(`\x1b[31m`)
	for _, args := range [][]string{{"status"}, {"status", "-o", "wide"}, {"check", "--manifests", w.manifests}, {"pin", "default/\x1b[31mweb", "userspace"}} {
		e := w.kproxy(args[0], args[1:]...)
		text := e.stdout + e.stderr
		if !strings.Contains(text, `\x1b[31m`) || strings.ContainsFunc(text, func(r rune) bool { return unicode.IsControl(r) && r != '\n' && r != '\t' }) {
			t.Errorf("%s: want the name in quotes, and no control characters:\n%q", e.command, text)
		}
	}
	w.eventually(10*time.Second, "problems in a small status", func() error {
		out := w.ok(w.kproxy("status", "-o", "json"))
		if !strings.Contains(out, "kproxy.dev/connect-timeout") || len(out) > 50_000 {
			return fmt.Errorf("it has %d bytes", len(out))
		}
		return nil
	})
	fifo := filepath.Join(w.dir, "fifo")
	w.must(syscall.Mkfifo(fifo, 0o600))
	for range 3 { // two are made at a time
		ctx, cancel := context.WithTimeout(w.ctx, patience(3*time.Second))
		_, err := w.client.Trace(ctx, trace.Request{Address: netip.MustParseAddrPort("10.96.0.10:80"), Protocol: service.TCP, Netns: fifo})
		if cancel(); err == nil || !strings.Contains(err.Error(), fifo) {
			t.Errorf("a trace from a FIFO: %v, want an error that names it", err)
		}
	}
}

// TestCommandsThatNeedNoRoot: check, render and version work for anybody, on
// a host without iptables, and touch nothing.
func TestCommandsThatNeedNoRoot(t *testing.T) {
	t.Parallel()
	dir := publicDir(t)
	l := lab.New(lab.DefaultConfig()) // for its addresses only: it isn't up
	m := newManifest("web", 10, l.Backends...)
	write(t, filepath.Join(dir, "web.yaml"), m.YAML())
	run := func(args ...string) ended {
		cmd := asNobody(t, command(t, args...))
		cmd.Env = []string{"PATH=/nonexistent"}
		return finish(t, nil, cmd)
	}
	run("version").wants(t, 0, "kproxy ", "commit ", "go1.")
	run("check", "--manifests", dir).wants(t, 0, "3 service ports", "no problem")
	run("check").wants(t, 2, "--manifests")
	run("check", "--manifests", filepath.Join(dir, "nosuch")).wants(t, 2, "nosuch")

	first := run("render", "--mode", "iptables", "--manifests", dir, "--node", "node")
	first.wants(t, 0, "KPROXY-SERVICES", "default/web:line", "10.96.0.10", "fd00:96::a", "10.2.0.2:9000", "KPROXY-USER-4")
	if second := run("render", "--mode", "iptables", "--manifests", dir, "--node", "node"); second.stdout != first.stdout {
		t.Errorf("two renderings of the same manifests differ:\n%s\n%s", first.stdout, second.stdout)
	}
	userspace := run("render", "--mode", "userspace", "--manifests", dir, "--node", "node")
	userspace.wants(t, 0, "KPROXY-PORTAL")
	if strings.Contains(userspace.stdout, "--to-destination 10.2.") {
		t.Errorf("mode userspace has rules to endpoints:\n%s", userspace.stdout)
	}
	run("render", "--mode", "sideways", "--manifests", dir).wants(t, 2, "sideways")
	configuration := filepath.Join(dir, "config.conf") // not a manifest, by its name
	write(t, configuration, "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\nmode: nftables\nclusterCIDR: 10.99.0.0/16\n")
	run("render", "--config", configuration, "--manifests", dir, "--node", "node").wants(t, 0, "table ip kproxy", "10.99.0.0/16")
	run("render", "--config", configuration, "--mode", "iptables", "--manifests", dir).wants(t, 0, "KPROXY-SERVICES", "10.99.0.0/16")
	run("render", "--config", configuration).wants(t, 2, "--manifests")
	inPod := asNobody(t, command(t, "render"))
	inPod.Env = []string{"PATH=/nonexistent", "KUBERNETES_SERVICE_HOST=10.96.0.1", "KUBERNETES_SERVICE_PORT=443"}
	finish(t, nil, inPod).wants(t, 1, "/var/run/secrets/kubernetes.io/serviceaccount/token")

	write(t, filepath.Join(dir, "broken.yaml"), "apiVersion: v1\nkind: Service\nmetadata:\n  name: broken\n  namespace: default\nspec:\n  prots: []\n")
	run("check", "--manifests", dir).wants(t, 2, filepath.Join(dir, "broken.yaml")+":7: ", "prots")
}

// write writes a file by rename: half a file is another manifest.
func write(t *testing.T, path, text string) {
	t.Helper()
	part := filepath.Join(filepath.Dir(path), "."+filepath.Base(path)+".part")
	err := os.WriteFile(part, []byte(text), 0o644)
	if err == nil {
		err = os.Rename(part, path)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// ended describes how a command ended.
type ended struct {
	command        string
	stdout, stderr string
	status         int
}

// finish runs a command to its end, but not for ever: `kproxy run` that should
// have failed would run on.
func finish(t *testing.T, ns *lab.Namespace, cmd *exec.Cmd) ended {
	t.Helper()
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	run := cmd.Run
	if ns != nil {
		run = func() error { return ns.Do(cmd.Run) }
	}
	err := run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatalf("%s: %v", cmd, err)
	}
	return ended{strings.Join(cmd.Args, " "), stdout.String(), stderr.String(), cmd.ProcessState.ExitCode()}
}

// command is the binary under test with arguments.
func command(t *testing.T, args ...string) *exec.Cmd {
	ctx, cancel := context.WithTimeout(context.Background(), patience(20*time.Second))
	t.Cleanup(cancel)
	return exec.CommandContext(ctx, binary, args...)
}

// kproxy runs a command of the binary under test on the node, with the control
// socket of the kproxy that runs there.
func (w *world) kproxy(name string, args ...string) ended {
	w.Helper()
	switch name {
	case "status", "connections", "pin", "bugreport":
		args = append([]string{"--socket", w.socket()}, args...)
	}
	return finish(w.T, w.net.Node, command(w.T, append([]string{name}, args...)...))
}

// socket is the control socket that start gives to kproxy.
func (w *world) socket() string { return filepath.Join(w.dir, "kproxy.sock") }

// ok checks that a command succeeded and returns what it printed.
func (w *world) ok(e ended) string {
	w.Helper()
	e.wants(w.T, 0)
	return e.stdout
}

// wants checks the exit status, and that what was printed holds every phrase.
func (e ended) wants(t *testing.T, status int, phrases ...string) {
	t.Helper()
	if e.status != status {
		t.Errorf("%s: exit status %d, want %d\nstdout: %s\nstderr: %s", e.command, e.status, status, e.stdout, e.stderr)
		return
	}
	for _, p := range phrases {
		if !strings.Contains(e.stdout+e.stderr, p) {
			t.Errorf("%s: doesn't say %q\nstdout: %s\nstderr: %s", e.command, p, e.stdout, e.stderr)
		}
	}
}

// nobody is a user without any capability.
const nobody = 65534

// asNobody makes cmd run as an unprivileged user, from a copy of the program
// that such a user can reach.
func asNobody(t *testing.T, cmd *exec.Cmd) *exec.Cmd {
	t.Helper()
	if os.Geteuid() != 0 {
		return cmd // unprivileged already
	}
	cmd.Path = filepath.Join(publicDir(t), "kproxy")
	in, err := os.Open(binary)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	executable(t, cmd.Path, in)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	return cmd
}

// publicDir is a temporary directory that everybody may read and enter, which
// t.TempDir is not.
func publicDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "kproxy-e2e-")
	if err == nil {
		t.Cleanup(func() { os.RemoveAll(dir) })
		err = os.Chmod(dir, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// executable makes an executable file. A process of its own writes it: one that is forked while this process has a file open for
// writing has it, too, and as long as it has, executing the file fails (ETXTBSY).
func executable(t *testing.T, path string, content io.Reader) {
	t.Helper()
	cmd := exec.Command("install", "-m", "755", "/dev/stdin", path)
	cmd.Stdin = content
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("make %s: %v\n%s", path, err, out)
	}
}

// get asks a web server in the node's network namespace.
func (w *world) get(url string) (status int, body string) {
	w.Helper()
	resp, err := w.net.Node.HTTPClient(patience(10 * time.Second)).Get(url)
	w.must(err)
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	w.must(err)
	return resp.StatusCode, string(b)
}

// sortedLines joins lines in order.
func sortedLines(lines []string) string {
	slices.Sort(lines)
	return strings.Join(lines, "\n") + "\n"
}

// TestRenderDiff: what a kproxy has left in the kernel is what render would program, and
// what somebody changes of it is printed.
func TestRenderDiff(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	m.Type = "NodePort"
	m.Ports[0].NodePort, m.Ports[1].NodePort, m.Ports[2].NodePort = 30080, 30080, 30081
	w.must(m.Write(w.manifests))
	diff := func() ended {
		return w.kproxy("render", "--diff", "--mode", string(mode), "--manifests", w.manifests, "--node", "node")
	}
	w.start()
	same := func() error {
		if got := diff(); got.status != 0 || got.stdout != "" {
			return fmt.Errorf("the kernel holds what was programmed, and yet: %+v", got)
		}
		return nil
	}
	w.eventually(5*time.Second, "all rules are written", same)
	w.ok(w.kproxy("pin", "default/web", "kernel"))
	w.eventually(5*time.Second, "a service that has left userspace makes no difference", same)
	w.stop()
	w.must(same())
	damage := []string{"iptables -t nat -F KPROXY-SERVICES", "iptables -t nat -N KPROXY-STRAY", "ipset add KPROXY-ENDPOINT-4 192.0.2.9,tcp:80,192.0.2.9"}
	told := []string{"+ ipv4 nat KPROXY-SERVICES: ", "- ipv4 nat chain KPROXY-STRAY\n", "- set KPROXY-ENDPOINT-4: 192.0.2.9,tcp:80,192.0.2.9\n"}
	if kernelPlane == plan.NFTables {
		damage = []string{"nft flush map ip kproxy services", "nft add chain ip kproxy stray", "nft add element ip kproxy endpoints { 192.0.2.9 . tcp . 80 . 192.0.2.9 }"}
		told = []string{"+ ip services: 10.96.0.10 . tcp . 80", "- ip chain stray\n", "- ip endpoints: 192.0.2.9 . tcp . 80 . 192.0.2.9\n"}
	}
	for _, line := range damage {
		w.inflict(variant, line)
	}
	before := w.everything()
	got := diff()
	got.wants(t, 1, append(told, "something else")...)
	if strings.Contains(got.stdout, "ipv6") || strings.Contains(got.stdout, "ip6") {
		t.Errorf("nothing of IPv6 was changed:\n%s", got.stdout)
	}
	if after := w.everything(); after != before {
		t.Errorf("it changed the node from\n%s\nto\n%s", before, after)
	}
}
