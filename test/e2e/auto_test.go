package e2e

import (
	"strings"
	"testing"

	"kproxy.dev/kproxy/plan"
)

// TestAutoTakesWhatThereIs: mode auto offloads to the best data plane that this
// host has, and says why it isn't a better one.
func TestAutoTakesWhatThereIs(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.plane = plan.IPTables
	if hasIPVS {
		w.plane = plan.IPVS
	}
	w.start("--mode", "auto")
	w.ask(w.net.Client, "tcp", frontends(m)[0])
	w.await("web", "line", w.plane, plan.StateOffloaded)
	w.ask(w.net.Client, "tcp", frontends(m)[0])
	c, s := w.capability("ipvs"), w.service("web", "line")
	if c.Supported != hasIPVS || c.Reason == "" {
		t.Errorf("capability ipvs: %+v, want supported %v and a reason", c, hasIPVS)
	}
	if s.Kernel != w.plane || !hasIPVS && !strings.Contains(s.KernelReason, c.Reason) {
		t.Errorf("beneath lies %s, because %q; want %s, and without IPVS because %q", s.Kernel, s.KernelReason, w.plane, c.Reason)
	}
	w.stop()
}
