package kube

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
)

// TestTakeover moves a node from a real kube-proxy to kproxy and back, as
// docs/migration.md says, while requests go on: none fails, and nothing of the
// one that left is left.
func TestTakeover(t *testing.T) {
	w := newWorld(t, plan.ModeIPTables)
	w.create(newService("steady", nil), newSlices("steady", w.net.Backends[:3]...)...)
	// One after the other: kproxy looks for a kube-proxy among all processes.
	for mode, mark := range map[string]string{"iptables": "KUBE-SVC-", "nftables": "endpoint-"} {
		t.Run("from "+mode, func(t *testing.T) { testTakeover(w.of(t), mode, mark) })
	}
}

// testTakeover does it with kube-proxy in a mode, of whose rules for a Service
// mark is a part.
func testTakeover(w *world, mode, mark string) {
	s := w.change("steady", func(*corev1.Service) {})
	w.point("steady", w.net.Backends[:3]...)
	kubeProxy := w.kubeProxy(mode)
	w.must(kubeProxy.Start())
	w.programs("kube-proxy", mark)
	w.everywhere(s, "b1", "b2", "b3")
	traffic := []*lab.Traffic{w.traffic(frontends(s)[0], 40), w.traffic(frontends(s)[1], 40)}

	w.must(kubeProxy.Kill())
	w.run()
	w.eventually("the service in the kernel", func() error { return w.offloaded("steady") })
	w.eventually("the log to say that there are rules of kube-proxy", func() error {
		if !strings.Contains(w.proxy.Log(), "kube-proxy has left behind") {
			return errors.New("it doesn't")
		}
		return nil
	})
	w.Log(strings.TrimSpace(w.node(binary, "cleanup", "--kube-proxy")))
	w.gone("kube-proxy", "KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-SVC-", "KUBE-SEP-", "table ip kube-proxy", "table ip6 kube-proxy")
	w.point("steady", w.net.Backends[1])
	w.everywhere(s, "b2")

	w.eventually("kproxy to see that", func() error {
		st, err := w.status.Status(w.ctx)
		if err == nil && slices.ContainsFunc(st.Capabilities, func(c plan.Capability) bool { return c.Name == "kube-proxy's rules are gone" }) {
			err = errors.New("its status says otherwise")
		}
		return err
	})
	w.must(kubeProxy.Start())
	w.programs("kube-proxy", mark)
	w.must(w.proxy.Stop(patience)) // removes what it has programmed, as kube-proxy serves
	w.gone("kproxy", "KPROXY-", "table ip kproxy", "table ip6 kproxy")
	w.point("steady", w.net.Backends[2])
	w.everywhere(s, "b3")
	for _, tr := range traffic {
		w.noneFailed("from kube-proxy to kproxy and back", tr.Stop())
	}
	w.must(kubeProxy.Kill())
	w.node(binary, "cleanup", "--kube-proxy")
}

// programs waits until a proxy has rules that hold a text.
func (w *world) programs(who, text string) {
	w.Helper()
	w.eventually(who+"'s rules", func() error {
		if w.rule(text) == "" {
			return fmt.Errorf("there are none")
		}
		return nil
	})
}

// gone checks that nothing of a proxy is left.
func (w *world) gone(who string, texts ...string) {
	w.Helper()
	if left := w.rule(texts...); left != "" {
		w.Errorf("of %s is left: %s", who, left)
	}
}

// kubeProxy is the node's, with an administrator's rights.
func (w *world) kubeProxy(mode string) *lab.Process {
	p := &lab.Process{
		Namespace: w.net.Node, Path: filepath.Join(programs, "kube-proxy"), Output: keep("kube-proxy"),
		Args: []string{
			"--kubeconfig", w.File("admin.kubeconfig"), "--proxy-mode", mode, "--hostname-override", "node",
			"--conntrack-max-per-core", "0", "--cluster-cidr", lab.PodCIDR4.String() + "," + lab.PodCIDR6.String(),
		},
	}
	w.Cleanup(func() {
		if p.Running() {
			w.must(p.Kill())
		}
		if w.Failed() {
			w.Logf("kube-proxy's log ends with:\n%s", end(p.Log()))
		}
	})
	return p
}

// rule returns the first line of the node's rules that holds one of the texts.
func (w *world) rule(texts ...string) string {
	w.Helper()
	rules := w.node("nft", "list", "ruleset") + w.node("iptables-save") + w.node("ip6tables-save")
	for line := range strings.Lines(rules) {
		for _, text := range texts {
			if strings.Contains(line, text) {
				return strings.TrimSpace(line)
			}
		}
	}
	return ""
}

// TestDeploy has the API server validate what is in deploy/, as kubectl
// --dry-run=server does, with every overlay.
func TestDeploy(t *testing.T) {
	w := newWorld(t, plan.ModeIPTables)
	folders := []string{"../../deploy"}
	overlays, err := os.ReadDir("../../deploy/overlays")
	w.must(err)
	for _, o := range overlays {
		folders = append(folders, filepath.Join("../../deploy/overlays", o.Name()))
	}
	folders = append(folders, overlay(t, "components/metrics"))
	for _, folder := range folders {
		out, err := w.kubectl(w.ctx, "apply", "--dry-run=server", "--validate=strict", "-k", folder)
		if err != nil {
			t.Errorf("kubectl apply --dry-run=server -k %s: %v\n%s", folder, err, out)
			continue
		}
		t.Logf("%s:\n%s", folder, out)
	}
	w.showsMonitoring()
}

// showsMonitoring: what the Prometheus operator is given comes out of kustomize
// whole. The API server here doesn't know its kinds.
func (w *world) showsMonitoring() {
	w.Helper()
	out, err := w.kubectl(w.ctx, "kustomize", overlay(w.T, "monitoring"))
	w.must(err)
	for _, want := range []string{"kind: PodMonitor", "kind: PrometheusRule", "name: kproxy-dashboard", "--metrics-bind-address=$(POD_IP)"} {
		if !strings.Contains(string(out), want) {
			w.Errorf("there is no %q in\n%s", want, out)
		}
	}
}

// overlay is a folder with deploy/base and one of the components in deploy/.
func overlay(t *testing.T, component string) string {
	t.Helper()
	dir := t.TempDir()
	deploy, err := filepath.Abs("../../deploy")
	if err != nil {
		t.Fatal(err)
	}
	to, err := filepath.Rel(dir, deploy)
	if err != nil {
		t.Fatal(err)
	}
	text := "resources: [" + to + "/base]\ncomponents: [" + to + "/" + component + "]\n"
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return dir
}

// TestAPIServerAway: kproxy is restarted while there is no API server, and the
// API server is gone while kproxy runs. What was served before is served on, the
// status says what is wrong, and what has changed meanwhile holds when the API
// server is back.
func TestAPIServerAway(t *testing.T) {
	w := newWorld(t, plan.ModeIPTables)
	b := w.net.Backends
	s := w.create(newService("steady", nil), newSlices("steady", b[:3]...)...)
	other := w.create(newService("other", nil), newSlices("other", b[0])...)
	w.run()
	w.everywhere(s, "b1", "b2", "b3")
	w.everywhere(other, "b1")
	w.eventually("the service in the kernel", func() error { return w.offloaded("steady") })
	traffic := w.traffic(frontends(s)[0], 50)

	w.must(w.proxy.Stop(patience))
	w.must(w.API.Kill())
	w.start()
	w.eventually("the status to say that there is no API", func() error { return w.source(false, "refused") })
	time.Sleep(2 * time.Second) // it keeps trying, and does no harm
	if !w.proxy.Running() {
		t.Fatal("kproxy has ended, want it to keep trying")
	}
	w.everywhere(other, "b1")
	w.noneFailed("without an API server from the start on", traffic.Results())

	w.must(w.API.Start())
	w.must(w.Await(w.ctx))
	w.eventually("the source to be in order", func() error { return w.source(true, "") })
	w.point("other", b[1])
	w.everywhere(other, "b2")
	w.awaitSettled()

	before, err := w.status.Status(w.ctx)
	w.must(err)
	log := w.proxy.Log()
	w.must(w.API.Kill())
	w.eventually("the status to say that the API is gone", func() error { return w.source(true, "refused") })
	w.everywhere(other, "b2")
	w.must(w.API.Start())
	w.must(w.Await(w.ctx))
	w.eventually("the source to be in order again", func() error { return w.source(true, "") })
	after, err := w.status.Status(w.ctx)
	w.must(err)
	if diff := cmp.Diff(shown(before), shown(after)); diff != "" {
		t.Errorf("the status before (-) and after (+) the API server was away:\n%s", diff)
	}
	changes := "kind=dataplane"
	if was, is := strings.Count(log, changes), strings.Count(w.proxy.Log(), changes); was != is {
		t.Errorf("%d changes of data planes while the API server was away and came back, want none", is-was)
	}
	w.point("other", b[2])
	w.everywhere(other, "b3")
	w.noneFailed("all the time", traffic.Stop())
}

// source returns nil if the API was read or not, as synced says, and its error
// holds a text; empty means no error.
func (w *world) source(synced bool, text string) error {
	st, err := w.status.Status(w.ctx)
	if err != nil {
		return err
	}
	if len(st.Sources) == 0 {
		return errors.New("no source")
	}
	for _, s := range st.Sources {
		if s.Synced != synced || !strings.Contains(s.Error, text) || text == "" && s.Error != "" {
			return fmt.Errorf("synced %t, error %q", s.Synced, s.Error)
		}
	}
	return nil
}
