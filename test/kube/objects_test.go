package kube

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/client-go/util/retry"
	"kproxy.dev/kproxy/lab"
)

// namespace is where the tests' objects are.
const namespace = metav1.NamespaceDefault

// lines is the port 80 of a Service, to the line servers of backends.
var lines = corev1.ServicePort{Name: "line", Port: 80, Protocol: corev1.ProtocolTCP, TargetPort: intstr.FromInt32(int32(lab.LinePort))}

// newService describes a dual-stack Service with port 80. Without a selector its
// EndpointSlices are the test's, with one the controller's.
func newService(name string, selector map[string]string) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace},
		Spec: corev1.ServiceSpec{
			Selector:       selector,
			IPFamilyPolicy: new(corev1.IPFamilyPolicyRequireDualStack),
			Ports:          []corev1.ServicePort{lines},
		},
	}
}

// newSlices describes the EndpointSlices of a Service, one a family, with
// backends that are ready.
func newSlices(service string, backends ...*lab.Backend) []*discoveryv1.EndpointSlice {
	var out []*discoveryv1.EndpointSlice
	for i, family := range []discoveryv1.AddressType{discoveryv1.AddressTypeIPv4, discoveryv1.AddressTypeIPv6} {
		s := &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Name: fmt.Sprintf("%s-%d", service, 4+2*i), Namespace: namespace,
				Labels: map[string]string{discoveryv1.LabelServiceName: service, discoveryv1.LabelManagedBy: "test.kproxy.dev"},
			},
			AddressType: family,
			Ports: []discoveryv1.EndpointPort{{
				Name: new(lines.Name), Port: new(int32(lab.LinePort)), Protocol: new(corev1.ProtocolTCP),
			}},
		}
		for _, b := range backends {
			s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{b.Addresses[i].String()}, NodeName: new("node")})
		}
		out = append(out, s)
	}
	return out
}

// create makes a Service and its EndpointSlices, and returns the Service with
// the addresses that it was given.
func (w *world) create(s *corev1.Service, slices ...*discoveryv1.EndpointSlice) *corev1.Service {
	w.Helper()
	made, err := w.client.core.Services(namespace).Create(w.ctx, s, metav1.CreateOptions{})
	w.must(err)
	for _, slice := range slices {
		_, err := w.client.discovery.EndpointSlices(namespace).Create(w.ctx, slice, metav1.CreateOptions{})
		w.must(err)
	}
	return made
}

// change updates a Service as f says.
func (w *world) change(name string, f func(*corev1.Service)) *corev1.Service {
	w.Helper()
	services := w.client.core.Services(namespace)
	var s *corev1.Service
	w.must(retry.RetryOnConflict(retry.DefaultRetry, func() (err error) {
		if s, err = services.Get(w.ctx, name, metav1.GetOptions{}); err != nil {
			return err
		}
		f(s)
		s, err = services.Update(w.ctx, s, metav1.UpdateOptions{})
		return err
	}))
	return s
}

func (w *world) deleteService(name string) {
	w.Helper()
	w.must(w.client.core.Services(namespace).Delete(w.ctx, name, metav1.DeleteOptions{}))
}

// point makes backends the endpoints of a Service, by updates of its slices.
func (w *world) point(service string, backends ...*lab.Backend) {
	w.Helper()
	for _, slice := range newSlices(service, backends...) {
		_, err := w.client.discovery.EndpointSlices(namespace).Update(w.ctx, slice, metav1.UpdateOptions{})
		w.must(err)
	}
}

// frontends are a Service's cluster IPs with port 80.
func frontends(s *corev1.Service) []netip.AddrPort {
	var out []netip.AddrPort
	for _, ip := range s.Spec.ClusterIPs {
		out = append(out, netip.AddrPortFrom(netip.MustParseAddr(ip), 80))
	}
	return out
}

// nodePort are the node's addresses with a Service's node port.
func (w *world) nodePort(s *corev1.Service) []netip.AddrPort {
	var out []netip.AddrPort
	for _, a := range w.net.Config.NodeAddresses() {
		out = append(out, netip.AddrPortFrom(a, uint16(s.Spec.Ports[0].NodePort)))
	}
	return out
}

// newPod describes a Pod on the node that runs nothing: the tests write its
// status. ports are its named TCP ports.
func newPod(name string, labels map[string]string, ports map[string]uint16) *corev1.Pod {
	c := corev1.Container{Name: "server", Image: "server"}
	for name, port := range ports {
		c.Ports = append(c.Ports, corev1.ContainerPort{Name: name, ContainerPort: int32(port), Protocol: corev1.ProtocolTCP})
	}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace, Labels: labels},
		Spec:       corev1.PodSpec{NodeName: "node", Containers: []corev1.Container{c}},
	}
}

// setStatus writes a Pod's status as its kubelet would: where it answers, and
// whether it is ready.
func (w *world) setStatus(pod string, b *lab.Backend, ready corev1.ConditionStatus) {
	w.Helper()
	p, err := w.client.core.Pods(namespace).Get(w.ctx, pod, metav1.GetOptions{})
	w.must(err)
	_, err = w.client.core.Pods(namespace).UpdateStatus(w.ctx, withStatus(p, b, ready), metav1.UpdateOptions{})
	w.must(err)
}

func withStatus(p *corev1.Pod, b *lab.Backend, ready corev1.ConditionStatus) *corev1.Pod {
	p.Status.Phase = corev1.PodRunning
	p.Status.PodIPs = nil
	for _, a := range b.Addresses {
		p.Status.PodIPs = append(p.Status.PodIPs, corev1.PodIP{IP: a.String()})
	}
	p.Status.PodIP = p.Status.PodIPs[0].IP
	p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: ready}}
	return p
}

// createPod creates a Pod and writes its status.
func (w *world) createPod(p *corev1.Pod, b *lab.Backend, ready corev1.ConditionStatus) {
	w.Helper()
	// The controller makes a namespace's service account, without which there are no Pods.
	w.eventually("pod "+p.Name, func() error {
		_, err := w.client.core.Pods(namespace).Create(w.ctx, p, metav1.CreateOptions{})
		return err
	})
	w.setStatus(p.Name, b, ready)
}

// deletePod deletes a Pod for good, as a kubelet does when its containers have ended.
func (w *world) deletePod(name string) {
	w.Helper()
	w.must(w.client.core.Pods(namespace).Delete(w.ctx, name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)}))
}

func ignoreNotFound(err error) error {
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

func addrPort(a string) netip.AddrPort { return netip.AddrPortFrom(netip.MustParseAddr(a), 80) }

// testServiceCIDRs: with the rights of deploy/, kproxy closes the networks that the API server was started with, and others as they
// come and go. Only their addresses are looked at: what becomes of packets, test/e2e shows.
func testServiceCIDRs(w *world) {
	closed := func(want ...string) {
		w.Helper()
		w.eventually(fmt.Sprintf("%v to be closed", want), func() error {
			var have []string
			for _, program := range []string{"iptables", "ip6tables"} {
				out, err := w.net.Node.Output(w.ctx, program, "-S", "KPROXY-CLOSED")
				if err != nil {
					return fmt.Errorf("%w: %s", err, out)
				}
				for line := range strings.Lines(string(out)) {
					if words := strings.Fields(line); slices.Contains(words, "KPROXY-NO-SERVICE") {
						have = append(have, words[3]) // -A KPROXY-CLOSED -d 10.96.0.0/12
					}
				}
			}
			if !slices.Equal(have, want) {
				return fmt.Errorf("closed is %v", have)
			}
			return nil
		})
	}
	closed("10.96.0.0/12", "fd00:96::/112")
	more := &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: "more"}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: []string{"10.160.0.0/16"}}}
	_, err := w.client.network.ServiceCIDRs().Create(w.ctx, more, metav1.CreateOptions{})
	w.must(err)
	closed("10.96.0.0/12", "10.160.0.0/16", "fd00:96::/112")
	w.must(w.client.network.ServiceCIDRs().Delete(w.ctx, "more", metav1.DeleteOptions{}))
	closed("10.96.0.0/12", "fd00:96::/112")
}
