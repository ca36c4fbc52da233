package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"
)

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
	w.stop()
	w.must(same())
	w.inflict("nft", "iptables -t nat -F KPROXY-SERVICES")
	w.inflict("nft", "iptables -t nat -N KPROXY-STRAY")
	w.inflict("nft", "ipset add KPROXY-ENDPOINT-4 192.0.2.9,tcp:80,192.0.2.9")
	before := w.everything()
	got := diff()
	got.wants(t, 1, "+ ipv4 nat KPROXY-SERVICES: ", "- ipv4 nat chain KPROXY-STRAY\n", "- set KPROXY-ENDPOINT-4: 192.0.2.9,tcp:80,192.0.2.9\n", "something else")
	if strings.Contains(got.stdout, "ipv6") {
		t.Errorf("nothing of IPv6 was changed:\n%s", got.stdout)
	}
	if after := w.everything(); after != before {
		t.Errorf("it changed the node from\n%s\nto\n%s", before, after)
	}
}
