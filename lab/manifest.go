package lab

import (
	"bufio"
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"text/template"
	"time"
)

// Manifest describes a Service and its EndpointSlices as kproxy reads them.
// Copy and change it freely: its methods return new values.
type Manifest struct {
	Namespace string // "default" if empty
	Name      string
	Type      string    // "ClusterIP" if empty; "NodePort", "LoadBalancer"
	Created   time.Time // left out if zero
	Headless  bool
	IPv6      bool // dual stack

	ClusterIPs      []netip.Addr
	ExternalIPs     []netip.Addr
	LoadBalancerIPs []netip.Addr
	SourceRanges    []netip.Prefix
	Ports           []ManifestPort

	Algorithm string            // annotation kproxy.dev/algorithm; left out if empty
	DataPlane string            // annotation kproxy.dev/dataplane; left out if empty
	Extra     map[string]string // further annotations of the Service
	Affinity  time.Duration     // ClientIP session affinity; none if zero

	InternalLocal bool // internalTrafficPolicy: Local
	ExternalLocal bool // externalTrafficPolicy: Local
	// HealthCheckNodePort is where load balancers ask; 0 for none.
	HealthCheckNodePort uint16

	Endpoints []ManifestEndpoint
}

// ManifestPort is one port of a Service.
type ManifestPort struct {
	Name     string
	Protocol string // "TCP" if empty
	Port     uint16 // clients connect to it
	Target   uint16 // endpoints serve it
	NodePort uint16 // 0 for none
}

// ManifestEndpoint is one endpoint; Addresses has at most one address per family.
type ManifestEndpoint struct {
	Name        string
	Addresses   []netip.Addr
	Node        string // "node" if empty
	NotReady    bool
	NotServing  bool
	Terminating bool
	Weight      int // in the annotation kproxy.dev/weights if not 1; [NewManifest] sets 1
}

// NewManifest describes a dual-stack service (if the backends are) of the lab's
// backends: TCP and UDP port 80 to the line servers, TCP port 8080 to HTTP.
// number, 1 to 254, makes its addresses: 10.96.0.<number> and fd00:96::<number>.
func NewManifest(name string, number int, backends ...*Backend) Manifest {
	m := Manifest{
		Namespace: "default", Name: name,
		ClusterIPs: []netip.Addr{nth(ServiceCIDR4, number)},
		Ports: []ManifestPort{
			{Name: "line", Protocol: "TCP", Port: 80, Target: LinePort},
			{Name: "datagram", Protocol: "UDP", Port: 80, Target: LinePort},
			{Name: "http", Protocol: "TCP", Port: 8080, Target: HTTPPort},
		},
	}
	for _, b := range backends {
		m.Endpoints = append(m.Endpoints, ManifestEndpoint{Name: b.Name, Addresses: b.Addresses, Weight: 1})
		m.IPv6 = m.IPv6 || len(b.Addresses) > 1
	}
	if m.IPv6 {
		m.ClusterIPs = append(m.ClusterIPs, nth(ServiceCIDR6, number))
	}
	return m
}

// Without returns m without the named endpoints.
func (m Manifest) Without(names ...string) Manifest {
	m.Endpoints = slices.DeleteFunc(slices.Clone(m.Endpoints), func(e ManifestEndpoint) bool {
		return slices.Contains(names, e.Name)
	})
	return m
}

// Edit returns m with the named endpoint as f changes it.
func (m Manifest) Edit(name string, f func(*ManifestEndpoint)) Manifest {
	m.Endpoints = slices.Clone(m.Endpoints)
	for i := range m.Endpoints {
		if m.Endpoints[i].Name == name {
			f(&m.Endpoints[i])
		}
	}
	return m
}

// Annotate returns m with a further annotation on the Service.
func (m Manifest) Annotate(key, value string) Manifest {
	extra := map[string]string{}
	maps.Copy(extra, m.Extra)
	extra[key] = value
	m.Extra = extra
	return m
}

// YAML returns the Service and an EndpointSlice per family, in a form that a
// person would have written.
func (m Manifest) YAML() string {
	var b strings.Builder
	if err := manifestTemplate.Execute(&b, m); err != nil {
		panic(fmt.Sprintf("lab: execute manifest template: %v", err)) // the template and the type are both here
	}
	return b.String()
}

// Write writes the manifests into dir as <name>.yaml.
func (m Manifest) Write(dir string) error { return WriteManifests(m.Path(dir), m) }

// WriteManifests writes manifests into one file, by rename, so that no reader sees half of it.
func WriteManifests(path string, all ...Manifest) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".manifests-*.tmp")
	if err != nil {
		return fmt.Errorf("write manifests: %w", err)
	}
	w := bufio.NewWriter(f)
	for i, m := range all {
		w.WriteString([]string{"", "---\n"}[min(i, 1)] + m.YAML()) // Flush says what fails
	}
	err = cmp.Or(w.Flush(), f.Chmod(0o644), f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		os.Remove(f.Name())
		return fmt.Errorf("write manifests: %w", err)
	}
	return nil
}

// Path is the file that Write writes.
func (m Manifest) Path(dir string) string { return filepath.Join(dir, m.Name+".yaml") }

// Annotations returns the Service's annotations.
func (m Manifest) Annotations() map[string]string {
	if m.Algorithm != "" {
		m = m.Annotate("kproxy.dev/algorithm", m.Algorithm)
	}
	if m.DataPlane != "" {
		m = m.Annotate("kproxy.dev/dataplane", m.DataPlane)
	}
	return m.Extra
}

// manifestSlice is one family's EndpointSlice, for the template.
type manifestSlice struct {
	AddressType string
	Suffix      string
	Weights     string
	Endpoints   []manifestSliceEndpoint
}

type manifestSliceEndpoint struct {
	ManifestEndpoint
	Address netip.Addr
}

// Slices groups the endpoints by family, as EndpointSlices hold them.
func (m Manifest) Slices() []manifestSlice {
	out := []manifestSlice{{AddressType: "IPv4", Suffix: "ipv4"}}
	if m.IPv6 {
		out = append(out, manifestSlice{AddressType: "IPv6", Suffix: "ipv6"})
	}
	for i := range out {
		s := &out[i]
		var weights []string
		for _, e := range m.Endpoints {
			for _, a := range e.Addresses {
				if a.Is6() != (s.AddressType == "IPv6") {
					continue
				}
				s.Endpoints = append(s.Endpoints, manifestSliceEndpoint{e, a})
				if e.Weight != 1 {
					weights = append(weights, fmt.Sprintf("%s=%d", a, e.Weight))
				}
			}
		}
		s.Weights = strings.Join(weights, ",")
	}
	return out
}

var manifestTemplate = template.Must(template.New("manifest").Funcs(template.FuncMap{
	"seconds": func(d time.Duration) int { return int(d / time.Second) },
	"rfc3339": func(t time.Time) string { return t.UTC().Format(time.RFC3339) },
	"json": func(v any) (string, error) { // which is YAML
		b, err := json.Marshal(v)
		return string(b), err
	},
}).Parse(manifestText))

const manifestText = `apiVersion: v1
kind: Service
metadata:
  name: {{.Name}}
  namespace: {{or .Namespace "default"}}
{{- if not .Created.IsZero}}
  creationTimestamp: {{rfc3339 .Created}}
{{- end}}
{{- with .Annotations}}
  annotations: {{json .}}
{{- end}}
spec:
  type: {{or .Type "ClusterIP"}}
{{- if .Headless}}
  clusterIP: None
  clusterIPs: ["None"]
{{- else if .ClusterIPs}}
  clusterIP: "{{index .ClusterIPs 0}}"
  clusterIPs: {{json .ClusterIPs}}
{{- end}}
{{- if .IPv6}}
  ipFamilyPolicy: RequireDualStack
  ipFamilies: [IPv4, IPv6]
{{- end}}
{{- with .ExternalIPs}}
  externalIPs: {{json .}}
{{- end}}
{{- with .SourceRanges}}
  loadBalancerSourceRanges: {{json .}}
{{- end}}
{{- if .InternalLocal}}
  internalTrafficPolicy: Local
{{- end}}
{{- if .ExternalLocal}}
  externalTrafficPolicy: Local
{{- end}}
{{- if .HealthCheckNodePort}}
  healthCheckNodePort: {{.HealthCheckNodePort}}
{{- end}}
{{- if .Affinity}}
  sessionAffinity: ClientIP
  sessionAffinityConfig:
    clientIP:
      timeoutSeconds: {{seconds .Affinity}}
{{- end}}
  ports:
{{- range .Ports}}
  - name: "{{.Name}}"
    protocol: {{or .Protocol "TCP"}}
    port: {{.Port}}
    targetPort: {{.Target}}
{{- if .NodePort}}
    nodePort: {{.NodePort}}
{{- end}}
{{- end}}
{{- with .LoadBalancerIPs}}
status:
  loadBalancer:
    ingress:
{{- range .}}
    - ip: "{{.}}"
{{- end}}
{{- end}}
{{- $m := .}}
{{- range .Slices}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata:
  name: {{$m.Name}}-{{.Suffix}}
  namespace: {{or $m.Namespace "default"}}
  labels:
    kubernetes.io/service-name: {{$m.Name}}
{{- with .Weights}}
  annotations:
    kproxy.dev/weights: "{{.}}"
{{- end}}
addressType: {{.AddressType}}
endpoints:
{{- range .Endpoints}}
- addresses: ["{{.Address}}"]
  nodeName: {{or .Node "node"}}
  conditions:
    ready: {{not .NotReady}}
    serving: {{not .NotServing}}
    terminating: {{.Terminating}}
{{- else}} []
{{- end}}
ports:
{{- range $m.Ports}}
- name: "{{.Name}}"
  protocol: {{or .Protocol "TCP"}}
  port: {{.Target}}
{{- end}}
{{- end}}
`
