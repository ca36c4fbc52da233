package web

import (
	"net/http"
	"net/http/pprof"
)

// profiles serves Go's profiles where kube-proxy does, while on says so. They
// tell much about the process and cost it time, so they are off unless asked for.
func profiles(on func() bool) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("/debug/pprof/", pprof.Index)
	mux.HandleFunc("/debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("/debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("/debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("/debug/pprof/trace", pprof.Trace)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if on == nil || !on() {
			refuse(w, http.StatusNotFound, "profiles are off; turn them on with --profiling, or enableProfiling in the file of --config")
			return
		}
		mux.ServeHTTP(w, r)
	})
}
