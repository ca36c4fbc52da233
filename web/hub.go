package web

import (
	"encoding/json"
	"sync"
	"time"

	"kproxy.dev/kproxy/plan"
)

// hello is the first event of a live stream.
type hello struct {
	Node            string    `json:"node"`
	Mode            plan.Mode `json:"mode"`
	Version         string    `json:"version"`
	Time            time.Time `json:"time"`
	IntervalSeconds float64   `json:"intervalSeconds"`
}

// overview is everything, as of one look.
type overview struct {
	Time      time.Time           `json:"time"`
	Alive     bool                `json:"alive"`
	Exhausted []plan.Resource     `json:"exhausted"`
	Sync      plan.SyncStatus     `json:"sync"`
	Sources   []plan.SourceStatus `json:"sources"`
	Services  []*Row              `json:"services"`
}

// delta is what one look found changed.
type delta struct {
	Time      time.Time       `json:"time"`
	Alive     bool            `json:"alive"`
	Exhausted []plan.Resource `json:"exhausted"`
	Changed   []*Row          `json:"changed"`
	Removed   []string        `json:"removed"`

	news bool // there is something to tell
}

// hub hands messages to any number of live streams. Nobody waits for one that
// doesn't keep up: it loses its place and begins anew with an overview.
type hub struct {
	watched chan struct{} // 1 slot: somebody has come

	mu     sync.Mutex // streams come and go while messages are published
	subs   map[chan *message]bool
	packer packer
	whole  *message // the overview as of the last look; nil until somebody asks
}

// hubBuffer is how many messages a stream may fall behind.
const hubBuffer = 16

// subscribe returns a channel of what changes after the returned overview, which is
// of now. The channel is closed when its reader falls behind.
func (h *hub) subscribe(now func() overview) (*message, chan *message) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.whole == nil {
		h.whole = h.packer.pack(sse(nil, "overview", now()))
	}
	ch := make(chan *message, hubBuffer)
	if h.subs == nil {
		h.subs = map[chan *message]bool{}
	}
	h.subs[ch] = true
	select {
	case h.watched <- struct{}{}:
	default:
	}
	return h.whole, ch
}

func (h *hub) unsubscribe(ch chan *message) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.subs, ch)
}

func (h *hub) anybody() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.subs) > 0
}

// publish tells what a look has found. The caller has stored it before.
func (h *hub) publish(d *delta) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.whole = nil
	if d.news && len(h.subs) > 0 {
		h.send(sse(nil, "rows", d))
	}
}

// maxAtOnce is how many events a stream is sent at a time. Whoever missed some
// asks for the timeline.
const maxAtOnce = 200

func (h *hub) publishEvents(events []plan.Event) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.subs) == 0 {
		return
	}
	var b []byte
	for _, e := range events[max(len(events)-maxAtOnce, 0):] {
		b = sse(b, "timeline", e)
	}
	h.send(b)
}

// publishNode tells how the node is, if somebody listens.
func (h *hub) publishNode(node func() NodeFigures) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.subs) > 0 {
		h.send(sse(nil, "node", node()))
	}
}

func (h *hub) send(b []byte) {
	m := h.packer.pack(b)
	for ch := range h.subs {
		select {
		case ch <- m:
		default:
			delete(h.subs, ch)
			close(ch)
		}
	}
}

// sse appends a server-sent event (WHATWG HTML, section 9.2) to b. JSON has no
// raw newline, so one data line is enough.
func sse(b []byte, event string, v any) []byte {
	data, err := json.Marshal(v)
	if err != nil {
		data = []byte("null") // can't be: no type here has a value that JSON lacks
	}
	b = append(b, "event: "...)
	b = append(b, event...)
	b = append(b, "\ndata: "...)
	b = append(b, data...)
	return append(b, "\n\n"...)
}

// pack makes a message for one stream.
func (h *hub) pack(plain []byte) *message {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.packer.pack(plain)
}
