package web

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"kproxy.dev/kproxy/plan"
)

func api(src Source) http.Handler {
	reg := NewMetrics(prometheus.NewRegistry(), metricsOf(src))
	rec := NewRecorder(DefaultRecorderConfig(src))
	rec.readStatus(start, true)
	return API(APIConfig{Source: src, Recorder: rec, Gatherer: reg, Profiling: func() bool { return false }, Configz: map[string]any{"kproxy.dev": map[string]string{"mode": "iptables"}}})
}

// get asks h and returns the answer.
func get(h http.Handler, path string) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
	return w
}

func TestAPI(t *testing.T) {
	h := api(shop())
	tests := []struct {
		path, contentType, contains string
		code                        int
	}{
		{"/", "text/html; charset=utf-8", `<html lang="en"`, 200},
		{"/docs/trace.md", "text/plain; charset=utf-8", "kproxy trace", 200},
		{"/docs/docs.go", "text/plain; charset=utf-8", "404 page not found", 404},
		{"/ui/index.html", "text/html; charset=utf-8", `<html lang="en"`, 200},
		{"/ui/none.js", "text/plain; charset=utf-8", "404", 404},
		{"/api/v1/history?service=shop/cart", "application/json", `"shop/cart":{"active":[1],"connections":[0]`, 200},
		{"/api/v1/history?service=shop/none", "application/json", `"services":{}`, 200},
		{"/api/v1/curve?minutes=361", "application/json", "a number from 1 to 360", 400},
		{"/api/v1/curve", "application/json", `{"stepSeconds":20,"begin":"`, 200},
		{"/api/v1/timeline", "application/json", `{"events":[]}`, 200},
		{"/api/v1/timeline?limit=0", "application/json", "a number from 1 to 2000", 400},
		{"/api/v1/timeline?limit=x", "application/json", "a number from 1 to 2000", 400},
		{"/api/v1/service?key=shop/web:http", "application/json", `"row":{"key":"shop/web:http","namespace":"shop"`, 200},
		{"/api/v1/service?key=shop/cart", "application/json", `"health":[{"address":"10.2.0.2:8080","changes":[{"time":`, 200},
		{"/api/v1/service?key=shop/web", "application/json", "there is no service port", 404},
		{"/api/v1/service", "application/json", "there is no service port", 404},
		{"/api/v1/clients?service=shop/web:http3", "application/json", `"service":"shop/web:http3/udp"`, 200},
		{"/api/v1/clients?service=shop/none", "application/json", "there is no service port", 404},
		{"/api/v1/refused", "application/json", `"client":"10.0.0.7:4711","address":"","endpoint":"","dataplane":"","lastedSeconds":0,"bytesIn":0,"bytesOut":0,"refused":"no endpoint can take it"`, 200},
		{"/api/v1/node", "application/json", `"node":"n1"`, 200},
		{"/api/v1/status", "application/json", `"node":"n1"`, 200},
		{"/api/v1/connections", "application/json", `"service":"shop/webmail"`, 200},
		{"/metrics", "text/plain; version=0.0.4; charset=utf-8; escaping=underscores", "kproxy_alive 1\n", 200},
		{"/proxyMode", "text/plain; charset=utf-8", "iptables", 200},
		{"/configz", "application/json", `{"kproxy.dev":{"mode":"iptables"}}`, 200},
		{"/healthz", "text/plain; charset=utf-8", "ok", 200},
		{"/debug/pprof/", "application/json", "profiles are off; turn them on with --profiling", 404},
		{"/debug/other", "text/plain; charset=utf-8", "404", 404},
	}
	for _, tt := range tests {
		t.Run(tt.path, func(t *testing.T) {
			w := get(h, tt.path)
			if w.Code != tt.code || w.Header().Get("Content-Type") != tt.contentType {
				t.Errorf("got %d %s, want %d %s", w.Code, w.Header().Get("Content-Type"), tt.code, tt.contentType)
			}
			if !strings.Contains(w.Body.String(), tt.contains) {
				t.Errorf("the body lacks %q:\n%s", tt.contains, w.Body)
			}
			for k, v := range securityHeaders {
				if k == "Cache-Control" && strings.HasPrefix(tt.contentType, "text/html") {
					v = "no-cache" // nothing in them is of this node
				}
				if got := w.Header().Get(k); got != v {
					t.Errorf("header %s: got %q, want %q", k, got, v)
				}
			}
		})
	}
}

// TestOpenerPolicy: browsers are told only where they heed it.
func TestOpenerPolicy(t *testing.T) {
	const policy = "Cross-Origin-Opener-Policy"
	h := api(shop())
	if got := fetch(h, "/", "Sec-Fetch-Dest", "document").Header().Get(policy); got != "same-origin" {
		t.Errorf("at a trustworthy address: got %q, want same-origin", got)
	}
	if got, sent := fetch(h, "/").Header()[policy]; sent {
		t.Errorf("elsewhere: got %q, want none", got)
	}
}

func TestStatusAndConnectionsAreCompressed(t *testing.T) {
	src := shop()
	for len(src.conns) < 100 {
		src.conns = append(src.conns, src.conns[0])
	}
	h := api(src)
	for _, path := range []string{"/api/v1/status", "/api/v1/connections"} {
		plain, zipped := fetch(h, path), fetch(h, path, "Accept-Encoding", "gzip")
		if got := zipped.Header().Get("Content-Encoding"); got != "gzip" {
			t.Errorf("%s: content encoding %q, want gzip", path, got)
		} else if want, got := plain.Body.String(), gunzip(t, zipped.Body.Bytes()); want != string(got) {
			t.Errorf("%s: compressed it says something else:\n%s", path, got)
		}
	}
}

func TestStatusIsTheContractsJSON(t *testing.T) {
	src := shop()
	var got plan.Status
	if err := json.Unmarshal(get(api(src), "/api/v1/status").Body.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(src.status, got, cmp.Comparer(equalAddrPort)); d != "" {
		t.Errorf("status (-want +got):\n%s", d)
	}
}

func TestStatusOfSomeServices(t *testing.T) {
	src := shop()
	var got plan.Status
	if err := json.Unmarshal(get(api(src), "/api/v1/status?services=1").Body.Bytes(), &got); err != nil {
		t.Fatal(err)
	}
	if len(got.Services) != 1 || len(got.Others) == 0 {
		t.Errorf("of %d services, asked for one, got %d, and others %q", len(src.status.Services), len(got.Services), got.Others)
	}
	if w := get(api(src), "/api/v1/status?services=-1"); w.Code != http.StatusBadRequest {
		t.Errorf("for -1 services: %d %s", w.Code, w.Body)
	}
}

func TestAPIOnlyReads(t *testing.T) {
	h := api(shop())
	for _, path := range []string{"/", "/api/v1/status", "/api/v1/events", "/metrics", "/pin", "/api/v1/live", "/api/v1/history", "/api/v1/timeline", "/api/v1/service", "/api/v1/node", "/ui/index.html"} {
		for _, method := range []string{"POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"} {
			w := httptest.NewRecorder()
			h.ServeHTTP(w, httptest.NewRequest(method, path, nil))
			if w.Code != http.StatusMethodNotAllowed || w.Header().Get("Allow") != "GET, HEAD" {
				t.Errorf("%s %s: got %d, Allow %q; want 405, GET, HEAD", method, path, w.Code, w.Header().Get("Allow"))
			}
		}
	}
}

func TestConnectionsOfOneService(t *testing.T) {
	for filter, want := range map[string]int{
		"": 3, "shop/web": 2, "shop/web:http": 1, "shop/webmail": 1, "shop/we": 0, "shop/none": 0,
	} {
		w := get(api(shop()), "/api/v1/connections?service="+filter)
		var got connectionList
		if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
			t.Fatal(err)
		}
		if len(got.Connections) != want {
			t.Errorf("service %q: got %d connections, want %d", filter, len(got.Connections), want)
		}
		if got.Connections == nil {
			t.Errorf("service %q: the list is null, want []: %s", filter, w.Body)
		}
	}
}

func TestConnectionsThatCantBeListed(t *testing.T) {
	src := shop()
	src.connErr = errors.New("dump conntrack: operation not permitted")
	w := get(api(src), "/api/v1/connections")
	if w.Code != http.StatusServiceUnavailable || !strings.Contains(w.Body.String(), "operation not permitted") {
		t.Errorf("got %d %s, want 503 with the reason", w.Code, w.Body)
	}
}

func TestForeignHostOnLoopback(t *testing.T) {
	loopback := &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 10249}
	loopback6 := &net.TCPAddr{IP: net.IPv6loopback, Port: 10249}
	outside := &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 10249}
	tests := []struct {
		host  string
		local net.Addr
		want  int
	}{
		{"127.0.0.1:10249", loopback, 200},
		{"127.0.0.2", loopback, 200},
		{"localhost:8080", loopback, 200},
		{"LOCALHOST.", loopback, 200},
		{"[::1]:10249", loopback6, 200},
		{"[::1]", loopback6, 200},
		{"[::ffff:127.0.0.1]:1", loopback, 200},
		{"evil.example:10249", loopback, 403},
		{"evil.example", loopback6, 403},
		{"localhost.evil.example", loopback, 403},
		{"127.0.0.1.evil.example", loopback, 403},
		{"192.0.2.1:10249", loopback, 403},
		{"", loopback, 403},
		{"node.example:10249", outside, 200},
	}
	h := api(shop())
	for _, tt := range tests {
		r := httptest.NewRequest(http.MethodGet, "/api/v1/status", nil)
		r.Host = tt.host
		r = r.WithContext(contextWith(r.Context(), http.LocalAddrContextKey, tt.local))
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code != tt.want {
			t.Errorf("host %q at %s: got %d, want %d", tt.host, tt.local, w.Code, tt.want)
		}
		if w.Code == 403 && !strings.Contains(w.Body.String(), "DNS rebinding") {
			t.Errorf("host %q: the refusal doesn't say why: %s", tt.host, w.Body)
		}
	}
}

func TestProfilesWhileTheyAreOn(t *testing.T) {
	on := false
	h := API(APIConfig{Source: shop(), Recorder: NewRecorder(DefaultRecorderConfig(shop())), Gatherer: prometheus.NewRegistry(), Profiling: func() bool { return on }})
	for _, tt := range []struct {
		on   bool
		path string
		code int
		has  string
	}{
		{false, "/debug/pprof/goroutine?debug=1", 404, "profiles are off"},
		{true, "/debug/pprof/", 200, "goroutine"},
		{true, "/debug/pprof/goroutine?debug=1", 200, "goroutine profile:"},
		{true, "/debug/pprof/none", 404, "Unknown profile"},
		{false, "/debug/pprof/", 404, "profiles are off"},
	} {
		on = tt.on
		if w := get(h, tt.path); w.Code != tt.code || !strings.Contains(w.Body.String(), tt.has) {
			t.Errorf("on %t, %s: got %d, want %d and %q in:\n%.200s", tt.on, tt.path, w.Code, tt.code, tt.has, w.Body)
		}
	}
}

// A client elsewhere reads the same as one at the control socket, and is told when a kproxy doesn't know its question.
func TestRemoteClient(t *testing.T) {
	src := shop()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, ln, api(src), slog.New(slog.DiscardHandler)) }()
	defer func() {
		cancel()
		<-done
	}()
	c := NewRemoteClient(func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", ln.Addr().String())
	})
	st, err := c.Status(t.Context())
	if err != nil || len(st.Services) != len(src.status.Services) {
		t.Errorf("status with %d services (%v), want %d", len(st.Services), err, len(src.status.Services))
	}
	if list, err := c.Connections(t.Context(), ""); err != nil || len(list) == 0 {
		t.Errorf("%d connections, %v", len(list), err)
	}
	refused := errors.New("forward a port: refused")
	none := NewRemoteClient(func(context.Context) (net.Conn, error) { return nil, refused })
	if _, err := none.Status(t.Context()); !errors.Is(err, refused) || err.Error() != refused.Error() {
		t.Errorf("where no connection comes about: %v, want %v and not a URL that is made up", err, refused)
	}
	if err := c.Drain(t.Context(), true); err == nil || !strings.Contains(err.Error(), "only reads") {
		t.Errorf("drain: %v, want that this address only reads", err)
	}
	if err := c.call(t.Context(), time.Minute, http.MethodGet, "/tomorrow", nil, &struct{}{}); !errors.Is(err, ErrUnknown) {
		t.Errorf("a question that isn't known: %v, want %v", err, ErrUnknown)
	}
}
