// Package web serves what kproxy knows of itself over HTTP: the dashboard,
// status, connections, events, traces and metrics ([API]), the health endpoints
// that load balancers and the kubelet ask ([Health]), and the control socket by
// which commands such as `status`, `connections` and `pin` talk to the running
// proxy ([Control], [Client]). What the dashboard shows of the last minutes, a
// [Recorder] keeps; its pages are static files, in ui/.
//
// Everything but the control socket only reads. The package decides nothing and
// knows the proxy through [Source] alone. All handlers are safe for concurrent
// use; [Serve] owns the goroutines of one listener, [Recorder.Run] those of a
// recorder, and they return when their context is done and these have stopped.
package web
