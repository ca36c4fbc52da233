package web

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/pprof"
	"strconv"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// APIConfig holds what API serves.
type APIConfig struct {
	Source Source
	// Gatherer is what /metrics shows.
	Gatherer prometheus.Gatherer
	// Recorder keeps what the dashboard shows.
	Recorder *Recorder
	// Configz is what /configz shows: configurations by name. It is encoded as JSON.
	Configz map[string]any
	// Profiling reports whether Go's profiles are served now, at /debug/pprof.
	Profiling func() bool
	// Log returns the last lines that kproxy logged. Only Control serves it.
	Log func() []byte
}

// API is the handler for --metrics-bind-address. All of it only reads.
func API(c APIConfig) http.Handler {
	src := c.Source
	events := newEventStream(src)
	long := newSlots(answersAtOnce, answersOfClient)
	mux := http.NewServeMux()
	pages := ui("ui/index.html")
	mux.HandleFunc("/{$}", pages)
	mux.HandleFunc("/ui/", pages)
	mux.HandleFunc("/docs/", compressed(http.HandlerFunc(docPage)))
	dashboard(mux, c.Recorder, long)
	mux.Handle("/api/v1/status", long.bound(status(src)))
	mux.Handle("/api/v1/connections", long.bound(connections(src)))
	mux.Handle("/api/v1/events", events)
	serveTraces(mux, "/api/v1/trace", src, false)
	mux.Handle("/metrics", long.bound(serveMetrics(c.Gatherer)))
	mux.Handle("/proxyMode", long.bound(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		plainText(w, http.StatusOK, string(src.Status().Mode))
	})))
	mux.HandleFunc("/configz", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, c.Configz)
	})
	mux.Handle("/debug/pprof/", profiles(c.Profiling))
	// As kube-proxy's on this address: that it answers is the answer.
	mux.HandleFunc("/healthz", func(w http.ResponseWriter, _ *http.Request) { plainText(w, http.StatusOK, "ok") })
	return withSecurityHeaders(ownHost(readOnly(mux)))
}

// status answers with the status, with ?services=N of N service ports at most ([plan.Status.Shorten]).
func status(src Source) http.HandlerFunc {
	return answer(func(_ http.ResponseWriter, r *http.Request) (any, error) {
		st := src.Status()
		if most := r.URL.Query().Get("services"); most != "" {
			n, err := strconv.ParseUint(most, 10, 31)
			if err != nil {
				return nil, Refusal(http.StatusBadRequest, "services: %q is no number", most)
			}
			st.Shorten(int(n))
		}
		return st, nil
	})
}

// connectionList is the JSON of live connections.
type connectionList struct {
	Connections []plan.ConnectionStatus `json:"connections"`
}

// connections lists live connections, with ?service=NAMESPACE/NAME[:PORT] only
// those of one service.
func connections(src Source) http.HandlerFunc {
	return answer(func(_ http.ResponseWriter, r *http.Request) (any, error) {
		all, err := src.Connections(r.Context())
		if err != nil {
			return nil, fmt.Errorf("list connections: %w", err)
		}
		list := connectionList{Connections: make([]plan.ConnectionStatus, 0, len(all))}
		filter := r.URL.Query().Get("service")
		for _, c := range all {
			if filter == "" || c.Service == filter || isPortOf(c.Service, filter) {
				list.Connections = append(list.Connections, c)
			}
		}
		return list, nil
	})
}

// isPortOf reports whether key is "name:port" for the given name.
func isPortOf(key, name string) bool {
	return strings.HasPrefix(key, name+":")
}

func plainText(w http.ResponseWriter, code int, s string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(code)
	_, _ = io.WriteString(w, s)
}

// profiles serves Go's profiles where kube-proxy does, while on says so. They
// reveal much of the process and cost it time, so they are off unless asked for.
func profiles(on func() bool) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !on() {
			refuse(w, http.StatusNotFound, "profiles are off; turn them on with --profiling, or enableProfiling in the file of --config")
			return
		}
		mux.ServeHTTP(w, r)
	})
}

// Source is the running proxy. Implementations are safe for concurrent use.
type Source interface {
	// Status returns the present state. The caller doesn't modify it.
	Status() plan.Status
	// Connections lists what is alive in every data plane.
	Connections(ctx context.Context) ([]plan.ConnectionStatus, error)
	// Subscribe returns a channel of events from now on, and a function that
	// ends the subscription. A subscriber that doesn't keep up loses events; the
	// source never waits for it. The source closes the channel when it stops.
	Subscribe() (<-chan plan.Event, func())
	Pins
	// Health returns what the health endpoints report.
	Health() HealthReport
}

// Pins keeps new connections in the data planes that users want.
type Pins interface {
	// Pin keeps a service port in a data plane until PreferAuto.
	Pin(k service.Key, p service.Preference) error
	// Drain drains the node, or ends that.
	Drain(on bool) error
}

// HealthReport holds what the health endpoints report. One pass programs both
// address families, so it holds for both.
type HealthReport struct {
	LastUpdated  time.Time // end of the last pass that succeeded; zero if none has
	PendingSince time.Time // since when a change waits for a successful pass; zero if none waits
	NodeEligible bool      // the node isn't about to be deleted (KEP-3836)
	Isolated     bool      // most other nodes are silent to this one, and --healthz-isolated asks to say so
	Drained      bool      // by kproxy drain: load balancers leave the node out
	NotReady     string    // why new connections to some service aren't carried; empty while all are
}

// What a request may ask for at once.
const (
	maxHistoryKeys   = 200
	maxTimelineLimit = 2000
	timelineLimit    = 200 // unless the request says
)

// dashboard adds what the pages ask for: the pages themselves are static.
func dashboard(mux *http.ServeMux, rec *Recorder, long *slots) {
	mux.Handle("/api/v1/live", compressed(newLiveStream(rec)))
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
	get("/api/v1/curve", func(r *http.Request) (any, error) {
		minutes, err := Parameter(r, "minutes", 60, 1, int(curveSpan.Minutes()))
		if err != nil {
			return nil, err
		}
		return rec.Curve(time.Now(), time.Duration(minutes)*time.Minute), nil
	})
	get("/api/v1/service", func(r *http.Request) (any, error) {
		key := r.URL.Query().Get("key")
		page, ok := rec.Service(key)
		if !ok {
			return nil, noService(key)
		}
		return page, nil
	})
	if c, ok := rec.cfg.Source.(Clients); ok {
		get("/api/v1/clients", func(r *http.Request) (any, error) { return clientsOf(rec, c, r.URL.Query().Get("service")) })
		get("/api/v1/refused", func(*http.Request) (any, error) { return refusedList{Refused: c.Refused()}, nil })
	}
	get("/api/v1/node", func(*http.Request) (any, error) { return rec.Node(), nil })
	mux.Handle("/api/v1/timeline", long.bound(timeline(rec)))
}

// Clients is a Source that remembers connections that are over.
type Clients interface {
	Recent(service.Key) (plan.Recent, error)
	Refused() []plan.Ended
}

// refusedList is the JSON of /api/v1/refused.
type refusedList struct {
	Refused []plan.Ended `json:"refused"`
}

func clientsOf(rec *Recorder, c Clients, key string) (any, error) {
	page, ok := rec.Service(key)
	if !ok {
		return nil, noService(key)
	}
	return c.Recent(page.Service.Key())
}

func noService(key string) error {
	return httpError{http.StatusNotFound, fmt.Sprintf("there is no service port %q; a key is namespace/name or namespace/name:port, as in /api/v1/status", key)}
}

// eventList is the JSON of /api/v1/timeline.
type eventList struct {
	Events []plan.Event `json:"events"`
}

func timeline(rec *Recorder) http.HandlerFunc {
	return answer(func(_ http.ResponseWriter, r *http.Request) (any, error) {
		limit, err := Parameter(r, "limit", timelineLimit, 1, maxTimelineLimit)
		if err != nil {
			return nil, err
		}
		return eventList{Events: rec.Timeline(r.URL.Query().Get("service"), limit)}, nil
	})
}

// Parameter returns a number that a request gives, from least to most; otherwise where it gives none.
func Parameter(r *http.Request, name string, otherwise, least, most int) (int, error) {
	text := r.URL.Query().Get(name)
	if text == "" {
		return otherwise, nil
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < least || n > most {
		return 0, Refusal(http.StatusBadRequest, "%s %q is not a number from %d to %d", name, text, least, most)
	}
	return n, nil
}
