package agent

import (
	"fmt"
	"strings"
	"sync"
	"time"

	"kproxy.dev/kproxy/plan"
)

// events hands out what people would want to see to any number of
// subscribers. One that doesn't keep up loses events; nothing waits for it.
type events struct {
	mu     sync.Mutex // subscribers come and go while events are published
	subs   map[chan plan.Event]bool
	closed bool
}

// eventBuffer is how far a subscriber may fall behind, deepEventBuffer one that
// keeps events for others: at an Event's 88 bytes, a bit more than a megabyte.
const (
	eventBuffer     = 256
	deepEventBuffer = 16384
)

func (e *events) subscribe(buffer int) (<-chan plan.Event, func()) {
	ch := make(chan plan.Event, buffer)
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closed {
		close(ch)
		return ch, func() {}
	}
	if e.subs == nil {
		e.subs = map[chan plan.Event]bool{}
	}
	e.subs[ch] = true
	return ch, func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		if e.subs[ch] {
			delete(e.subs, ch)
			close(ch)
		}
	}
}

func (e *events) publish(list []plan.Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, ev := range list {
		for ch := range e.subs {
			select {
			case ch <- ev:
			default:
			}
		}
	}
}

// close ends every subscription.
func (e *events) close() {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.closed = true
	for ch := range e.subs {
		close(ch)
	}
	e.subs = nil
}

// recordMoves writes an event about every Service that d moves to another data
// plane. What came or went is no move, nor is what the first plan starts with.
func (a *Agent) recordMoves(d plan.Delta) {
	if a.record == nil {
		return
	}
	for _, m := range moves(d) {
		a.record.Event(m.namespace, m.name, false, "DataPlaneChanged", m.action, strings.Join(m.notes, "; "))
	}
}

// recordEjections writes an event about every Service with an endpoint that d ejects or takes back.
func (a *Agent) recordEjections(d plan.Delta, at time.Time) {
	if a.record == nil {
		return
	}
	for _, c := range d.Changes {
		ejected, back := c.Ejections()
		if c.Is == nil {
			continue
		}
		k := c.Is.Port.Key
		if len(ejected) > 0 {
			a.record.Event(k.Namespace, k.Name, true, "EndpointEjected", "Eject", ejectionNote(ejected)+": "+a.passive.view().Text(ejected[0].Ejected, at))
		}
		if len(back) > 0 {
			a.record.Event(k.Namespace, k.Name, false, "EndpointBack", "Uneject", ejectionNote(back)+" gets connections again")
		}
	}
}

// healthPortFailed keeps the event that load balancers get no answer, where its
// Service's users look: kube-proxy's reason and action.
func (a *Agent) healthPortFailed(h plan.HealthPort, why string) {
	if a.record != nil {
		a.record.Event(h.Namespace, h.Name, true, "FailedToStartServiceHealthcheck", "Listen", "node "+a.node+": "+why)
	}
}

// ejectionNote names endpoints, the first of many.
func ejectionNote(of []*plan.Endpoint) string {
	if len(of) == 1 {
		return of[0].Address.String()
	}
	return fmt.Sprintf("%s and %d more", of[0].Address, len(of)-1)
}

// move says what happened to the ports of one Service.
type move struct {
	namespace, name string
	action          string // of the first port, where they go different ways
	notes           []string
}

// moves returns the Services that d moves to another data plane, in key order, with
// one note for each of their ports. That userspace bridges the moment that the kernel's
// rules take to follow a change is none: every change of endpoints may take that way.
func moves(d plan.Delta) []move {
	var out []move
	for _, c := range d.Changes {
		was, is := c.Was, c.Is
		if was == nil || is == nil || was.DataPlane == is.DataPlane || c.Move() == plan.CatchUp {
			continue
		}
		k := is.Port.Key
		if n := len(out); n == 0 || out[n-1].namespace != k.Namespace || out[n-1].name != k.Name {
			out = append(out, move{namespace: k.Namespace, name: k.Name, action: actionOf(was.DataPlane, is.DataPlane)})
		}
		note := fmt.Sprintf("%s to %s: %s", was.DataPlane, is.DataPlane, is.Reason)
		if k.Port != "" {
			note = k.Port + ": " + note
		}
		m := &out[len(out)-1]
		m.notes = append(m.notes, note)
	}
	return out
}

// actionOf names what kproxy does when it moves a service port.
func actionOf(was, is plan.DataPlane) string {
	switch {
	case is == plan.None:
		return "Reject"
	case was == plan.None:
		return "Serve"
	case is == plan.Userspace:
		return "Recall"
	}
	return "Offload"
}
