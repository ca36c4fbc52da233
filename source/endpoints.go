package source

import (
	"net/netip"
	"unique"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"

	"kproxy.dev/kproxy/service"
)

// addSlice adds s's endpoints of the service port k. The slice's port of the
// same name and protocol has the number that endpoints listen on: that is how
// named target ports come out resolved, and why one Service port may lead to
// different numbers in different slices.
func addSlice(b *service.Builder, k service.Key, s *discoveryv1.EndpointSlice, w weights, want families) {
	number, ok := slicePort(s, k)
	if !ok || !wantsSlice(s, want) {
		return
	}
	for i := range s.Endpoints {
		ep := &s.Endpoints[i]
		if len(ep.Addresses) == 0 {
			continue
		}
		// Further addresses of one endpoint are not used, as in kube-proxy:
		// the API defines them as fungible and no controller writes them.
		a, err := ParseAddr(ep.Addresses[0])
		if err != nil || !want.has(a) || service.FamilyOf(a) != sliceFamily(s) {
			continue
		}
		e := service.Endpoint{
			Address:     netip.AddrPortFrom(a, number),
			Node:        shared(ptr.Deref(ep.NodeName, "")),
			Ready:       ptr.Deref(ep.Conditions.Ready, true),
			Serving:     ptr.Deref(ep.Conditions.Serving, true),
			Terminating: ptr.Deref(ep.Conditions.Terminating, false),
			Weight:      w.of(a),
		}
		addHints(&e, ep.Hints)
		b.AddEndpoint(k, e)
	}
}

func addHints(e *service.Endpoint, hints *discoveryv1.EndpointHints) {
	if hints == nil || len(hints.ForZones)+len(hints.ForNodes) == 0 {
		return
	}
	e.Hints = &service.Hints{}
	for _, z := range hints.ForZones {
		e.Hints.Zones = append(e.Hints.Zones, shared(z.Name))
	}
	for _, n := range hints.ForNodes {
		e.Hints.Nodes = append(e.Hints.Nodes, shared(n.Name))
	}
}

// slicePort returns the number of s's port for k. A port without a name or a
// number is none: the API server names even the unnamed port, "".
func slicePort(s *discoveryv1.EndpointSlice, k service.Key) (uint16, bool) {
	for _, p := range s.Ports {
		if p.Name == nil || p.Port == nil || *p.Name != k.Port {
			continue
		}
		proto, err := protocol(ptr.Deref(p.Protocol, corev1.ProtocolTCP))
		number, ok := portNumber(*p.Port)
		if err == nil && ok && proto == k.Protocol {
			return number, true
		}
	}
	return 0, false
}

// wantsSlice is false for slices of host names and of other families.
func wantsSlice(s *discoveryv1.EndpointSlice, want families) bool {
	switch s.AddressType {
	case discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6:
		return want[sliceFamily(s)]
	}
	return false
}

func sliceFamily(s *discoveryv1.EndpointSlice) service.Family {
	if s.AddressType == discoveryv1.AddressTypeIPv6 {
		return service.IPv6
	}
	return service.IPv4
}

// addEndpoints adds e's endpoints of the service port k.
func addEndpoints(b *service.Builder, k service.Key, e *Endpoints, want families) {
	for i := range e.Subsets {
		sub := &e.Subsets[i]
		for _, p := range sub.Ports {
			proto, err := protocol(p.Protocol)
			number, ok := portNumber(p.Port)
			if err != nil || !ok || p.Name != k.Port || proto != k.Protocol {
				continue
			}
			addSubset(b, k, sub.Addresses, number, true, want)
			addSubset(b, k, sub.NotReadyAddresses, number, false, want)
		}
	}
}

func addSubset(b *service.Builder, k service.Key, list []corev1.EndpointAddress, number uint16, ready bool, want families) {
	for i := range list {
		a, err := ParseAddr(list[i].IP)
		if err != nil || !want.has(a) {
			continue
		}
		b.AddEndpoint(k, service.Endpoint{
			Address: netip.AddrPortFrom(a, number),
			Node:    shared(ptr.Deref(list[i].NodeName, "")),
			Ready:   ready,
			Serving: ready, // Endpoints have neither serving nor terminating
			Weight:  1,
		})
	}
}

// shared returns the one copy of s in memory: many endpoints have the same names of
// nodes, zones and namespaces.
func shared(s string) string {
	if s == "" {
		return ""
	}
	return unique.Make(s).Value()
}
