package source

import (
	"net/netip"
	"strings"
	"testing"
	"unsafe"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/service"
)

const dualStackWeb = `
kind: Service
metadata: {name: web, namespace: default}
spec: {clusterIPs: [10.96.0.1, "fd00:96::1"], clusterIP: 10.96.0.1, ports: [{name: http, port: 80, targetPort: web}, {name: dns, port: 53, protocol: UDP}]}
---
`

func ready(address string, change ...func(*service.Endpoint)) service.Endpoint {
	e := service.Endpoint{Address: netip.MustParseAddrPort(address), Ready: true, Serving: true, Weight: 1}
	for _, f := range change {
		f(&e)
	}
	return e
}

func TestEndpoints(t *testing.T) {
	const slice = "kind: EndpointSlice\nmetadata: {name: web-1, namespace: default, labels: {kubernetes.io/service-name: web}}\n"
	const ports = "ports: [{name: http, port: 8080, protocol: TCP}]\n"
	unready := func(e *service.Endpoint) { e.Ready, e.Serving = false, false }
	cases := map[string]struct {
		text string
		want []service.Endpoint
	}{
		"conditions absent": {
			slice + "addressType: IPv4\n" + ports + "endpoints: [{addresses: [10.2.0.2]}]",
			[]service.Endpoint{ready("10.2.0.2:8080")},
		},
		"conditions null": {
			slice + "addressType: IPv4\n" + ports + "endpoints: [{addresses: [10.2.0.2], conditions: {ready: null, serving: null, terminating: null}}]",
			[]service.Endpoint{ready("10.2.0.2:8080")},
		},
		"conditions given": {
			slice + "addressType: IPv4\n" + ports + "endpoints: [{addresses: [10.2.0.2], conditions: {ready: false, serving: false, terminating: true}}]",
			[]service.Endpoint{ready("10.2.0.2:8080", unready, func(e *service.Endpoint) { e.Terminating = true })},
		},
		"node, zone and hints": {
			slice + "addressType: IPv4\n" + ports + "endpoints: [{addresses: [10.2.0.2], nodeName: node-1, zone: z, hints: {forZones: [{name: b}, {name: a}], forNodes: [{name: node-1}]}}]",
			[]service.Endpoint{ready("10.2.0.2:8080", func(e *service.Endpoint) {
				e.Node, e.Hints = "node-1", &service.Hints{Zones: []string{"a", "b"}, Nodes: []string{"node-1"}}
			})},
		},
		"the first address only": {
			slice + "addressType: IPv4\n" + ports + "endpoints: [{addresses: [10.2.0.2, 10.2.0.3]}, {addresses: []}]",
			[]service.Endpoint{ready("10.2.0.2:8080")},
		},
		"leading zeros and mapped addresses": {
			slice + "addressType: IPv4\n" + ports + `endpoints: [{addresses: [010.002.000.002]}, {addresses: ["::ffff:10.2.0.3"]}]`,
			[]service.Endpoint{ready("10.2.0.2:8080"), ready("10.2.0.3:8080")},
		},
		"IPv6": {
			slice + "addressType: IPv6\n" + ports + `endpoints: [{addresses: ["fd00::2"]}]`,
			[]service.Endpoint{ready("[fd00::2]:8080")},
		},
		"FQDN": {
			slice + "addressType: FQDN\n" + ports + `endpoints: [{addresses: [a.example.com]}]`, nil,
		},
		"addresses that contradict the slice's family": {
			slice + "addressType: IPv6\n" + ports + `endpoints: [{addresses: [10.2.0.2]}]`, nil,
		},
		"addresses that are none": {
			slice + "addressType: IPv4\n" + ports + `endpoints: [{addresses: [x]}, {addresses: ["fe80::1%eth0"]}]`, nil,
		},
		"ports without a name or a number": {
			slice + "addressType: IPv4\n" + "ports: [{port: 1}, {name: http}, {name: http, port: 0}, {name: http, port: 8080}]\n" + "endpoints: [{addresses: [10.2.0.2]}]",
			[]service.Endpoint{ready("10.2.0.2:8080")},
		},
		"ports of another name or protocol": {
			slice + "addressType: IPv4\n" + "ports: [{name: https, port: 1}, {name: http, port: 2, protocol: UDP}, {name: http, port: 3, protocol: DCCP}, {name: http, port: 70000}]\n" + "endpoints: [{addresses: [10.2.0.2]}]",
			nil,
		},
		"weights": {
			"kind: EndpointSlice\nmetadata: {name: web-1, namespace: default, labels: {kubernetes.io/service-name: web}, annotations: {kproxy.dev/weights: \"10.2.0.2=3, 10.2.0.3=0,10.2.0.9=7\"}}\n" +
				"addressType: IPv4\n" + ports + "endpoints: [{addresses: [10.2.0.2]}, {addresses: [10.2.0.3]}, {addresses: [10.2.0.4]}]",
			[]service.Endpoint{
				ready("10.2.0.2:8080", func(e *service.Endpoint) { e.Weight = 3 }),
				ready("10.2.0.3:8080", func(e *service.Endpoint) { e.Weight = 0 }),
				ready("10.2.0.4:8080"),
			},
		},
		"one named target port, two numbers": {
			slice + "addressType: IPv4\n" + ports + "endpoints: [{addresses: [10.2.0.2]}]\n---\n" +
				"kind: EndpointSlice\nmetadata: {name: web-2, namespace: default, labels: {kubernetes.io/service-name: web}}\naddressType: IPv4\n" +
				"ports: [{name: http, port: 9090}]\nendpoints: [{addresses: [10.2.0.3]}]",
			[]service.Endpoint{ready("10.2.0.2:8080"), ready("10.2.0.3:9090")},
		},
		"an address in two slices": {
			slice + "addressType: IPv4\n" + ports + "endpoints: [{addresses: [10.2.0.2], conditions: {terminating: true}}]\n---\n" +
				"kind: EndpointSlice\nmetadata: {name: web-2, namespace: default, labels: {kubernetes.io/service-name: web}}\naddressType: IPv4\n" +
				"ports: [{name: http, port: 8080}]\nendpoints: [{addresses: [10.2.0.2]}]",
			[]service.Endpoint{ready("10.2.0.2:8080")},
		},
		"slices of other services and namespaces": {
			"kind: EndpointSlice\nmetadata: {name: web-1, namespace: other, labels: {kubernetes.io/service-name: web}}\naddressType: IPv4\n" + ports + "endpoints: [{addresses: [10.2.0.2]}]\n---\n" +
				"kind: EndpointSlice\nmetadata: {name: web, namespace: default}\naddressType: IPv4\n" + ports + "endpoints: [{addresses: [10.2.0.2]}]",
			nil,
		},
		"slices of a headless service": {
			"kind: EndpointSlice\nmetadata: {name: web-1, namespace: default, labels: {kubernetes.io/service-name: web, service.kubernetes.io/headless: ''}}\n" +
				"addressType: IPv4\n" + ports + "endpoints: [{addresses: [10.2.0.2]}]",
			nil,
		},
		"Endpoints": {
			"kind: Endpoints\nmetadata: {name: web, namespace: default}\nsubsets:\n" +
				`- {addresses: [{ip: 10.2.0.2, nodeName: node-1}, {ip: "fd00::2"}, {ip: x}], notReadyAddresses: [{ip: 10.2.0.3}], ports: [{name: http, port: 8080}, {name: dns, port: 53, protocol: UDP}]}` +
				"\n- {addresses: [{ip: 10.2.0.4}], ports: [{name: http, port: 9090}, {name: http, port: 0}]}",
			[]service.Endpoint{
				ready("10.2.0.2:8080", func(e *service.Endpoint) { e.Node = "node-1" }),
				ready("10.2.0.3:8080", unready),
				ready("10.2.0.4:9090"),
				ready("[fd00::2]:8080"),
			},
		},
		"Endpoints beside a slice": {
			slice + "addressType: IPv4\n" + ports + "endpoints: [{addresses: [10.2.0.2]}]\n---\n" +
				"kind: Endpoints\nmetadata: {name: web, namespace: default}\nsubsets: [{addresses: [{ip: 10.2.0.9}], ports: [{name: http, port: 8080}]}]",
			[]service.Endpoint{ready("10.2.0.2:8080")},
		},
		"Endpoints beside an empty slice": {
			slice + "addressType: IPv4\n" + ports + "endpoints: []\n---\n" +
				"kind: Endpoints\nmetadata: {name: web, namespace: default}\nsubsets: [{addresses: [{ip: 10.2.0.9}], ports: [{name: http, port: 8080}]}]",
			nil,
		},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			_, got, ok := Build(objects(t, dualStackWeb+c.text), "n").Get(tcp("web", "http"))
			if !ok {
				t.Fatal("not served")
			}
			if diff := cmp.Diff(c.want, got, compareNetip); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

// A Service with addresses of one family has endpoints of that family only.
func TestEndpointsOfAFamilyNotServed(t *testing.T) {
	got := Build(objects(t, `
kind: Service
metadata: {name: web, namespace: default}
spec: {clusterIP: "fd00:96::1", ports: [{port: 80}]}
---
kind: EndpointSlice
metadata: {name: web-4, namespace: default, labels: {kubernetes.io/service-name: web}}
addressType: IPv4
ports: [{name: "", port: 8080}]
endpoints: [{addresses: [10.2.0.2]}]
---
kind: EndpointSlice
metadata: {name: web-6, namespace: default, labels: {kubernetes.io/service-name: web}}
addressType: IPv6
ports: [{name: "", port: 8080}]
endpoints: [{addresses: ["fd00::2"]}]
`), "n")
	_, eps, _ := got.Get(tcp("web", ""))
	if diff := cmp.Diff([]service.Endpoint{ready("[fd00::2]:8080")}, eps, compareNetip); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestNode(t *testing.T) {
	const nodes = `
kind: Node
metadata: {name: other, labels: {topology.kubernetes.io/zone: b}}
spec: {podCIDR: 10.9.0.0/24}
---
kind: Node
metadata: {name: node-1, labels: {topology.kubernetes.io/zone: a}}
spec: {podCIDR: 10.1.0.0/24, podCIDRs: [10.1.0.5/24, "fd00:1::/64", x]}
status:
  addresses:
  - {type: Hostname, address: node-1}
  - {type: InternalIP, address: 192.168.0.010}
  - {type: InternalIP, address: "fd00:ffff::1"}
  - {type: ExternalIP, address: 203.0.113.1}
  - {type: InternalIP, address: x}
---
kind: Node
metadata: {name: outside}
status: {addresses: [{type: ExternalIP, address: 203.0.113.1}, {type: ExternalIP, address: "2001:db8::1"}, {type: InternalIP, address: "fd00:ffff::2"}]}
`
	cases := map[string]service.Node{
		"node-1":  {Name: "node-1", Zone: "a", Addresses: ips("192.168.0.10", "fd00:ffff::1"), PodCIDRs: prefixes("10.1.0.0/24", "fd00:1::/64")},
		"outside": {Name: "outside", Addresses: ips("203.0.113.1", "fd00:ffff::2")},
		// only the older, single field
		"other":   {Name: "other", Zone: "b", PodCIDRs: prefixes("10.9.0.0/24")},
		"unknown": {Name: "unknown"},
	}
	for name, want := range cases {
		if diff := cmp.Diff(want, Build(objects(t, nodes), name).Node(), compareNetip); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
	told := objects(t, nodes)
	told.NodeAddresses = ips("192.168.7.7")
	want := cases["node-1"]
	want.Addresses = ips("192.168.7.7")
	if diff := cmp.Diff(want, Build(told, "node-1").Node(), compareNetip); diff != "" {
		t.Errorf("with addresses that were told (-want +got):\n%s", diff)
	}
}

// Names that many endpoints have in common are in memory once.
func TestNamesAreShared(t *testing.T) {
	a, b := shared(strings.Repeat("n", 9)), shared(strings.Repeat("n", 9))
	if unsafe.StringData(a) != unsafe.StringData(b) || a != "nnnnnnnnn" {
		t.Errorf("%q and %q are two", a, b)
	}
}
