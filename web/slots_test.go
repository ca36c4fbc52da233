package web

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/prometheus/client_golang/prometheus"

	"kproxy.dev/kproxy/plan"
)

// answerFrom is h's answer to a client at ip.
func answerFrom(ctx context.Context, h http.Handler, ip, path string) int {
	r := httptest.NewRequest(http.MethodGet, "http://192.0.2.254"+path, nil).WithContext(ctx)
	r.RemoteAddr = ip + ":4321"
	w := httptest.NewRecorder()
	h.ServeHTTP(w, r)
	return w.Code
}

// TestGreedyClientsWaitForThemselves: a client with fifty requests that take for
// ever has two of them answered at a time, and a hundred others are answered
// meanwhile, at most so many at once.
func TestGreedyClientsWaitForThemselves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const greedy = "192.0.2.1"
		var mu sync.Mutex
		var atOnce, peak, ofGreedy int
		count := func(n *int, by int) {
			mu.Lock()
			defer mu.Unlock()
			*n += by
			peak = max(peak, atOnce)
		}
		ctx, giveUp := context.WithCancel(t.Context())
		h := newSlots(8, 2).bound(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
			count(&atOnce, 1)
			defer count(&atOnce, -1)
			if requester(r).Addr().String() == greedy {
				count(&ofGreedy, 1)
				<-ctx.Done()
			}
		}))
		var all sync.WaitGroup
		for range 50 {
			all.Go(func() { answerFrom(ctx, h, greedy, "/") })
		}
		synctest.Wait()
		if ofGreedy != 2 {
			t.Errorf("%d requests of one client are answered at once, want 2", ofGreedy)
		}
		var others sync.WaitGroup
		for i := range 100 {
			others.Go(func() {
				if code := answerFrom(t.Context(), h, fmt.Sprintf("198.51.100.%d", i), "/"); code != http.StatusOK {
					t.Errorf("another client: HTTP status %d", code)
				}
			})
		}
		others.Wait()
		if peak > 8 {
			t.Errorf("%d requests were answered at once, more than 8", peak)
		}
		giveUp()
		all.Wait()
	})
}

// slowSource answers nothing until goOn is closed.
type slowSource struct {
	*fakeSource
	begun chan bool
	goOn  chan bool
}

func (s slowSource) wait() {
	s.begun <- true
	<-s.goOn
}

func (s slowSource) Status() plan.Status {
	s.wait()
	return s.fakeSource.Status()
}

func (s slowSource) Connections(ctx context.Context) ([]plan.ConnectionStatus, error) {
	s.wait()
	return s.fakeSource.Connections(ctx)
}

// TestLongAnswersAreBounded: of what takes memory or time, a client gets two
// answers at a time, and all together eight. Further requests are refused after a
// while.
func TestLongAnswersAreBounded(t *testing.T) {
	for _, path := range []string{"/api/v1/status", "/api/v1/connections", "/proxyMode"} {
		for _, tt := range []struct{ clients, want int }{{1, 2}, {3, 6}, {20, 8}} {
			t.Run(fmt.Sprintf("%s for %d clients", path, tt.clients), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					src := slowSource{shop(), make(chan bool, 100), make(chan bool)}
					h := API(APIConfig{Source: src, Gatherer: prometheus.NewRegistry()})
					codes := make(chan int, 100)
					for i := range 60 {
						go func() {
							codes <- answerFrom(t.Context(), h, fmt.Sprintf("198.51.100.%d", i%tt.clients), path)
						}()
					}
					synctest.Wait()
					if n := len(src.begun); n != tt.want {
						t.Errorf("%d are answered at once, want %d", n, tt.want)
					}
					for range 60 - tt.want {
						if code := <-codes; code != http.StatusServiceUnavailable {
							t.Errorf("one too many: HTTP status %d", code)
						}
					}
					close(src.goOn)
					for range tt.want {
						if code := <-codes; code != http.StatusOK {
							t.Errorf("HTTP status %d", code)
						}
					}
				})
			})
		}
	}
}
