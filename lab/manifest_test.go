package lab

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"
)

func twoBackends() []*Backend {
	n := New(Config{Prefix: "p", Backends: 2, Clients: 1, IPv6: true})
	return n.Backends
}

func TestManifestYAML(t *testing.T) {
	m := NewManifest("web", 10, twoBackends()...)
	m.IPv6 = false
	m.ClusterIPs = m.ClusterIPs[:1]
	m.Ports = m.Ports[:1]
	m.Ports[0].NodePort = 30080
	m.Type = "NodePort"
	m.Affinity = time.Hour
	m.Algorithm = "least-connections"
	m = m.Annotate("kproxy.dev/retries", "2").Edit("b2", func(e *ManifestEndpoint) { e.Weight = 3; e.NotReady = true })
	want := `apiVersion: v1
kind: Service
metadata:
  name: web
  namespace: default
  annotations: {"kproxy.dev/algorithm":"least-connections","kproxy.dev/retries":"2"}
spec:
  type: NodePort
  clusterIP: "10.96.0.10"
  clusterIPs: ["10.96.0.10"]
  sessionAffinity: ClientIP
  sessionAffinityConfig:
    clientIP:
      timeoutSeconds: 3600
  ports:
  - name: "line"
    protocol: TCP
    port: 80
    targetPort: 9000
    nodePort: 30080
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: web-ipv4
  namespace: default
  labels:
    kubernetes.io/service-name: web
  annotations:
    kproxy.dev/weights: "10.2.0.3=3"
addressType: IPv4
endpoints:
- addresses: ["10.2.0.2"]
  nodeName: node
  conditions:
    ready: true
    serving: true
    terminating: false
- addresses: ["10.2.0.3"]
  nodeName: node
  conditions:
    ready: false
    serving: true
    terminating: false
ports:
- name: "line"
  protocol: TCP
  port: 9000
`
	if diff := cmp.Diff(want, m.YAML()); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// Every option at once, and each end of it, is still YAML.
func TestManifestIsYAML(t *testing.T) {
	full := NewManifest("full", 20, twoBackends()...)
	full.Created = time.Unix(1700000000, 0)
	full.ExternalIPs = []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}
	full.LoadBalancerIPs = full.ExternalIPs
	full.SourceRanges = []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8"), netip.MustParsePrefix("fd00::/8")}
	full.InternalLocal, full.ExternalLocal = true, true
	full.DataPlane = "userspace"
	headless := NewManifest("headless", 21, twoBackends()...)
	headless.Headless = true
	cases := map[string]struct {
		manifest  Manifest
		endpoints []int
	}{
		"full":      {full, []int{2, 2}},
		"headless":  {headless, []int{2, 2}},
		"reduced":   {full.Without("b1"), []int{1, 1}},
		"emptied":   {full.Without("b1", "b2"), []int{0, 0}},
		"no family": {NewManifest("none", 22), []int{0}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			decoder := yaml.NewDecoder(strings.NewReader(c.manifest.YAML()))
			var kinds []string
			var endpoints []int
			for {
				var doc struct {
					Kind      string
					Endpoints []map[string]any
				}
				if decoder.Decode(&doc) != nil {
					break
				}
				kinds = append(kinds, doc.Kind)
				if doc.Kind == "EndpointSlice" {
					endpoints = append(endpoints, len(doc.Endpoints))
				}
			}
			if diff := cmp.Diff(c.endpoints, endpoints); diff != "" || kinds[0] != "Service" {
				t.Errorf("kinds %v, endpoints (-want +got):\n%s\n%s", kinds, diff, c.manifest.YAML())
			}
		})
	}
}

func TestManifestValuesAreIndependent(t *testing.T) {
	m := NewManifest("web", 10, twoBackends()...)
	before := m.YAML()
	m.Without("b1")
	m.Edit("b1", func(e *ManifestEndpoint) { e.Terminating = true })
	m.Annotate("a", "b")
	if diff := cmp.Diff(before, m.YAML()); diff != "" {
		t.Errorf("m changed (-before +after):\n%s", diff)
	}
}

func TestManifestWrite(t *testing.T) {
	dir := t.TempDir()
	m := NewManifest("web", 10, twoBackends()...)
	for _, v := range []Manifest{m, m.Without("b1")} {
		if err := v.Write(dir); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(filepath.Join(dir, "web.yaml"))
		if diff := cmp.Diff(v.YAML(), string(got)); err != nil || diff != "" {
			t.Errorf("%v (-want +got):\n%s", err, diff)
		}
	}
	if entries, _ := os.ReadDir(dir); len(entries) != 1 {
		t.Errorf("directory holds %v, want one file", entries)
	}
	if err := m.Write(filepath.Join(dir, "none")); err == nil {
		t.Error("directory that doesn't exist: got no error")
	}
}
