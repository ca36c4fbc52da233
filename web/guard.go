package web

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
)

// readOnly refuses every method that could be meant to change something.
func readOnly(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet && r.Method != http.MethodHead {
			w.Header().Set("Allow", "GET, HEAD")
			refuse(w, http.StatusMethodNotAllowed, "this address only reads; changes are made by commands: `kproxy pin` on the node, `kubectl kproxy pin` on all")
			return
		}
		next.ServeHTTP(w, r)
	})
}

// securityHeaders keep browsers from running, framing, guessing or keeping
// anything of what is served.
var securityHeaders = map[string]string{
	"Cache-Control":                "no-store",
	"Content-Security-Policy":      "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
	"Cross-Origin-Resource-Policy": "same-origin",
	"Referrer-Policy":              "no-referrer",
	"X-Content-Type-Options":       "nosniff",
	"X-Frame-Options":              "DENY",
}

func withSecurityHeaders(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for k, v := range securityHeaders {
			w.Header().Set(k, v)
		}
		// Browsers apply it only where the address is trustworthy, which HTTP is on loopback
		// addresses alone, and complain in the console otherwise. They show that by sending
		// Sec-Fetch-Dest (W3C, Fetch Metadata Request Headers, 2).
		if r.Header.Get("Sec-Fetch-Dest") != "" {
			w.Header().Set("Cross-Origin-Opener-Policy", "same-origin")
		}
		next.ServeHTTP(w, r)
	})
}

// ownHost refuses requests that reach a loopback address under a foreign name:
// a page on the Internet whose name was made to resolve to 127.0.0.1 (DNS
// rebinding) counts as same-origin in the browser and could read everything.
func ownHost(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if onLoopback(r) && !loopbackName(r.Host) {
			refuse(w, http.StatusForbidden, fmt.Sprintf(
				"the request came to a loopback address for host %q; to keep web pages from reading this by DNS rebinding, only localhost and loopback addresses are answered here", r.Host))
			return
		}
		next.ServeHTTP(w, r)
	})
}

// onLoopback reports whether the connection ends at a loopback address. It asks
// the connection, so that listeners on 0.0.0.0 are covered too.
func onLoopback(r *http.Request) bool {
	local, ok := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
	return ok && local.IP.IsLoopback()
}

// loopbackName reports whether a Host header names the loopback interface. The
// port doesn't matter: it changes on the way through a port forward.
func loopbackName(hostport string) bool {
	host := hostport
	if h, _, err := net.SplitHostPort(hostport); err == nil {
		host = h
	}
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	if strings.EqualFold(strings.TrimSuffix(host, "."), "localhost") {
		return true
	}
	a, err := netip.ParseAddr(host)
	return err == nil && a.Unmap().IsLoopback()
}
