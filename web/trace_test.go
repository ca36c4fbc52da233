package web

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace"
)

// tracing is a Source that makes traces.
type tracing struct {
	*fakeSource
	trace func(context.Context, trace.Request) (trace.Result, error)
}

func (t tracing) Trace(ctx context.Context, r trace.Request) (trace.Result, error) {
	return t.trace(ctx, r)
}

func TestTraceRequests(t *testing.T) {
	src := tracing{&fakeSource{}, func(_ context.Context, r trace.Request) (trace.Result, error) {
		switch r.Address.Port() {
		case 1:
			return trace.Result{}, errors.New("kproxy is still starting")
		case 2:
			return trace.Result{}, fmt.Errorf("%w from there", trace.ErrClient)
		}
		res := trace.Result{Request: r, Verdict: trace.Forwarded}
		if r.Probe {
			res.Probe = &trace.Probe{Outcome: "connected"}
		}
		return res, nil
	}}
	c := APIConfig{Source: src, Recorder: NewRecorder(DefaultRecorderConfig(src))}
	api, control := API(c), Control(c, nil)
	for _, c := range []struct {
		handler http.Handler
		target  string
		code    int
		words   string
	}{
		{api, "/api/v1/trace?address=10.96.0.10:80", 200, `"protocol":"TCP"`},
		{api, "/api/v1/trace?address=10.96.0.10:80&protocol=udp&from=10.1.0.2", 200, `"from":"10.1.0.2"`},
		{api, "/api/v1/trace?address=[fd00::1]:80", 200, "fd00::1"},
		{api, "/api/v1/trace?address=10.96.0.10:80&probe=true", 400, "only reads"},
		{api, "/api/v1/trace?address=10.96.0.10", 400, "isn't IP:PORT"},
		{api, "/api/v1/trace", 400, "isn't IP:PORT"},
		{api, "/api/v1/trace?address=10.96.0.10:0", 400, "no ADDRESS:PORT"},
		{api, "/api/v1/trace?address=10.96.0.10:80&protocol=sctp", 400, "use tcp or udp"},
		{api, "/api/v1/trace?address=10.96.0.10:80&protocol=icmp", 400, "isn't tcp or udp"},
		{api, "/api/v1/trace?address=10.96.0.10:80&from=pod", 400, "isn't an IP address"},
		{api, "/api/v1/trace?address=10.96.0.10:80&from=fd00::2", 400, "another address family"},
		{api, "/api/v1/trace?address=10.96.0.10:1", 503, "still starting"},
		{control, "/trace?address=10.96.0.10:80&probe=true", 200, `"outcome":"connected"`},
		{control, "/trace?address=10.96.0.10:2&probe=true", 400, "can't be found"},
	} {
		r := httptest.NewRequest(http.MethodGet, "http://localhost"+c.target, nil)
		w := httptest.NewRecorder()
		c.handler.ServeHTTP(w, r)
		var body any
		if err := json.Unmarshal(w.Body.Bytes(), &body); err != nil {
			t.Errorf("%s: %v", c.target, err)
		}
		text, _ := json.Marshal(body)
		if w.Code != c.code || !strings.Contains(string(text), c.words) && !strings.Contains(w.Body.String(), c.words) {
			t.Errorf("%s: %d %s, want %d and %s", c.target, w.Code, w.Body, c.code, c.words)
		}
	}
}

// TestTracesAtOnce: only so many are made at a time; others wait for their turn,
// and one whose client has gone takes none.
func TestTracesAtOnce(t *testing.T) {
	begun, goOn := make(chan bool, 10), make(chan bool)
	api := API(APIConfig{Recorder: NewRecorder(DefaultRecorderConfig(shop())), Source: tracing{&fakeSource{}, func(context.Context, trace.Request) (trace.Result, error) {
		begun <- true
		<-goOn
		return trace.Result{}, nil
	}}})
	get := func(ctx context.Context, client int) int {
		return answerFrom(ctx, api, fmt.Sprintf("198.51.100.%d", client), "/api/v1/trace?address=10.96.0.10:80")
	}
	codes := make(chan int, tracesAtOnce)
	for i := range tracesAtOnce {
		go func() { codes <- get(t.Context(), i) }()
		<-begun
	}
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if code := get(ctx, tracesAtOnce); code != http.StatusServiceUnavailable || len(begun) > 0 {
		t.Errorf("one too many: %d, and %d began; want it refused", code, len(begun))
	}
	close(goOn)
	for range tracesAtOnce {
		if code := <-codes; code != http.StatusOK {
			t.Errorf("HTTP status %d", code)
		}
	}
}

// TestClientTraces: what the client asks arrives, and comes back whole.
func TestClientTraces(t *testing.T) {
	want := trace.Request{Address: netip.MustParseAddrPort("[fd00:96::a]:53"), Protocol: service.UDP, From: netip.MustParseAddr("fd00::2"), Probe: true}
	var got trace.Request
	client := NewClient(serveControl(t, tracing{&fakeSource{}, func(_ context.Context, r trace.Request) (trace.Result, error) {
		got = r
		return trace.Result{Request: r, Verdict: trace.Dropped, Culprit: "a rule."}, nil
	}}))
	res, err := client.Trace(t.Context(), want)
	if err != nil || got != want || res.Address != want.Address || res.Culprit != "a rule." {
		t.Errorf("Trace = %+v, %v; it was asked %+v", res, err, got)
	}
}

// TestClientFindsOutWhoAnswers: any answer will do, and none says that nobody runs.
func TestClientFindsOutWhoAnswers(t *testing.T) {
	if err := NewClient(serveControl(t, &fakeSource{})).Answers(t.Context(), time.Minute); err != nil {
		t.Errorf("a kproxy that runs: %v", err)
	}
	if err := NewClient(t.TempDir()+"/nobody").Answers(t.Context(), time.Minute); !errors.Is(err, ErrNotRunning) {
		t.Errorf("none: %v", err)
	}
}
