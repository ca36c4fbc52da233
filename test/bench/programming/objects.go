package programming

import (
	"fmt"
	"net/netip"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/lab/load"
)

// objectsVersion is part of what kept data is called by. Change it with what follows.
const objectsVersion = "2"

// namespace holds the services.
const namespace = metav1.NamespaceDefault

// movables is how many services have a single endpoint, which changes: spread
// evenly among the others.
const movables = 10

// Bounds that the networks below have room for.
const (
	maxServices  = 60_000
	maxEndpoints = 1 << 20
)

var (
	clusterIPs = netip.MustParseAddr("10.97.0.0")
	// Every address of a network is one of a backend's: of b1's and of b2's.
	endpointNetworks = [2]netip.Prefix{netip.MustParsePrefix("10.128.0.0/11"), netip.MustParsePrefix("10.160.0.0/11")}
	// The client counts as a pod: its connections aren't masqueraded, so endpoints
	// see the port that it, or a proxy in userspace, has chosen.
	podCIDR = lab.ClientCIDR4.String()
)

// world is the services that all is about.
type world struct{ services, endpoints int }

func serviceName(i int) string { return fmt.Sprintf("s%05d", i) }

// address returns where clients reach the i-th service.
func address(i int) netip.AddrPort { return netip.AddrPortFrom(plus(clusterIPs, i), 80) }

func plus(a netip.Addr, n int) netip.Addr {
	b := a.As4()
	v := uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
	v += uint32(n)
	return netip.AddrFrom4([4]byte{byte(v >> 24), byte(v >> 16), byte(v >> 8), byte(v)})
}

// movable is the number of the k-th service whose endpoint changes.
func (w world) movable(k int) int {
	step := w.services / movables
	return k%movables*step + step/2
}

func (w world) isMovable(i int) bool {
	step := w.services / movables
	return i%step == step/2 && i/step < movables
}

func meta(i int) metav1.ObjectMeta {
	return metav1.ObjectMeta{Name: serviceName(i), Namespace: namespace}
}

func (w world) service(i int) *corev1.Service {
	ip := address(i).Addr().String()
	return &corev1.Service{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: meta(i),
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: ip, ClusterIPs: []string{ip},
			Ports: []corev1.ServicePort{{Name: "line", Port: 80, Protocol: corev1.ProtocolTCP, TargetPort: intstr.FromInt32(int32(serverPort))}},
		},
	}
}

// slice describes a service's endpoints at the backend side, 0 or 1.
func (w world) slice(i, side int) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		TypeMeta:    metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta:  meta(i),
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("line"), Port: ptr.To(int32(serverPort)), Protocol: ptr.To(corev1.ProtocolTCP)}},
	}
	s.Labels = map[string]string{discoveryv1.LabelServiceName: s.Name, discoveryv1.LabelManagedBy: "bench.kproxy.dev"}
	n := w.endpoints
	if w.isMovable(i) {
		n = 1
	}
	for e := range n {
		a := plus(endpointNetworks[side].Addr(), 256+i*w.endpoints+e)
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{a.String()}, NodeName: ptr.To("elsewhere"),
			Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true), Serving: ptr.To(true), Terminating: ptr.To(false)},
		})
	}
	return s
}

// loaded is the service that loads go through, at the backend's own address; its ports are those of load.Kinds.
func loaded(backend netip.Addr) (*corev1.Service, *discoveryv1.EndpointSlice) {
	m := metav1.ObjectMeta{Name: "loaded", Namespace: namespace}
	s := &corev1.Service{ObjectMeta: m, Spec: corev1.ServiceSpec{
		Type: corev1.ServiceTypeClusterIP, ClusterIP: load.ServiceAddress.String(), ClusterIPs: []string{load.ServiceAddress.String()},
	}}
	m.Labels = map[string]string{discoveryv1.LabelServiceName: m.Name, discoveryv1.LabelManagedBy: "bench.kproxy.dev"}
	slice := &discoveryv1.EndpointSlice{ObjectMeta: m, AddressType: discoveryv1.AddressTypeIPv4, Endpoints: []discoveryv1.Endpoint{{
		Addresses: []string{backend.String()}, NodeName: ptr.To("elsewhere"),
		Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true), Serving: ptr.To(true), Terminating: ptr.To(false)},
	}}}
	for _, k := range load.Kinds {
		protocol := corev1.ProtocolTCP
		if k.UDP() {
			protocol = corev1.ProtocolUDP
		}
		s.Spec.Ports = append(s.Spec.Ports, corev1.ServicePort{Name: string(k), Port: int32(k.Port()), Protocol: protocol})
		slice.Ports = append(slice.Ports, discoveryv1.EndpointPort{Name: ptr.To(string(k)), Port: ptr.To(int32(k.Port())), Protocol: &protocol})
	}
	return s, slice
}

// node is the object of the node that the proxies run on.
func node(addresses []netip.Addr) *corev1.Node {
	n := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: nodeName, Labels: map[string]string{corev1.LabelHostname: nodeName, corev1.LabelTopologyZone: "here"}},
		Spec:       corev1.NodeSpec{PodCIDR: lab.PodCIDR4.String(), PodCIDRs: []string{lab.PodCIDR4.String()}},
	}
	for _, a := range addresses {
		n.Status.Addresses = append(n.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a.String()})
	}
	n.Status.Conditions = []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}}
	return n
}

const nodeName = "node"
