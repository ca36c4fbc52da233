package e2e

import (
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// TestIPVSHeldAcrossMoves: connections of both families that were opened before
// and after each move live on across all of them.
func TestIPVSHeldAcrossMoves(t *testing.T) {
	w := newWorld(t)
	m := newManifest("web", 10, w.net.Backends...)
	w.must(m.Write(w.manifests))
	w.start()
	var held []*lab.Held
	for _, plane := range []service.Preference{service.PreferUserspace, service.PreferKernel, service.PreferUserspace, service.PreferKernel} {
		w.pin("web", "line", plane)
		for _, target := range frontends(m) {
			held = append(held, w.hold(target))
		}
		sleep(500 * time.Millisecond) // some exchanges
	}
	w.unbroken("across three moves", held...)
	w.carriedBy([]*lab.Held{held[0], held[1], held[4], held[5]}, plan.Userspace)
	w.carriedBy([]*lab.Held{held[2], held[3], held[6], held[7]}, plan.IPVS)
	for i, h := range held {
		if h.Exchanges() < 2 {
			t.Errorf("connection %d made %d exchanges only", i+1, h.Exchanges())
		}
	}
}

// TestIPVSLeastConnections: where one endpoint takes long for each connection,
// least connections sends few there, round robin a third.
func TestIPVSLeastConnections(t *testing.T) {
	w := newWorld(t)
	least, robin := newManifest("least", 10, w.net.Backends...), newManifest("robin", 11, w.net.Backends...)
	least.Algorithm = string(service.LeastConnections)
	w.must(least.Write(w.manifests))
	w.must(robin.Write(w.manifests))
	w.start()
	w.pin("least", "line", service.PreferKernel)
	w.pin("robin", "line", service.PreferKernel)
	busy := w.net.Backend("b1")
	busy.SetDelay(lasting(1500 * time.Millisecond))
	w.must(busy.Fail(w.ctx, lab.Slow))
	for f := range frontends(least) {
		var by [2]map[string]int
		var running [2]*lab.Traffic
		for i, m := range []lab.Manifest{least, robin} {
			var err error
			running[i], err = lab.StartTraffic(w.ctx, lab.TrafficConfig{
				From: w.net.Client, Network: "tcp", Target: frontends(m)[f], Rate: 30 / pace, Count: 90, Timeout: within(20 * time.Second),
			})
			w.must(err)
		}
		for i, tr := range running {
			r := tr.Wait()
			w.noneFailed("with one slow endpoint", r)
			by[i] = r.ByBackend()
		}
		t.Logf("%s: least connections %v, round robin %v", frontends(least)[f], by[0], by[1])
		if by[1]["b1"] != 30 || by[0]["b1"] == 0 || by[0]["b1"] > 15 {
			t.Errorf("of 90 connections each, the slow endpoint got %d by least connections and %d by round robin; want a few, and 30", by[0]["b1"], by[1]["b1"])
		}
	}
}

// TestIPVSScheduler: an annotation names any scheduler of the kernel; with one
// that the kernel lacks a service stays in userspace and says so.
func TestIPVSScheduler(t *testing.T) {
	w := newWorld(t)
	sed := newManifest("sed", 10, w.net.Backends...).Annotate("kproxy.dev/ipvs-scheduler", "sed")
	nosuch := newManifest("nosuch", 11, w.net.Backends...).Annotate("kproxy.dev/ipvs-scheduler", "nosuch")
	w.must(sed.Write(w.manifests))
	w.must(nosuch.Write(w.manifests))
	w.start("--offload-after", "0s", "--mode", "ipvs")
	w.pin("sed", "line", service.PreferKernel)
	if out := w.node("ipvsadm", "-Ln", "-t", "10.96.0.10:80"); !strings.Contains(out, " sed") {
		t.Errorf("its virtual server doesn't have the scheduler of the annotation:\n%s", out)
	}
	for _, target := range frontends(sed) {
		w.ask(w.net.Client, "tcp", target)
	}
	w.awaitBackends(nosuch, "b1", "b2", "b3")
	sleep(time.Second)
	s := w.service("nosuch", "line")
	if s.DataPlane != plan.Userspace || s.State != plan.StateUserspace || !strings.Contains(s.Reason, "nosuch") {
		t.Errorf("with a scheduler that there isn't, it is in %s, %s: %s; want userspace because of that", s.DataPlane, s.State, s.Reason)
	}
}

// TestIPVSBesideIPTables: in mode auto, services that IPVS can't express go to
// iptables, all others to IPVS, and the status says why.
func TestIPVSBesideIPTables(t *testing.T) {
	w := newWorld(t)
	planes := map[string]plan.DataPlane{}
	manifests := map[string]lab.Manifest{}
	for i, c := range []struct {
		algorithm service.Algorithm
		plane     plan.DataPlane
		reason    string
	}{
		{service.RoundRobin, plan.IPVS, "all that it asks for"},
		{service.LeastConnections, plan.IPVS, "all that it asks for"},
		{service.Random, plan.IPTables, "random"},
	} {
		name := string(c.algorithm)
		m := newManifest(name, 10+i, w.net.Backends...)
		m.Algorithm = name
		w.must(m.Write(w.manifests))
		planes[name], manifests[name] = c.plane, m
		t.Run(name, func(t *testing.T) {
			if w.proxy == nil {
				w.start("--mode", "auto")
			}
			w.await(name, "line", plan.Userspace, "")
			if s := w.service(name, "line"); s.Kernel != c.plane || !strings.Contains(s.KernelReason, c.reason) {
				t.Errorf("beneath %s is %s, because %q; want %s, because of %q", name, s.Kernel, s.KernelReason, c.plane, c.reason)
			}
		})
	}
	var held []*lab.Held
	for name, m := range manifests {
		for _, target := range frontends(m) {
			held = append(held, w.hold(target))
			w.ask(w.net.Node, "tcp", target)
		}
		w.await(name, "line", planes[name], plan.StateOffloaded)
		for _, target := range frontends(m) {
			w.eventuallyCarries(t, target, planes[name])
			w.ask(w.net.Node, "tcp", target)
			w.ask(w.net.Backends[0].Namespace, "tcp", target)
		}
	}
	w.unbroken("after their services were offloaded", held...)
}
