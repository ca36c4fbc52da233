package kube

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

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
	if !strings.Contains(w.proxy.Log(), "kube-proxy has left behind") {
		w.Error("kproxy's log doesn't say that there are rules of kube-proxy")
	}
	w.Log(strings.TrimSpace(w.node(binary, "cleanup", "--kube-proxy")))
	w.gone("kube-proxy", "KUBE-SERVICES", "KUBE-NODEPORTS", "KUBE-SVC-", "KUBE-SEP-", "table ip kube-proxy", "table ip6 kube-proxy")
	w.point("steady", w.net.Backends[1])
	w.everywhere(s, "b2")

	w.must(w.proxy.Stop(patience))
	w.must(kubeProxy.Start())
	w.programs("kube-proxy", mark)
	w.node(binary, "cleanup", "--state-dir", w.file("state"))
	w.gone("kproxy", "KPROXY-")
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
			"--kubeconfig", w.file("admin.kubeconfig"), "--proxy-mode", mode, "--hostname-override", "node",
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
