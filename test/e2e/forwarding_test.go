package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
)

// settings that decide whether the node forwards.
const (
	forward4 = "net.ipv4.ip_forward"
	forward6 = "net.ipv6.conf.all.forwarding"
)

func (w *world) sysctl(name, value string) {
	w.Helper()
	w.node("sysctl", "-qw", name+"="+value)
}

// everywhere makes an exchange with every address of m, from another host and
// from the node.
func (w *world) everywhere(m lab.Manifest) {
	w.Helper()
	for _, target := range frontends(m) {
		for _, network := range []string{"tcp", "udp"} {
			w.ask(w.net.Client, network, target)
			w.ask(w.net.Node, network, target)
		}
	}
}

// keptBack waits until default/web is in userspace because of a setting.
func (w *world) keptBack(setting string) {
	w.Helper()
	for _, port := range []string{"line", "datagram"} {
		w.eventually(10*time.Second, "web:"+port+" to be in userspace because of "+setting, func() error {
			s := w.service("web", port)
			if s.DataPlane != plan.Userspace || s.State != plan.StateUserspace || !strings.Contains(s.Reason, "forwarding is off on this node (sysctl "+setting+")") {
				return fmt.Errorf("%s, %s: %s", s.DataPlane, s.State, s.Reason)
			}
			if !strings.Contains(s.Degraded, "only clients on this node are served while kproxy is down") {
				return fmt.Errorf("degraded %q", s.Degraded)
			}
			return nil
		})
	}
}

// TestNodeThatDoesNotForward: a node doesn't forward IPv6 unless it is told to.
// A dual-stack service then stays in userspace, where it works, and says why;
// it is offloaded as soon as the node forwards, and recalled when that ends.
func TestNodeThatDoesNotForward(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.sysctl(forward6, "0")
	w.start()
	w.everywhere(m)
	sleep(2 * time.Second) // longer than it has to be steady
	w.keptBack(forward6)
	w.everywhere(m)

	w.sysctl(forward6, "1")
	for _, port := range []string{"line", "datagram"} {
		w.await("web", port, w.plane, plan.StateOffloaded)
	}
	w.everywhere(m)

	for _, setting := range []string{forward6, forward4} {
		w.sysctl(setting, "0")
		w.keptBack(setting)
		w.everywhere(m)
		w.sysctl(setting, "1")
		for _, port := range []string{"line", "datagram"} {
			w.await("web", port, w.plane, plan.StateOffloaded)
		}
	}
}
