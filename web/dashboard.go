package web

import (
	"fmt"
	"net/http"
	"strconv"

	"kproxy.dev/kproxy/plan"
)

// What a request may ask for at once.
const (
	maxHistoryKeys   = 200
	maxTimelineLimit = 2000
	timelineLimit    = 200 // unless the request says
)

// dashboard adds what the pages ask for: the pages themselves are static.
func dashboard(mux *http.ServeMux, rec *Recorder, long *slots) {
	mux.Handle("/api/v1/live", newLiveStream(rec))
	get := func(path string, value func(r *http.Request) (any, error)) {
		mux.Handle(path, long.bound(answer(func(_ http.ResponseWriter, r *http.Request) (any, error) {
			rec.refresh()
			return value(r)
		})))
	}
	get("/api/v1/history", func(r *http.Request) (any, error) {
		keys := r.URL.Query()["service"]
		if len(keys) > maxHistoryKeys {
			return nil, httpError{http.StatusBadRequest, fmt.Sprintf("the request names %d services; ask for at most %d at once", len(keys), maxHistoryKeys)}
		}
		return rec.History(keys), nil
	})
	get("/api/v1/service", func(r *http.Request) (any, error) {
		key := r.URL.Query().Get("key")
		page, ok := rec.Service(key)
		if !ok {
			return nil, httpError{http.StatusNotFound, fmt.Sprintf("there is no service port %q; a key is namespace/name or namespace/name:port, as in /api/v1/status", key)}
		}
		return page, nil
	})
	get("/api/v1/node", func(*http.Request) (any, error) { return rec.Node(), nil })
	mux.Handle("/api/v1/timeline", long.bound(timeline(rec)))
}

// eventList is the JSON of /api/v1/timeline.
type eventList struct {
	Events []plan.Event `json:"events"`
}

func timeline(rec *Recorder) http.HandlerFunc {
	return answer(func(_ http.ResponseWriter, r *http.Request) (any, error) {
		q := r.URL.Query()
		limit := timelineLimit
		if text := q.Get("limit"); text != "" {
			n, err := strconv.Atoi(text)
			if err != nil || n < 1 || n > maxTimelineLimit {
				return nil, httpError{http.StatusBadRequest, fmt.Sprintf("limit %q is not a number from 1 to %d", text, maxTimelineLimit)}
			}
			limit = n
		}
		return eventList{Events: rec.Timeline(q.Get("service"), limit)}, nil
	})
}
