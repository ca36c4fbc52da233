package plan

import (
	"testing"

	"kproxy.dev/kproxy/service"
)

func TestCountChanges(t *testing.T) {
	snapshot := func(build func(*world)) *service.Snapshot {
		w := newWorld(t)
		build(w)
		return w.snapshot()
	}
	base := func(w *world) {
		w.set(port("a", portNamed("http")), "10.0.0.1 n1 ready")
		w.set(port("a", portNamed("https")), "10.0.0.1 n1 ready")
		w.set(port("b"), "10.0.0.2 n1 ready")
	}
	tests := []struct {
		name                string
		old, now            func(*world)
		services, endpoints int
	}{
		{"at start", func(*world) {}, base, 2, 2},
		{"nothing", base, base, 0, 0},
		{"an endpoint of a Service's ports", base, func(w *world) {
			base(w)
			w.set(port("a", portNamed("http")), "10.0.0.3 n1 ready")
			w.set(port("a", portNamed("https")), "10.0.0.3 n1 ready")
		}, 0, 1},
		{"a Service's number", base, func(w *world) {
			base(w)
			w.set(port("b", func(p *service.Port) { p.Number = 81 }), "10.0.0.2 n1 ready")
		}, 1, 0},
		{"a Service goes", base, func(w *world) { w.set(port("b"), "10.0.0.2 n1 ready") }, 1, 1},
		{"one without endpoints comes", base, func(w *world) { base(w); w.set(port("c")) }, 1, 0},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			services, endpoints := service.CountChanges(snapshot(tt.old), snapshot(tt.now))
			if services != tt.services || endpoints != tt.endpoints {
				t.Errorf("%d Services, endpoints of %d; want %d and %d", services, endpoints, tt.services, tt.endpoints)
			}
		})
	}
}

func TestNoLocal(t *testing.T) {
	w := newWorld(t)
	local := func(p *service.Port) { p.InternalLocal = true }
	w.set(port("here", local), "10.0.0.1 n1 ready")
	w.set(port("elsewhere", local, func(p *service.Port) {
		p.ClusterIPs = addrs("10.96.0.2")
		p.ExternalIPs, p.ExternallyAccessible, p.ExternalLocal, p.NodePort = addrs("192.0.2.1"), true, true, 30080
	}), "10.0.0.1 n2 ready")
	w.set(port("nowhere", local, func(p *service.Port) { p.ClusterIPs = addrs("10.96.0.3") }))
	internal, external := w.compute().NoLocal()
	if want := [2]int{1, 0}; internal != want || external != want {
		t.Errorf("internal %v, external %v; want %v of both", internal, external, want)
	}
}
