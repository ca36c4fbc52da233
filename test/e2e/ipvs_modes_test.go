package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
)

// TestIPVSModeChanges: kproxy takes over what another mode left, whichever that
// is. No new connection fails on the way, those that each mode made live on, and
// the rules of a mode that isn't in use any more go.
func TestIPVSModeChanges(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	var held []*lab.Held
	start := func(mode plan.Mode, plane plan.DataPlane) {
		w.plane = plane
		w.start("--mode", string(mode), "--drain-timeout", within(2*time.Minute).String())
		w.await("web", "line", plane, plan.StateOffloaded)
		for _, target := range frontends(m) {
			held = append(held, w.hold(target))
		}
		sleep(time.Second)
		w.unbroken("in mode "+string(mode), held...)
	}
	begin := func() {
		for _, target := range frontends(m) {
			w.ask(w.net.Client, "tcp", target)
		}
	}
	w.plane = plan.IPVS
	w.start("--mode", "ipvs")
	begin()
	w.await("web", "line", plan.IPVS, plan.StateOffloaded)
	tr := w.traffic("tcp", frontends(m)[0], 20)
	for _, next := range []struct {
		mode  plan.Mode
		plane plan.DataPlane
	}{{plan.ModeIPTables, plan.IPTables}, {plan.ModeIPVS, plan.IPVS}, {plan.ModeAuto, plan.IPVS}, {plan.ModeIPTables, plan.IPTables}} {
		w.stop()
		start(next.mode, next.plane)
	}
	w.noneFailed("across changes of mode", tr.Stop())
	for _, h := range held {
		h.Close()
	}
	w.printsNothing("virtual servers", 3*time.Minute, "ipvsadm", "-Sn")
	w.printsNothing("addresses of the dummy link", time.Minute, "ip", "-o", "addr", "show", "dev", "kproxy0")
	w.stop()
	w.start("--mode", "userspace")
	begin()
	w.printsNothing("rules beneath", time.Minute, "sh", "-c", "iptables-save | grep KPROXY-DISPATCH")
}

// printsNothing waits until a command on the node prints nothing.
func (w *world) printsNothing(what string, limit time.Duration, command ...string) {
	w.Helper()
	w.eventually(limit, what+" to be gone", func() error {
		out, _ := w.net.Node.Command(w.ctx, command[0], command[1:]...).Output() // fails where the link is gone
		if text := strings.TrimSpace(string(out)); text != "" {
			return fmt.Errorf("there is\n%s", text)
		}
		return nil
	})
}
