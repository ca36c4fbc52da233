package e2e

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// TestNFTablesNeedsNoProgram: where there is neither iptables nor ipset nor nft, kproxy serves
// in userspace and in the kernel, and cleans up.
func TestNFTablesNeedsNoProgram(t *testing.T) {
	w := newWorld(t)
	w.env = []string{"PATH=/nonexistent"}
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start()
	for _, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel} {
		w.pin("web", "line", plane)
		for _, target := range frontends(m) {
			w.ask(w.net.Client, "tcp", target)
		}
	}
	w.stop()
	for _, args := range [][]string{{"cleanup", "--dry-run"}, {"cleanup"}} {
		cmd := command(t, append(args, "--state-dir", w.dir)...)
		cmd.Env = w.env
		finish(t, w.net.Node, cmd).wants(t, 0)
	}
	if left := w.tables() + w.routes(); strings.Contains(left, "kproxy") || strings.Contains(left, "lookup 10249") {
		t.Errorf("cleanup left:\n%s", left)
	}
}

// TestNFTablesModeChanges: kproxy takes over what another mode left, in every direction.
// Connections live on, none is refused, and nothing of the other mode is left. Only what a
// process served in userspace ends with it.
func TestNFTablesModeChanges(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	var held []*lab.Held
	var traffic []*lab.Traffic
	noneFailed := func() {
		for _, tr := range traffic {
			w.noneFailed("until mode "+string(w.plane), tr.Stop())
		}
		traffic = nil
	}
	for i, plane := range []plan.DataPlane{plan.Userspace, plan.IPTables, plan.NFTables, plan.Userspace, plan.NFTables, plan.IPTables} {
		if i > 0 && w.plane == plan.Userspace {
			noneFailed()
		}
		if i > 0 {
			w.stop()
		}
		w.plane = plane
		w.start("--mode", string(plane), "--drain-timeout", within(2*time.Minute).String())
		if traffic == nil {
			traffic = []*lab.Traffic{w.traffic("tcp", frontends(m)[0], 30), w.traffic("tcp", frontends(m)[1], 30)}
		}
		if plane != plan.Userspace {
			w.await("web", "line", plane, plan.StateOffloaded)
			w.eventually(10*time.Second, "the other mode's rules to be gone", func() error {
				if rules, tables := w.rules()+w.sets(), w.tables(); strings.Contains(rules, "KPROXY-") == (plane == plan.NFTables) || strings.Contains(tables, "kproxy") == (plane == plan.IPTables) {
					return fmt.Errorf("there are\n%s%s", rules, tables)
				}
				return nil
			})
			for _, target := range frontends(m) {
				held = append(held, w.hold(target))
			}
		}
		sleep(time.Second)
		w.unbroken("in mode "+string(plane), held...)
	}
	noneFailed()
}

// TestNFTablesHugeForeignTransactions: while other programs keep nftables' lock for long,
// no connection fails, and a change of endpoints takes effect.
func TestNFTablesHugeForeignTransactions(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start()
	w.pin("web", "line", service.PreferKernel)
	w.pin("web", "http", service.PreferUserspace)
	traffic := []*lab.Traffic{w.traffic("tcp", frontends(m)[0], 30), w.traffic("tcp", frontends(m)[1], 30)}
	const others = `i=0; while [ $i -lt 4 ]; do i=$((i+1))
{ echo 'add table ip others'; echo 'flush table ip others'; echo 'delete table ip others'; echo 'table ip others { chain c {'; seq -f 'tcp dport %g accept' 1 60000; printf '}\n}\n'; } | nft -f -; done`
	done := make(chan error, 1)
	go func() { done <- w.net.Node.Command(w.ctx, "sh", "-c", others).Run() }()
	for _, less := range []lab.Manifest{m.Without("b3"), m, m.Without("b2"), m} {
		sleep(700 * time.Millisecond)
		w.must(less.Write(w.manifests))
	}
	w.must(<-done)
	w.await("web", "line", w.plane, plan.StatePinned)
	w.awaitBackends(m, "b1", "b2", "b3")
	for _, tr := range traffic {
		w.noneFailed("beside huge transactions", tr.Stop())
	}
}

// TestNFTablesChangesLeaveNoConnectionBehind: while a service that is offloaded changes endpoints, twenty times under load, every
// connection that begins is carried by the kernel, and none fails.
func TestNFTablesChangesLeaveNoConnectionBehind(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start()
	w.pin("web", "line", service.PreferKernel)
	var loads []*lab.Traffic
	for range 4 {
		loads = append(loads, w.traffic("tcp", frontends(m)[0], 60))
	}
	sleep(200 * time.Millisecond)
	steered := func() string { return w.node("nft", "list", "counter", "ip", "kproxy", "steered") }
	before := steered()
	for i := range 20 {
		to := m
		if i%2 == 0 {
			to = m.Without(w.net.Backends[0].Name)
		}
		w.must(to.Write(w.manifests))
		w.eventually(10*time.Second, "the change", func() error {
			if n := len(w.service("web", "line").Endpoints); n != 2*(len(w.net.Backends)-(i+1)%2) { // of both families
				return fmt.Errorf("%d endpoints", n)
			}
			return nil
		})
		sleep(50 * time.Millisecond)
	}
	after := steered()
	for _, l := range loads {
		w.noneFailed("across all changes", l.Stop())
	}
	if after != before {
		t.Errorf("connections went to userspace: before\n%s\nafter\n%s", before, after)
	}
	if s := w.service("web", "line"); s.DataPlane != plan.NFTables || s.Recalls > 0 {
		t.Errorf("it is in %s, and was recalled %d times", s.DataPlane, s.Recalls)
	}
}
