package web

import (
	"strings"
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
