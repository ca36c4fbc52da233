package web

import (
	"context"
	"net/netip"
	"sync"
	"time"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// RecorderConfig says what a Recorder looks at and how much it keeps.
type RecorderConfig struct {
	Source Source
	// Subscribe is where events come from; nil means Source.Subscribe.
	Subscribe func() (<-chan plan.Event, func())
	// Node tells what the status doesn't; nil leaves it out.
	Node func() plan.NodeFigures
	// Glance is a look that costs next to nothing: it calls traffic for every service
	// port that has ever carried anything, and returns the present plan, nil before
	// the first. It is all that is done while the Recorder dozes; nil lets it never doze.
	Glance func(traffic func(service.Key, plan.Connections)) *plan.Plan
	// Interval is the time between two samples, and between two looks while
	// somebody watches; IdleInterval between two looks while nobody does.
	Interval, IdleInterval time.Duration
	// Awake is how long after the last stream or request the Recorder dozes off.
	Awake time.Duration
	// Samples is how many the history holds.
	Samples int
	// Events is how many the timeline holds, ServiceEvents how many of these it
	// holds of a service port, however many others have.
	Events, ServiceEvents int
}

// DefaultRecorderConfig looks at src every two seconds, every ten while nobody
// watches, and keeps five minutes. A look at 5,000 services of three endpoints
// costs about 40 ms of CPU and 20 MB of garbage, most of them in the status: so it
// only glances from a minute after somebody has watched.
func DefaultRecorderConfig(src Source) RecorderConfig {
	return RecorderConfig{
		Source: src, Interval: 2 * time.Second, IdleInterval: 10 * time.Second, Awake: time.Minute,
		Samples: 150, Events: 2000, ServiceEvents: 24,
	}
}

// soonest is how quickly a look may follow another when something happens while
// somebody watches. Without, nobody has to know before the next look.
const soonest = 500 * time.Millisecond

// Recorder looks at the status at an interval and keeps what the dashboard
// shows: the present state, a few minutes of rates, and what happened. It tells
// every live stream what has changed, which is found out and encoded once for
// all of them. While nobody watches it dozes: it keeps the history of what carries
// traffic, and what happens, but nothing of the present state, which is much of what
// many services need. Its methods are safe for concurrent use.
type Recorder struct {
	cfg RecorderConfig
	hub hub

	looking sync.Mutex // held for a look: one at a time, so that none undoes a later one

	mu       sync.RWMutex // looks write, requests read; nobody who holds it takes the hub's
	status   plan.Status
	services []*record // in the order of status.Services
	byKey    map[string]*record
	timeline eventRing
	looks    int       // how often the status was read
	looked   time.Time // when it was last
	kept     time.Time // when the history last got a sample
	samples  int       // how many it ever got
	asked    time.Time // when somebody last wanted to know
	dozing   bool      // only glances since
	glanced  *plan.Plan
	loose    bool // there may be records of what no plan has
}

// record is what is kept of one service port.
type record struct {
	key     string
	row     *Row
	at      int              // in status.Services
	seen    int              // the look that last found it
	carried int              // the glance that last found traffic
	counted plan.Connections // when the history last got a sample
	begun   bool             // counted is a reading
	rings   [seriesCount]ring
	events  eventRing
	health  map[netip.AddrPort]healthLog
}

// NewRecorder returns a Recorder that knows nothing before Run.
func NewRecorder(c RecorderConfig) *Recorder {
	if c.Subscribe == nil {
		c.Subscribe = c.Source.Subscribe
	}
	return &Recorder{cfg: c, hub: hub{watched: make(chan struct{}, 1)}, byKey: map[string]*record{}, timeline: eventRing{limit: c.Events}}
}

// Run records until ctx is done.
func (r *Recorder) Run(ctx context.Context) error {
	events, cancel := r.cfg.Subscribe()
	defer cancel()
	r.sample(time.Now())
	next := time.NewTimer(r.wait())
	defer next.Stop()
	soon := time.NewTimer(0)
	soon.Stop()
	due := false // soon is set
	for {
		select {
		case <-ctx.Done():
			return nil
		case e, open := <-events:
			if !open {
				events = nil // the source has stopped; what it left is still shown
				continue
			}
			r.happened(drainEvents(events, e))
			if !due && r.hub.anybody() { // show what came of it without waiting for the interval's end
				due = true
				soon.Reset(max(soonest-r.age(), 0))
			}
		case <-soon.C:
			due = false
			r.look(time.Now(), false)
		case <-r.hub.watched: // the first one since a while
			next.Reset(r.wait())
		case <-next.C:
			r.sample(time.Now())
			next.Reset(r.wait())
		}
	}
}

// wait is how long the next sample may wait.
func (r *Recorder) wait() time.Duration {
	every := r.cfg.IdleInterval
	if r.hub.anybody() {
		every = r.cfg.Interval
	}
	r.mu.RLock()
	defer r.mu.RUnlock()
	return max(every-time.Since(r.kept), 0)
}

// age is how old what is known is.
func (r *Recorder) age() time.Duration {
	r.mu.RLock()
	defer r.mu.RUnlock()
	return time.Since(r.looked)
}

// refresh looks if what is known is older than an interval: while nobody
// watched, nothing had to be as new as that.
func (r *Recorder) refresh() {
	now := time.Now()
	r.mu.Lock()
	r.asked = now
	r.mu.Unlock()
	if r.age() > r.cfg.Interval {
		r.look(now, false)
	}
}

// drainEvents returns first and whatever else waits.
func drainEvents(events <-chan plan.Event, first plan.Event) []plan.Event {
	out := []plan.Event{first}
	for {
		select {
		case e, open := <-events:
			if !open {
				return out // the next receive tells
			}
			out = append(out, e)
		default:
			return out
		}
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
		if rec == nil { // it comes with the next sample, or it has gone
			rec = r.newRecord(e.Service)
			r.loose = true
		}
		rec.events.add(e)
	}
	r.mu.Unlock()
	r.hub.publishEvents(events)
}
