package flows

import (
	"bytes"
	"fmt"
	"net/netip"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"sigs.k8s.io/yaml"

	"kproxy.dev/kproxy/service"
)

// Network holds what the objects take from the network they are tried in. Lists of
// addresses have one per family, IPv4 first.
type Network struct {
	Endpoints   map[string][]netip.Addr // by EndpointNames
	TargetPorts [2]uint16               // of the endpoints, TCP and UDP; see [Service.Target]
	Node        []netip.Addr            // this node's own
	Outside     []netip.Addr            // the client's on another host
	Pods        []netip.Prefix
	// Annotations are those of all Services.
	Annotations map[string]string
}

// nodeNetworks returns, for each of the node's own addresses, a network with only it.
func (n *Network) nodeNetworks() (out []netip.Prefix) {
	for _, a := range n.Node {
		out = append(out, netip.PrefixFrom(a, a.BitLen()))
	}
	return out
}

// admitted are the source ranges of a service.
func (n *Network) admitted(who string) (out []string) {
	hosts := map[string][]netip.Addr{"outside": n.Outside, "node": n.Node}[who]
	for _, a := range hosts {
		out = append(out, netip.PrefixFrom(a, a.BitLen()).String())
	}
	if who == "pods" {
		for _, p := range n.Pods {
			out = append(out, p.String())
		}
	}
	return out
}

// Manifests returns this node and the services tried in c, as YAML.
func (m *Matrix) Manifests(c Configuration, n *Network) ([]byte, error) {
	objects := []any{&corev1.Node{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: metav1.ObjectMeta{Name: ThisNode, Labels: map[string]string{corev1.LabelTopologyZone: ThisZone}},
		Status:     corev1.NodeStatus{Addresses: nodeAddresses(n)},
	}}
	for i := range m.Services {
		s := &m.Services[i]
		if !s.In(c) {
			continue
		}
		objects = append(objects, s.object(n))
		for _, family := range service.Families {
			for _, names := range s.slices() {
				objects = append(objects, s.slice(n, family, names))
			}
		}
	}
	var out bytes.Buffer
	for _, o := range objects {
		data, err := yaml.Marshal(o)
		if err != nil {
			return nil, fmt.Errorf("write manifests of flows: %w", err)
		}
		out.WriteString("---\n")
		out.Write(data)
	}
	return out.Bytes(), nil
}

func nodeAddresses(n *Network) (out []corev1.NodeAddress) {
	for _, a := range n.Node {
		out = append(out, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a.String()})
	}
	return out
}

// object is the Service.
func (s *Service) object(n *Network) *corev1.Service {
	internal, dual := corev1.ServiceInternalTrafficPolicy(s.Internal), corev1.IPFamilyPolicyRequireDualStack
	out := &corev1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: metav1.ObjectMeta{Name: s.Name, Namespace: "default", Annotations: n.Annotations},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeLoadBalancer, IPFamilyPolicy: &dual, IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol},
			ClusterIP: s.Address(ClusterIP, service.IPv4).String(), LoadBalancerSourceRanges: n.admitted(s.Admits),
			InternalTrafficPolicy: &internal, ExternalTrafficPolicy: corev1.ServiceExternalTrafficPolicy(s.External),
		},
	}
	for _, family := range service.Families {
		out.Spec.ClusterIPs = append(out.Spec.ClusterIPs, s.Address(ClusterIP, family).String())
		out.Spec.ExternalIPs = append(out.Spec.ExternalIPs, s.Address(ExternalIP, family).String())
		out.Status.LoadBalancer.Ingress = append(out.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{IP: s.Address(LoadBalancer, family).String()})
	}
	if s.Special == Affinity {
		out.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	}
	for port := range s.Ports() {
		for _, p := range s.Protocols() {
			name := portName(p, port)
			out.Spec.Ports = append(out.Spec.Ports, corev1.ServicePort{
				Name: name, Protocol: objectProtocol(p), Port: int32(ClusterPort(port)),
				TargetPort: intstr.FromString(name), NodePort: int32(s.NodePort(port)),
			})
		}
	}
	return out
}

func objectProtocol(p service.Protocol) corev1.Protocol {
	return corev1.Protocol(strings.ToUpper(p.String()))
}

func portName(p service.Protocol, port int) string {
	return map[service.Protocol]string{service.TCP: "line", service.UDP: "datagram", service.SCTP: "sctp"}[p] + []string{"", "-2"}[port]
}

// slices are the endpoints' names, by EndpointSlice of a family.
func (s *Service) slices() (out [][]string) {
	if s.Special != Slices {
		return [][]string{EndpointNames}
	}
	for _, name := range EndpointNames {
		out = append(out, []string{name})
	}
	return out
}

// slice is an EndpointSlice of one family, with those of the endpoints named that the
// service has. All of them have the first one's target ports.
func (s *Service) slice(n *Network, family service.Family, names []string) *discoveryv1.EndpointSlice {
	out := &discoveryv1.EndpointSlice{
		TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta: metav1.ObjectMeta{
			Name: fmt.Sprintf("%s-%s-%s", s.Name, [2]string{"4", "6"}[family], names[0]), Namespace: "default",
			Labels: map[string]string{discoveryv1.LabelServiceName: s.Name},
		},
		AddressType: [2]discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6}[family],
		Endpoints:   []discoveryv1.Endpoint{},
	}
	for _, name := range names {
		if c, ok := s.Endpoints.Conditions[name]; ok {
			out.Endpoints = append(out.Endpoints, c.object(Nodes[name], n.Endpoints[name][family]))
		}
	}
	for port := range s.Ports() {
		for _, p := range s.Protocols() {
			protocol := objectProtocol(p)
			name, target := portName(p, port), int32(n.TargetPorts[s.Target(names[0], port)])
			out.Ports = append(out.Ports, discoveryv1.EndpointPort{Name: &name, Protocol: &protocol, Port: &target})
		}
	}
	return out
}

func (c Condition) object(node string, address netip.Addr) discoveryv1.Endpoint {
	e := discoveryv1.Endpoint{
		Addresses: []string{address.String()}, NodeName: &node,
		Conditions: discoveryv1.EndpointConditions{Ready: &c.Ready, Serving: &c.Serving, Terminating: &c.Terminating},
	}
	if c.Zone != "" {
		e.Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: c.Zone}}}
	}
	if c.Node != "" {
		e.Hints = &discoveryv1.EndpointHints{ForNodes: []discoveryv1.ForNode{{Name: c.Node}}}
	}
	return e
}
