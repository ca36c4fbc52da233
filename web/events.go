package web

import (
	"encoding/json"
	"fmt"
	"net/http"
	"time"

	"kproxy.dev/kproxy/plan"
)

// keepAlive is how often an idle stream shows that it lives; proxies on the
// way tend to cut connections after a minute of silence.
const keepAlive = 15 * time.Second

// eventStream serves the source's events as server-sent events (WHATWG HTML,
// section 9.2). Each event has the event's kind as its type and the plan.Event
// as JSON in its data.
type eventStream struct {
	src   Source
	slots *slots
}

func newEventStream(src Source) *eventStream {
	return &eventStream{src: src, slots: newSlots(maxStreams, streamsOfClient)}
}

func (s *eventStream) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	client := requester(r)
	if !s.slots.try(client) {
		refuse(w, http.StatusServiceUnavailable, fmt.Sprintf("%d event streams are open, or %d of this client, which is the limit; close one", maxStreams, streamsOfClient))
		return
	}
	defer s.slots.release(client)
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	out := streamWriter{w: w, ctl: http.NewResponseController(w)}
	if r.Method == http.MethodHead {
		return
	}
	events, cancel := s.src.Subscribe()
	defer cancel()
	if out.start() != nil {
		return
	}
	tick := time.NewTicker(keepAlive)
	defer tick.Stop()
	for {
		var err error
		select {
		case <-r.Context().Done():
			return
		case e, open := <-events:
			if !open {
				return
			}
			err = out.event(e)
		case <-tick.C:
			err = out.write(": alive\n\n")
		}
		if err != nil {
			return // the client has gone
		}
	}
}

// streamWriter writes to a response that outlives the server's write limit: the
// limit starts anew with each write.
type streamWriter struct {
	w   http.ResponseWriter
	ctl *http.ResponseController
}

// start lifts the server's read limit, which would otherwise end the request's
// context when it expires, and tells the client how soon to reconnect.
func (s streamWriter) start() error {
	if err := s.ctl.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	return s.write("retry: 2000\n\n")
}

func (s streamWriter) event(e plan.Event) error {
	data, err := json.Marshal(e) // JSON has no raw newline, so one data line is enough
	if err != nil {
		return err
	}
	return s.write(fmt.Sprintf("event: %s\ndata: %s\n\n", e.Kind, data))
}

func (s streamWriter) write(text string) error {
	if err := s.ctl.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	if _, err := s.w.Write([]byte(text)); err != nil {
		return err
	}
	return s.ctl.Flush()
}
