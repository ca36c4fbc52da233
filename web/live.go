package web

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"kproxy.dev/kproxy/plan"
)

// keepAlive is how often an idle stream shows that it lives; proxies on the
// way tend to cut connections after a minute of silence.
const keepAlive = 15 * time.Second

// retry is how many milliseconds after a stream has ended its client opens another.
const retry = "retry: 2000\n\n"

// eventStream serves server-sent events (WHATWG HTML, section 9.2) to a bounded number
// of clients.
type eventStream struct {
	name  string
	slots *slots
	// follow writes retry, then events: of all that happens from then on. It returns nil
	// when the server stops, and an error when the client has gone.
	follow func(context.Context, *eventWriter) error
}

// newEventStream serves the source's events. Each has the event's kind as its type and
// the plan.Event as JSON in its data.
func newEventStream(src Source) *eventStream {
	return &eventStream{"event", newSlots(maxStreams, streamsOfClient), func(ctx context.Context, out *eventWriter) error {
		events, cancel := src.Subscribe()
		defer cancel()
		err := out.write([]byte(retry))
		if err == nil {
			_, err = forward(ctx, out, events, func(e plan.Event) []byte { return sse(nil, e.Kind, e) })
		}
		return err
	}}
}

// newLiveStream serves what a Recorder finds: an overview, then what changes.
// A client that falls behind gets an overview again, in the same stream.
func newLiveStream(rec *Recorder) *eventStream {
	return &eventStream{"live", newSlots(maxStreams, streamsOfClient), func(ctx context.Context, out *eventWriter) error {
		err := out.write([]byte(retry))
		for behind := true; behind && err == nil; {
			rec.refresh()
			overview, changes := rec.hub.subscribe(rec.overview)
			if err = out.write(overview); err == nil {
				behind, err = forward(ctx, out, changes, func(b []byte) []byte { return b })
			}
			rec.hub.unsubscribe(changes)
		}
		return err
	}}
}

// forward writes what comes from a channel until ctx ends or the channel is closed.
func forward[T any](ctx context.Context, out *eventWriter, from <-chan T, encode func(T) []byte) (closed bool, err error) {
	tick := time.NewTicker(keepAlive)
	defer tick.Stop()
	for err == nil {
		select {
		case <-ctx.Done():
			return false, nil
		case v, open := <-from:
			if !open {
				return true, nil
			}
			err = out.write(encode(v))
		case <-tick.C:
			err = out.write([]byte(": alive\n\n"))
		}
	}
	return false, err
}

func (s *eventStream) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	release := s.slots.try(clientOf(r.RemoteAddr))
	if release == nil {
		refuse(w, http.StatusServiceUnavailable, fmt.Sprintf("%d %s streams are open, or %d of this client, which is the limit; close one", maxStreams, s.name, streamsOfClient))
		return
	}
	defer release()
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	out := eventWriter{to: w, ctl: http.NewResponseController(w)}
	// Without a read limit, which would end the request's context when it expires.
	if r.Method == http.MethodHead || out.ctl.SetReadDeadline(time.Time{}) != nil {
		return
	}
	_ = s.follow(r.Context(), &out) // fails when the client has gone
}

// eventWriter writes to a response that outlives the server's write limit: the
// limit starts anew with each write.
type eventWriter struct {
	to  io.Writer
	ctl *http.ResponseController
}

func (w *eventWriter) write(b []byte) error {
	if err := w.ctl.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	if _, err := w.to.Write(b); err != nil {
		return err
	}
	return w.ctl.Flush()
}

// sse appends a server-sent event to b. JSON has no raw newline, so one data line is
// enough.
func sse(b []byte, event string, v any) []byte {
	data, err := json.Marshal(v)
	if err != nil {
		data = []byte("null") // can't be: no type here has a value that JSON lacks
	}
	return fmt.Appendf(b, "event: %s\ndata: %s\n\n", event, data)
}

// overview is everything, as of one read of the status.
type overview struct {
	Time time.Time `json:"time"`
	nodeState
	IntervalSeconds float64         `json:"intervalSeconds"` // between samples
	Sync            plan.SyncStatus `json:"sync"`
	Services        []*Row          `json:"services"`
	Verdict         []plan.Tally    `json:"verdict"`
}

// nodeState says how kproxy is on this node.
type nodeState struct {
	Node      string              `json:"node"`
	Mode      plan.Mode           `json:"mode"`
	Version   string              `json:"version"`
	Alive     bool                `json:"alive"`
	Exhausted []plan.Resource     `json:"exhausted"`
	NotReady  string              `json:"notReady"`
	Drain     *plan.Drain         `json:"drain"` // null where it isn't drained
	Warnings  []string            `json:"warnings"`
	Sources   []plan.SourceStatus `json:"sources"`
}

func stateOf(s *plan.Status) nodeState {
	return nodeState{s.Node, s.Mode, s.Version, s.Alive, listed(s.Exhausted), s.NotReady, s.Drain, listed(s.Warnings), listed(s.Sources)}
}

// delta holds what one read of the status found changed.
type delta struct {
	Time      time.Time       `json:"time"`
	Alive     bool            `json:"alive"`
	Exhausted []plan.Resource `json:"exhausted"`
	Changed   []*Row          `json:"changed"`
	Verdict   []plan.Tally    `json:"verdict"`
	Removed   []string        `json:"removed"`
}

// hub hands events to any number of live streams. It waits for none: a stream that
// falls behind is dropped, and begins anew with an overview.
type hub struct {
	watched chan struct{} // 1 slot: a stream has begun

	mu    sync.Mutex // streams come and go while events are published
	subs  map[chan []byte]bool
	whole []byte // the overview as of the last read; nil until a stream needs it
}

// hubBuffer is how many writes a stream may fall behind.
const hubBuffer = 16

// subscribe returns a channel of what changes after the returned overview, which is
// of now. The channel is closed when its reader falls behind.
func (h *hub) subscribe(now func() overview) ([]byte, chan []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.whole == nil {
		h.whole = sse(nil, "overview", now())
	}
	ch := make(chan []byte, hubBuffer)
	if h.subs == nil {
		h.subs = map[chan []byte]bool{}
	}
	h.subs[ch] = true
	select {
	case h.watched <- struct{}{}:
	default:
	}
	return h.whole, ch
}

func (h *hub) unsubscribe(ch chan []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.subs, ch)
}

// watching reports whether a stream is open.
func (h *hub) watching() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.subs) > 0
}

// publishRows sends what a read of the status has found, if anything has changed. The
// caller has stored it before.
func (h *hub) publishRows(d *delta, changed bool) {
	h.mu.Lock()
	h.whole = nil
	h.mu.Unlock()
	if changed {
		h.publish(func(b []byte) []byte { return sse(b, "rows", d) })
	}
}

// maxAtOnce is how many events a stream is sent at a time; the timeline has more.
const maxAtOnce = 200

func (h *hub) publishEvents(events []plan.Event) {
	h.publish(func(b []byte) []byte {
		for _, e := range events[max(len(events)-maxAtOnce, 0):] {
			b = sse(b, "timeline", e)
		}
		return b
	})
}

func (h *hub) publishNode(node func() NodeFigures) {
	h.publish(func(b []byte) []byte { return sse(b, "node", node()) })
}

// publish encodes events, if a stream is open, and sends them to all.
func (h *hub) publish(encode func([]byte) []byte) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.subs) == 0 {
		return
	}
	b := encode(nil)
	for ch := range h.subs {
		select {
		case ch <- b:
		default:
			delete(h.subs, ch)
			close(ch)
		}
	}
}
