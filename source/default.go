package source

import (
	"cmp"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// Default fills in what an API server would: the namespace, protocols, the
// types and policies of a Service, the empty name of an EndpointSlice's
// unnamed port. It is for objects that come from no API server. Objects of
// other types it leaves alone.
func Default(object metav1.Object) {
	switch o := object.(type) {
	case *corev1.Service:
		defaultNamespace(o)
		defaultService(&o.Spec)
	case *discoveryv1.EndpointSlice:
		defaultNamespace(o)
		for i := range o.Ports {
			p := &o.Ports[i]
			p.Name = cmp.Or(p.Name, new(""))
			p.Protocol = cmp.Or(p.Protocol, new(corev1.ProtocolTCP))
		}
	case *Endpoints:
		defaultNamespace(o)
		for i := range o.Subsets {
			for j := range o.Subsets[i].Ports {
				p := &o.Subsets[i].Ports[j]
				p.Protocol = cmp.Or(p.Protocol, corev1.ProtocolTCP)
			}
		}
	}
}

func defaultNamespace(o metav1.Object) {
	if o.GetNamespace() == "" {
		o.SetNamespace(metav1.NamespaceDefault)
	}
}

// defaultService follows SetDefaults_Service of k8s.io/kubernetes
// (pkg/apis/core/v1/defaults.go). Each of clusterIP and clusterIPs also stands
// for the other, as it does in the API for clients that know only one.
func defaultService(s *corev1.ServiceSpec) {
	s.Type = cmp.Or(s.Type, corev1.ServiceTypeClusterIP)
	s.SessionAffinity = cmp.Or(s.SessionAffinity, corev1.ServiceAffinityNone)
	if s.SessionAffinity == corev1.ServiceAffinityClientIP {
		s.SessionAffinityConfig = cmp.Or(s.SessionAffinityConfig, &corev1.SessionAffinityConfig{})
		c := s.SessionAffinityConfig
		c.ClientIP = cmp.Or(c.ClientIP, &corev1.ClientIPConfig{})
		c.ClientIP.TimeoutSeconds = cmp.Or(c.ClientIP.TimeoutSeconds, new(corev1.DefaultClientIPServiceAffinitySeconds))
	}
	for i := range s.Ports {
		p := &s.Ports[i]
		p.Protocol = cmp.Or(p.Protocol, corev1.ProtocolTCP)
		if p.TargetPort == intstr.FromInt32(0) || p.TargetPort == intstr.FromString("") {
			p.TargetPort = intstr.FromInt32(p.Port)
		}
	}
	if s.Type == corev1.ServiceTypeExternalName {
		return
	}
	if externallyAccessible(s) {
		s.ExternalTrafficPolicy = cmp.Or(s.ExternalTrafficPolicy, corev1.ServiceExternalTrafficPolicyCluster)
	}
	s.InternalTrafficPolicy = cmp.Or(s.InternalTrafficPolicy, new(corev1.ServiceInternalTrafficPolicyCluster))
	switch {
	case s.ClusterIP == "" && len(s.ClusterIPs) > 0:
		s.ClusterIP = s.ClusterIPs[0]
	case s.ClusterIP != "" && len(s.ClusterIPs) == 0:
		s.ClusterIPs = []string{s.ClusterIP}
	}
}
