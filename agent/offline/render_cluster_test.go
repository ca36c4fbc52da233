package offline

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/plan"
)

// TestRenderOfACluster: what a cluster has is rendered as manifests are; an API server that refuses is
// an error that says so.
func TestRenderOfACluster(t *testing.T) {
	list := func(kind, version, items string) string {
		return fmt.Sprintf(`{"kind":"%sList","apiVersion":"%s","metadata":{"resourceVersion":"1"},"items":[%s]}`, kind, version, items)
	}
	lists := map[string]string{
		"services": list("Service", "v1", `{"metadata":{"namespace":"default","name":"web"},"spec":{"clusterIP":"10.96.0.10","clusterIPs":["10.96.0.10"],"ports":[{"port":80,"protocol":"TCP"}]}}`),
		"endpointslices": list("EndpointSlice", "discovery.k8s.io/v1", `{"metadata":{"namespace":"default","name":"web-1","labels":{"kubernetes.io/service-name":"web"}},
			"addressType":"IPv4","endpoints":[{"addresses":["10.2.0.2"],"conditions":{"ready":true}}],"ports":[{"name":"","port":9000,"protocol":"TCP"}]}`),
		"nodes": list("Node", "v1", `{"metadata":{"name":"node"}}`),
	}
	var refuses atomic.Bool
	var refused atomic.Int32
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch q := r.URL.Query(); {
		case refuses.Load():
			if filepath.Base(r.URL.Path) == "services" && refused.Add(1) > 2 { // the first two answers have been heard
				cancel()
			}
			w.WriteHeader(http.StatusForbidden)
			fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","message":"not you","code":403}`)
		case q.Get("sendInitialEvents") != "":
			w.WriteHeader(http.StatusUnprocessableEntity)
			fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Invalid","message":"sendInitialEvents is forbidden","code":422}`)
		case q.Get("watch") != "":
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		default:
			fmt.Fprint(w, lists[filepath.Base(r.URL.Path)])
		}
	}))
	defer api.Close()
	kubeconfig := filepath.Join(t.TempDir(), "kubeconfig")
	text := fmt.Sprintf("apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: %q}}]\ncontexts: [{name: c, context: {cluster: c}}]\ncurrent-context: c\n", api.URL)
	if err := os.WriteFile(kubeconfig, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	o := RenderOptions{Config: config.Default(), Node: "node"}
	o.Config.Kubeconfig, o.Config.Mode = kubeconfig, string(plan.ModeNFTables)
	got, err := RenderText(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"default/web tcp: userspace", "add element ip kproxy backends { 10.96.0.10 . tcp . 80 . 0x00000000 : 10.2.0.2 . 9000 }"} {
		if !strings.Contains(got, want) {
			t.Errorf("it doesn't say %q:\n%s", want, got)
		}
	}
	refuses.Store(true)
	if _, err := RenderText(ctx, o); err == nil || !strings.Contains(err.Error(), "not you") {
		t.Errorf("refused: %v", err)
	}
}
