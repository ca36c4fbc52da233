package kube

import (
	"maps"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kproxy.dev/kproxy/source"
)

// The functions below return what is kept of an object: what source.Build
// reads, and what finding it again takes. They leave their argument alone, and
// trimming twice is trimming once.

// trimMeta keeps the identity, the annotations of kproxy and the labels named.
func trimMeta(m *metav1.ObjectMeta, labels ...string) metav1.ObjectMeta {
	out := metav1.ObjectMeta{Namespace: m.Namespace, Name: m.Name, UID: m.UID}
	for _, l := range labels {
		if v, ok := m.Labels[l]; ok {
			if out.Labels == nil {
				out.Labels = make(map[string]string, len(labels))
			}
			out.Labels[l] = v
		}
	}
	for k := range m.Annotations {
		if strings.HasPrefix(k, source.AnnotationPrefix) {
			out.Annotations = maps.Clone(m.Annotations)
			maps.DeleteFunc(out.Annotations, func(k, _ string) bool { return !strings.HasPrefix(k, source.AnnotationPrefix) })
			break
		}
	}
	return out
}

func trimService(s *corev1.Service) *corev1.Service {
	out := &corev1.Service{
		ObjectMeta: trimMeta(&s.ObjectMeta, source.ProxyNameLabel),
		Spec: corev1.ServiceSpec{
			Type:                     s.Spec.Type,
			ClusterIP:                s.Spec.ClusterIP,
			ClusterIPs:               s.Spec.ClusterIPs,
			Ports:                    make([]corev1.ServicePort, len(s.Spec.Ports)),
			ExternalIPs:              s.Spec.ExternalIPs,
			SessionAffinity:          s.Spec.SessionAffinity,
			SessionAffinityConfig:    s.Spec.SessionAffinityConfig,
			LoadBalancerSourceRanges: s.Spec.LoadBalancerSourceRanges,
			ExternalTrafficPolicy:    s.Spec.ExternalTrafficPolicy,
			InternalTrafficPolicy:    s.Spec.InternalTrafficPolicy,
			HealthCheckNodePort:      s.Spec.HealthCheckNodePort,
		},
		Status: corev1.ServiceStatus{LoadBalancer: s.Status.LoadBalancer},
	}
	out.CreationTimestamp = s.CreationTimestamp
	for i, p := range s.Spec.Ports {
		out.Spec.Ports[i] = corev1.ServicePort{Name: p.Name, Protocol: p.Protocol, Port: p.Port, NodePort: p.NodePort}
	}
	return out
}

func trimSlice(s *discoveryv1.EndpointSlice) *discoveryv1.EndpointSlice {
	out := &discoveryv1.EndpointSlice{
		ObjectMeta:  trimMeta(&s.ObjectMeta, discoveryv1.LabelServiceName, corev1.IsHeadlessService),
		AddressType: s.AddressType,
		Ports:       make([]discoveryv1.EndpointPort, len(s.Ports)),
		Endpoints:   make([]discoveryv1.Endpoint, len(s.Endpoints)),
	}
	if at, ok := s.Annotations[corev1.EndpointsLastChangeTriggerTime]; ok {
		if out.Annotations == nil {
			out.Annotations = make(map[string]string, 1)
		}
		out.Annotations[corev1.EndpointsLastChangeTriggerTime] = at
	}
	for i, p := range s.Ports {
		out.Ports[i] = discoveryv1.EndpointPort{Name: p.Name, Protocol: p.Protocol, Port: p.Port}
	}
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		out.Endpoints[i] = discoveryv1.Endpoint{
			Addresses: e.Addresses, NodeName: e.NodeName, Hints: e.Hints, Conditions: e.Conditions,
		}
	}
	return out
}

func trimServiceCIDR(c *networkingv1.ServiceCIDR) *networkingv1.ServiceCIDR {
	return &networkingv1.ServiceCIDR{ObjectMeta: trimMeta(&c.ObjectMeta), Spec: networkingv1.ServiceCIDRSpec{CIDRs: c.Spec.CIDRs}}
}

func trimNode(n *corev1.Node) *corev1.Node {
	out := &corev1.Node{
		ObjectMeta: trimMeta(&n.ObjectMeta, corev1.LabelTopologyZone),
		Spec:       corev1.NodeSpec{PodCIDR: n.Spec.PodCIDR, PodCIDRs: n.Spec.PodCIDRs, Taints: n.Spec.Taints},
		Status:     corev1.NodeStatus{Addresses: n.Status.Addresses},
	}
	out.DeletionTimestamp = n.DeletionTimestamp
	return out
}
