package web

import (
	"context"
	"math"
	"slices"
	"strings"
	"sync"
	"time"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// RecorderConfig says what a Recorder reads and how much it keeps.
type RecorderConfig struct {
	Source Source
	// Subscribe is where events come from.
	Subscribe func() (<-chan plan.Event, func())
	// Node returns the figures that the status lacks; nil leaves them out.
	Node func() plan.NodeFigures
	// Traffic reads counters, and returns the plan and what calls each for its service ports with their data planes and
	// counters: for every one, or, if the plan is still the last, for those that have ever carried anything. It
	// costs much less than a status, so the Recorder reads nothing else while it is idle; with nil it
	// never is.
	Traffic func(last *plan.Plan) (is *plan.Plan, some func(each func(service.Key, plan.DataPlane, plan.Connections)))
	// Interval is the time between two samples while streams are open, IdleInterval
	// while none is.
	Interval, IdleInterval time.Duration
	// IdleAfter is how long after the last stream or request the Recorder is idle.
	IdleAfter time.Duration
	// Samples is how many the history holds.
	Samples int
	// Events is how many the timeline holds, ServiceEvents how many more it holds of
	// each service port.
	Events, ServiceEvents int
}

// DefaultRecorderConfig samples src every two seconds, every ten while no stream is
// open, and keeps five minutes. Reading the status of 5,000 services of three endpoints
// costs about 40 ms of CPU and 20 MB of garbage, so it is read only until a minute after
// the last request.
func DefaultRecorderConfig(src Source) RecorderConfig {
	return RecorderConfig{
		Source: src, Subscribe: src.Subscribe, Interval: 2 * time.Second, IdleInterval: 10 * time.Second, IdleAfter: time.Minute,
		Samples: 150, Events: 2000, ServiceEvents: 24,
	}
}

// soonest is the least time between two reads of the status when events hasten the next.
const soonest = 500 * time.Millisecond

// Recorder samples the status and keeps what the dashboard shows: the present state,
// minutes of rates, and what happened. It finds out and encodes what has changed once
// for all live streams. While idle it keeps the history of what carries traffic, and
// events, but not the present state. Its methods are safe for concurrent use.
type Recorder struct {
	cfg RecorderConfig
	hub hub

	// reading is held from deciding what to read until that is stored: a read never
	// undoes a later one, nor drops the status that a request has just asked for.
	reading sync.Mutex

	mu       sync.RWMutex // reads of the status write, requests read; taken after the hub's
	status   plan.Status  // without services while idle
	services []*record    // in the order of status.Services
	byKey    map[string]*record
	timeline recentEvents
	passes   int       // how often the services were read
	read     time.Time // when the status was last; zero while idle
	kept     time.Time // when the history last got a sample
	samples  int       // how many it ever got
	curve    curve
	asked    time.Time  // when a stream was last open, or a request came
	sampled  *plan.Plan // by whose service ports there are records; nil while there are others
}

// record holds what is kept of one service port.
type record struct {
	key     string
	row     *Row             // nil while idle, and until the status has the service port
	at      int              // in status.Services
	seen    int              // the pass that last found it
	counted plan.Connections // when the history last got a sample
	begun   bool             // counted is a reading
	rings   [seriesCount]ring
	events  recentEvents
}

// NewRecorder returns a Recorder that knows nothing before Run.
func NewRecorder(c RecorderConfig) *Recorder {
	return &Recorder{cfg: c, hub: hub{watched: make(chan struct{}, 1)}, byKey: map[string]*record{}, timeline: recentEvents{limit: c.Events}}
}

// Run records until ctx is done.
func (r *Recorder) Run(ctx context.Context) error {
	events, cancel := r.cfg.Subscribe()
	defer cancel()
	r.sample(time.Now())
	next := time.NewTimer(r.wait())
	defer next.Stop()
	var soon <-chan time.Time // nil while no event has hastened the next read
	for {
		select {
		case <-ctx.Done():
			return nil
		case e, open := <-events:
			if !open {
				events = nil // the source has stopped; what it left is still shown
				continue
			}
			batch := []plan.Event{e}
			for range len(events) { // nobody else takes from it
				batch = append(batch, <-events)
			}
			r.happened(batch)
			if soon == nil && r.hub.watching() { // show the outcome before the interval ends
				soon = time.After(max(soonest-r.age(), 0))
			}
		case <-soon:
			soon = nil
			r.reading.Lock()
			r.readStatus(time.Now(), false)
			r.reading.Unlock()
		case <-r.hub.watched: // the first stream in a while
			next.Reset(r.wait())
		case <-next.C:
			r.sample(time.Now())
			next.Reset(r.wait())
		}
	}
}

// wait returns how long the next sample may wait.
func (r *Recorder) wait() time.Duration {
	every := r.cfg.IdleInterval
	if r.hub.watching() {
		every = r.cfg.Interval
	}
	r.mu.RLock()
	defer r.mu.RUnlock()
	return max(every-time.Since(r.kept), 0)
}

// age returns how old the status is.
func (r *Recorder) age() time.Duration {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return time.Since(r.read)
}

// refresh reads the status for a request, unless the last read is newer than an interval.
func (r *Recorder) refresh() {
	now := time.Now()
	r.mu.Lock()
	r.asked = now
	r.mu.Unlock()
	r.reading.Lock() // before its age is known: a read of the traffic in progress drops the status
	defer r.reading.Unlock()
	if r.age() > r.cfg.Interval {
		r.readStatus(now, false)
	}
}

// happened keeps events and passes them on.
func (r *Recorder) happened(events []plan.Event) {
	r.mu.Lock()
	for _, e := range events {
		r.timeline.add(e)
		if e.Service == "" {
			continue
		}
		rec := r.byKey[e.Service]
		if rec == nil { // the next pass finds its service port, or drops it
			rec, r.sampled = r.newRecord(e.Service), nil
		}
		rec.events.add(e)
	}
	r.mu.Unlock()
	r.hub.publishEvents(events)
}

// sample adds a sample of now to the history.
func (r *Recorder) sample(now time.Time) {
	r.reading.Lock()
	defer r.reading.Unlock()
	if r.cfg.Traffic != nil && r.isIdle(now) {
		r.readTraffic(now)
	} else {
		r.readStatus(now, true)
	}
}

func (r *Recorder) isIdle(now time.Time) bool {
	watched := r.hub.watching()
	r.mu.Lock()
	defer r.mu.Unlock()
	if watched {
		r.asked = now
	}
	return r.asked.IsZero() || now.Sub(r.asked) >= r.cfg.IdleAfter
}

// readTraffic adds a sample of the counters alone, and drops the status. The caller
// holds reading.
func (r *Recorder) readTraffic(now time.Time) {
	p, some := r.cfg.Traffic(r.sampled) // the kernel's counters may take a while: requests and events don't wait for them
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.read.IsZero() {
		r.read, r.status.Services, r.services = time.Time{}, nil, nil
		for _, rec := range r.byKey {
			rec.row = nil
		}
	}
	r.passes++
	k := r.sampleAt(now)
	var key []byte
	some(func(port service.Key, plane plan.DataPlane, c plan.Connections) {
		key = port.Append(key[:0])
		rec := r.byKey[string(key)]
		if c == (plan.Connections{}) && (rec == nil || rec.isEmpty()) {
			delete(r.byKey, string(key))
			return
		}
		if rec == nil {
			rec = r.newRecord(string(key))
		}
		rec.seen = r.passes
		rec.begun = rec.begun || r.samples > 0 // it had no traffic at the last sample
		r.keepCounts(rec, plane, c, k)
	})
	r.keptAt(now, k)
	if r.sampled == nil || p != r.sampled {
		r.sampled = p
		r.forget()
	}
}

// isEmpty reports whether rec holds nothing that a new record lacks.
func (rec *record) isEmpty() bool {
	has := func(r ring) bool { return len(r) > 0 }
	return len(rec.events.events) == 0 && rec.counted == plan.Connections{} && !slices.ContainsFunc(rec.rings[:], has)
}

// readStatus reads the status and sends the streams what has changed. With keep, the
// history gets a sample. The caller holds reading.
func (r *Recorder) readStatus(now time.Time, keep bool) {
	st := r.cfg.Source.Status()
	r.mu.Lock()
	r.passes++
	r.read, r.sampled = now, nil
	var k sampling
	if keep {
		k = r.sampleAt(now)
	}
	d := delta{Time: now.UTC(), Alive: st.Alive, Exhausted: listed(st.Exhausted), Changed: []*Row{}}
	services := make([]*record, len(st.Services))
	for i := range st.Services {
		s := &st.Services[i]
		key := s.Title()
		rec := r.byKey[key]
		if rec == nil {
			rec = r.newRecord(key)
		}
		services[i] = rec
		rec.at, rec.seen = i, r.passes
		was := rec.row
		rec.row = newRow(was, s, r.keepCounts(rec, s.DataPlane, s.Connections, k), now)
		if rec.row != was {
			d.Changed = append(d.Changed, rec.row)
		}
	}
	d.Removed, d.Verdict = r.forget(), verdict(services)
	changed := len(d.Changed) > 0 || len(d.Removed) > 0 || st.Health() != r.status.Health()
	r.status, r.services = st, services
	if keep {
		r.keptAt(now, k)
	}
	r.mu.Unlock()
	r.hub.publishRows(&d, changed)
	if keep {
		r.hub.publishNode(r.Node)
	}
}

func (r *Recorder) newRecord(key string) *record {
	rec := &record{key: strings.Clone(key), seen: r.passes, events: recentEvents{limit: r.cfg.ServiceEvents}}
	r.byKey[rec.key] = rec
	return rec
}

// sampling says for how many intervals a sample of the history stands: for several if it
// comes several after the last.
type sampling struct {
	intervals int // 0: it is none of the history's
	took      time.Duration
}

func (r *Recorder) sampleAt(now time.Time) sampling {
	s := sampling{intervals: 1}
	if !r.kept.IsZero() {
		s.took = now.Sub(r.kept)
		s.intervals = min(max(int((s.took+r.cfg.Interval/2)/r.cfg.Interval), 1), r.cfg.Samples)
	}
	return s
}

// keptAt notes that the history has a sample of now.
func (r *Recorder) keptAt(now time.Time, s sampling) {
	r.kept, r.curve.until = now, now
	r.samples += s.intervals
}

// keepCounts adds to the history and returns the rates to show. The first reading of a
// service port is where its rates begin.
func (r *Recorder) keepCounts(rec *record, plane plan.DataPlane, c plan.Connections, s sampling) Rates {
	if !rec.begun {
		rec.counted, rec.begun = c, true
	}
	if s.intervals == 0 {
		if rec.row == nil {
			return Rates{}
		}
		return rec.row.Rates
	}
	now := rates(rec.counted, c, s.took)
	r.curve.add(r.kept, r.kept.Add(s.took), plane, rec.counted, c)
	rec.counted = c
	for i, v := range [seriesCount]float64{
		seriesActive: float64(c.Active), seriesConnections: now.Connections,
		seriesBytesIn: now.BytesIn, seriesBytesOut: now.BytesOut,
		seriesFailed: now.Failed, seriesRetried: now.Retried,
	} {
		for interval := range s.intervals {
			rec.rings[i].put(r.samples+interval, r.cfg.Samples, v)
		}
	}
	return now
}

// forget drops the records of the service ports that this pass didn't find, and returns
// the keys of those that had a row. A record that an event made waits for one more pass:
// the service port may be newer than this pass.
func (r *Recorder) forget() []string {
	removed := []string{}
	for key, rec := range r.byKey {
		if rec.seen == r.passes {
			continue
		}
		if rec.row == nil && rec.seen == r.passes-1 {
			r.sampled = nil
			continue
		}
		delete(r.byKey, key)
		if rec.row != nil {
			removed = append(removed, key)
		}
	}
	return removed
}

// The figures that history is kept of.
const (
	seriesActive = iota
	seriesConnections
	seriesBytesIn
	seriesBytesOut
	seriesFailed
	seriesRetried
	seriesCount
)

// ring is the last samples of one figure, in order. It holds only those that aren't
// zero: most services are idle most of the time, and hardly any ever fails.
type ring []point

type point struct {
	at    int32 // the number of the sample
	value float32
}

// put adds the sample number at and drops those that are size samples older.
func (r *ring) put(at, size int, v float64) {
	old := 0
	for old < len(*r) && int((*r)[old].at) <= at-size {
		old++
	}
	if *r = slices.Delete(*r, 0, old); v != 0 {
		*r = append(*r, point{int32(at), float32(v)})
	}
	if len(*r) == 0 {
		*r = nil
	}
}

// last returns the n samples before the number next, oldest first.
func (r ring) last(next, n int) []float64 {
	out := make([]float64, n)
	for _, p := range r {
		if i := int(p.at) - (next - n); i >= 0 {
			out[i] = round2(float64(p.value))
		}
	}
	return out
}

// Series is the history of one service port: rates per second, and what was
// active; oldest first.
type Series struct {
	Active      []float64 `json:"active"`
	Connections []float64 `json:"connections"`
	BytesIn     []float64 `json:"bytesIn"`
	BytesOut    []float64 `json:"bytesOut"`
	Failed      []float64 `json:"failed"`
	Retried     []float64 `json:"retried"`
}

// rates returns the rates per second between two readings. A counter that went
// back belongs to a new service port, whose rate isn't known yet.
func rates(was, is plan.Connections, took time.Duration) Rates {
	per := func(was, is uint64) float64 {
		if is <= was || took <= 0 {
			return 0
		}
		return round2(float64(is-was) / took.Seconds())
	}
	return Rates{
		Connections: per(was.Attempts(), is.Attempts()), BytesIn: per(was.BytesIn, is.BytesIn), BytesOut: per(was.BytesOut, is.BytesOut),
		Failed: per(was.Failed, is.Failed), Retried: per(was.Retried, is.Retried),
	}
}

// round2 keeps the two decimals that the dashboard shows, so that smaller changes
// aren't sent.
func round2(v float64) float64 { return math.Round(v*100) / 100 }

// recentEvents keeps the last events. The zero value keeps none.
type recentEvents struct {
	events []plan.Event // oldest first
	limit  int
}

func (r *recentEvents) add(e plan.Event) {
	r.events = append(r.events, e)
	r.events = r.events[max(0, len(r.events)-r.limit):]
}

// newest returns up to n events, newest first.
func (r *recentEvents) newest(n int) []plan.Event {
	out := append([]plan.Event{}, r.events[max(0, len(r.events)-n):]...) // which JSON has as a list, too
	slices.Reverse(out)
	return out
}

// HealthChange is one change of an endpoint's health.
type HealthChange struct {
	Time   time.Time `json:"time"`
	Health string    `json:"health"`
	Error  string    `json:"error"`
}

// EndpointHealth is the history of one endpoint's health, oldest first.
type EndpointHealth struct {
	Address string         `json:"address"`
	Changes []HealthChange `json:"changes"`
}

// healthOf returns the history of an endpoint's health: what the events of its service
// port say, "ADDRESS is up" or "ADDRESS is down: ERROR", and its present health.
func healthOf(e *plan.EndpointStatus, events *recentEvents) EndpointHealth {
	address := e.Address.String()
	now := HealthChange{Time: e.Since, Health: e.Health}
	if e.Health == "down" {
		now.Error = e.LastError
	}
	changes := []HealthChange{now}
	for _, event := range events.newest(events.limit) { // in front: oldest first
		what, ok := strings.CutPrefix(event.Message, address+" is ")
		if !ok || event.Kind != "health" {
			continue
		}
		health, problem, _ := strings.Cut(what, ": ")
		change := HealthChange{event.Time, health, problem}
		if health == "up" && problem != "" && e.Since.IsZero() { // ejected no longer, and not checked
			change = HealthChange{event.Time, e.Health, ""}
		}
		if len(changes) == 1 && change.Health == e.Health {
			changes[0] = change // the event of what the status says
		} else {
			changes = append([]HealthChange{change}, changes...)
		}
	}
	return EndpointHealth{Address: address, Changes: changes}
}
