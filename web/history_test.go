package web

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/plan"
)

// TestHistoryGoesOn: the Recorder of a kproxy that takes over shows what the one before it has kept, though its first sample
// may come before its first plan.
func TestHistoryGoesOn(t *testing.T) {
	src := shop()
	c := DefaultRecorderConfig(src)
	c.Samples = 5
	at := func(i int) time.Time { return start.Add(time.Duration(i) * c.Interval) }
	add := func(n uint64) {
		src.change(func(st *plan.Status) { st.Services[0].Connections.Total += n })
	}
	was := NewRecorder(c)
	for i := range 3 {
		was.readStatus(at(i), true)
		add(4)
	}
	e := plan.Event{Time: start, Kind: "dataplane", Service: "shop/cart", Message: "offloaded"}
	was.happened([]plan.Event{e, {Time: at(1), Kind: "sync", Message: "failed"}})

	is := NewRecorder(c)
	is.Load(was.Save())
	services := src.Status().Services
	src.change(func(st *plan.Status) { st.Services = nil })
	is.readStatus(at(2), false)
	src.change(func(st *plan.Status) { st.Services = services })
	for i := range 2 {
		is.readStatus(at(3+i), true)
		add(6)
	}
	if d := cmp.Diff([]float64{0, 2, 2, 2, 3}, is.History([]string{"shop/cart"}).Services["shop/cart"].Connections); d != "" {
		t.Errorf("rates (-want +got):\n%s", d)
	}
	if d := cmp.Diff(was.timeline.newest(9), is.timeline.newest(9)); d != "" {
		t.Errorf("events (-want +got):\n%s", d)
	}
	if d := cmp.Diff([]plan.Event{e}, is.byKey["shop/cart"].events.newest(9)); d != "" {
		t.Errorf("a service's events (-want +got):\n%s", d)
	}
	for _, other := range []string{"", "nonsense", `{"version":2}`, `{"version":1,"interval":1,"samples":7}`} {
		r := NewRecorder(c)
		if r.Load([]byte(other)); r.samples != 0 {
			t.Errorf("it begins with %q", other)
		}
	}
}
