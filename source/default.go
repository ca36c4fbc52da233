package source

import (
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
			p.Name = defaultPtr(p.Name, "")
			p.Protocol = defaultPtr(p.Protocol, corev1.ProtocolTCP)
		}
	case *Endpoints:
		defaultNamespace(o)
		for i := range o.Subsets {
			for j := range o.Subsets[i].Ports {
				defaultTo(&o.Subsets[i].Ports[j].Protocol, corev1.ProtocolTCP)
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
	defaultTo(&s.Type, corev1.ServiceTypeClusterIP)
	defaultTo(&s.SessionAffinity, corev1.ServiceAffinityNone)
	if s.SessionAffinity == corev1.ServiceAffinityClientIP {
		if s.SessionAffinityConfig == nil {
			s.SessionAffinityConfig = &corev1.SessionAffinityConfig{}
		}
		c := s.SessionAffinityConfig
		c.ClientIP = defaultPtr(c.ClientIP, corev1.ClientIPConfig{})
		c.ClientIP.TimeoutSeconds = defaultPtr(c.ClientIP.TimeoutSeconds, corev1.DefaultClientIPServiceAffinitySeconds)
	}
	for i := range s.Ports {
		p := &s.Ports[i]
		defaultTo(&p.Protocol, corev1.ProtocolTCP)
		if p.TargetPort == intstr.FromInt32(0) || p.TargetPort == intstr.FromString("") {
			p.TargetPort = intstr.FromInt32(p.Port)
		}
	}
	if s.Type == corev1.ServiceTypeExternalName {
		return
	}
	if externallyAccessible(s) {
		defaultTo(&s.ExternalTrafficPolicy, corev1.ServiceExternalTrafficPolicyCluster)
	}
	s.InternalTrafficPolicy = defaultPtr(s.InternalTrafficPolicy, corev1.ServiceInternalTrafficPolicyCluster)
	switch {
	case s.ClusterIP == "" && len(s.ClusterIPs) > 0:
		s.ClusterIP = s.ClusterIPs[0]
	case s.ClusterIP != "" && len(s.ClusterIPs) == 0:
		s.ClusterIPs = []string{s.ClusterIP}
	}
}

func defaultTo[T comparable](field *T, value T) {
	var zero T
	if *field == zero {
		*field = value
	}
}

func defaultPtr[T any](p *T, value T) *T {
	if p == nil {
		return &value
	}
	return p
}
