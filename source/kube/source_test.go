package kube

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/utils/ptr"

	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/source"
)

const node = "node-1"

// patience bounds a wait for what is bound to happen.
const patience = time.Minute

// waitFor returns once what holds.
func waitFor(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !holds(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%s: it never happened", what)
		}
	}
}

// follow runs a Source on a until the test ends.
func follow(t *testing.T, a *api) *Source {
	t.Helper()
	cfg := Config{QPS: 5, Burst: 10, ContentType: protobuf, UserAgent: "kproxy"}
	cfg.Master, cfg.Node, cfg.QPS = "http://"+a.address, node, -1
	s, err := Open(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return s
}

func aService(n string, ip int) *corev1.Service {
	return &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: n, UID: "uid-of-" + "service"},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: fmt.Sprintf("10.96.0.%d", ip), ClusterIPs: []string{fmt.Sprintf("10.96.0.%d", ip)},
			Ports: []corev1.ServicePort{{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP}},
		},
	}
}

func aSlice(n, svc string, endpoints ...int) *discoveryv1.EndpointSlice {
	s := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: n, Labels: map[string]string{discoveryv1.LabelServiceName: svc}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("http"), Port: ptr.To(int32(8080)), Protocol: ptr.To(corev1.ProtocolTCP)}},
	}
	for _, e := range endpoints {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{Addresses: []string{fmt.Sprintf("10.2.0.%d", e)}, NodeName: ptr.To(node)})
	}
	return s
}

func aNode() *corev1.Node {
	return &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{Name: node, Labels: map[string]string{corev1.LabelTopologyZone: "zone-a"}},
		Spec:       corev1.NodeSpec{PodCIDRs: []string{"10.2.0.0/24"}},
	}
}

// world starts an API with two Services and this node.
func world(t *testing.T) *api {
	a := newAPI(t)
	a.set("services", aService("web", 1))
	a.set("endpointslices", aSlice("web-1", "web", 1, 2))
	a.set("services", aService("api", 2))
	a.set("endpointslices", aSlice("api-1", "api", 3))
	a.set("nodes", aNode())
	return a
}

// fromScratch returns what source.Build makes of everything in a.
func (a *api) fromScratch() *service.Snapshot {
	a.mu.Lock()
	defer a.mu.Unlock()
	o := source.Objects{}
	for _, x := range a.objects["services"] {
		o.Services = append(o.Services, x.(*corev1.Service))
	}
	for _, x := range a.objects["endpointslices"] {
		o.EndpointSlices = append(o.EndpointSlices, x.(*discoveryv1.EndpointSlice))
	}
	for _, x := range a.objects["nodes"] {
		o.Nodes = append(o.Nodes, x.(*corev1.Node))
	}
	for _, x := range a.objects["servicecidrs"] {
		o.ServiceCIDRs = append(o.ServiceCIDRs, x.(*networkingv1.ServiceCIDR))
	}
	return source.Build(o, node)
}

// agrees reports whether s says what a holds.
func agrees(s *Source, a *api) bool {
	l := s.Latest()
	return l != nil && l.Hash() == a.fromScratch().Hash()
}

func problems(s *Source) []string { return s.Status()[0].Errors }

func TestFollow(t *testing.T) {
	for name, old := range map[string]bool{"watch with initial events": false, "list, then watch": true} {
		t.Run(name, func(t *testing.T) {
			a := world(t)
			a.noStream = old
			a.start()
			s := follow(t, a)
			waitFor(t, "the first Snapshot", func() bool { return agrees(s, a) })

			a.set("endpointslices", aSlice("web-2", "web", 7))
			waitFor(t, "an endpoint more", func() bool { return agrees(s, a) })
			a.set("services", aService("new", 3))
			a.remove("services", name3("api"))
			a.remove("endpointslices", name3("web-1"))
			waitFor(t, "a Service that came, one that went, a slice that went", func() bool { return agrees(s, a) })
			if s.Latest().Len() != 2 {
				t.Errorf("%d service ports, want 2", s.Latest().Len())
			}
			n := aNode()
			n.Labels[corev1.LabelTopologyZone] = "zone-b"
			a.set("nodes", n)
			waitFor(t, "another zone", func() bool { return s.Latest().Node().Zone == "zone-b" })

			want := []source.Status{{Name: "http://" + a.address, Synced: true}}
			if diff := cmp.Diff(want, s.Status()); diff != "" {
				t.Errorf("status (-want +got):\n%s", diff)
			}
		})
	}
}

func name3(n string) name { return name{Namespace: "default", Name: n} }

// What another proxy serves, and what is headless, isn't even asked for.
func TestSelectors(t *testing.T) {
	a := world(t)
	a.start()
	s := follow(t, a)
	waitFor(t, "the first Snapshot", func() bool { return agrees(s, a) })
	want := map[string][]string{
		"services":       {"!service.kubernetes.io/service-proxy-name spec.clusterIP!=None"},
		"endpointslices": {"!service.kubernetes.io/headless "},
		"nodes":          {" metadata.name=node-1"},
		"servicecidrs":   {" "},
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if diff := cmp.Diff(want, a.asked); diff != "" {
		t.Errorf("selectors (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]int{"services": 1, "endpointslices": 1, "nodes": 1, "servicecidrs": 1}, a.opened); diff != "" {
		t.Errorf("watches opened (-want +got):\n%s", diff)
	}
}

func TestAwayAtStart(t *testing.T) {
	a := world(t)
	a.start()
	a.stop()
	s := follow(t, a)
	waitFor(t, "every watch fails", func() bool { return len(problems(s)) == 3 })
	if s.Latest() != nil || s.Status()[0].Synced {
		t.Error("there is a Snapshot of an API that was never heard")
	}
	if !s.NodeEligible() {
		t.Error("a node that was never heard of is not eligible")
	}
	for i, kind := range []string{"Services", "EndpointSlices", "Node"} {
		got := problems(s)[i]
		if !strings.HasPrefix(got, kind+": watch fails since 2") || !strings.Contains(got, "connection refused") || strings.Contains(got, "\n") {
			t.Errorf("problem %q, want one line: what fails, since when, why", got)
		}
	}
	a.start()
	waitFor(t, "the first Snapshot", func() bool { return agrees(s, a) })
	if p := problems(s); len(p) != 0 {
		t.Errorf("still said to be wrong: %q", p)
	}
}

func TestAwayLater(t *testing.T) {
	for name, forget := range map[string]bool{"watches resume": false, "everything is listed anew": true} {
		t.Run(name, func(t *testing.T) {
			a := world(t)
			a.start()
			s := follow(t, a)
			waitFor(t, "the first Snapshot", func() bool { return agrees(s, a) })
			<-s.Snapshots()
			before := s.Latest()

			a.stop()
			waitFor(t, "every watch fails", func() bool { return len(problems(s)) == 3 })
			if s.Latest() != before {
				t.Error("the last state didn't stay")
			}
			if forget {
				a.forget()
			}
			a.start()
			waitFor(t, "no watch fails", func() bool { return len(problems(s)) == 0 })
			select {
			case <-s.Snapshots():
				t.Error("a signal, although nothing has changed")
			default:
			}
			a.set("endpointslices", aSlice("web-2", "web", 9))
			waitFor(t, "the watches are in use", func() bool { return agrees(s, a) })
			if s.Latest() == before || s.Latest().Len() != before.Len() {
				t.Errorf("%d service ports, want %d", s.Latest().Len(), before.Len())
			}
		})
	}
}

// What changed while the API server was away shows when it is back, and no
// Snapshot in between lacks anything.
func TestChangedMeanwhile(t *testing.T) {
	a := world(t)
	a.start()
	s := follow(t, a)
	waitFor(t, "the first Snapshot", func() bool { return agrees(s, a) })
	a.stop()
	a.set("services", aService("new", 3))
	a.set("endpointslices", aSlice("web-1", "web", 5))
	a.remove("services", name3("api"))
	a.forget()
	a.start()
	end := time.Now().Add(patience)
	for !agrees(s, a) {
		if l := s.Latest(); l.Len() < 1 || l.Len() > 3 {
			t.Fatalf("a Snapshot with %d service ports in between", l.Len())
		}
		if time.Now().After(end) {
			t.Fatal("never caught up")
		}
	}
}

// A watch that is refused says so, and keeps nobody else from working.
func TestRefused(t *testing.T) {
	for status, text := range map[int]string{
		http.StatusForbidden: "EndpointSlices: list fails since", http.StatusInternalServerError: "EndpointSlices: list fails since",
		http.StatusTooManyRequests: "EndpointSlices: watch fails since",
	} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			a := world(t)
			a.answer("endpointslices", status)
			a.start()
			s := follow(t, a)
			waitFor(t, "a problem", func() bool { return len(problems(s)) == 1 && strings.HasPrefix(problems(s)[0], text) })
			waitFor(t, "the others work", func() bool { return a.watches("services") > 0 && a.watches("nodes") > 0 })
			if s.Latest() != nil {
				t.Error("a Snapshot without EndpointSlices: every Service would be without endpoints")
			}
			a.answer("endpointslices", 0)
			waitFor(t, "the first Snapshot", func() bool { return agrees(s, a) && len(problems(s)) == 0 })
		})
	}
}

func aServiceCIDR(n string, networks ...string) *networkingv1.ServiceCIDR {
	return &networkingv1.ServiceCIDR{ObjectMeta: metav1.ObjectMeta{Name: n}, Spec: networkingv1.ServiceCIDRSpec{CIDRs: networks}}
}

// TestServiceCIDRs: the networks of all are in the Snapshot, as they come, change and go, and are saved with the rest.
func TestServiceCIDRs(t *testing.T) {
	a := world(t)
	a.set("servicecidrs", aServiceCIDR("kubernetes", "10.96.0.0/12", "fd00:96::/112"))
	a.start()
	file := filepath.Join(t.TempDir(), "state.zip")
	s, stop := run(t, saving(a, file))
	has := func(want ...string) {
		t.Helper()
		waitFor(t, strings.Join(want, " and "), func() bool {
			l := s.Latest()
			return l != nil && l.Len() == 2 && fmt.Sprint(l.ServiceCIDRs()) == fmt.Sprint(want)
		})
	}
	waitFor(t, "the first Snapshot", func() bool { return s.Latest() != nil })
	if got := fmt.Sprint(s.Latest().ServiceCIDRs()); got != "[10.96.0.0/12 fd00:96::/112]" {
		t.Errorf("the first Snapshot has %s", got)
	}
	a.set("servicecidrs", aServiceCIDR("more", "10.112.0.0/16", "10.96.0.0/12", "nonsense"))
	has("10.96.0.0/12", "10.112.0.0/16", "fd00:96::/112")
	a.remove("servicecidrs", name{Name: "kubernetes"}) // what both have stays
	has("10.96.0.0/12", "10.112.0.0/16")
	a.set("servicecidrs", aServiceCIDR("more", "10.112.0.0/16"))
	has("10.112.0.0/16")
	waitFor(t, "it is saved", func() bool {
		_, saved, err := readArchive(must(os.ReadFile(file)))
		return err == nil && len(saved.cidrs.Items) == 1 && fmt.Sprint(saved.cidrs.Items[0].Spec.CIDRs) == "[10.112.0.0/16]"
	})
	stop()
	a.stop()
	s, _ = run(t, saving(a, file))
	has("10.112.0.0/16")
}

func must[T any](v T, _ error) T { return v }

// TestServiceCIDRsAreMissing: an API without them is none the worse for it, and one that lets kproxy have none has one warning.
func TestServiceCIDRsAreMissing(t *testing.T) {
	for status, want := range map[int]string{
		http.StatusNotFound:  "level=INFO msg=\"this API server has no ServiceCIDRs",
		http.StatusForbidden: "level=WARN msg=\"kproxy may not list ServiceCIDRs",
	} {
		t.Run(fmt.Sprint(status), func(t *testing.T) {
			a := world(t)
			a.set("servicecidrs", aServiceCIDR("kubernetes", "10.96.0.0/12"))
			a.answer("servicecidrs", status)
			a.start()
			var log lockedBuffer
			cfg := Config{Master: "http://" + a.address, Node: node, QPS: -1, Logger: slog.New(slog.NewTextHandler(&log, nil))}
			s, _ := run(t, cfg)
			waitFor(t, "the first Snapshot", func() bool { return s.Latest() != nil })
			s.retries.hurry() // asked again, it isn't told again
			a.set("services", aService("new", 3))
			waitFor(t, "a Service more", func() bool { return s.Latest().Len() == 3 })
			if got := problems(s); len(got) > 0 || len(s.Latest().ServiceCIDRs()) > 0 {
				t.Errorf("networks %v, problems %v; want none", s.Latest().ServiceCIDRs(), got)
			}
			a.answer("servicecidrs", 0)
			waitFor(t, "the networks, once it may have them", func() bool { s.retries.hurry(); return len(s.Latest().ServiceCIDRs()) == 1 })
			if got := log.String(); strings.Count(got, "ServiceCIDRs") != 1 || !strings.Contains(got, want) {
				t.Errorf("the log is\n%s\nwant it to tell once of %s", got, want)
			}
		})
	}
}

// lockedBuffer is one that several goroutines may use.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func TestNodeUnknown(t *testing.T) {
	a := world(t)
	a.remove("nodes", name{Name: node})
	a.start()
	s := follow(t, a)
	waitFor(t, "the first Snapshot", func() bool { return agrees(s, a) })
	want := []string{"Node: there is none named node-1; --hostname-override says which one this is"}
	if diff := cmp.Diff(want, problems(s)); diff != "" || s.NodeEligible() {
		t.Errorf("eligible: %v; problems (-want +got):\n%s", s.NodeEligible(), diff)
	}
	a.set("nodes", aNode())
	waitFor(t, "it is there", func() bool { return s.NodeEligible() && len(problems(s)) == 0 })
}

// Whatever happens, converting changes one by one gives what converting
// everything at once does.
func TestRandomChanges(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	a := world(t)
	a.start()
	s := follow(t, a)
	waitFor(t, "the first Snapshot", func() bool { return agrees(s, a) })
	for step := range 400 {
		svc := fmt.Sprintf("svc-%d", rng.IntN(10))
		slice := fmt.Sprintf("slice-%d", rng.IntN(20))
		switch rng.IntN(6) {
		case 0, 1:
			a.set("services", aService(svc, 10+rng.IntN(100)))
		case 2, 3:
			a.set("endpointslices", aSlice(slice, svc, rng.IntN(250), rng.IntN(250))) // may move to another Service
		case 4:
			a.remove("services", name3(svc))
		case 5:
			a.remove("endpointslices", name3(slice))
		}
		if step%80 == 79 {
			waitFor(t, "the same as from scratch", func() bool { return agrees(s, a) })
		}
	}
	waitFor(t, "the same as from scratch", func() bool { return agrees(s, a) })
}

// TestRead: who only looks gets what who follows gets, and writes nothing, not even that it starts.
func TestRead(t *testing.T) {
	a := world(t)
	a.start()
	got, err := Read(t.Context(), Config{Master: "http://" + a.address, Node: node, QPS: -1})
	if err != nil || got.Hash() != a.fromScratch().Hash() {
		t.Errorf("%+v, %v", got, err)
	}
	if events := a.written(); len(events) > 0 {
		t.Errorf("it has written %+v", events)
	}
	a.stop()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	if _, err := Read(ctx, Config{Master: "http://" + a.address, Node: node, QPS: -1}); err == nil || !strings.Contains(err.Error(), "read Services of http://"+a.address+": ") {
		t.Errorf("an API that is away: %v", err)
	}
}

func TestEvents(t *testing.T) {
	a := world(t)
	a.start()
	s := follow(t, a)
	waitFor(t, "the first Snapshot", func() bool { return agrees(s, a) })
	s.Event("default", "web", false, "DataPlaneChanged", "Offload", "userspace to iptables: steady for 100%")
	s.Event("default", "web", true, "FailedToStartServiceHealthcheck", "Listen", strings.Repeat("x", 2000))
	waitFor(t, "three events", func() bool { return len(a.written()) == 3 })
	for range 20 { // they are one with the first
		s.Event("default", "web", false, "DataPlaneChanged", "Offload", "again")
	}
	waitFor(t, "the first to be counted", func() bool {
		a.mu.Lock()
		defer a.mu.Unlock()
		return a.counted > 0
	})
	type row struct{ Regarding, Related, UID, Type, Reason, Action, Note, From string }
	want := []row{
		{"Node /node-1", "", "node-1", "Normal", "Starting", "StartKproxy", "", "kproxy"},
		{"Service default/web", "Node /node-1", "uid-of-service", "Normal", "DataPlaneChanged", "Offload", "userspace to iptables: steady for 100%", "kproxy"},
		{"Service default/web", "Node /node-1", "uid-of-service", "Warning", "FailedToStartServiceHealthcheck", "Listen", strings.Repeat("x", 1021) + "...", "kproxy"},
	}
	var got []row
	for _, e := range a.written() {
		r := row{Type: e.Type, Reason: e.Reason, Action: e.Action, Note: e.Note, From: e.ReportingController, UID: string(e.Regarding.UID)}
		r.Regarding = fmt.Sprintf("%s %s/%s", e.Regarding.Kind, e.Regarding.Namespace, e.Regarding.Name)
		if e.Related != nil {
			r.Related = fmt.Sprintf("%s %s/%s", e.Related.Kind, e.Related.Namespace, e.Related.Name)
		}
		got = append(got, r)
	}
	byReason := cmpopts.SortSlices(func(a, b row) bool { return a.Reason > b.Reason })
	if diff := cmp.Diff(want, got, byReason); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
}
