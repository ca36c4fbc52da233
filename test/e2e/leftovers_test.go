package e2e

import (
	"errors"
	"strings"
	"testing"
	"time"
)

// TestLeftoversOfKubeProxy: kproxy says at start what a kube-proxy has left on the
// node, leaves it alone, and removes it when asked, while it goes on serving; its
// own rules and others' stay.
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
	if strings.Contains(after, "KUBE-S") || strings.Contains(after, "KUBE-MARK-MASQ") || !strings.Contains(after, ":KUBE-KUBELET-CANARY") || !strings.Contains(after, "-j KPROXY-SERVICES") {
		t.Errorf("afterwards:\n%s", after)
	}
	w.kproxy("cleanup", "--kube-proxy").wants(t, 0, "removed of kube-proxy: nothing")
}
