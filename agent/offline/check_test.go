package offline

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestCheckNamesLines: each problem once, at the line that it is about, those of
// annotations too.
func TestCheckNamesLines(t *testing.T) {
	file := filepath.Join(t.TempDir(), "m.yaml")
	text := `apiVersion: v1
kind: Service
metadata:
  name: web
  annotations:
    kproxy.dev/algorithm: maglev
    kproxy.dev/retries: many
    kproxy.dev/proxy-protocol: v2
spec:
  clusterIP: 10.96.0.10
  ports: [{name: a, port: 80}, {name: b, port: 81}, {name: c, port: 80, protocol: UDP}]
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: web-1
  labels: {kubernetes.io/service-name: web}
  annotations:
    kproxy.dev/weights: 10.2.0.2=heavy
addressType: IPv4
endpoints: [{addresses: [10.2.0.2]}]
ports: [{name: a, port: 9000}]
---
apiVersion: v1
kind: Servce
`
	want := []string{
		file + `:7: Service default/web: kproxy.dev/retries: "many" is not a whole number from 0 to 10`,
		file + `:8: Service default/web: kproxy.dev/proxy-protocol: only TCP ports have it, and this one is UDP`,
		file + `:19: EndpointSlice default/web-1: kproxy.dev/weights of EndpointSlice web-1: weight "heavy" of 10.2.0.2 is not a whole number from 0 to 1000`,
	}
	for kind, last := range map[string][]string{"Servce": {file + ":25: kind Servce doesn't exist, did you mean Service?"}, "Pod": nil} {
		t.Run(kind, func(t *testing.T) {
			text := []byte(text[:len(text)-len("Servce\n")] + kind + "\n")
			if err := os.WriteFile(file, text, 0o644); err != nil {
				t.Fatal(err)
			}
			r, err := Check([]string{file}, "n1")
			if err != nil {
				t.Fatal(err)
			}
			if d := cmp.Diff(append(want[:len(want):len(want)], last...), r.Problems); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
		})
	}
}
