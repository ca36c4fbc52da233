package source

import (
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"

	"kproxy.dev/kproxy/service"
)

// maxAffinitySeconds is the API's bound, a day.
const maxAffinitySeconds = 86400

func (v *validator) service(s *corev1.Service) {
	spec := &s.Spec
	choice(v, "spec.type", spec.Type, corev1.ServiceTypeClusterIP, corev1.ServiceTypeNodePort,
		corev1.ServiceTypeLoadBalancer, corev1.ServiceTypeExternalName)
	if spec.Type == corev1.ServiceTypeExternalName {
		return // a name in the DNS; no proxy serves it
	}
	v.servicePorts(spec)
	v.clusterIPs(spec)
	v.families(spec)
	for i, a := range spec.ExternalIPs {
		v.address(item("spec.externalIPs", i), a)
	}
	v.affinity(spec)
	v.policies(spec)
	v.loadBalancer(s)
}

func (v *validator) servicePorts(spec *corev1.ServiceSpec) {
	if len(spec.Ports) == 0 && !headless(spec) {
		v.fail("spec.ports", "missing: a Service needs a port")
	}
	names, numbers, nodePorts := map[string]string{}, map[string]string{}, map[string]string{}
	for i := range spec.Ports {
		p := &spec.Ports[i]
		at := func(sub string) string { return item("spec.ports", i, sub) }
		v.portName(at("name"), p.Name, len(spec.Ports))
		if p.Name != "" {
			v.once(names, p.Name, item("spec.ports", i), at("name"), fmt.Sprintf("name %q", p.Name))
		}
		v.protocol(at("protocol"), p.Protocol)
		v.port(at("port"), p.Port)
		number := fmt.Sprintf("%d/%s", p.Port, p.Protocol)
		v.once(numbers, number, item("spec.ports", i), at("port"), "port "+number)
		v.optionalPort(at("nodePort"), p.NodePort)
		if p.NodePort != 0 {
			if !hasNodePorts(spec.Type) {
				v.fail(at("nodePort"), "a Service of type %s has no node ports", spec.Type)
			}
			number := fmt.Sprintf("%d/%s", p.NodePort, p.Protocol)
			v.once(nodePorts, number, item("spec.ports", i), at("nodePort"), "node port "+number)
		}
	}
}

func headless(spec *corev1.ServiceSpec) bool { return spec.ClusterIP == corev1.ClusterIPNone }

func (v *validator) clusterIPs(spec *corev1.ServiceSpec) {
	if len(spec.ClusterIPs) > 0 && spec.ClusterIPs[0] != spec.ClusterIP {
		v.fail("spec.clusterIPs[0]", "%q contradicts spec.clusterIP %q", spec.ClusterIPs[0], spec.ClusterIP)
	}
	if len(spec.ClusterIPs) > 2 {
		v.fail("spec.clusterIPs", "%d addresses, and a Service has at most one in each IP family", len(spec.ClusterIPs))
	}
	if headless(spec) {
		if len(spec.ClusterIPs) > 1 {
			v.fail("spec.clusterIPs", "a headless Service has no addresses besides None")
		}
		if hasNodePorts(spec.Type) {
			v.fail("spec.clusterIP", "None contradicts type %s", spec.Type)
		}
		return
	}
	list, path := spec.ClusterIPs, func(i int) string { return item("spec.clusterIPs", i) }
	if len(list) == 0 && spec.ClusterIP != "" {
		list, path = []string{spec.ClusterIP}, func(int) string { return "spec.clusterIP" }
	}
	var seen families
	for i, s := range list {
		a, ok := v.address(path(i), s)
		switch {
		case !ok:
		case seen.has(a):
			v.fail(path(i), "%s is the second address of family %s", s, service.FamilyOf(a))
		default:
			seen[service.FamilyOf(a)] = true
		}
	}
}

// families checks what the Service says of its families against its addresses.
func (v *validator) families(spec *corev1.ServiceSpec) {
	for i, f := range spec.IPFamilies {
		field := item("spec.ipFamilies", i)
		choice(v, field, f, corev1.IPv4Protocol, corev1.IPv6Protocol)
		if i >= len(spec.ClusterIPs) {
			continue
		}
		if a, err := ParseAddr(spec.ClusterIPs[i]); err == nil && !strings.EqualFold(service.FamilyOf(a).String(), string(f)) {
			v.fail(field, "%s contradicts cluster IP %s", f, a)
		}
	}
	if spec.IPFamilyPolicy == nil {
		return
	}
	choice(v, "spec.ipFamilyPolicy", *spec.IPFamilyPolicy, corev1.IPFamilyPolicySingleStack,
		corev1.IPFamilyPolicyPreferDualStack, corev1.IPFamilyPolicyRequireDualStack)
	if *spec.IPFamilyPolicy == corev1.IPFamilyPolicySingleStack && len(spec.ClusterIPs) > 1 {
		v.fail("spec.ipFamilyPolicy", "SingleStack contradicts %d cluster IPs", len(spec.ClusterIPs))
	}
}

func (v *validator) affinity(spec *corev1.ServiceSpec) {
	choice(v, "spec.sessionAffinity", spec.SessionAffinity, corev1.ServiceAffinityNone, corev1.ServiceAffinityClientIP)
	c := spec.SessionAffinityConfig
	if c == nil {
		return
	}
	if spec.SessionAffinity == corev1.ServiceAffinityNone {
		v.fail("spec.sessionAffinityConfig", "contradicts sessionAffinity None")
	}
	if c.ClientIP == nil || c.ClientIP.TimeoutSeconds == nil {
		return
	}
	if n := *c.ClientIP.TimeoutSeconds; n < 1 || n > maxAffinitySeconds {
		v.fail("spec.sessionAffinityConfig.clientIP.timeoutSeconds", "%d is not from 1 to %d seconds", n, maxAffinitySeconds)
	}
}

func (v *validator) policies(spec *corev1.ServiceSpec) {
	choice(v, "spec.externalTrafficPolicy", spec.ExternalTrafficPolicy,
		corev1.ServiceExternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal)
	if spec.ExternalTrafficPolicy != "" && !externallyAccessible(spec) {
		v.fail("spec.externalTrafficPolicy", "a Service of type %s without external IPs has no external traffic", spec.Type)
	}
	if p := spec.InternalTrafficPolicy; p != nil {
		choice(v, "spec.internalTrafficPolicy", *p, corev1.ServiceInternalTrafficPolicyCluster, corev1.ServiceInternalTrafficPolicyLocal)
	}
	const field = "spec.healthCheckNodePort"
	v.optionalPort(field, spec.HealthCheckNodePort)
	if spec.HealthCheckNodePort == 0 {
		return
	}
	if spec.Type != corev1.ServiceTypeLoadBalancer || spec.ExternalTrafficPolicy != corev1.ServiceExternalTrafficPolicyLocal {
		v.fail(field, "only type LoadBalancer with externalTrafficPolicy Local has one")
	}
	for i, p := range spec.Ports {
		if p.NodePort == spec.HealthCheckNodePort && p.Protocol == corev1.ProtocolTCP {
			v.fail(field, "%d is the node port of %s too", p.NodePort, item("spec.ports", i))
		}
	}
}

func (v *validator) loadBalancer(s *corev1.Service) {
	if s.Spec.Type != corev1.ServiceTypeLoadBalancer {
		if len(s.Spec.LoadBalancerSourceRanges) > 0 {
			v.fail("spec.loadBalancerSourceRanges", "a Service of type %s has no load balancer", s.Spec.Type)
		}
		if len(s.Status.LoadBalancer.Ingress) > 0 {
			v.fail("status.loadBalancer", "a Service of type %s has no load balancer", s.Spec.Type)
		}
	}
	for i, r := range s.Spec.LoadBalancerSourceRanges {
		v.prefix(item("spec.loadBalancerSourceRanges", i), r)
	}
	for i := range s.Status.LoadBalancer.Ingress {
		in := &s.Status.LoadBalancer.Ingress[i]
		at := func(sub string) string { return item("status.loadBalancer.ingress", i, sub) }
		if in.IP != "" {
			v.address(at("ip"), in.IP)
		}
		if in.IPMode == nil {
			continue
		}
		choice(v, at("ipMode"), *in.IPMode, corev1.LoadBalancerIPModeVIP, corev1.LoadBalancerIPModeProxy)
		if in.IP == "" {
			v.fail(at("ipMode"), "means nothing without ip")
		}
	}
}
