package kube

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
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
				{"service CIDRs", testServiceCIDRs},
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

// modes returns those to test in: $KPROXY_KUBE_MODES, separated by commas, or else
// iptables and userspace. IPVS is for kernels that have it, such as that of make vm.
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
	other := lab.NewBackend("other", w.net.Backends[1].Namespace, otherPort)
	w.must(other.Start(w.ctx))
	w.Cleanup(other.Stop)
	labels := map[string]string{"app": "ports"}
	service := newService("ports", labels)
	service.Spec.Ports[0].TargetPort = intstr.FromString("line")
	s := w.create(service)
	for i, port := range []uint16{lab.LinePort, otherPort} {
		w.createPod(newPod(fmt.Sprintf("ports-%d", i), labels, map[string]uint16{"line": port}), w.net.Backends[i], corev1.ConditionTrue)
	}
	w.everywhere(s, "b1")
	w.everywhere(s, "other")
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

var reached = regexp.MustCompile(`(?m)^kubeproxy_network_programming_duration_seconds_count\{ip_family="IPv4"\} (\S+)$`)

// testProgrammingTime: changes that the real controller of EndpointSlices made,
// for the tests before, were timed from what happened to the pod.
func testProgrammingTime(w *world) {
	w.Helper()
	client := w.net.Node.HTTPClient(10 * time.Second)
	w.eventually("the time that changes took", func() error {
		resp, err := client.Get("http://127.0.0.1:10249/metrics")
		if err != nil {
			return err
		}
		defer resp.Body.Close()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			return err
		}
		m := reached.FindSubmatch(text)
		if m == nil {
			return fmt.Errorf("no metric %s", reached)
		}
		if n, err := strconv.ParseFloat(string(m[1]), 64); err != nil || n < 1 {
			return fmt.Errorf("%s changes (%v), want some", m[1], err)
		}
		return nil
	})
}

// programmed prints all that kproxy has programmed on the node, in a form in
// which equal states are equal texts: chains by name, their rules in order, sets
// without the sizes and ages that the kernel chooses.
func (w *world) programmed() string {
	w.Helper()
	var out []string
	for _, save := range []string{"iptables-save", "ip6tables-save"} {
		text := w.node(save)
		table := ""
		var lines []string
		for line := range strings.Lines(text) {
			line = counters.ReplaceAllString(strings.TrimSpace(line), "")
			if name, ok := strings.CutPrefix(line, "*"); ok {
				table = name
			}
			if strings.Contains(line, "KPROXY") {
				lines = append(lines, save+" "+table+" "+line)
			}
		}
		slices.SortStableFunc(lines, func(a, b string) int { return cmp.Compare(chain(a), chain(b)) })
		out = append(out, lines...)
	}
	var sets []string
	for line := range strings.Lines(w.node("ipset", "save")) {
		if !memories.MatchString(line) {
			sets = append(sets, ages.ReplaceAllString(strings.TrimSpace(line), ""))
		}
	}
	slices.Sort(sets)
	if w.mode == plan.ModeIPVS {
		out = append(out, sortedLines(w.node("ipvsadm", "-S", "-n"))...)
		out = append(out, sortedLines(w.node("ip", "-o", "-br", "address", "show", "dev", "kproxy0"))...)
	}
	return strings.Join(append(out, sets...), "\n")
}

func sortedLines(text string) []string {
	return slices.Sorted(strings.Lines(text))
}

var (
	counters = regexp.MustCompile(` ?\[\d+:\d+\]`)
	// Which endpoint a client has, and which of its connections userspace carries,
	// is what has happened and not what is programmed.
	memories = regexp.MustCompile(`^add KPROXY-(AFF|HELD)-`)
	ages     = regexp.MustCompile(` (hashsize|initval|timeout|bucketsize) \w+`)
)

// chain is the first four words of a line: save, table, command, chain.
func chain(line string) string {
	words := strings.SplitN(line, " ", 5)
	return strings.Join(words[:min(4, len(words))], " ")
}

// wanted says what the status must show for what the API holds now, a line per
// service port: its cluster IPs, its node port and the endpoints that are used.
func (w *world) wanted() ([]string, error) {
	services, err := w.client.core.Services("").List(w.ctx, metav1.ListOptions{
		LabelSelector: "!service.kubernetes.io/service-proxy-name",
	})
	if err != nil {
		return nil, err
	}
	endpoints, err := w.client.discovery.EndpointSlices("").List(w.ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	usable := map[string][]string{}
	for _, s := range endpoints.Items {
		for _, e := range s.Endpoints {
			for _, p := range s.Ports {
				key := s.Namespace + "/" + s.Labels[discoveryv1.LabelServiceName] + ":" + *p.Name
				usable[key] = append(usable[key], netip.AddrPortFrom(netip.MustParseAddr(e.Addresses[0]), uint16(*p.Port)).String())
			}
		}
	}
	var out []string
	for _, s := range services.Items {
		if s.Spec.ClusterIP == corev1.ClusterIPNone || s.Spec.Type == corev1.ServiceTypeExternalName {
			continue
		}
		for _, p := range s.Spec.Ports {
			var addresses []string
			for _, ip := range s.Spec.ClusterIPs {
				addresses = append(addresses, netip.AddrPortFrom(netip.MustParseAddr(ip), uint16(p.Port)).String())
			}
			key := s.Namespace + "/" + s.Name + ":" + p.Name
			out = append(out, describe(key, addresses, uint16(p.NodePort), usable[key]))
		}
	}
	slices.Sort(out)
	return out, nil
}

// shown is the status in the form of wanted.
func shown(st plan.Status) []string {
	var out []string
	for _, s := range st.Services {
		var addresses, usable []string
		for _, a := range s.Addresses {
			addresses = append(addresses, a.String())
		}
		for _, e := range s.Endpoints {
			if e.Usable {
				usable = append(usable, e.Address.String())
			}
		}
		out = append(out, describe(s.Namespace+"/"+s.Name+":"+s.Port, addresses, s.NodePort, usable))
	}
	slices.Sort(out)
	return out
}

func describe(key string, addresses []string, nodePort uint16, endpoints []string) string {
	slices.Sort(addresses)
	slices.Sort(endpoints)
	return fmt.Sprintf("%s %v %d -> %v", key, addresses, nodePort, endpoints)
}
