package source

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func problems(o metav1.Object) (out []string) {
	Default(o)
	for _, e := range Validate(o) {
		out = append(out, e.Error())
	}
	return out
}

func TestValidateService(t *testing.T) {
	const special = ", which no service or endpoint can have"
	cases := map[string]struct {
		spec string
		want []string
	}{
		"shortest": {"{clusterIP: 10.96.0.1, ports: [{port: 80}]}", nil},
		"everything": {`{type: LoadBalancer, clusterIP: 10.96.0.1, clusterIPs: [10.96.0.1, "fd00::1"], ipFamilies: [IPv4, IPv6], ipFamilyPolicy: RequireDualStack,
			externalIPs: [192.0.2.1], loadBalancerSourceRanges: [" 10.0.0.0/8"], sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 86400}},
			externalTrafficPolicy: Local, internalTrafficPolicy: Local, healthCheckNodePort: 32000,
			ports: [{name: a, port: 53, protocol: UDP, nodePort: 30053}, {name: b, port: 53, protocol: TCP, nodePort: 30053}, {name: c, port: 53, protocol: SCTP}]}`, nil},
		"headless":             {"{clusterIP: None}", nil},
		"without a cluster IP": {"{ports: [{port: 80}]}", nil},
		"ExternalName":         {"{type: ExternalName, externalName: example.com}", nil},
		"unknown type":         {"{type: Gateway, clusterIP: 10.96.0.1, ports: [{port: 80}]}", []string{`spec.type: "Gateway" is not one of ClusterIP, NodePort, LoadBalancer, ExternalName`}},
		"no ports":             {"{clusterIP: 10.96.0.1}", []string{"spec.ports: missing: a Service needs a port"}},
		"port 0":               {"{clusterIP: 10.96.0.1, ports: [{port: 0}]}", []string{"spec.ports[0].port: 0 is not a port number from 1 to 65535"}},
		"port too high":        {"{clusterIP: 10.96.0.1, ports: [{port: 65536}]}", []string{"spec.ports[0].port: 65536 is not a port number from 1 to 65535"}},
		"node port of ClusterIP": {"{clusterIP: 10.96.0.1, ports: [{port: 80, nodePort: 70000}]}", []string{
			"spec.ports[0].nodePort: 70000 is not a port number from 1 to 65535",
			"spec.ports[0].nodePort: a Service of type ClusterIP has no node ports",
		}},
		"unknown protocol": {"{clusterIP: 10.96.0.1, ports: [{port: 80, protocol: tcp}]}", []string{`spec.ports[0].protocol: "tcp" is not one of TCP, UDP, SCTP`}},
		"ports that collide": {"{clusterIP: 10.96.0.1, type: NodePort, ports: [{name: a, port: 80, nodePort: 30080}, {name: a, port: 80, nodePort: 30080}, {port: 81}]}", []string{
			`spec.ports[1].name: name "a" is used by spec.ports[0] too`,
			"spec.ports[1].port: port 80/TCP is used by spec.ports[0] too",
			"spec.ports[1].nodePort: node port 30080/TCP is used by spec.ports[0] too",
			"spec.ports[2].name: missing, and needed where there is more than one port",
		}},
		"port name": {"{clusterIP: 10.96.0.1, ports: [{name: A_b, port: 80}]}", []string{
			`spec.ports[0].name: "A_b" is not a name: lower-case letters, digits and '-', at most 63, beginning and ending with a letter or digit`,
		}},
		"cluster IPs that contradict each other": {"{clusterIP: 10.96.0.1, clusterIPs: [10.96.0.2, 10.96.0.1, x], ports: [{port: 80}]}", []string{
			`spec.clusterIPs[0]: "10.96.0.2" contradicts spec.clusterIP "10.96.0.1"`,
			"spec.clusterIPs: 3 addresses, and a Service has at most one in each IP family",
			"spec.clusterIPs[1]: 10.96.0.1 is the second address of family ipv4",
			`spec.clusterIPs[2]: "x" is not an IP address`,
		}},
		"bad cluster IP":           {"{clusterIP: 10.96.0.256, ports: [{port: 80}]}", []string{`spec.clusterIPs[0]: "10.96.0.256" is not an IP address`}},
		"headless with addresses":  {"{clusterIP: None, clusterIPs: [None, 10.96.0.1]}", []string{"spec.clusterIPs: a headless Service has no addresses besides None"}},
		"headless with node ports": {"{clusterIP: None, type: NodePort, ports: [{port: 80}]}", []string{"spec.clusterIP: None contradicts type NodePort"}},
		"special external IPs": {`{clusterIP: 10.96.0.1, externalIPs: [0.0.0.0, 127.0.0.1, "fe80::1", 224.0.0.1, "fe80::1%eth0", x], ports: [{port: 80}]}`, []string{
			"spec.externalIPs[0]: 0.0.0.0 is unspecified" + special,
			"spec.externalIPs[1]: 127.0.0.1 is a loopback address" + special,
			"spec.externalIPs[2]: fe80::1 is a link-local address" + special,
			"spec.externalIPs[3]: 224.0.0.1 is a multicast address" + special,
			`spec.externalIPs[4]: "fe80::1%eth0" has a zone, which no service address can have`,
			`spec.externalIPs[5]: "x" is not an IP address`,
		}},
		"families": {`{clusterIPs: [10.96.0.1, "fd00::1"], ipFamilies: [IPv6, ipv4], ipFamilyPolicy: SingleStack, ports: [{port: 80}]}`, []string{
			"spec.ipFamilies[0]: IPv6 contradicts cluster IP 10.96.0.1",
			`spec.ipFamilies[1]: "ipv4" is not one of IPv4, IPv6`,
			"spec.ipFamilies[1]: ipv4 contradicts cluster IP fd00::1",
			"spec.ipFamilyPolicy: SingleStack contradicts 2 cluster IPs",
		}},
		"family policy": {"{clusterIP: 10.96.0.1, ipFamilyPolicy: DualStack, ports: [{port: 80}]}", []string{
			`spec.ipFamilyPolicy: "DualStack" is not one of SingleStack, PreferDualStack, RequireDualStack`,
		}},
		"affinity": {"{clusterIP: 10.96.0.1, sessionAffinity: Cookie, ports: [{port: 80}]}", []string{`spec.sessionAffinity: "Cookie" is not one of None, ClientIP`}},
		"affinity config without affinity": {"{clusterIP: 10.96.0.1, sessionAffinityConfig: {clientIP: {timeoutSeconds: 0}}, ports: [{port: 80}]}", []string{
			"spec.sessionAffinityConfig: contradicts sessionAffinity None",
			"spec.sessionAffinityConfig.clientIP.timeoutSeconds: 0 is not from 1 to 86400 seconds",
		}},
		"affinity too long": {"{clusterIP: 10.96.0.1, sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 86401}}, ports: [{port: 80}]}", []string{
			"spec.sessionAffinityConfig.clientIP.timeoutSeconds: 86401 is not from 1 to 86400 seconds",
		}},
		"policies": {"{clusterIP: 10.96.0.1, type: NodePort, externalTrafficPolicy: local, internalTrafficPolicy: Node, ports: [{port: 80}]}", []string{
			`spec.externalTrafficPolicy: "local" is not one of Cluster, Local`,
			`spec.internalTrafficPolicy: "Node" is not one of Cluster, Local`,
		}},
		"external policy without external traffic": {"{clusterIP: 10.96.0.1, externalTrafficPolicy: Local, ports: [{port: 80}]}", []string{
			"spec.externalTrafficPolicy: a Service of type ClusterIP without external IPs has no external traffic",
		}},
		"health check port": {"{clusterIP: 10.96.0.1, type: NodePort, healthCheckNodePort: 66000, ports: [{port: 80}]}", []string{
			"spec.healthCheckNodePort: 66000 is not a port number from 1 to 65535",
			"spec.healthCheckNodePort: only type LoadBalancer with externalTrafficPolicy Local has one",
		}},
		"health check port that is a node port": {"{clusterIP: 10.96.0.1, type: LoadBalancer, externalTrafficPolicy: Local, healthCheckNodePort: 30080, ports: [{port: 80, nodePort: 30080}]}", []string{
			"spec.healthCheckNodePort: 30080 is the node port of spec.ports[0] too",
		}},
		"source ranges": {"{clusterIP: 10.96.0.1, loadBalancerSourceRanges: [10.0.0.0], ports: [{port: 80}]}", []string{
			"spec.loadBalancerSourceRanges: a Service of type ClusterIP has no load balancer",
			`spec.loadBalancerSourceRanges[0]: "10.0.0.0" is not a network in CIDR notation`,
		}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			got := problems(read(t, "kind: Service\nmetadata: {name: x}\nspec: "+c.spec))
			if diff := cmp.Diff(c.want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestValidateObjects(t *testing.T) {
	const slice = "kind: EndpointSlice\nmetadata: {name: x}\n"
	const label = "lower-case letters, digits and '-', at most 63, beginning and ending with a letter or digit"
	const subdomain = "lower-case letters, digits, '-' and '.', at most 253, beginning and ending with a letter or digit"
	const status = "kind: Service\nmetadata: {name: x}\nspec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}\n"
	cases := map[string]struct {
		text string
		want []string
	}{
		"no name":             {"kind: Service\nmetadata: {}\nspec: {clusterIP: None}", []string{"metadata.name: missing"}},
		"bad names":           {"kind: Service\nmetadata: {name: 'a\" -j ACCEPT', namespace: a.b}\nspec: {clusterIP: None}", []string{`metadata.name: "a\" -j ACCEPT" is not a name: ` + label, `metadata.namespace: "a.b" is not a name: ` + label}},
		"no name of a slice":  {"kind: EndpointSlice\nmetadata: {}\naddressType: IPv4", []string{"metadata.name: missing"}},
		"bad name of a slice": {"kind: EndpointSlice\nmetadata: {name: A}\naddressType: IPv4", []string{`metadata.name: "A" is not a name: ` + subdomain}},
		"load balancer of no LoadBalancer": {status + "status: {loadBalancer: {ingress: [{ip: 192.0.2.1}]}}", []string{
			"status.loadBalancer: a Service of type ClusterIP has no load balancer",
		}},
		"load balancer": {strings.Replace(status, "spec: {", "spec: {type: LoadBalancer, ", 1) + "status: {loadBalancer: {ingress: [{ip: 0.0.0.0}, {ip: 192.0.2.1, ipMode: DSR}, {hostname: a, ipMode: VIP}]}}", []string{
			"status.loadBalancer.ingress[0].ip: 0.0.0.0 is unspecified, which no service or endpoint can have",
			`status.loadBalancer.ingress[1].ipMode: "DSR" is not one of VIP, Proxy`,
			"status.loadBalancer.ingress[2].ipMode: means nothing without ip",
		}},
		"slice":                 {slice + "addressType: IPv4\nports: [{port: 80}, {name: a, port: 81, protocol: UDP}, {name: b}]\nendpoints: [{addresses: [10.2.0.2], nodeName: n.example.com, hints: {forZones: [{name: Zone_A}]}}]", nil},
		"slice without a type":  {slice, []string{"addressType: missing"}},
		"slice of another type": {slice + "addressType: ipv4", []string{`addressType: "ipv4" is not one of IPv4, IPv6, FQDN`}},
		"slice of host names":   {slice + "addressType: FQDN\nendpoints: [{addresses: [a.example.com]}]", nil},
		"slice of a service that has no such name": {"kind: EndpointSlice\nmetadata: {name: x, labels: {kubernetes.io/service-name: A}}\naddressType: IPv4", []string{
			`metadata.labels[kubernetes.io/service-name]: "A" is not a name: ` + label,
		}},
		"slice with bad endpoints": {slice + "addressType: IPv4\nendpoints: [{addresses: []}, {addresses: [10.2.0.2, 'fd00::2', x, 127.0.0.1]}, {addresses: [10.2.0.3], nodeName: A, hints: {forZones: [{name: ''}], forNodes: [{name: ''}]}}]", []string{
			"endpoints[0].addresses: missing: an endpoint needs an address",
			"endpoints[1].addresses[1]: fd00::2 contradicts addressType IPv4",
			`endpoints[1].addresses[2]: "x" is not an IP address`,
			"endpoints[1].addresses[3]: 127.0.0.1 is a loopback address, which no service or endpoint can have",
			`endpoints[2].nodeName: "A" is not a name: ` + subdomain,
			"endpoints[2].hints.forZones[0].name: missing",
			"endpoints[2].hints.forNodes[0].name: missing",
		}},
		"slice with bad ports": {slice + "addressType: IPv6\nports: [{port: 0}, {port: 65536, protocol: X}, {name: A, port: 1}]", []string{
			"ports[0].port: 0 is not a port number from 1 to 65535",
			`ports[1].name: name "" is used by ports[0] too`,
			`ports[1].protocol: "X" is not one of TCP, UDP, SCTP`,
			"ports[1].port: 65536 is not a port number from 1 to 65535",
			`ports[2].name: "A" is not a name: ` + label,
		}},
		"Endpoints": {"kind: Endpoints\nmetadata: {name: x.y}\nsubsets: [{addresses: [{ip: 10.2.0.2, nodeName: n}], ports: [{port: 80}]}, {notReadyAddresses: [{ip: 'fd00::2'}], ports: [{name: a, port: 1}, {name: b, port: 1}]}]", nil},
		"bad Endpoints": {"kind: Endpoints\nmetadata: {name: x}\nsubsets: [{}, {addresses: [{ip: x, nodeName: A}], notReadyAddresses: [{ip: 127.0.0.1}], ports: [{name: a, port: 0}, {name: a, port: 1}, {port: 2, protocol: x}]}]", []string{
			"subsets[0]: neither addresses nor notReadyAddresses",
			`subsets[1].addresses[0].ip: "x" is not an IP address`,
			`subsets[1].addresses[0].nodeName: "A" is not a name: ` + subdomain,
			"subsets[1].notReadyAddresses[0].ip: 127.0.0.1 is a loopback address, which no service or endpoint can have",
			"subsets[1].ports[0].port: 0 is not a port number from 1 to 65535",
			`subsets[1].ports[1].name: name "a" is used by subsets[1].ports[0] too`,
			"subsets[1].ports[2].name: missing, and needed where there is more than one port",
			`subsets[1].ports[2].protocol: "x" is not one of TCP, UDP, SCTP`,
		}},
		"Node": {"kind: Node\nmetadata: {name: node-1.example.com}\nspec: {podCIDR: 10.1.0.0/24, podCIDRs: [10.1.0.0/24, 'fd00::/64']}\nstatus: {addresses: [{type: InternalIP, address: 10.0.0.1}, {type: Hostname, address: x}]}", nil},
		"bad Node": {"kind: Node\nmetadata: {name: node-1}\nspec: {podCIDR: 10.1.0.0, podCIDRs: [10.1.0.0/24, x]}\nstatus: {addresses: [{type: InternalIP, address: x}]}", []string{
			`status.addresses[0].address: "x" is not an IP address`,
			`spec.podCIDRs[1]: "x" is not a network in CIDR notation`,
			`spec.podCIDR: "10.1.0.0" is not a network in CIDR notation`,
			`spec.podCIDR: "10.1.0.0" contradicts spec.podCIDRs[0] "10.1.0.0/24"`,
		}},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, problems(read(t, c.text))); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
}

func TestDefault(t *testing.T) {
	cases := map[string]struct{ in, want string }{
		"Service": {
			"kind: Service\nmetadata: {name: x}\nspec: {clusterIP: 10.96.0.1, ports: [{port: 80}]}",
			"kind: Service\nmetadata: {name: x, namespace: default}\nspec: {type: ClusterIP, sessionAffinity: None, internalTrafficPolicy: Cluster, clusterIP: 10.96.0.1, clusterIPs: [10.96.0.1], ports: [{port: 80, protocol: TCP, targetPort: 80}]}",
		},
		"Service with much given": {
			"kind: Service\nmetadata: {name: x, namespace: y}\nspec: {type: NodePort, clusterIPs: ['fd00::1'], sessionAffinity: ClientIP, internalTrafficPolicy: Local, ports: [{port: 80, protocol: UDP, targetPort: dns}]}",
			"kind: Service\nmetadata: {name: x, namespace: y}\nspec: {type: NodePort, clusterIP: 'fd00::1', clusterIPs: ['fd00::1'], sessionAffinity: ClientIP, sessionAffinityConfig: {clientIP: {timeoutSeconds: 10800}}, externalTrafficPolicy: Cluster, internalTrafficPolicy: Local, ports: [{port: 80, protocol: UDP, targetPort: dns}]}",
		},
		"ExternalName": {
			"kind: Service\nmetadata: {name: x}\nspec: {type: ExternalName, externalName: y}",
			"kind: Service\nmetadata: {name: x, namespace: default}\nspec: {type: ExternalName, externalName: y, sessionAffinity: None}",
		},
		"EndpointSlice": {
			"kind: EndpointSlice\nmetadata: {name: x}\nports: [{port: 80}, {name: a, protocol: UDP}]",
			"kind: EndpointSlice\nmetadata: {name: x, namespace: default}\nports: [{name: '', port: 80, protocol: TCP}, {name: a, protocol: UDP}]",
		},
		"Endpoints": {
			"kind: Endpoints\nmetadata: {name: x}\nsubsets: [{ports: [{port: 80}, {port: 53, protocol: UDP}]}]",
			"kind: Endpoints\nmetadata: {name: x, namespace: default}\nsubsets: [{ports: [{port: 80, protocol: TCP}, {port: 53, protocol: UDP}]}]",
		},
		"Node": {"kind: Node\nmetadata: {name: x}", "kind: Node\nmetadata: {name: x}"},
	}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			got, want := read(t, c.in), read(t, c.want)
			Default(got)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
			Default(got)
			if diff := cmp.Diff(want, got); diff != "" {
				t.Errorf("the second time (-want +got):\n%s", diff)
			}
		})
	}
}
