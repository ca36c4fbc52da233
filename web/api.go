package web

import (
	"io"
	"net/http"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"kproxy.dev/kproxy/plan"
)

// APIConfig is what API serves.
type APIConfig struct {
	Source Source
	// Gatherer is what /metrics shows.
	Gatherer prometheus.Gatherer
	// Recorder keeps what the dashboard shows; nil serves no dashboard.
	Recorder *Recorder
	// Configz is what /configz shows: configurations by name. It is encoded as JSON.
	Configz map[string]any
	// Profiling reports whether Go's profiles are served now, at /debug/pprof; nil
	// for never.
	Profiling func() bool
}

// API is the handler for --metrics-bind-address. All of it only reads.
func API(c APIConfig) http.Handler {
	src := c.Source
	events := newEventStream(src)
	long := newSlots(answersAtOnce, answersOfClient)
	mux := http.NewServeMux()
	mux.HandleFunc("/{$}", ui)
	mux.HandleFunc("/ui/", ui)
	if c.Recorder != nil {
		dashboard(mux, c.Recorder, long)
	}
	mux.Handle("/api/v1/status", long.bound(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		writeCompressed(w, r, src.Status())
	})))
	mux.Handle("/api/v1/connections", long.bound(connections(src)))
	mux.Handle("/api/v1/events", events)
	serveTraces(mux, "/api/v1/trace", src, false)
	mux.Handle("/metrics", long.bound(promhttp.HandlerFor(c.Gatherer, promhttp.HandlerOpts{ErrorHandling: promhttp.ContinueOnError})))
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

// connectionList is the JSON of live connections.
type connectionList struct {
	Connections []plan.ConnectionStatus `json:"connections"`
}

// connections lists live connections, with ?service=NAMESPACE/NAME[:PORT] only
// those of one service.
func connections(src Source) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		all, err := src.Connections(r.Context())
		if err != nil {
			refuse(w, http.StatusServiceUnavailable, "list connections: "+err.Error())
			return
		}
		list := connectionList{Connections: make([]plan.ConnectionStatus, 0, len(all))}
		filter := r.URL.Query().Get("service")
		for _, c := range all {
			if filter == "" || c.Service == filter || isPortOf(c.Service, filter) {
				list.Connections = append(list.Connections, c)
			}
		}
		writeCompressed(w, r, list)
	}
}

// isPortOf reports whether key is "name:port" for the given name.
func isPortOf(key, name string) bool {
	return len(key) > len(name) && key[:len(name)] == name && key[len(name)] == ':'
}

func plainText(w http.ResponseWriter, code int, s string) {
	w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	w.WriteHeader(code)
	_, _ = io.WriteString(w, s)
}
