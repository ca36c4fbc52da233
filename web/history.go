package web

import (
	"math"
	"slices"
	"strings"
	"time"

	"kproxy.dev/kproxy/plan"
)

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

// eventRing keeps the last events. The zero value keeps none.
type eventRing struct {
	events []plan.Event
	next   int
	limit  int
}

func (r *eventRing) add(e plan.Event) {
	if len(r.events) < r.limit {
		r.events = append(r.events, e)
		return
	}
	if r.limit > 0 {
		r.events[r.next] = e
		r.next = (r.next + 1) % r.limit
	}
}

// newest returns up to n events, newest first.
func (r *eventRing) newest(n int) []plan.Event {
	size := len(r.events)
	out := make([]plan.Event, 0, min(n, size))
	for i := range min(n, size) {
		out = append(out, r.events[(r.next-1-i+2*size)%size])
	}
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
func healthOf(e *plan.EndpointStatus, events *eventRing) EndpointHealth {
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
		if len(changes) == 1 && health == e.Health {
			changes[0] = change // the event of what the status says
		} else {
			changes = append([]HealthChange{change}, changes...)
		}
	}
	return EndpointHealth{Address: address, Changes: changes}
}
