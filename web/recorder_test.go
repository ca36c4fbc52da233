package web

import (
	"bufio"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"net/netip"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// change changes the status that the source reports. Status are values, so
// nobody who read the last one sees it.
func (f *fakeSource) change(edit func(*plan.Status)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	s := f.status
	s.Services = append([]plan.ServiceStatus{}, s.Services...)
	for i := range s.Services {
		s.Services[i].Endpoints = append([]plan.EndpointStatus{}, s.Services[i].Endpoints...)
	}
	edit(&s)
	f.status = s
}

// sseEvent is one event of a stream.
type sseEvent struct{ kind, data string }

// stream collects what a live stream says. It is safe for concurrent use.
type stream struct {
	mu     sync.Mutex
	events []sseEvent
	err    error
}

func (s *stream) read(r io.Reader) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 16<<20)
	var e sseEvent
	for lines.Scan() {
		name, value, _ := strings.Cut(lines.Text(), ": ")
		switch name {
		case "event":
			e.kind = value
		case "data":
			e.data = value
			s.mu.Lock()
			s.events = append(s.events, e)
			s.mu.Unlock()
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = lines.Err()
}

// take returns what came since the last call, node figures left out.
func (s *stream) take() []sseEvent {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []sseEvent
	for _, e := range s.events {
		if e.kind != "node" {
			out = append(out, e)
		}
	}
	s.events = nil
	return out
}

func kinds(events []sseEvent) []string {
	out := []string{}
	for _, e := range events {
		out = append(out, e.kind)
	}
	return out
}

// watch runs a recorder and a server on a fake clock, opens a live stream, and
// hands both to the test.
func watch(t *testing.T, src *fakeSource, encoding string, test func(*Recorder, *stream)) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		rec := NewRecorder(DefaultRecorderConfig(src))
		var done sync.WaitGroup
		done.Go(func() { _ = rec.Run(ctx) })
		time.Sleep(time.Millisecond) // the first look has been
		ln := listenPipe(t.Context())
		done.Go(func() {
			if err := Serve(ctx, ln, API(APIConfig{Source: src, Recorder: rec}), slog.New(slog.DiscardHandler)); err != nil {
				t.Errorf("serve: %v", err)
			}
		})
		client := &http.Client{Transport: &http.Transport{DialContext: ln.dial, DisableCompression: true}}
		req, err := http.NewRequest(http.MethodGet, "http://kproxy/api/v1/live", nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Accept-Encoding", encoding)
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		s := &stream{}
		done.Go(func() {
			var body io.Reader = resp.Body
			if resp.Header.Get("Content-Encoding") == "gzip" {
				z, err := gzip.NewReader(body)
				if err != nil {
					t.Error(err)
					return
				}
				body = z
			}
			s.read(body)
		})
		synctest.Wait()
		test(rec, s)
		cancel()
		done.Wait()
		if s.err != nil {
			t.Errorf("the stream didn't end in good order: %v", s.err)
		}
		_ = resp.Body.Close()
	})
}

func TestLiveStreamTellsWhatChanges(t *testing.T) {
	for _, encoding := range []string{"identity", "gzip"} {
		t.Run(encoding, func(t *testing.T) {
			src := shop()
			watch(t, src, encoding, func(_ *Recorder, s *stream) {
				first := s.take()
				if d := cmp.Diff([]string{"overview"}, kinds(first)); d != "" {
					t.Fatalf("at the start (-want +got):\n%s", d)
				}
				var o overview
				if err := json.Unmarshal([]byte(first[0].data), &o); err != nil {
					t.Fatal(err)
				}
				if len(o.Services) != 3 || !o.Alive || o.Services[1].Key != "shop/web:http" || o.Services[1].Endpoints != (EndpointCount{Total: 2, Up: 1, Down: 1, Usable: 1}) {
					t.Errorf("overview: got %s", first[0].data)
				}

				time.Sleep(10 * time.Second)
				synctest.Wait()
				if got := s.take(); len(got) != 0 {
					t.Errorf("nothing changed, but the stream said %v", got)
				}

				src.change(func(st *plan.Status) {
					st.Services = append(st.Services[:1], st.Services[2:]...) // web:http goes
					st.Services[1].DataPlane, st.Services[1].State = plan.IPTables, plan.StateOffloaded
					st.Services[1].Connections.Total += 10
				})
				src.send(plan.Event{Time: start, Kind: "dataplane", Service: "shop/web:http3", Message: "userspace to iptables: healthy"})
				time.Sleep(time.Second) // less than an interval: the event hastens the look
				synctest.Wait()
				got := s.take()
				if d := cmp.Diff([]string{"timeline", "rows"}, kinds(got)); d != "" {
					t.Fatalf("after a change (-want +got):\n%s", d)
				}
				var d delta
				if err := json.Unmarshal([]byte(got[1].data), &d); err != nil {
					t.Fatal(err)
				}
				if len(d.Changed) != 1 || d.Changed[0].Key != "shop/web:http3" || d.Changed[0].DataPlane != plan.IPTables || !cmp.Equal(d.Removed, []string{"shop/web:http"}) {
					t.Errorf("rows: got %s", got[1].data)
				}

				time.Sleep(2 * time.Second)
				synctest.Wait()
				got = s.take() // the rate of those ten connections
				if d := cmp.Diff([]string{"rows"}, kinds(got)); d != "" || !strings.Contains(got[0].data, `"rates":{"connections":5,`) {
					t.Errorf("rates after the interval: got %v", got)
				}
				time.Sleep(2 * time.Second)
				synctest.Wait()
				if got := s.take(); len(got) != 1 || !strings.Contains(got[0].data, `"rates":{"connections":0,`) {
					t.Errorf("rates go back to nothing: got %v", got)
				}
			})
		})
	}
}

func TestAStreamThatFallsBehindBeginsAnew(t *testing.T) {
	rec := NewRecorder(DefaultRecorderConfig(shop()))
	rec.readStatus(start, true)
	_, slow := rec.hub.subscribe(rec.overview)
	_, quick := rec.hub.subscribe(rec.overview)
	for i := range hubBuffer + 1 {
		rec.happened([]plan.Event{{Time: start, Kind: "sync", Message: fmt.Sprint(i)}})
		<-quick
	}
	n := 0
	for range slow { // ends only when it was closed
		n++
	}
	if n != hubBuffer {
		t.Errorf("the slow one got %d messages, want %d", n, hubBuffer)
	}
	if len(rec.hub.subs) != 1 {
		t.Errorf("%d streams are subscribed, want the quick one", len(rec.hub.subs))
	}
}

func TestHistory(t *testing.T) {
	src := shop()
	c := DefaultRecorderConfig(src)
	c.Samples = 4
	rec := NewRecorder(c)
	for i := range 6 {
		rec.readStatus(start.Add(time.Duration(i)*2*time.Second), true)
		src.change(func(st *plan.Status) {
			st.Services[0].Connections.Total += uint64(2 * i)
			st.Services[0].Connections.Active = int64(i)
		})
	}
	h := rec.History([]string{"shop/cart", "shop/none"})
	want := History{IntervalSeconds: 2, End: start.Add(10 * time.Second), Services: map[string]Series{"shop/cart": {
		Active: []float64{1, 2, 3, 4}, Connections: []float64{1, 2, 3, 4},
		BytesIn: []float64{0, 0, 0, 0}, BytesOut: []float64{0, 0, 0, 0}, Failed: []float64{0, 0, 0, 0}, Retried: []float64{0, 0, 0, 0},
	}}}
	if d := cmp.Diff(want, h); d != "" {
		t.Errorf("history (-want +got):\n%s", d)
	}
	if rec.byKey["shop/cart"].rings[seriesFailed] != nil {
		t.Error("a figure that is always zero takes memory")
	}
	// A counter that starts anew is no burst, and a service that is back begins anew.
	src.change(func(st *plan.Status) { st.Services[0].Connections.Total = 1 })
	rec.readStatus(start.Add(12*time.Second), true)
	if got := rec.History([]string{"shop/cart"}).Services["shop/cart"].Connections[3]; got != 0 {
		t.Errorf("rate after the counter went back: got %v, want 0", got)
	}
}

func TestWithoutStreams(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		src := shop()
		rec := NewRecorder(DefaultRecorderConfig(src))
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- rec.Run(ctx) }()
		time.Sleep(time.Second)
		src.change(func(st *plan.Status) { st.Services[0].Connections.Total += 100 })
		time.Sleep(60 * time.Second)
		rec.mu.RLock()
		if passes, samples := rec.passes, rec.samples; passes != 7 || samples != 31 {
			t.Errorf("in a minute without streams: %d passes for %d samples, want 7 for 31", passes, samples)
		}
		rec.mu.RUnlock()
		got := rec.History([]string{"shop/cart"}).Services["shop/cart"].Connections[:7]
		if d := cmp.Diff([]float64{0, 10, 10, 10, 10, 10, 0}, got); d != "" {
			t.Errorf("rates that were seen once (-want +got):\n%s", d)
		}
		_, stream := rec.hub.subscribe(rec.overview)
		time.Sleep(20 * time.Second)
		rec.mu.RLock()
		if rec.passes < 7+9 {
			t.Errorf("%d passes in 20 seconds with a stream", rec.passes-7)
		}
		rec.mu.RUnlock()
		rec.hub.unsubscribe(stream)
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestTimelineIsBoundedByService(t *testing.T) {
	c := DefaultRecorderConfig(shop())
	c.Events, c.ServiceEvents = 5, 2
	rec := NewRecorder(c)
	rec.readStatus(start, true)
	for i := range 7 {
		rec.happened([]plan.Event{{Kind: "health", Service: "shop/web:http", Message: fmt.Sprint(i)}})
	}
	rec.happened([]plan.Event{{Kind: "health", Service: "shop/gone", Message: "removed"}})
	rec.readStatus(start.Add(time.Second), false)
	rec.readStatus(start.Add(2*time.Second), false)
	for _, tt := range []struct {
		key  string
		n    int
		want []string
	}{
		{"", 10, []string{"removed", "6", "5", "4", "3"}},
		{"", 2, []string{"removed", "6"}},
		{"shop/web:http", 10, []string{"6", "5"}},
		{"shop/web", 10, []string{"6", "5", "4", "3"}}, // all its ports, of those there are over all
		{"shop/gone", 10, []string{"removed"}},         // its record has gone with it
		{"shop/none", 10, []string{}},
	} {
		got := []string{}
		for _, e := range rec.Timeline(tt.key, tt.n) {
			got = append(got, e.Message)
		}
		if d := cmp.Diff(tt.want, got); d != "" {
			t.Errorf("%q, %d (-want +got):\n%s", tt.key, tt.n, d)
		}
	}
	if len(rec.byKey) != 3 {
		t.Errorf("%d records are kept, want those of the 3 services there are", len(rec.byKey))
	}
}

func TestTimelineOfAllPortsHasWhatOthersPushedOut(t *testing.T) {
	src := shop()
	c := DefaultRecorderConfig(src)
	c.Events = 2
	rec := NewRecorder(c)
	rec.readStatus(start, true)
	for i, key := range []string{"shop/web:http", "shop/web:https", "shop/web:http", "shop/cart", "shop/webmail"} {
		rec.happened([]plan.Event{{Time: start.Add(time.Duration(i) * time.Second), Kind: "health", Service: key, Message: fmt.Sprint(i)}})
	}
	got := []string{}
	for _, e := range rec.Timeline("shop/web", 2) {
		got = append(got, e.Message)
	}
	if d := cmp.Diff([]string{"2", "1"}, got); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
}

// TestHealthHistory: the history of an endpoint's health is what events said of it, and
// its present health.
func TestHealthHistory(t *testing.T) {
	src := shop()
	src.change(func(st *plan.Status) { st.Services[0].Endpoints[0].Since = start })
	rec := NewRecorder(DefaultRecorderConfig(src))
	history := func() []EndpointHealth {
		t.Helper()
		rec.readStatus(time.Now(), true)
		page, ok := rec.Service("shop/cart")
		if !ok {
			t.Fatal("no such service")
		}
		return page.Health
	}
	if d := cmp.Diff([]HealthChange{{Time: start, Health: "up"}}, history()[0].Changes); d != "" {
		t.Errorf("without events (-want +got):\n%s", d)
	}
	at := func(minute int) time.Time { return start.Add(time.Duration(minute) * time.Minute) }
	event := func(minute int, message string) {
		rec.happened([]plan.Event{{Time: at(minute), Kind: "health", Service: "shop/cart", Message: message}})
	}
	event(0, "10.2.0.2:8080 is up")
	event(1, "10.2.0.2:8080 is down: connect: connection refused")
	event(1, "10.2.0.20:8080 is down")
	event(2, "10.2.0.2:8080 is up")
	want := []HealthChange{
		{Time: at(0), Health: "up"},
		{Time: at(1), Health: "down", Error: "connect: connection refused"},
		{Time: at(2), Health: "up"},
	}
	if d := cmp.Diff(want, history()[0].Changes); d != "" {
		t.Errorf("changes (-want +got):\n%s", d)
	}
	src.change(func(st *plan.Status) {
		e := &st.Services[0].Endpoints[0]
		e.Health, e.LastError, e.Since = "down", "time-out", at(3) // the event is still to come
	})
	want = append(want, HealthChange{Time: at(3), Health: "down", Error: "time-out"})
	if d := cmp.Diff(want, history()[0].Changes); d != "" {
		t.Errorf("status newer than events (-want +got):\n%s", d)
	}
	event(3, "10.2.0.2:8080 is down: time-out")
	if d := cmp.Diff(want, history()[0].Changes); d != "" {
		t.Errorf("the event came (-want +got):\n%s", d)
	}
	src.change(func(st *plan.Status) {
		e := &st.Services[0].Endpoints[0]
		e.Health, e.LastError, e.Since = "unknown", "", time.Time{} // it isn't checked, and was ejected
	})
	event(4, "10.2.0.2:8080 is up: ejected no longer, after 1m0s")
	want = append(want, HealthChange{Time: at(4), Health: "unknown"})
	if d := cmp.Diff(want, history()[0].Changes); d != "" {
		t.Errorf("ejected no longer (-want +got):\n%s", d)
	}
	if d := cmp.Diff([]HealthChange{{Health: "down"}}, history()[1].Changes); d != "" {
		t.Errorf("another endpoint (-want +got):\n%s", d)
	}
}

func TestCountdownDoesntJitter(t *testing.T) {
	s := plan.ServiceStatus{Name: "web", QualifiesInSeconds: 10}
	first := newRow(nil, &s, Rates{}, start)
	s.QualifiesInSeconds = 8.1
	if second := newRow(first, &s, Rates{}, start.Add(2*time.Second)); second != first {
		t.Errorf("the same countdown made another row: %v, %v", first.QualifiesAt, second.QualifiesAt)
	}
	s.QualifiesInSeconds = 20
	if third := newRow(first, &s, Rates{}, start.Add(2*time.Second)); !third.QualifiesAt.Equal(start.Add(22 * time.Second)) {
		t.Errorf("qualifies at: got %v, want in 20 s", third.QualifiesAt)
	}
}

func TestHistoryIsBounded(t *testing.T) {
	path := "/api/v1/history?service=" + strings.Repeat("a/b&service=", maxHistoryKeys)
	if w := get(api(shop()), path); w.Code != http.StatusBadRequest || !strings.Contains(w.Body.String(), "201 services") {
		t.Errorf("got %d %s, want 400 with the reason", w.Code, w.Body)
	}
}

func TestLiveStreamsAreBounded(t *testing.T) {
	s := newLiveStream(NewRecorder(DefaultRecorderConfig(shop())))
	for i := range maxStreams {
		s.slots.try(clientOf(netip.AddrPortFrom(netip.AddrFrom4([4]byte{198, 51, 100, byte(i)}), 80).String()))
	}
	if w := get(s, "/api/v1/live"); w.Code != http.StatusServiceUnavailable || !strings.Contains(w.Body.String(), "64 live streams are open") {
		t.Errorf("got %d %s, want 503 with the reason", w.Code, w.Body)
	}
}

// bigCluster is a proxy with n service ports of three endpoints.
func bigCluster(n int) *fakeSource {
	f := &fakeSource{}
	for i := range n {
		s := plan.ServiceStatus{
			Namespace: fmt.Sprintf("team-%d", i/500), Name: fmt.Sprintf("svc-%04d", i), Port: "http", Protocol: "TCP",
			Addresses: []netip.AddrPort{netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 96, byte(i >> 8), byte(i)}), 80)},
			DataPlane: plan.IPTables, State: plan.StateOffloaded, Reason: "every endpoint has been up for 10s",
		}
		for e := range 3 {
			s.Endpoints = append(s.Endpoints, plan.EndpointStatus{
				Address: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(e), byte(i >> 8), byte(i)}), 8080), Health: "up", Usable: true, Since: start,
			})
		}
		f.status.Services = append(f.status.Services, s)
	}
	return f
}

// BenchmarkReadStatus measures what reading 5,000 services costs beside the status itself,
// and what the recorder keeps of them: with one in twenty busy, which is a lot, and
// with all of them, which is the worst.
func BenchmarkReadStatus(b *testing.B) {
	for _, every := range []int{20, 1} {
		b.Run(fmt.Sprintf("busy=1in%d", every), func(b *testing.B) {
			src := bigCluster(many(5000))
			before := heap()
			rec := NewRecorder(DefaultRecorderConfig(src))
			at := start
			read := func() {
				for i := 0; i < len(src.status.Services); i += every {
					c := &src.status.Services[i].Connections
					*c = plan.Connections{Active: 1, Total: c.Total + 9, Failed: c.Failed + 1, Retried: c.Retried + 1, BytesIn: c.BytesIn + 1e3, BytesOut: c.BytesOut + 1e6}
				}
				at = at.Add(2 * time.Second)
				rec.readStatus(at, true)
			}
			for range rec.cfg.Samples {
				read()
			}
			b.ReportAllocs()
			for b.Loop() {
				read()
			}
			b.ReportMetric((float64(heap())-float64(before))/(1<<20), "MB-kept")
			runtime.KeepAlive(rec)
		})
	}
}

// BenchmarkOverview measures what the first of all streams that begin between two reads
// costs.
func BenchmarkOverview(b *testing.B) {
	rec := NewRecorder(DefaultRecorderConfig(bigCluster(many(5000))))
	rec.readStatus(start, true)
	b.ReportAllocs()
	for b.Loop() {
		rec.hub.whole = nil
		m, ch := rec.hub.subscribe(rec.overview)
		rec.hub.unsubscribe(ch)
		b.ReportMetric(float64(len(m))/1e3, "kB-sent")
	}
}

// many returns how many services a benchmark has that is to have n: with -short, which has it run once, fewer.
func many(n int) int {
	if testing.Short() {
		return n / 50
	}
	return n
}

func heap() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// A ring gives back the last samples it got, however many of them are zero.
func TestRing(t *testing.T) {
	const size = 40
	for _, share := range []float64{0, 0.02, 0.3, 1} {
		random := rand.New(rand.NewPCG(1, 2))
		var r ring
		var put []float64
		for at := range 4 * size {
			v := 0.0
			if random.Float64() < share {
				v = float64(1 + random.IntN(9))
			}
			if at >= 3*size {
				v = 0
			}
			r.put(at, size, v)
			put = append(put, v)
			n := min(len(put), size)
			if d := cmp.Diff(put[len(put)-n:], r.last(len(put), n)); d != "" {
				t.Fatalf("share %v, after %d samples (-want +got):\n%s", share, len(put), d)
			}
		}
		if r != nil {
			t.Errorf("share %v: samples that are all zero take memory", share)
		}
	}
}

// trafficSource is a shop that tells its traffic apart from its status.
type trafficSource struct {
	*fakeSource
	reads int
	plan  *plan.Plan
	keys  []string // of plan
}

func (g *trafficSource) traffic(last *plan.Plan) (*plan.Plan, func(each func(service.Key, plan.DataPlane, plan.Connections))) {
	g.reads++
	services := g.Status().Services
	var keys []string
	for i := range services {
		keys = append(keys, services[i].Title())
	}
	if !slices.Equal(keys, g.keys) {
		g.plan, g.keys = new(plan.Plan), keys
	}
	is := g.plan
	return is, func(each func(service.Key, plan.DataPlane, plan.Connections)) {
		for _, s := range services {
			if is != last || s.Connections != (plan.Connections{}) {
				each(service.Key{Namespace: s.Namespace, Name: s.Name, Port: s.Port}, s.DataPlane, s.Connections)
			}
		}
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
	c.Traffic = func(last *plan.Plan) (*plan.Plan, func(each func(service.Key, plan.DataPlane, plan.Connections))) {
		go func() {
			rec.refresh()
			close(asked)
		}()
		select {
		case <-asked: // the status is new enough
		case <-time.After(50 * time.Millisecond): // it waits
		}
		return g.traffic(last)
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

// TestIdleRecorderKeepsEvents: what has happened to a service port that carries nothing stays, while the others' traffic is
// sampled, and goes with it.
func TestIdleRecorderKeepsEvents(t *testing.T) {
	g := &trafficSource{fakeSource: shop()}
	g.change(func(st *plan.Status) { st.Services[0].Connections = plan.Connections{} })
	rec := g.recorder()
	rec.sample(start)
	rec.happened([]plan.Event{{Service: "shop/cart"}})
	at := start
	sample := func() int {
		at = at.Add(10 * time.Second)
		rec.sample(at)
		if rec.curve.until != at {
			t.Errorf("the curve has counted until %s, want %s", rec.curve.until, at)
		}
		if x := rec.byKey["shop/cart"]; x != nil {
			return len(x.events.events)
		}
		return 0
	}
	for i := range 5 {
		if n := sample(); n != 1 {
			t.Errorf("%d events after %d samples, want 1", n, i+1)
		}
	}
	g.change(func(st *plan.Status) { st.Services = st.Services[1:] })
	sample()
	if n := sample(); n != 0 {
		t.Errorf("%d events of a service that has gone", n)
	}
}

// BenchmarkIdleSample measures what 10,000 services cost while the recorder is idle, one in
// twenty of them busy.
func BenchmarkIdleSample(b *testing.B) {
	var keys []service.Key
	for i := range many(10_000) {
		keys = append(keys, service.Key{Namespace: "team", Name: netip.AddrFrom4([4]byte{0, 0, byte(i >> 8), byte(i)}).String()})
	}
	n := uint64(0)
	c := DefaultRecorderConfig(&fakeSource{})
	c.Subscribe = func() (<-chan plan.Event, func()) { return nil, nil }
	p := &plan.Plan{}
	c.Traffic = func(last *plan.Plan) (*plan.Plan, func(each func(service.Key, plan.DataPlane, plan.Connections))) {
		n++
		return p, func(each func(service.Key, plan.DataPlane, plan.Connections)) {
			for i, k := range keys {
				if i%20 == 0 {
					each(k, plan.Userspace, plan.Connections{Active: 1, Total: n, BytesIn: n, BytesOut: n})
				} else if last != p {
					each(k, plan.Userspace, plan.Connections{})
				}
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
