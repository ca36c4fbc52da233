package source

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"kproxy.dev/kproxy/service"
)

var compareNetip = cmp.Options{
	cmpopts.EquateComparable(netip.Addr{}, netip.AddrPort{}, netip.Prefix{}),
	cmpopts.EquateEmpty(),
}

// read decodes one object and nothing more: no defaults, no validation.
func read(t testing.TB, text string) metav1.Object {
	t.Helper()
	var head metav1.TypeMeta
	if err := yaml.Unmarshal([]byte(text), &head); err != nil {
		t.Fatal(err)
	}
	var o metav1.Object
	switch head.Kind {
	case "Service":
		o = new(corev1.Service)
	case "EndpointSlice":
		o = new(discoveryv1.EndpointSlice)
	case "Endpoints":
		o = new(Endpoints)
	case "Node":
		o = new(corev1.Node)
	default:
		t.Fatalf("kind %q in\n%s", head.Kind, text)
	}
	if err := yaml.UnmarshalStrict([]byte(text), o); err != nil {
		t.Fatalf("%v in\n%s", err, text)
	}
	return o
}

// objects decodes documents separated by "---".
func objects(t testing.TB, text string) (o Objects) {
	t.Helper()
	for doc := range strings.SplitSeq(text, "\n---\n") {
		switch x := read(t, doc).(type) {
		case *corev1.Service:
			o.Services = append(o.Services, x)
		case *discoveryv1.EndpointSlice:
			o.EndpointSlices = append(o.EndpointSlices, x)
		case *Endpoints:
			o.Endpoints = append(o.Endpoints, x)
		case *corev1.Node:
			o.Nodes = append(o.Nodes, x)
		}
	}
	return o
}

func ips(list ...string) (out []netip.Addr) {
	for _, s := range list {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

func prefixes(list ...string) (out []netip.Prefix) {
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

func tcp(name, port string) service.Key {
	return service.Key{Namespace: "default", Name: name, Port: port, Protocol: service.TCP}
}

func keys(s *service.Snapshot) (out []string) {
	for p := range s.All() {
		out = append(out, p.Key.String()+"/"+p.Protocol.String())
	}
	return out
}

func TestBuildTakesEverythingFromAService(t *testing.T) {
	o := objects(t, `
apiVersion: v1
kind: Service
metadata:
  name: web
  namespace: default
  creationTimestamp: "2024-05-01T12:00:00+02:00"
  annotations:
    kproxy.dev/algorithm: least-connections
    kproxy.dev/dataplane: userspace
    kproxy.dev/health-check: http
    kproxy.dev/health-path: /healthz
    kproxy.dev/health-port: "9090"
    kproxy.dev/health-interval: 5s
    kproxy.dev/health-timeout: 500ms
    kproxy.dev/health-rise: "4"
    kproxy.dev/health-fall: "5"
    kproxy.dev/proxy-protocol: v2
    kproxy.dev/connect-timeout: 250ms
    kproxy.dev/retries: "0"
    kproxy.dev/idle-timeout: 10m
    kproxy.dev/udp-responses: "2"
    example.com/other: ignored
spec:
  type: LoadBalancer
  clusterIP: 10.96.0.10
  clusterIPs: [10.96.0.10, "fd00:96::10"]
  externalIPs: [192.0.2.1, "2001:db8::1"]
  loadBalancerSourceRanges: [" 10.0.0.0/8 ", "010.1.0.0/16", "fd00::/8"]
  sessionAffinity: ClientIP
  sessionAffinityConfig: {clientIP: {timeoutSeconds: 60}}
  externalTrafficPolicy: Local
  internalTrafficPolicy: Local
  healthCheckNodePort: 32000
  ports:
  - {name: http, port: 80, targetPort: web, nodePort: 30080, protocol: TCP}
  - {name: dns, port: 53, nodePort: 30053, protocol: UDP}
status:
  loadBalancer:
    ingress:
    - ip: 198.51.100.1
    - {ip: 198.51.100.2, ipMode: VIP}
    - {ip: 198.51.100.3, ipMode: Proxy}
    - hostname: lb.example.com
    - ip: "2001:db8::2"
`)
	o.Where = func(*corev1.Service) string { return "a.yaml:2" }
	s := Build(o, "node-1")
	base := service.Port{
		Created:              metav1.Date(2024, 5, 1, 10, 0, 0, 0, metav1.Now().UTC().Location()).Time,
		ClusterIPs:           ips("10.96.0.10", "fd00:96::10"),
		ExternalIPs:          ips("192.0.2.1", "2001:db8::1"),
		LoadBalancerIPs:      ips("198.51.100.1", "198.51.100.2", "2001:db8::2"),
		SourceRanges:         prefixes("10.0.0.0/8", "10.1.0.0/16", "fd00::/8"),
		ExternallyAccessible: true,
		InternalLocal:        true,
		ExternalLocal:        true,
		HealthCheckNodePort:  32000,
		Affinity:             60e9,
		Algorithm:            service.LeastConnections,
		AlgorithmGiven:       true,
		Prefer:               service.PreferUserspace,
		Health: service.HealthCheck{Kind: service.CheckHTTP, Path: "/healthz", Port: 9090,
			Interval: 5e9, Timeout: 5e8, Rise: 4, Fall: 5},
		ConnectTimeout: 250e6,
		Retries:        0,
		IdleTimeout:    600e9,
		Responses:      2,
		Source:         "a.yaml:2",
	}
	http := base
	http.Key, http.Number, http.NodePort, http.ProxyProtocol = tcp("web", "http"), 80, 30080, 2
	dns := base
	dns.Key = service.Key{Namespace: "default", Name: "web", Port: "dns", Protocol: service.UDP}
	dns.Number, dns.NodePort = 53, 30053
	dns.Problems = []string{"kproxy.dev/proxy-protocol: only TCP ports have it, and this one is UDP"}
	for _, want := range []service.Port{http, dns} {
		got, _, ok := s.Get(want.Key)
		if !ok {
			t.Fatalf("no service port %v", want.Key)
		}
		if diff := cmp.Diff(want, *got, compareNetip); diff != "" {
			t.Errorf("%v (-want +got):\n%s", want.Key, diff)
		}
	}
}

// A manifest as short as can be, and without what an API server adds.
func TestBuildDefaults(t *testing.T) {
	s := Build(objects(t, `
kind: Service
metadata: {name: web, namespace: default}
spec:
  clusterIP: 010.096.000.010
  ports: [{port: 80}]
`), "node-1")
	want := service.Port{
		Key: tcp("web", ""), Number: 80, ClusterIPs: ips("10.96.0.10"), Retries: -1, Responses: -1,
		Algorithm: service.RoundRobin, Prefer: service.PreferAuto,
	}
	got, eps, _ := s.Get(want.Key)
	if diff := cmp.Diff(&want, got, compareNetip); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if len(eps) != 0 {
		t.Errorf("endpoints out of nowhere: %v", eps)
	}
}

func TestBuildLeavesOut(t *testing.T) {
	const head = "kind: Service\nmetadata: {name: x, namespace: default}\nspec: "
	cases := map[string]string{
		"headless":                   head + "{clusterIP: None, ports: [{port: 80}]}",
		"headless in both fields":    head + "{clusterIP: None, clusterIPs: [None], ports: [{port: 80}]}",
		"without a cluster IP":       head + "{ports: [{port: 80}]}",
		"with a broken cluster IP":   head + "{clusterIP: 10.96, ports: [{port: 80}]}",
		"ExternalName":               head + "{type: ExternalName, externalName: example.com, ports: [{port: 80}]}",
		"ExternalName with an IP":    head + "{type: ExternalName, clusterIP: 10.96.0.1, ports: [{port: 80}]}",
		"with port 0":                head + "{clusterIP: 10.96.0.1, ports: [{port: 0}]}",
		"with a port too high":       head + "{clusterIP: 10.96.0.1, ports: [{port: 65536}]}",
		"with an unknown protocol":   head + "{clusterIP: 10.96.0.1, ports: [{port: 80, protocol: DCCP}]}",
		"without ports":              head + "{clusterIP: 10.96.0.1}",
		"another proxy's":            "kind: Service\nmetadata: {name: x, namespace: default, labels: {service.kubernetes.io/service-proxy-name: cilium}}\nspec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}",
		"another proxy's, unnamed":   "kind: Service\nmetadata: {name: x, namespace: default, labels: {service.kubernetes.io/service-proxy-name: \"\"}}\nspec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}",
		"an endpoint slice alone":    "kind: EndpointSlice\nmetadata: {name: x, labels: {kubernetes.io/service-name: x}}\naddressType: IPv4\nports: [{name: '', port: 80}]\nendpoints: [{addresses: [10.2.0.2]}]",
		"an endpoints object alone ": "kind: Endpoints\nmetadata: {name: x}\nsubsets: [{addresses: [{ip: 10.2.0.2}], ports: [{port: 80}]}]",
	}
	for name, text := range cases {
		t.Run(name, func(t *testing.T) {
			if got := keys(Build(objects(t, text), "node-1")); len(got) != 0 {
				t.Errorf("served: %v", got)
			}
		})
	}
}

func TestServiceFields(t *testing.T) {
	cases := map[string]struct {
		spec string
		want func(*service.Port)
	}{
		"ClusterIP ignores node port, load balancer and external policy": {
			"{type: ClusterIP, externalTrafficPolicy: Local, healthCheckNodePort: 1234, ports: [{port: 80, nodePort: 30080}], loadBalancerSourceRanges: [10.0.0.0/8]}",
			func(p *service.Port) {},
		},
		"NodePort": {
			"{type: NodePort, externalTrafficPolicy: Local, healthCheckNodePort: 1234, ports: [{port: 80, nodePort: 30080}]}",
			func(p *service.Port) { p.NodePort, p.ExternallyAccessible, p.ExternalLocal = 30080, true, true },
		},
		"LoadBalancer with a node port that isn't one": {
			"{type: LoadBalancer, ports: [{port: 80, nodePort: 99999}]}",
			func(p *service.Port) { p.ExternallyAccessible = true },
		},
		"LoadBalancer with policy Cluster has no health check port": {
			"{type: LoadBalancer, healthCheckNodePort: 1234, externalTrafficPolicy: Cluster, ports: [{port: 80}]}",
			func(p *service.Port) { p.ExternallyAccessible = true },
		},
		"external IPs make a ClusterIP accessible": {
			"{externalIPs: [192.0.2.1], externalTrafficPolicy: Local, ports: [{port: 80}]}",
			func(p *service.Port) {
				p.ExternalIPs, p.ExternallyAccessible, p.ExternalLocal = ips("192.0.2.1"), true, true
			},
		},
		"external IPs of another family, broken or doubled": {
			`{externalIPs: ["2001:db8::1", x, 192.0.2.010, 192.0.2.10, "::ffff:192.0.2.10"], ports: [{port: 80}]}`,
			func(p *service.Port) { p.ExternalIPs, p.ExternallyAccessible = ips("192.0.2.10"), true },
		},
		"source ranges of another family, broken or doubled": {
			`{type: LoadBalancer, loadBalancerSourceRanges: ["fd00::/8", x, "10.0.0.0/33", "10.1.2.3/8", " 10.0.0.0/08", "::ffff:192.0.2.0/120"], ports: [{port: 80}]}`,
			func(p *service.Port) {
				p.SourceRanges, p.ExternallyAccessible = prefixes("10.0.0.0/8", "192.0.2.0/24"), true
			},
		},
		"a range of length 0 is one": { // which allows all of its family; plan goes by that
			`{type: LoadBalancer, loadBalancerSourceRanges: ["10.0.0.0/8", "0.0.0.0/0"], ports: [{port: 80}]}`,
			func(p *service.Port) {
				p.SourceRanges, p.ExternallyAccessible = prefixes("0.0.0.0/0", "10.0.0.0/8"), true
			},
		},
		"a range of length 0 of another family": {
			`{type: LoadBalancer, loadBalancerSourceRanges: ["10.0.0.0/8", "::/0"], ports: [{port: 80}]}`,
			func(p *service.Port) { p.SourceRanges, p.ExternallyAccessible = prefixes("10.0.0.0/8"), true },
		},
		"a range of length 0 in one of two families": {
			`{clusterIPs: [10.96.0.1, "fd00::1"], type: LoadBalancer, loadBalancerSourceRanges: ["10.0.0.0/8", "::/0"], ports: [{port: 80}]}`,
			func(p *service.Port) {
				p.ClusterIPs = ips("10.96.0.1", "fd00::1")
				p.SourceRanges, p.ExternallyAccessible = prefixes("10.0.0.0/8", "::/0"), true
			},
		},
		"affinity without a time-out": {
			"{sessionAffinity: ClientIP, ports: [{port: 80}]}",
			func(p *service.Port) { p.Affinity = 10800e9 },
		},
		"affinity None with a time-out": {
			"{sessionAffinity: None, sessionAffinityConfig: {clientIP: {timeoutSeconds: 5}}, ports: [{port: 80}]}",
			func(p *service.Port) {},
		},
		"internal policy Cluster": {
			"{internalTrafficPolicy: Cluster, ports: [{port: 80}]}",
			func(p *service.Port) {},
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			svc := read(t, "kind: Service\nmetadata: {name: x, namespace: default}\nspec: "+c.spec).(*corev1.Service)
			svc.Spec.ClusterIP = "10.96.0.1"
			want := service.Port{Key: tcp("x", ""), Number: 80, ClusterIPs: ips("10.96.0.1"), Retries: -1, Responses: -1,
				Algorithm: service.RoundRobin, Prefer: service.PreferAuto}
			c.want(&want)
			got, _, ok := Build(Objects{Services: []*corev1.Service{svc}}, "n").Get(want.Key)
			if !ok {
				t.Fatal("not served")
			}
			if diff := cmp.Diff(want, *got, compareNetip); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// Of two objects with one name, and two ports with one key, the first is in force.
func TestFirstIsInForce(t *testing.T) {
	s := Build(objects(t, `
kind: Service
metadata: {name: x, namespace: default}
spec: {clusterIP: 10.96.0.1, ports: [{port: 80}, {port: 81}]}
---
kind: Service
metadata: {name: x, namespace: default}
spec: {clusterIP: 10.96.0.2, ports: [{port: 82}]}
---
kind: EndpointSlice
metadata: {name: x-1, namespace: default, labels: {kubernetes.io/service-name: x}}
addressType: IPv4
ports: [{name: "", port: 8080}]
endpoints: [{addresses: [10.2.0.2]}]
---
kind: EndpointSlice
metadata: {name: x-1, namespace: default, labels: {kubernetes.io/service-name: x}}
addressType: IPv4
ports: [{name: "", port: 8080}]
endpoints: [{addresses: [10.2.0.3]}]
`), "n")
	p, eps, _ := s.Get(tcp("x", ""))
	if s.Len() != 1 || p.Number != 80 || p.ClusterIPs[0] != netip.MustParseAddr("10.96.0.1") {
		t.Errorf("%d ports, %+v", s.Len(), p)
	}
	if len(eps) != 1 || eps[0].Address != netip.MustParseAddrPort("10.2.0.2:8080") {
		t.Errorf("endpoints %v, want those of the first slice, once", eps)
	}
}

// The order in which objects come never shows.
func TestBuildIsIndependentOfOrder(t *testing.T) {
	o := manyServices(50)
	want := Build(o, "n").Hash()
	reverse(o.Services)
	reverse(o.EndpointSlices)
	if got := Build(o, "n").Hash(); got != want {
		t.Errorf("hash %x, in the other order %x", want, got)
	}
}

func reverse[T any](s []T) {
	for i, j := 0, len(s)-1; i < j; i, j = i+1, j-1 {
		s[i], s[j] = s[j], s[i]
	}
}
