package web

import (
	"cmp"
	"runtime"
	"runtime/metrics"
	"slices"
	"strings"
	"time"

	"kproxy.dev/kproxy/plan"
)

// overview returns everything, as of the last read.
func (r *Recorder) overview() overview {
	r.mu.RLock()
	defer r.mu.RUnlock()
	o := overview{
		Time: time.Now().UTC(), nodeState: stateOf(&r.status), IntervalSeconds: r.cfg.Interval.Seconds(), Sync: r.status.Sync, Services: make([]*Row, len(r.services)),
	}
	for i, rec := range r.services {
		o.Services[i] = rec.row
	}
	o.Verdict = verdict(r.services)
	return o
}

// verdict counts service ports by condition.
func verdict(services []*record) []plan.Tally {
	counts := map[plan.Condition]int{}
	for _, rec := range services {
		counts[rec.row.Condition]++
	}
	return plan.Summarize(counts)
}

// History is the JSON of /api/v1/history.
type History struct {
	IntervalSeconds float64           `json:"intervalSeconds"`
	End             time.Time         `json:"end"` // of the last sample
	Services        map[string]Series `json:"services"`
}

// History returns the samples there are of some service ports. What there is no
// service port of is left out.
func (r *Recorder) History(keys []string) History {
	r.mu.RLock()
	defer r.mu.RUnlock()
	h := History{IntervalSeconds: r.cfg.Interval.Seconds(), End: r.kept.UTC(), Services: map[string]Series{}}
	n := min(r.samples, r.cfg.Samples)
	for _, key := range keys {
		rec := r.byKey[key]
		if rec == nil || rec.row == nil {
			continue
		}
		of := func(series int) []float64 { return rec.rings[series].last(r.samples, n) }
		h.Services[key] = Series{
			Active: of(seriesActive), Connections: of(seriesConnections), BytesIn: of(seriesBytesIn),
			BytesOut: of(seriesBytesOut), Failed: of(seriesFailed), Retried: of(seriesRetried),
		}
	}
	return h
}

// Timeline returns up to n events, newest first: those of a service port
// (namespace/name:port), of all ports of a service (namespace/name), or of
// everything if key is empty.
func (r *Recorder) Timeline(key string, n int) []plan.Event {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if key == "" {
		return r.timeline.newest(n)
	}
	if rec := r.byKey[key]; rec != nil {
		return rec.events.newest(n)
	}
	out, seen := []plan.Event{}, map[plan.Event]bool{}
	for _, e := range r.timeline.newest(len(r.timeline.events)) {
		if e.Service == key || isPortOf(e.Service, key) {
			out, seen[e] = append(out, e), true
		}
	}
	for k, rec := range r.byKey { // has some that others' have pushed out of the timeline
		if !isPortOf(k, key) {
			continue
		}
		for _, e := range rec.events.newest(rec.events.limit) {
			if !seen[e] {
				out = append(out, e)
			}
		}
	}
	slices.SortStableFunc(out, func(a, b plan.Event) int { return cmp.Or(b.Time.Compare(a.Time), cmp.Compare(a.Service, b.Service)) })
	return out[:min(n, len(out))]
}

// ServicePage is the JSON of /api/v1/service.
type ServicePage struct {
	Service plan.ServiceStatus `json:"service"`
	Row     *Row               `json:"row"`
	Health  []EndpointHealth   `json:"health"` // in the order of the service's endpoints
}

// Service returns what is known of a service port, as of the last read.
// namespace/name will do for a service of one port.
func (r *Recorder) Service(key string) (ServicePage, bool) {
	r.mu.RLock()
	defer r.mu.RUnlock()
	rec := r.byKey[key]
	if rec == nil || rec.row == nil {
		if rec = r.onlyPortOf(key); rec == nil {
			return ServicePage{}, false
		}
	}
	page := ServicePage{Service: r.status.Services[rec.at], Row: rec.row, Health: []EndpointHealth{}}
	for i := range page.Service.Endpoints {
		page.Health = append(page.Health, healthOf(&page.Service.Endpoints[i], &rec.events))
	}
	return page, true
}

func (r *Recorder) onlyPortOf(name string) *record {
	namespace, name, ok := strings.Cut(name, "/")
	if !ok {
		return nil
	}
	var found *record
	for _, rec := range r.services {
		if rec.row.Namespace == namespace && rec.row.Name == name {
			if found != nil {
				return nil
			}
			found = rec
		}
	}
	return found
}

// listed makes an empty list of none, so that JSON has one.
func listed[T any](list []T) []T {
	if list == nil {
		return []T{}
	}
	return list
}

// NodeFigures is the JSON of /api/v1/node.
type NodeFigures struct {
	plan.NodeFigures
	nodeState
	GoVersion     string            `json:"goVersion"`
	UptimeSeconds int64             `json:"uptimeSeconds"`
	Capabilities  []plan.Capability `json:"capabilities"`
	Sync          NodeSync          `json:"sync"`
	MemoryBytes   uint64            `json:"memoryBytes"`
	Goroutines    int               `json:"goroutines"`
}

// NodeSync is the last pass of the reconcile loop, and how long some before took.
type NodeSync struct {
	plan.SyncStatus
	Recent []plan.SyncTime `json:"recent"` // oldest first
}

// Node returns how the node is: its status as of the last read, the rest as of
// now.
func (r *Recorder) Node() NodeFigures {
	r.mu.RLock()
	s := r.status
	r.mu.RUnlock()
	n := NodeFigures{
		nodeState: stateOf(&s), GoVersion: runtime.Version(), UptimeSeconds: s.UptimeSeconds, Capabilities: listed(s.Capabilities), Sync: NodeSync{SyncStatus: s.Sync},
		MemoryBytes: memoryInUse(), Goroutines: runtime.NumGoroutine(),
	}
	if r.cfg.Node != nil {
		n.NodeFigures = r.cfg.Node()
	}
	if n.Rules == nil {
		n.Rules = map[string]map[string]int{}
	}
	n.Sync.Recent = listed(n.Syncs)
	return n
}

// memoryInUse returns how many bytes of the system's memory the Go runtime holds, without what
// it has given back. Unlike runtime.ReadMemStats it doesn't stop the world.
func memoryInUse() uint64 {
	s := []metrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
	metrics.Read(s)
	if s[0].Value.Kind() != metrics.KindUint64 || s[1].Value.Kind() != metrics.KindUint64 {
		return 0
	}
	return s[0].Value.Uint64() - s[1].Value.Uint64()
}
