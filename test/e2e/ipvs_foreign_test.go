package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// TestIPVSForeignStays: virtual servers, real servers and sets that others made
// stay as they are, whatever kproxy does beside them; where one is at an address
// of a service, the service stays in userspace and says so, until it is gone.
func TestIPVSForeignStays(t *testing.T) {
	w := newWorld(t)
	for _, line := range append([]string{"ipset create others hash:ip", "ipset add others 203.0.113.7"}, foreignIPVS...) {
		w.inflict("nft", line)
	}
	w.inflict("nft", "ipvsadm -A -t 10.96.0.11:80 -s lblc")
	w.inflict("nft", "ipvsadm -a -t 10.96.0.11:80 -r 10.2.0.2:8080 -m -w 5")
	foreign := strings.SplitAfter(strings.TrimSpace(w.node("ipvsadm", "-Sn"))+"\n", "\n")
	untouched := func(when string) {
		t.Helper()
		now := w.node("ipvsadm", "-Sn")
		for _, f := range foreign {
			if !strings.Contains(now, f) {
				t.Errorf("%s, %q is gone:\n%s", when, f, now)
			}
		}
		if out := w.node("ipset", "save", "others"); !strings.Contains(out, "add others 203.0.113.7") {
			t.Errorf("%s, others' set says\n%s", when, out)
		}
	}
	m, taken := newManifest("web", 10, w.net.Backends...), newManifest("taken", 11, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.must(taken.Write(w.manifests))
	w.start("--offload-after", "0s")
	w.pin("web", "line", service.PreferKernel)
	untouched("once kproxy runs")
	w.awaitBackends(taken, "b1", "b2", "b3") // in userspace
	w.eventually(10*time.Second, "the status to name the foreign virtual server", func() error {
		if s := w.service("taken", "line"); s.DataPlane != plan.Userspace || !strings.Contains(s.Reason, "10.96.0.11:80") {
			return fmt.Errorf("%s: %s", s.DataPlane, s.Reason)
		}
		return nil
	})

	// A foreign real server behind a virtual server of kproxy's.
	own, stranger := frontends(m)[0].String(), "203.0.113.10:9000"
	w.node("ipvsadm", "-a", "-t", own, "-r", stranger, "-m", "-w", "0")
	w.must(m.Without("b1").Write(w.manifests))
	w.awaitBackends(m, "b2", "b3")
	w.must(m.Write(w.manifests))
	w.awaitBackends(m, "b1", "b2", "b3")
	if now := w.node("ipvsadm", "-Sn"); !strings.Contains(now, "-r "+stranger) {
		t.Errorf("after changes of endpoints, somebody else's real server is gone:\n%s", now)
	}
	w.node("ipvsadm", "-d", "-t", own, "-r", stranger)

	w.node("ipvsadm", "-D", "-t", "10.96.0.11:80")
	foreign = slices.DeleteFunc(foreign, func(line string) bool { return strings.Contains(line, "10.96.0.11:80") })
	w.pin("taken", "line", service.PreferKernel)
	w.awaitBackends(taken, "b1", "b2", "b3")
	w.settled()

	// What is kproxy's is repaired, and the rest stays.
	before := w.everything()
	w.node("ip", "link", "del", "kproxy0")
	w.node("ipvsadm", "-D", "-t", own)
	w.repaired(t, before)
	untouched("after a repair")

	w.stop()
	w.kproxy("cleanup", "--state-dir", filepath.Join(w.dir, "state")).wants(t, 0, "gone")
	untouched("after cleanup")
	if now := w.everything(); strings.Contains(now, "KPROXY-") || strings.Contains(now, own) {
		t.Errorf("cleanup has left\n%s", now)
	}
}

// TestIPVSChangesNeedNoRules: while no rule of iptables can be written, because
// another program holds the lock, changes of endpoints take effect all the same,
// in the kernel.
func TestIPVSChangesNeedNoRules(t *testing.T) {
	w := newWorld(t)
	path := filepath.Join(w.dir, "xtables.lock")
	w.env = []string{"XTABLES_LOCKFILE=" + path}
	w.holdsRules("legacy") // the nft variant has no lock
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start()
	w.pin("web", "line", service.PreferKernel)
	held := w.hold(frontends(m)[0])
	lock, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	w.must(err)
	defer lock.Close()
	w.must(syscall.Flock(int(lock.Fd()), syscall.LOCK_EX))

	w.must(m.Without("b3").Write(w.manifests))
	w.awaitBackends(m, "b1", "b2")
	w.must(m.Write(w.manifests))
	w.awaitBackends(m, "b1", "b2", "b3")
	for _, target := range frontends(m) {
		w.eventuallyCarries(t, target, plan.IPVS)
	}
	if st, err := w.client.Status(w.ctx); err != nil || st.Sync.LastError != "" {
		t.Errorf("the status says %q, %v", st.Sync.LastError, err)
	}
	w.unbroken("while the lock was held", held)
}
