package web

import (
	"time"

	"kproxy.dev/kproxy/plan"
)

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

// maxHealthChanges bounds what is kept of one endpoint.
const maxHealthChanges = 10

// healthLog is the last changes of one endpoint, oldest first.
type healthLog []HealthChange

// lacks reports whether e's health has changed since the last entry.
func (l healthLog) lacks(e *plan.EndpointStatus) bool {
	return len(l) == 0 || l[len(l)-1].Health != e.Health || e.Since.After(l[len(l)-1].Time)
}

// add returns l with e's present health.
func (l healthLog) add(e *plan.EndpointStatus, now time.Time) healthLog {
	change := HealthChange{Time: e.Since, Health: e.Health, Error: e.LastError}
	if change.Time.IsZero() {
		change.Time = now
	}
	if change.Health == "up" {
		change.Error = "" // what was wrong before, the entry before tells
	}
	if len(l) == maxHealthChanges {
		l = l[:copy(l, l[1:])]
	}
	return append(l, change)
}
