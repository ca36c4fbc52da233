package web

import (
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// glancer is a shop whose plan can be glanced at.
type glancer struct {
	*fakeSource
	plan    *plan.Plan
	glances int
}

// newGlancer returns a shop with the plan that its status tells of.
func newGlancer() *glancer {
	g := &glancer{fakeSource: shop()}
	g.replan()
	return g
}

// replan makes the plan anew, as the status is now.
func (g *glancer) replan() {
	p := &plan.Plan{}
	for _, s := range g.Status().Services {
		port := &plan.Service{Port: &service.Port{Key: service.Key{Namespace: s.Namespace, Name: s.Name, Port: s.Port}}}
		for _, e := range s.Endpoints {
			port.Endpoints = append(port.Endpoints, plan.Endpoint{Endpoint: &service.Endpoint{Address: e.Address}, Probed: &plan.Probed{Health: e.Health, Since: e.Since, Error: e.LastError}})
		}
		p.Services = append(p.Services, port)
	}
	g.plan = p
}

func (g *glancer) glance(traffic func(service.Key, plan.Connections)) *plan.Plan {
	g.glances++
	for _, s := range g.Status().Services {
		if s.Connections != (plan.Connections{}) {
			traffic(service.Key{Namespace: s.Namespace, Name: s.Name, Port: s.Port}, s.Connections)
		}
	}
	return g.plan
}

func (g *glancer) recorder() *Recorder {
	c := DefaultRecorderConfig(g)
	c.Glance = g.glance
	return NewRecorder(c)
}

// What carries traffic while nobody watches has a history when somebody comes.
func TestHistoryGoesOnWhileNobodyWatches(t *testing.T) {
	g := newGlancer()
	g.change(func(st *plan.Status) { st.Services[1].Connections = plan.Connections{} })
	rec := g.recorder()
	at := func(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }
	rec.sample(at(0))
	g.change(func(st *plan.Status) { st.Services[0].Connections.Total += 100; st.Services[1].Connections.Total = 20 })
	rec.sample(at(10))
	if rec.services != nil || rec.status.Services != nil || len(rec.byKey) != 3 {
		t.Errorf("a recorder that dozes keeps %d rows, %d services and %d records; want none, none and those of 3 that carried something",
			len(rec.services), len(rec.status.Services), len(rec.byKey))
	}
	rec.asked = at(11)
	rec.look(at(11), false)
	rec.sample(at(12))
	h := rec.History([]string{"shop/cart", "shop/web:http"})
	if d := cmp.Diff([]float64{0, 10, 10, 10, 10, 10, 0}, h.Services["shop/cart"].Connections); d != "" {
		t.Errorf("rates (-want +got):\n%s", d)
	}
	if d := cmp.Diff([]float64{0, 2, 2, 2, 2, 2, 0}, h.Services["shop/web:http"].Connections); d != "" {
		t.Errorf("rates of a service that had carried nothing (-want +got):\n%s", d)
	}
	if g.glances != 2 {
		t.Errorf("%d glances, want 2: it was awake for the last sample", g.glances)
	}
}

// A service whose counters are gone shows no rate.
func TestGlanceAtAServiceThatBeganAnew(t *testing.T) {
	g := newGlancer()
	rec := g.recorder()
	for i, total := range []uint64{10, 30, 0} {
		g.change(func(st *plan.Status) { st.Services[0].Connections = plan.Connections{Total: total} })
		rec.sample(start.Add(time.Duration(i) * 2 * time.Second))
	}
	rec.look(start.Add(5*time.Second), false)
	if d := cmp.Diff([]float64{0, 10, 0}, rec.History([]string{"shop/cart"}).Services["shop/cart"].Connections); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

func TestHealthIsFollowedWhileNobodyWatches(t *testing.T) {
	g := newGlancer()
	rec := g.recorder()
	set := func(minute int, health, problem string) {
		at := start.Add(time.Duration(minute) * time.Minute)
		g.change(func(st *plan.Status) {
			e := &st.Services[0].Endpoints[0]
			e.Health, e.LastError, e.Since = health, problem, at
		})
		g.replan()
		rec.sample(at)
	}
	rec.look(start, true) // somebody watched, long ago
	set(2, "down", "connection refused")
	set(4, "up", "")
	rec.look(start.Add(5*time.Minute), false)
	page, ok := rec.Service("shop/cart")
	if !ok {
		t.Fatal("no such service")
	}
	want := []HealthChange{
		{Time: start, Health: "up"},
		{Time: start.Add(2 * time.Minute), Health: "down", Error: "connection refused"},
		{Time: start.Add(4 * time.Minute), Health: "up"},
	}
	if d := cmp.Diff(want, page.Health[0].Changes); d != "" {
		t.Errorf("changes (-want +got):\n%s", d)
	}
	if len(page.Health[1].Changes) != 1 {
		t.Errorf("the other endpoint's health: %v, want how it is", page.Health[1].Changes)
	}
}

// Records of services that have gone don't pile up, nor do those that events made.
func TestDozingForgetsWhatHasGone(t *testing.T) {
	g := newGlancer()
	rec := g.recorder()
	rec.sample(start)
	rec.happened([]plan.Event{{Service: "shop/gone"}, {Service: "shop/web:http"}})
	g.change(func(st *plan.Status) { st.Services = st.Services[1:] })
	g.replan()
	for i := range 3 {
		rec.sample(start.Add(time.Duration(i+1) * 10 * time.Second))
	}
	keys := []string{}
	for _, k := range []string{"shop/cart", "shop/gone", "shop/web:http", "shop/web:http3"} {
		if rec.byKey[k] != nil {
			keys = append(keys, k)
		}
	}
	if d := cmp.Diff([]string{"shop/web:http", "shop/web:http3"}, keys); d != "" || rec.loose {
		t.Errorf("records (-want +got):\n%s\nloose: %v", d, rec.loose)
	}
}

// BenchmarkGlance is what 10,000 services of ten endpoints cost while nobody
// watches, one in twenty of them busy.
func BenchmarkGlance(b *testing.B) {
	p := &plan.Plan{}
	for i := range 10_000 {
		s := &plan.Service{Port: &service.Port{Key: service.Key{Namespace: "team", Name: netip.AddrFrom4([4]byte{0, 0, byte(i >> 8), byte(i)}).String()}}}
		s.Endpoints = make([]plan.Endpoint, 10)
		p.Services = append(p.Services, s)
	}
	n := uint64(0)
	c := DefaultRecorderConfig(nil)
	c.Subscribe = func() (<-chan plan.Event, func()) { return nil, nil }
	c.Glance = func(traffic func(service.Key, plan.Connections)) *plan.Plan {
		n++
		for i := 0; i < len(p.Services); i += 20 {
			traffic(p.Services[i].Port.Key, plan.Connections{Active: 1, Total: n, BytesIn: n, BytesOut: n})
		}
		return p
	}
	before := heap()
	rec := NewRecorder(c)
	at := start
	b.ReportAllocs()
	for b.Loop() {
		at = at.Add(10 * time.Second)
		rec.glance(at)
	}
	b.ReportMetric((float64(heap())-float64(before))/(1<<20), "MB-kept")
}
