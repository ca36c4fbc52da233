package web

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/plan"
)

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
