package agent

import (
	"sync"

	"kproxy.dev/kproxy/plan"
)

// events hands out what people would want to see to any number of
// subscribers. One that doesn't keep up loses events; nobody waits for it.
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

func (e *events) subscribe() (<-chan plan.Event, func()) { return e.subscribeWith(eventBuffer) }

func (e *events) subscribeWith(buffer int) (<-chan plan.Event, func()) {
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
