package source

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/utils/ptr"

	"kproxy.dev/kproxy/service"
)

// families says in which IP families something exists.
type families [len(service.Families)]bool

func familiesOf(list []netip.Addr) (f families) {
	for _, a := range list {
		f[service.FamilyOf(a)] = true
	}
	return f
}

func (f families) has(a netip.Addr) bool { return f[service.FamilyOf(a)] }

// clusterIPs returns the usable cluster IPs, none for a headless Service.
// Older objects, and manifests written by hand, have spec.clusterIP alone.
func clusterIPs(svc *corev1.Service) []netip.Addr {
	list := svc.Spec.ClusterIPs
	if len(list) == 0 {
		list = []string{svc.Spec.ClusterIP}
	}
	return Addrs(list) // "None" and "" are no addresses
}

// basePort returns what svc's ports have in common.
func basePort(svc *corev1.Service) service.Port {
	p := service.Port{
		Key:           service.Key{Namespace: shared(svc.Namespace), Name: svc.Name},
		ClusterIPs:    clusterIPs(svc),
		InternalLocal: ptr.Deref(svc.Spec.InternalTrafficPolicy, "") == corev1.ServiceInternalTrafficPolicyLocal,
		Affinity:      affinity(&svc.Spec),
		Retries:       -1,
		Responses:     -1,
	}
	if t := svc.CreationTimestamp.Time; !t.IsZero() {
		p.Created = t.UTC()
	}
	want := familiesOf(p.ClusterIPs)
	p.ExternalIPs = served(&p, "spec.externalIPs", svc.Spec.ExternalIPs, want)
	if svc.Spec.Type == corev1.ServiceTypeLoadBalancer {
		p.LoadBalancerIPs = served(&p, "status.loadBalancer.ingress", ingressIPs(svc), want)
		p.SourceRanges = slices.DeleteFunc(Prefixes(svc.Spec.LoadBalancerSourceRanges), func(r netip.Prefix) bool { return !want.has(r.Addr()) })
	}
	p.ExternallyAccessible = externallyAccessible(&svc.Spec)
	p.ExternalLocal = p.ExternallyAccessible && svc.Spec.ExternalTrafficPolicy == corev1.ServiceExternalTrafficPolicyLocal
	if p.ExternalLocal && svc.Spec.Type == corev1.ServiceTypeLoadBalancer {
		p.HealthCheckNodePort, _ = portNumber(svc.Spec.HealthCheckNodePort)
	}
	annotate(&p, svc.Annotations)
	return p
}

// served is addrs without those that no service can have, each of which becomes a
// problem of p. In a manifest they are errors, and an API server refuses them in
// spec (ValidateNonSpecialIP), but in status it takes any address: that of
// localhost would take a port from the node's own programs.
func served(p *service.Port, field string, in []string, want families) []netip.Addr {
	return slices.DeleteFunc(addrs(in, want), func(a netip.Addr) bool {
		what := special(a)
		if what != "" {
			p.Problems = append(p.Problems, fmt.Sprintf("%s: %s is %s, which no service can have; it isn't served", field, a, what))
		}
		return what != ""
	})
}

// finishPort returns base as the port sp of svc, and false if sp is none that
// can be served.
func finishPort(base service.Port, svc *corev1.Service, sp *corev1.ServicePort) (service.Port, bool) {
	proto, err := protocol(sp.Protocol)
	number, ok := portNumber(sp.Port)
	if err != nil || !ok {
		return service.Port{}, false
	}
	p := base
	p.Port, p.Protocol, p.Number = shared(sp.Name), proto, number
	if hasNodePorts(svc.Spec.Type) {
		p.NodePort, _ = portNumber(sp.NodePort)
	}
	annotateProtocol(&p)
	return p, true
}

// protocol is TCP where none is named, the API's default.
func protocol(p corev1.Protocol) (service.Protocol, error) {
	if p == "" {
		return service.TCP, nil
	}
	return service.ParseProtocol(string(p))
}

// portNumber returns n as a port number, and false (with 0) if it is none.
func portNumber(n int32) (uint16, bool) {
	if n < 1 || n > math.MaxUint16 {
		return 0, false
	}
	return uint16(n), true
}

func hasNodePorts(t corev1.ServiceType) bool {
	return t == corev1.ServiceTypeNodePort || t == corev1.ServiceTypeLoadBalancer
}

func externallyAccessible(spec *corev1.ServiceSpec) bool {
	return hasNodePorts(spec.Type) || len(spec.ExternalIPs) > 0
}

// affinity returns the time-out of ClientIP affinity, 0 for none.
func affinity(spec *corev1.ServiceSpec) time.Duration {
	if spec.SessionAffinity != corev1.ServiceAffinityClientIP {
		return 0
	}
	seconds := int32(corev1.DefaultClientIPServiceAffinitySeconds)
	if c := spec.SessionAffinityConfig; c != nil && c.ClientIP != nil && c.ClientIP.TimeoutSeconds != nil {
		seconds = *c.ClientIP.TimeoutSeconds
	}
	return time.Duration(seconds) * time.Second
}

// ingressIPs leaves out addresses with ipMode Proxy: their traffic has to
// leave the node and pass the load balancer.
func ingressIPs(svc *corev1.Service) []string {
	var out []string
	for _, in := range svc.Status.LoadBalancer.Ingress {
		if in.IP != "" && (in.IPMode == nil || *in.IPMode == corev1.LoadBalancerIPModeVIP) {
			out = append(out, in.IP)
		}
	}
	return out
}
