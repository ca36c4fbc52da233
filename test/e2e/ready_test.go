package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// TestReadyMeansReady: as soon as kproxy says that it is ready, or names a sync that
// succeeded, every service is carried, and the rules beneath are written.
func TestReadyMeansReady(t *testing.T) {
	const services = 100
	w := newWorld(t)
	var all []string
	for i := range services {
		m := newManifest(fmt.Sprintf("web-%d", i), 10+i, w.net.Backends...)
		w.must(m.Write(w.manifests))
		all = append(all, frontends(m)[0].String())
	}
	w.configure()
	w.must(w.proxy.Start())
	w.eventually(20*time.Second, "a sync that succeeded", func() error {
		st, err := w.client.Status(w.ctx)
		if err == nil && st.Ready != !st.Sync.LastSuccess.IsZero() {
			t.Errorf("ready %v, but the last success is %s", st.Ready, st.Sync.LastSuccess)
		}
		if err == nil && !st.Ready {
			err = fmt.Errorf("not ready: %s", st.NotReady)
		}
		return err
	})
	for _, address := range []string{all[0], all[services/2], all[services-1]} {
		c, err := w.net.Client.Dial(w.ctx, "tcp", address)
		if err != nil {
			t.Errorf("a connection to %s begun when kproxy said that it was ready: %v", address, err)
			continue
		}
		c.Close()
	}
	if w.plane == plan.IPTables {
		if rules := w.node("iptables-save", "-t", "nat"); strings.Count(rules, ":KPROXY-SVC-") < services {
			t.Errorf("%d chains of services are in the kernel when kproxy said that it was ready, want %d", strings.Count(rules, ":KPROXY-SVC-"), services)
		}
	}
	// A second one finds it ready at once, as the command does, which shows it then.
	var st plan.Status
	w.must(json.Unmarshal([]byte(w.ok(w.kproxy("status", "--wait", "-o", "json"))), &st))
	if !st.Ready {
		t.Errorf("kproxy status --wait showed one that isn't ready: %s", st.NotReady)
	}
	w.stop()
	w.kproxy("status", "--wait", "--timeout", "300ms").wants(t, 1)
}

// TestNothingArrives: while connections that rules send to userspace are dropped on
// their way, kproxy says that it isn't ready, and why; what it refuses is counted.
func TestNothingArrives(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	none := newManifest("none", 11)
	w.must(none.Write(w.manifests))
	w.start("--alive-timeout", "1s") // it compares every ten of these
	w.pin("web", "line", service.PreferUserspace)
	w.ask(w.net.Client, "tcp", frontends(m)[0])
	w.refuses(w.net.Client, "tcp", frontends(none)[0])
	w.metric("kproxy_refused_packets_total", func(v float64) bool { return v > 0 })
	w.metric("kproxy_ready", func(v float64) bool { return v == 1 })

	drop := []string{"INPUT", "!", "-i", "lo", "-p", "tcp", "--dport", "10244", "-j", "DROP"} // not the heartbeat
	w.node("iptables", append([]string{"-I"}, drop...)...)
	w.traffic("tcp", frontends(m)[0], 5)
	w.eventually(90*time.Second, "kproxy to notice", func() error {
		st, err := w.client.Status(w.ctx)
		if err == nil && (st.Ready || !strings.Contains(st.NotReady, "none arrived")) {
			err = fmt.Errorf("ready %v: %s", st.Ready, st.NotReady)
		}
		return err
	})
	w.node("iptables", append([]string{"-D"}, drop...)...)
	w.eventually(90*time.Second, "kproxy to be ready again", func() error {
		st, err := w.client.Status(w.ctx)
		if err == nil && !st.Ready {
			err = errors.New(st.NotReady)
		}
		return err
	})
}
