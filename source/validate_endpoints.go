package source

import (
	"fmt"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/utils/ptr"

	"kproxy.dev/kproxy/service"
)

func (v *validator) endpointSlice(s *discoveryv1.EndpointSlice) {
	if s.AddressType == "" {
		v.fail("addressType", "missing")
	}
	choice(v, "addressType", s.AddressType, discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6, discoveryv1.AddressTypeFQDN)
	if name, ok := s.Labels[discoveryv1.LabelServiceName]; ok {
		v.label("metadata.labels["+discoveryv1.LabelServiceName+"]", name)
	}
	for i := range s.Endpoints {
		v.sliceEndpoint(s.AddressType, &s.Endpoints[i], item("endpoints", i))
	}
	names := map[string]string{}
	for i := range s.Ports {
		p := &s.Ports[i]
		name := ptr.Deref(p.Name, "")
		if name != "" {
			v.label(item("ports", i, "name"), name)
		}
		v.once(names, name, item("ports", i), item("ports", i, "name"), fmt.Sprintf("name %q", name))
		v.protocol(item("ports", i, "protocol"), ptr.Deref(p.Protocol, ""))
		if p.Port != nil {
			v.port(item("ports", i, "port"), *p.Port)
		}
	}
}

func (v *validator) sliceEndpoint(t discoveryv1.AddressType, e *discoveryv1.Endpoint, path string) {
	if len(e.Addresses) == 0 {
		v.fail(path+".addresses", "missing: an endpoint needs an address")
	}
	for i, s := range e.Addresses {
		field := item(path+".addresses", i)
		if t != discoveryv1.AddressTypeIPv4 && t != discoveryv1.AddressTypeIPv6 {
			continue
		}
		if a, ok := v.address(field, s); ok && (service.FamilyOf(a) == service.IPv6) != (t == discoveryv1.AddressTypeIPv6) {
			v.fail(field, "%s contradicts addressType %s", s, t)
		}
	}
	if e.NodeName != nil {
		v.subdomain(path+".nodeName", *e.NodeName)
	}
	if e.Hints == nil {
		return
	}
	for i, z := range e.Hints.ForZones {
		if z.Name == "" {
			v.fail(item(path+".hints.forZones", i, "name"), "missing")
		}
	}
	for i, n := range e.Hints.ForNodes {
		v.subdomain(item(path+".hints.forNodes", i, "name"), n.Name)
	}
}

func (v *validator) endpoints(e *Endpoints) {
	for i := range e.Subsets {
		s := &e.Subsets[i]
		at := item("subsets", i)
		if len(s.Addresses) == 0 && len(s.NotReadyAddresses) == 0 {
			v.fail(at, "neither addresses nor notReadyAddresses")
		}
		v.subsetAddresses(at+".addresses", s.Addresses)
		v.subsetAddresses(at+".notReadyAddresses", s.NotReadyAddresses)
		names := map[string]string{}
		for j := range s.Ports {
			p := &s.Ports[j]
			port := item(at+".ports", j)
			v.portName(port+".name", p.Name, len(s.Ports))
			if p.Name != "" {
				v.once(names, fmt.Sprintf("%s/%s", p.Name, p.Protocol), port, port+".name", fmt.Sprintf("name %q", p.Name))
			}
			v.protocol(port+".protocol", p.Protocol)
			v.port(port+".port", p.Port)
		}
	}
}

func (v *validator) subsetAddresses(path string, list []corev1.EndpointAddress) {
	for i := range list {
		v.address(item(path, i, "ip"), list[i].IP)
		if list[i].NodeName != nil {
			v.subdomain(item(path, i, "nodeName"), *list[i].NodeName)
		}
	}
}

func (v *validator) node(n *corev1.Node) {
	for i, a := range n.Status.Addresses {
		if a.Type == corev1.NodeInternalIP || a.Type == corev1.NodeExternalIP {
			if _, err := ParseAddr(a.Address); err != nil {
				v.fail(item("status.addresses", i, "address"), "%v", err)
			}
		}
	}
	for i, c := range n.Spec.PodCIDRs {
		v.prefix(item("spec.podCIDRs", i), c)
	}
	if n.Spec.PodCIDR == "" {
		return
	}
	v.prefix("spec.podCIDR", n.Spec.PodCIDR)
	if len(n.Spec.PodCIDRs) > 0 && n.Spec.PodCIDRs[0] != n.Spec.PodCIDR {
		v.fail("spec.podCIDR", "%q contradicts spec.podCIDRs[0] %q", n.Spec.PodCIDR, n.Spec.PodCIDRs[0])
	}
}
