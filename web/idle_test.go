package web

import (
	"net/netip"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// trafficSource is a shop that tells its traffic apart from its status.
type trafficSource struct {
	*fakeSource
	reads int
}

func (g *trafficSource) traffic(each func(service.Key, plan.Connections)) {
	g.reads++
	for _, s := range g.Status().Services {
		each(service.Key{Namespace: s.Namespace, Name: s.Name, Port: s.Port}, s.Connections)
	}
}

func (g *trafficSource) recorder() *Recorder {
	c := DefaultRecorderConfig(g)
	c.Traffic = g.traffic
	return NewRecorder(c)
}

// What carries traffic while the recorder is idle has a history when it is asked for.
func TestIdleRecorderKeepsHistory(t *testing.T) {
	g := &trafficSource{fakeSource: shop()}
	g.change(func(st *plan.Status) { st.Services[1].Connections = plan.Connections{} })
	rec := g.recorder()
	at := func(seconds int) time.Time { return start.Add(time.Duration(seconds) * time.Second) }
	rec.sample(at(0))
	g.change(func(st *plan.Status) { st.Services[0].Connections.Total += 100; st.Services[1].Connections.Total = 20 })
	rec.sample(at(10))
	if rec.services != nil || rec.status.Services != nil || len(rec.byKey) != 3 {
		t.Errorf("an idle recorder keeps %d rows, %d services and %d records; want none, none and those of 3 that carried something",
			len(rec.services), len(rec.status.Services), len(rec.byKey))
	}
	rec.asked = at(11)
	rec.readStatus(at(11), false)
	rec.sample(at(12))
	h := rec.History([]string{"shop/cart", "shop/web:http"})
	if d := cmp.Diff([]float64{0, 10, 10, 10, 10, 10, 0}, h.Services["shop/cart"].Connections); d != "" {
		t.Errorf("rates (-want +got):\n%s", d)
	}
	if d := cmp.Diff([]float64{0, 2, 2, 2, 2, 2, 0}, h.Services["shop/web:http"].Connections); d != "" {
		t.Errorf("rates of a service that had carried nothing (-want +got):\n%s", d)
	}
	if g.reads != 2 {
		t.Errorf("%d reads of the traffic, want 2: it wasn't idle for the last sample", g.reads)
	}
}

// A service whose counters are gone shows no rate.
func TestCountersThatBeganAnewWhileIdle(t *testing.T) {
	g := &trafficSource{fakeSource: shop()}
	rec := g.recorder()
	for i, total := range []uint64{10, 30, 0} {
		g.change(func(st *plan.Status) { st.Services[0].Connections = plan.Connections{Total: total} })
		rec.sample(start.Add(time.Duration(i) * 2 * time.Second))
	}
	rec.readStatus(start.Add(5*time.Second), false)
	if d := cmp.Diff([]float64{0, 10, 0}, rec.History([]string{"shop/cart"}).Services["shop/cart"].Connections); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

// A request that comes while the counters are read, or just before, has rows.
func TestRequestWhileIdleBegins(t *testing.T) {
	g := &trafficSource{fakeSource: shop()}
	c := DefaultRecorderConfig(g)
	c.IdleAfter = 1
	var rec *Recorder
	asked := make(chan bool)
	c.Traffic = func(each func(service.Key, plan.Connections)) {
		go func() {
			rec.refresh()
			close(asked)
		}()
		select {
		case <-asked: // the status is new enough
		case <-time.After(50 * time.Millisecond): // it waits
		}
		g.traffic(each)
	}
	rec = NewRecorder(c)
	rec.refresh()
	rec.sample(time.Now().Add(time.Second))
	<-asked
	if n := len(rec.overview().Services); n != 3 || g.reads != 1 {
		t.Errorf("%d rows after %d reads of the traffic, want 3 after 1", n, g.reads)
	}
}

// Records of services that have gone don't pile up, nor do those that events made.
func TestIdleRecorderForgetsWhatHasGone(t *testing.T) {
	g := &trafficSource{fakeSource: shop()}
	rec := g.recorder()
	rec.sample(start)
	rec.happened([]plan.Event{{Service: "shop/gone"}, {Service: "shop/web:http"}})
	g.change(func(st *plan.Status) { st.Services = st.Services[1:] })
	for i := range 3 {
		rec.sample(start.Add(time.Duration(i+1) * 10 * time.Second))
	}
	keys := []string{}
	for _, k := range []string{"shop/cart", "shop/gone", "shop/web:http", "shop/web:http3"} {
		if rec.byKey[k] != nil {
			keys = append(keys, k)
		}
	}
	if d := cmp.Diff([]string{"shop/web:http", "shop/web:http3"}, keys); d != "" {
		t.Errorf("records (-want +got):\n%s", d)
	}
}

// BenchmarkIdleSample is what 10,000 services cost while the recorder is idle, one in
// twenty of them busy.
func BenchmarkIdleSample(b *testing.B) {
	var keys []service.Key
	for i := range 10_000 {
		keys = append(keys, service.Key{Namespace: "team", Name: netip.AddrFrom4([4]byte{0, 0, byte(i >> 8), byte(i)}).String()})
	}
	n := uint64(0)
	c := DefaultRecorderConfig(nil)
	c.Subscribe = func() (<-chan plan.Event, func()) { return nil, nil }
	c.Traffic = func(each func(service.Key, plan.Connections)) {
		n++
		for i, k := range keys {
			if i%20 == 0 {
				each(k, plan.Connections{Active: 1, Total: n, BytesIn: n, BytesOut: n})
			} else {
				each(k, plan.Connections{})
			}
		}
	}
	before := heap()
	rec := NewRecorder(c)
	at := start
	b.ReportAllocs()
	for b.Loop() {
		at = at.Add(10 * time.Second)
		rec.readTraffic(at)
	}
	b.ReportMetric((float64(heap())-float64(before))/(1<<20), "MB-kept")
}
