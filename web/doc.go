// Package web serves what kproxy knows of itself over HTTP: status,
// connections, events and metrics ([API]), the health endpoints that load
// balancers and the kubelet ask ([Health]), and the control socket by which the
// commands `status`, `connections` and `pin` talk to the running proxy
// ([Control], [Client]).
//
// Everything but the control socket only reads. The package decides nothing and
// knows the proxy through [Source] alone. All handlers are safe for concurrent
// use; [Serve] owns the goroutines of one listener and returns when its context
// is done and they have stopped.
package web
