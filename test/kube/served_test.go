package kube

import (
	"context"
	"crypto/tls"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
)

// TestServed makes, changes and deletes objects through the API and looks with
// packets for what comes of it.
func TestServed(t *testing.T) {
	for _, mode := range modes() {
		t.Run(string(mode), func(t *testing.T) {
			w := newWorld(t, mode)
			w.run()
			for _, c := range []struct {
				name string
				test func(*world)
			}{
				{"slices", testSlices},
				{"types", testTypes},
				{"proxy name", testProxyName},
				{"headless", testHeadless},
				{"named ports", testNamedPorts},
				{"not ready", testNotReady},
				{"readiness", testReadiness},
				{"API itself", testAPIItself},
				{"events", testEvents},
				{"rolling update", testRollingUpdate},
				{"programming time", testProgrammingTime},
			} {
				t.Run(c.name, func(t *testing.T) { c.test(w.of(t)) })
			}
		})
	}
}

// modes are those to test in: $KPROXY_KUBE_MODES, separated by commas. IPVS is
// for kernels that have it, such as that of make vm.
func modes() []plan.Mode {
	list := os.Getenv("KPROXY_KUBE_MODES")
	if list == "" {
		return []plan.Mode{plan.ModeIPTables, plan.ModeUserspace}
	}
	var out []plan.Mode
	for mode := range strings.SplitSeq(list, ",") {
		out = append(out, plan.Mode(mode))
	}
	return out
}

// of is the same world in a subtest.
func (w *world) of(t *testing.T) *world {
	sub := *w
	sub.T = t
	return &sub
}

// everywhere waits until each of a Service's cluster IPs is answered by backends.
func (w *world) everywhere(s *corev1.Service, backends ...string) {
	w.Helper()
	for _, target := range frontends(s) {
		w.answers(target, backends...)
	}
}

// nowhere waits until none of them is answered.
func (w *world) nowhere(s *corev1.Service) {
	w.Helper()
	for _, target := range frontends(s) {
		w.silent(target)
	}
}

func testSlices(w *world) {
	b := w.net.Backends
	s := w.create(newService("slices", nil), newSlices("slices", b[0])...)
	w.everywhere(s, "b1")
	w.point("slices", b[1])
	w.everywhere(s, "b2")
	w.point("slices", b[1], b[2])
	w.everywhere(s, "b3")
	w.point("slices")
	w.nowhere(s)
	w.point("slices", b[0])
	w.everywhere(s, "b1")
	w.deleteService("slices")
	w.nowhere(s)
}

func testTypes(w *world) {
	s := w.create(newService("types", nil), newSlices("types", w.net.Backends[0])...)
	w.everywhere(s, "b1")

	s = w.change("types", func(s *corev1.Service) { s.Spec.Type = corev1.ServiceTypeNodePort })
	nodePorts := w.nodePort(s)
	for _, target := range nodePorts {
		w.answers(target, "b1")
	}

	s = w.change("types", func(s *corev1.Service) {
		s.Spec.Type = corev1.ServiceTypeLoadBalancer
		s.Spec.ExternalIPs = []string{"203.0.113.7", "2001:db8::7"}
	})
	s.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{
		{IP: "203.0.113.8", IPMode: new(corev1.LoadBalancerIPModeVIP)},
		{IP: "2001:db8::8", IPMode: new(corev1.LoadBalancerIPModeVIP)},
	}
	_, err := w.client.core.Services(namespace).UpdateStatus(w.ctx, s, metav1.UpdateOptions{})
	w.must(err)
	for _, a := range []string{"203.0.113.7", "2001:db8::7", "203.0.113.8", "2001:db8::8"} {
		w.answers(addrPort(a), "b1")
	}

	s = w.change("types", func(s *corev1.Service) {
		s.Spec.Type, s.Spec.ExternalIPs = corev1.ServiceTypeClusterIP, nil
		s.Spec.Ports[0].NodePort = 0
	})
	w.silent(addrPort("203.0.113.7"))
	w.silent(addrPort("2001:db8::8"))
	w.silent(nodePorts[0])
	w.everywhere(s, "b1")

	was := s
	w.change("types", func(s *corev1.Service) {
		s.Spec = corev1.ServiceSpec{Type: corev1.ServiceTypeExternalName, ExternalName: "elsewhere.example"}
	})
	w.nowhere(was)
}

func testProxyName(w *world) {
	const label = "service.kubernetes.io/service-proxy-name"
	s := w.create(newService("named", nil), newSlices("named", w.net.Backends[0])...)
	w.everywhere(s, "b1")
	for range 2 {
		w.change("named", func(s *corev1.Service) { s.Labels = map[string]string{label: "another"} })
		w.nowhere(s)
		w.change("named", func(s *corev1.Service) { delete(s.Labels, label) })
		w.everywhere(s, "b1")
	}
}

// The API doesn't let a Service with addresses become headless: it is made anew.
func testHeadless(w *world) {
	s := w.create(newService("headless", nil), newSlices("headless", w.net.Backends[0])...)
	w.everywhere(s, "b1")
	w.deleteService("headless")
	headless := newService("headless", nil)
	headless.Spec.ClusterIP = corev1.ClusterIPNone
	w.create(headless)
	w.nowhere(s)
	w.deleteService("headless")
	again := newService("headless", nil)
	again.Spec.ClusterIP, again.Spec.ClusterIPs = s.Spec.ClusterIP, s.Spec.ClusterIPs
	w.create(again)
	for _, slice := range newSlices("headless", w.net.Backends[1]) { // those of before may be garbage already
		err := w.client.discovery.EndpointSlices(namespace).Delete(w.ctx, slice.Name, metav1.DeleteOptions{})
		w.must(ignoreNotFound(err))
		_, err = w.client.discovery.EndpointSlices(namespace).Create(w.ctx, slice, metav1.CreateOptions{})
		w.must(err)
	}
	w.everywhere(s, "b2")
}

// Two Pods give the same name to different ports, so the controller makes
// EndpointSlices with different ports.
func testNamedPorts(w *world) {
	const otherPort = 9100
	b := w.net.Backends[1]
	stop, err := serveLines(w.ctx, b, otherPort)
	w.must(err)
	w.Cleanup(stop)
	labels := map[string]string{"app": "ports"}
	service := newService("ports", labels)
	service.Spec.Ports[0].TargetPort = intstr.FromString("line")
	s := w.create(service)
	for i, port := range []uint16{lab.LinePort, otherPort} {
		w.createPod(newPod(fmt.Sprintf("ports-%d", i), labels, map[string]uint16{"line": port}), w.net.Backends[i], corev1.ConditionTrue)
	}
	w.everywhere(s, "b1")
	w.everywhere(s, fmt.Sprintf("b2:%d", otherPort))
	w.deletePod("ports-0")
	w.deletePod("ports-1")
}

func testNotReady(w *world) {
	labels := map[string]string{"app": "early"}
	s := w.create(newService("early", labels))
	w.createPod(newPod("early", labels, nil), w.net.Backends[0], corev1.ConditionFalse)
	w.nowhere(s)
	w.change("early", func(s *corev1.Service) { s.Spec.PublishNotReadyAddresses = true })
	w.everywhere(s, "b1")
	w.change("early", func(s *corev1.Service) { s.Spec.PublishNotReadyAddresses = false })
	w.nowhere(s)
	w.deletePod("early")
}

// A Pod becomes ready, is told to end, and is gone. While no other is ready, it
// is used until it is gone.
func testReadiness(w *world) {
	labels := map[string]string{"app": "life"}
	s := w.create(newService("life", labels))
	w.nowhere(s)
	w.createPod(newPod("life-0", labels, nil), w.net.Backends[0], corev1.ConditionFalse)
	w.nowhere(s)
	w.setStatus("life-0", w.net.Backends[0], corev1.ConditionTrue)
	w.everywhere(s, "b1")

	w.must(w.client.core.Pods(namespace).Delete(w.ctx, "life-0", metav1.DeleteOptions{}))
	w.eventually("the endpoint to terminate", func() error { return w.endpoint("life", "10.2.0.2:9000", "terminating", "usable") })
	w.everywhere(s, "b1")
	w.createPod(newPod("life-1", labels, nil), w.net.Backends[1], corev1.ConditionTrue)
	w.eventually("the endpoint that terminates to be left", func() error { return w.endpoint("life", "10.2.0.2:9000", "terminating") })
	w.everywhere(s, "b2")
	w.deletePod("life-0")
	w.eventually("the endpoint to be gone", func() error {
		if err := w.endpoint("life", "10.2.0.2:9000", "terminating"); err == nil {
			return fmt.Errorf("it is there")
		}
		return nil
	})
	w.everywhere(s, "b2")
	w.deletePod("life-1")
	w.nowhere(s)
}

// endpoint returns nil if the Service's endpoint is in exactly these conditions:
// terminating, usable.
func (w *world) endpoint(service, address string, conditions ...string) error {
	st, err := w.status.Status(w.ctx)
	if err != nil {
		return err
	}
	for _, s := range st.Services {
		for _, e := range s.Endpoints {
			if s.Name != service || e.Address.String() != address {
				continue
			}
			var have []string
			if e.Terminating {
				have = append(have, "terminating")
			}
			if e.Usable {
				have = append(have, "usable")
			}
			if fmt.Sprint(have) != fmt.Sprint(conditions) {
				return fmt.Errorf("%s is %v", address, have)
			}
			return nil
		}
	}
	return fmt.Errorf("no endpoint %s", address)
}

// Pods reach the API server by a Service like any other.
func testAPIItself(w *world) {
	s, err := w.client.core.Services(metav1.NamespaceDefault).Get(w.ctx, "kubernetes", metav1.GetOptions{})
	w.must(err)
	client := w.net.Client.HTTPClient(0)                                                       // ctx bounds it
	client.Transport.(*http.Transport).TLSClientConfig = &tls.Config{InsecureSkipVerify: true} // the server makes its own certificate
	w.eventually("the API server's answer at its cluster IP", func() error {
		ctx, cancel := context.WithTimeout(w.ctx, patience/10)
		defer cancel()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+s.Spec.ClusterIP+"/version", nil)
		if err != nil {
			return err
		}
		resp, err := client.Do(req)
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			return fmt.Errorf("status %s", resp.Status)
		}
		return nil
	})
}

// A Service whose data plane changes has an event that says so.
func testEvents(w *world) {
	w.create(newService("eventful", nil), newSlices("eventful", w.net.Backends[0])...)
	if w.mode != plan.ModeUserspace { // where nothing else is
		w.eventually("the service in the kernel", func() error { return w.offloaded("eventful") })
		w.eventually("an event", func() error {
			events, err := w.client.events.Events(namespace).List(w.ctx, metav1.ListOptions{
				FieldSelector: "regarding.kind=Service,regarding.name=eventful,reason=DataPlaneChanged",
			})
			if err == nil && len(events.Items) == 0 {
				err = fmt.Errorf("there is none")
			}
			if err == nil {
				e := events.Items[0]
				w.Logf("%s %s %s %s: %s", e.Type, e.Reason, e.Action, e.ReportingController, e.Note)
			}
			return err
		})
	}
}
