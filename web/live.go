package web

import (
	"fmt"
	"net/http"
	"time"
)

// liveStream serves what a Recorder finds as server-sent events: hello and an
// overview, then what changes. A client that falls behind gets an overview
// again, in the same stream.
type liveStream struct {
	rec   *Recorder
	slots *slots
}

func newLiveStream(rec *Recorder) *liveStream {
	return &liveStream{rec: rec, slots: newSlots(maxStreams, streamsOfClient)}
}

func (s *liveStream) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	client := requester(r)
	if !s.slots.try(client) {
		refuse(w, http.StatusServiceUnavailable, fmt.Sprintf("%d live streams are open, or %d of this client, which is the limit; close one", maxStreams, streamsOfClient))
		return
	}
	defer s.slots.release(client)
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Vary", "Accept-Encoding")
	out := liveWriter{streamWriter: streamWriter{w: w, ctl: http.NewResponseController(w)}}
	if acceptsGzip(r) {
		w.Header().Set("Content-Encoding", "gzip")
		out.gzip = &gzipStream{w: w}
	}
	if r.Method == http.MethodHead || out.begin(&s.rec.hub) != nil {
		return
	}
	if s.follow(r, &out) == nil {
		_ = out.end() // the server stops; the client may as well have gone
	}
}

// follow returns nil when the server stops, and an error when the client has gone.
func (s *liveStream) follow(r *http.Request, out *liveWriter) error {
	h := &s.rec.hub
	s.rec.refresh()
	if err := out.send(h.pack(sse(nil, "hello", s.rec.hello()))); err != nil {
		return err
	}
	alive := h.pack([]byte(": alive\n\n"))
	tick := time.NewTicker(keepAlive)
	defer tick.Stop()
	var news chan *message // nil: begin anew
	defer func() { h.unsubscribe(news) }()
	for {
		m := alive
		if news == nil {
			s.rec.refresh()
			m, news = h.subscribe(s.rec.overview)
		} else {
			select {
			case <-r.Context().Done():
				return nil
			case next, open := <-news:
				if m = next; !open {
					news = nil
					continue
				}
			case <-tick.C:
			}
		}
		if err := out.send(m); err != nil {
			return err
		}
	}
}

// liveWriter writes messages, compressed where the client takes it.
type liveWriter struct {
	streamWriter
	gzip *gzipStream // nil: as they are
}

// begin lifts the server's read limit, as streamWriter.start does, and tells the
// client how soon to reconnect.
func (w *liveWriter) begin(h *hub) error {
	if err := w.ctl.SetReadDeadline(time.Time{}); err != nil {
		return err
	}
	if w.gzip != nil {
		if _, err := w.w.Write(gzipHeader); err != nil {
			return err
		}
	}
	return w.send(h.pack([]byte("retry: 2000\n\n")))
}

func (w *liveWriter) send(m *message) error {
	if w.gzip == nil {
		return w.write(string(m.plain))
	}
	if err := w.ctl.SetWriteDeadline(time.Now().Add(writeTimeout)); err != nil {
		return err
	}
	if err := w.gzip.write(m); err != nil {
		return err
	}
	return w.ctl.Flush()
}

func (w *liveWriter) end() error {
	if w.gzip == nil {
		return nil
	}
	return w.gzip.end()
}
