package upstream

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"

	"kproxy.dev/kproxy/source"
)

// The node that both proxies are on.
const (
	thisNode = "node"
	thisZone = "zone-a"
)

// objects holds what both proxies are told.
type objects struct {
	services []*corev1.Service
	slices   []*discoveryv1.EndpointSlice
}

// random makes objects such as an API server would take, with everything that the
// proxies are to ignore in them. No two Services share an address and port: which of
// them upstream serves is left to the order of a Go map.
type random struct {
	*rand.Rand
	objects
	nodePorts int32
}

func (r *random) chance(n int) bool { return r.IntN(n) == 0 }

func pick[T any](r *random, of ...T) T { return of[r.IntN(len(of))] }

// add makes the n-th Service and its slices.
func (r *random) add(n int) {
	s := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: pick(r, "default", "shop"), Name: fmt.Sprintf("s%d", n)}}
	s.Spec.Type = pick(r, corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort, corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeLoadBalancer)
	families := pick(r, []int{4}, []int{6}, []int{4, 6}, []int{6, 4}, []int{4, 6})
	for _, f := range families {
		s.Spec.ClusterIPs = append(s.Spec.ClusterIPs, address(f, 0, n))
		s.Spec.IPFamilies = append(s.Spec.IPFamilies, map[int]corev1.IPFamily{4: corev1.IPv4Protocol, 6: corev1.IPv6Protocol}[f])
	}
	switch {
	case r.chance(50):
		s.Spec.ClusterIPs = []string{corev1.ClusterIPNone}
	case r.chance(50):
		s.Spec.Type, s.Spec.ClusterIPs = corev1.ServiceTypeExternalName, nil
	}
	if len(s.Spec.ClusterIPs) > 0 {
		s.Spec.ClusterIP = s.Spec.ClusterIPs[0]
	}
	local := corev1.ServiceInternalTrafficPolicyLocal
	if r.chance(3) {
		s.Spec.InternalTrafficPolicy = &local
	}
	external := r.chance(2)
	if external {
		for _, f := range []int{4, 6} {
			for range r.IntN(2) {
				s.Spec.ExternalIPs = append(s.Spec.ExternalIPs, r.leadingZeros(address(f, 1, n)))
			}
		}
	}
	if s.Spec.Type == corev1.ServiceTypeLoadBalancer {
		r.balancer(s, n)
	}
	if (s.Spec.Type != corev1.ServiceTypeClusterIP || len(s.Spec.ExternalIPs) > 0) && r.chance(2) {
		s.Spec.ExternalTrafficPolicy = corev1.ServiceExternalTrafficPolicyLocal
	}
	if r.chance(4) {
		s.Spec.SessionAffinity = corev1.ServiceAffinityClientIP
	}
	r.ports(s)
	source.Default(s) // as the API server does
	r.services = append(r.services, s)
	r.slicesOf(s)
}

// balancer fills in what a load balancer's controller and its user do.
func (r *random) balancer(s *corev1.Service, n int) {
	vip, proxy := corev1.LoadBalancerIPModeVIP, corev1.LoadBalancerIPModeProxy
	for _, f := range []int{4, 6} {
		for i := range r.IntN(3) {
			s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress,
				corev1.LoadBalancerIngress{IP: address(f, 2+i, n), IPMode: pick(r, nil, &vip, &proxy)})
		}
	}
	if r.chance(5) {
		s.Status.LoadBalancer.Ingress = append(s.Status.LoadBalancer.Ingress, corev1.LoadBalancerIngress{Hostname: "lb.example"})
	}
	if r.chance(2) {
		return
	}
	for range 1 + r.IntN(3) {
		s.Spec.LoadBalancerSourceRanges = append(s.Spec.LoadBalancerSourceRanges, pick(r,
			"198.18.7.0/24", " 198.18.7.0/24 ", "198.018.007.000/24", "2001:db8:18:7::/64", "10.2.0.0/24", "fd00:2::/64",
			"10.1.0.1/32", "fd00:1::1/128", "10.1.0.0/16", "0.0.0.0/0", "::/0", "203.0.113.0/24", "2001:db8:113::/48"))
	}
}

// leadingZeros sometimes writes an IPv4 address as old API servers let people.
func (r *random) leadingZeros(a string) string {
	if ip := netip.MustParseAddr(a); ip.Is4() && r.chance(4) {
		b := ip.As4()
		return fmt.Sprintf("%03d.%03d.%03d.%03d", b[0], b[1], b[2], b[3])
	}
	return a
}

// address is the n-th Service's in one of the networks of addresses: 0 for cluster
// IPs, 1 for external IPs, from 2 for load balancers.
func address(family, network, n int) string {
	if family == 4 {
		return fmt.Sprintf("%s.%d.%d", []string{"10.96", "192.88", "203.10", "203.11"}[network], n/250, 1+n%250)
	}
	return fmt.Sprintf("fd00:%s::%x:%x", []string{"96", "88", "10", "11"}[network], n/250+1, 1+n%250)
}

// ports gives a Service one to three ports; several share a number if their protocols
// differ.
func (r *random) ports(s *corev1.Service) {
	protocols := []corev1.Protocol{corev1.ProtocolTCP, corev1.ProtocolUDP, corev1.ProtocolSCTP}
	count := 1 + r.IntN(3)
	for i := range count {
		p := corev1.ServicePort{Name: fmt.Sprintf("p%d", i), Port: pick(r, int32(80), 443, 53), Protocol: pick(r, protocols...)}
		if count == 1 && r.chance(2) {
			p.Name = ""
		}
		taken := func(o corev1.ServicePort) bool { return o.Port == p.Port && o.Protocol == p.Protocol }
		if slices.ContainsFunc(s.Spec.Ports, taken) {
			continue
		}
		p.TargetPort = pick(r, intstr.FromString("web"), intstr.FromInt32(9000))
		if s.Spec.Type == corev1.ServiceTypeNodePort || s.Spec.Type == corev1.ServiceTypeLoadBalancer && !r.chance(5) {
			r.nodePorts++
			p.NodePort = 20000 + r.nodePorts
		}
		s.Spec.Ports = append(s.Spec.Ports, p)
	}
}

// slicesOf makes s's slices, sometimes none.
func (r *random) slicesOf(s *corev1.Service) {
	hints := pick(r, "", "", "zone", "node", "both", "some")
	taken := map[string][]bool{}
	for i, t := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6, discoveryv1.AddressTypeIPv4,
		discoveryv1.AddressTypeIPv6, discoveryv1.AddressTypeFQDN} {
		if r.chance(4) || t == discoveryv1.AddressTypeFQDN && !r.chance(5) {
			continue
		}
		slice := &discoveryv1.EndpointSlice{
			ObjectMeta:  metav1.ObjectMeta{Namespace: s.Namespace, Name: fmt.Sprintf("%s-%d", s.Name, i), Labels: map[string]string{discoveryv1.LabelServiceName: s.Name}},
			AddressType: t,
		}
		for _, p := range s.Spec.Ports {
			if ep, ok := r.slicePort(p); ok {
				slice.Ports = append(slice.Ports, ep)
			}
		}
		for range r.IntN(4) {
			r.endpoint(slice, hints, taken)
		}
		r.slices = append(r.slices, slice)
	}
}

// slicePort is a slice's port for p, mostly such as p finds.
func (r *random) slicePort(p corev1.ServicePort) (discoveryv1.EndpointPort, bool) {
	name, protocol, number := p.Name, p.Protocol, pick(r, int32(9000), 9001)
	out := discoveryv1.EndpointPort{Name: &name, Protocol: &protocol, Port: &number}
	switch r.IntN(20) {
	case 0:
		out.Port = nil
	case 1:
		name = "other"
	case 2:
		protocol = pick(r, corev1.ProtocolTCP, corev1.ProtocolUDP)
	case 3:
		return out, false
	}
	return out, true
}

// endpoint adds one. Its address may be in the Service's slices already, once, and just
// one of the two terminates: upstream leaves undefined which of two others counts. taken
// says which do, by address.
func (r *random) endpoint(slice *discoveryv1.EndpointSlice, hints string, taken map[string][]bool) {
	e := discoveryv1.Endpoint{NodeName: pick(r, nil, new(thisNode), new(thisNode), new("another"), new(""))}
	c := &e.Conditions
	c.Ready, c.Serving, c.Terminating = pick(r, nil, new(true), new(true), new(false)), pick(r, nil, new(true), new(false)), pick(r, nil, new(false), new(true))
	if c.Terminating != nil && *c.Terminating && !r.chance(8) {
		c.Ready = new(false)
	}
	host := 1 + r.IntN(6)
	text := map[discoveryv1.AddressType]string{
		discoveryv1.AddressTypeIPv4: fmt.Sprintf("10.2.0.%d", host), discoveryv1.AddressTypeIPv6: fmt.Sprintf("fd00:2::%x", host),
		discoveryv1.AddressTypeFQDN: fmt.Sprintf("host%d.example", host),
	}[slice.AddressType]
	switch before := taken[text]; len(before) {
	case 1:
		c.Terminating = new(!before[0])
	case 2:
		return
	}
	taken[text] = append(taken[text], c.Terminating != nil && *c.Terminating)
	e.Addresses = []string{text}
	if r.chance(10) {
		e.Addresses = append(e.Addresses, "10.2.0.200") // only the first counts
	}
	if zone := hints == "zone" || hints == "both" || hints == "some" && r.chance(2); zone {
		e.Hints = &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: pick(r, thisZone, "zone-b")}}}
		if r.chance(3) {
			e.Hints.ForZones = append(e.Hints.ForZones, discoveryv1.ForZone{Name: pick(r, thisZone, "zone-c")})
		}
	}
	if node := hints == "node" || hints == "both" || hints == "some" && r.chance(2); node {
		if e.Hints == nil {
			e.Hints = &discoveryv1.EndpointHints{}
		}
		e.Hints.ForNodes = []discoveryv1.ForNode{{Name: pick(r, thisNode, "another")}}
	}
	slice.Endpoints = append(slice.Endpoints, e)
}
