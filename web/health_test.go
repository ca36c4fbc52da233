package web

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"kproxy.dev/kproxy/plan"
)

func TestHealth(t *testing.T) {
	now := start.Add(time.Hour)
	healthy := HealthReport{LastUpdated: start, NodeEligible: true}
	with := func(change func(*HealthReport)) HealthReport {
		r := healthy
		change(&r)
		return r
	}
	tests := []struct {
		name                   string
		report                 HealthReport
		healthz, livez, readyz int
	}{
		{"idle", healthy, 200, 200, 200},
		{"starting", with(func(r *HealthReport) {
			r.LastUpdated, r.NotReady = time.Time{}, "the kernel's rules aren't written yet"
		}), 200, 200, 503},
		{"no longer serving", with(func(r *HealthReport) { r.NotReady = "the forwarder doesn't serve" }), 200, 200, 503},
		{"change waits, not yet late", with(func(r *HealthReport) { r.PendingSince = now.Add(-59 * time.Second) }), 200, 200, 200},
		{"change waits too long", with(func(r *HealthReport) { r.PendingSince = now.Add(-60 * time.Second) }), 503, 503, 200},
		{"first pass never succeeds", with(func(r *HealthReport) {
			r.LastUpdated, r.PendingSince, r.NotReady = time.Time{}, now.Add(-2*time.Minute), "the first pass failed"
		}), 503, 503, 503},
		{"cut off from other nodes", with(func(r *HealthReport) { r.Isolated = true }), 503, 200, 200},
		{"node about to be deleted", with(func(r *HealthReport) { r.NodeEligible = false }), 503, 200, 200},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				time.Sleep(time.Until(now))
				h := Health(&fakeSource{report: tt.report}, prometheus.NewRegistry())
				for path, want := range map[string]int{"/healthz": tt.healthz, "/livez": tt.livez, "/readyz": tt.readyz} {
					if got := get(h, path).Code; got != want {
						t.Errorf("%s: got %d, want %d", path, got, want)
					}
				}
			})
		})
	}
}

func TestHealthBodies(t *testing.T) {
	now := start.Add(time.Hour)
	current := now.Local().Format(time.RFC3339)
	late := HealthReport{LastUpdated: start, PendingSince: start, NodeEligible: true}
	family := func(healthy bool) map[string]any {
		f := map[string]any{"lastUpdated": "2026-01-02T03:04:05Z", "healthy": healthy}
		return map[string]any{"IPv4": f, "IPv6": f}
	}
	tests := []struct {
		name, path string
		report     HealthReport
		want       map[string]any
	}{
		{"healthy: last updated now", "/healthz", HealthReport{LastUpdated: start, NodeEligible: true}, map[string]any{
			"lastUpdated": current, "currentTime": current,
			"nodeEligible": true, "healthy": true, "status": family(true),
		}},
		{"late: last updated as it was", "/healthz", late, map[string]any{
			"lastUpdated": "2026-01-02T03:04:05Z", "currentTime": current,
			"nodeEligible": true, "healthy": false, "status": family(false),
		}},
		{"livez doesn't speak of the node", "/livez", HealthReport{LastUpdated: start}, map[string]any{
			"lastUpdated": current, "currentTime": current,
			"healthy": true, "status": family(true),
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				time.Sleep(time.Until(now))
				w := get(Health(&fakeSource{report: tt.report}, prometheus.NewRegistry()), tt.path)
				var got map[string]any
				if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
					t.Fatal(err)
				}
				if d := cmp.Diff(tt.want, got); d != "" {
					t.Errorf("body (-want +got):\n%s", d)
				}
				if ct := w.Header().Get("Content-Type"); ct != "application/json" {
					t.Errorf("content type: got %q, want application/json", ct)
				}
			})
		})
	}
}

func TestHealthPort(t *testing.T) {
	late := HealthReport{LastUpdated: start, PendingSince: time.Now().Add(-2 * time.Minute), NodeEligible: true}
	tests := []struct {
		name      string
		report    HealthReport
		endpoints int
		code      int
		weight    string
		healthy   bool
	}{
		{"endpoints here", HealthReport{NodeEligible: true}, 2, 200, "2", true},
		{"none here", HealthReport{NodeEligible: true}, 0, 503, "0", true},
		{"the proxy is late", late, 2, 503, "2", false},
		{"the node is about to be deleted, which isn't asked here", HealthReport{}, 1, 200, "1", true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			h := HealthPort(&fakeSource{report: tt.report}, func() plan.HealthPort {
				return plan.HealthPort{Namespace: "shop", Name: "web", Port: 32000, Endpoints: tt.endpoints}
			})
			for _, path := range []string{"/", "/healthz", "/any/where?at=all"} {
				w := httptest.NewRecorder()
				h.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
				if w.Code != tt.code {
					t.Errorf("%s: status %d, want %d", path, w.Code, tt.code)
				}
				headers := http.Header{
					"Content-Type": {"application/json"}, "X-Content-Type-Options": {"nosniff"}, "X-Load-Balancing-Endpoint-Weight": {tt.weight},
				}
				if diff := cmp.Diff(headers, w.Header()); diff != "" {
					t.Errorf("%s: headers (-want +got):\n%s", path, diff)
				}
				var got map[string]any
				if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil {
					t.Fatal(err)
				}
				want := map[string]any{
					"service":        map[string]any{"namespace": "shop", "name": "web"},
					"localEndpoints": float64(tt.endpoints), "serviceProxyHealthy": tt.healthy,
				}
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("%s: body (-want +got):\n%s", path, diff)
				}
			}
		})
	}
}
