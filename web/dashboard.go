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
	mux.Handle("/api/v1/history", long.bound(history(rec)))
	mux.Handle("/api/v1/timeline", long.bound(timeline(rec)))
	mux.Handle("/api/v1/service", long.bound(servicePage(rec)))
	mux.Handle("/api/v1/node", long.bound(nodePage(rec)))
}

func history(rec *Recorder) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		keys := r.URL.Query()["service"]
		if len(keys) > maxHistoryKeys {
			refuse(w, http.StatusBadRequest, fmt.Sprintf("the request names %d services; ask for at most %d at once", len(keys), maxHistoryKeys))
			return
		}
		rec.refresh()
		writeCompressed(w, r, rec.History(keys))
	}
}

// eventList is the JSON of /api/v1/timeline.
type eventList struct {
	Events []plan.Event `json:"events"`
}

func timeline(rec *Recorder) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		limit := timelineLimit
		if text := q.Get("limit"); text != "" {
			n, err := strconv.Atoi(text)
			if err != nil || n < 1 || n > maxTimelineLimit {
				refuse(w, http.StatusBadRequest, fmt.Sprintf("limit %q is not a number from 1 to %d", text, maxTimelineLimit))
				return
			}
			limit = n
		}
		writeCompressed(w, r, eventList{Events: rec.Timeline(q.Get("service"), limit)})
	}
}

func servicePage(rec *Recorder) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		rec.refresh()
		key := r.URL.Query().Get("key")
		page, ok := rec.Service(key)
		if !ok {
			refuse(w, http.StatusNotFound, fmt.Sprintf("there is no service port %q; a key is namespace/name or namespace/name:port, as in /api/v1/status", key))
			return
		}
		writeCompressed(w, r, page)
	}
}

func nodePage(rec *Recorder) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		rec.refresh()
		writeCompressed(w, r, rec.Node())
	}
}
