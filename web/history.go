package web

import (
	"encoding/json"
	"slices"
	"time"

	"kproxy.dev/kproxy/plan"
)

// history holds what a Recorder keeps of the past, for the Recorder of a kproxy that takes over. A release that keeps
// something else gives it another version.
type history struct {
	Version  int           `json:"version"`
	Interval time.Duration `json:"interval"` // between two samples
	Samples  int           `json:"samples"`  // how many there ever were
	Kept     time.Time     `json:"kept"`     // the last
	Timeline []plan.Event  `json:"timeline"` // newest first
	Services []past        `json:"services"`
}

// past is a service port's.
type past struct {
	Key     string                 `json:"key"`
	Counted plan.Connections       `json:"counted"`
	At      [seriesCount][]int32   `json:"at"` // the numbers of the samples that aren't zero
	Values  [seriesCount][]float32 `json:"values"`
	Events  []plan.Event           `json:"events"` // newest first
}

const historyVersion = 1

// Save returns what the Recorder keeps of the past.
func (r *Recorder) Save() []byte {
	r.mu.RLock()
	defer r.mu.RUnlock()
	h := history{Version: historyVersion, Interval: r.cfg.Interval, Samples: r.samples, Kept: r.kept, Timeline: r.timeline.newest(r.timeline.limit)}
	for _, rec := range r.byKey {
		p := past{Key: rec.key, Counted: rec.counted, Events: rec.events.newest(rec.events.limit)}
		for i, ring := range rec.rings {
			for _, x := range ring {
				p.At[i], p.Values[i] = append(p.At[i], x.at), append(p.Values[i], x.value)
			}
		}
		h.Services = append(h.Services, p)
	}
	b, err := json.Marshal(h)
	if err != nil {
		return nil // a value that isn't a number: there is none
	}
	return b
}

// Load begins with what another Recorder has saved, if this one knows its form. Call it before Run.
func (r *Recorder) Load(saved []byte) {
	var h history
	if json.Unmarshal(saved, &h) != nil || h.Version != historyVersion || h.Interval != r.cfg.Interval {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.samples, r.kept = h.Samples, h.Kept
	r.timeline.load(h.Timeline)
	for _, p := range h.Services {
		rec := r.newRecord(p.Key)
		rec.seen, rec.counted, rec.begun = r.passes+1, p.Counted, true // the first pass may come before the first plan
		rec.events.load(p.Events)
		for i := range rec.rings {
			for j, at := range p.At[i][:min(len(p.At[i]), len(p.Values[i]))] {
				rec.rings[i] = append(rec.rings[i], point{at, p.Values[i][j]})
			}
		}
	}
}

// load adds events, newest first.
func (r *recentEvents) load(events []plan.Event) {
	for _, e := range slices.Backward(events) {
		r.add(e)
	}
}
