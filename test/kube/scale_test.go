package kube

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/source/kube"
	"kproxy.dev/kproxy/test/apiserver"
)

// BenchmarkAPI measures what kproxys cost a real API server: as many sources of Services as a cluster has nodes, each with
// connections of its own, hear of all Services and then of changes of EndpointSlices, made one after the other. Per kproxy: bytes
// of the first lists and of a change, as they come through TLS. Of the API server: CPU time for both, and its memory. docs/scale.md
// has the figures of a run; KPROXY_SERVICES is the number of Services.
func BenchmarkAPI(b *testing.B) {
	if os.Geteuid() != 0 {
		b.Skip("needs root to make network namespaces")
	}
	services := 1000
	if text := os.Getenv("KPROXY_SERVICES"); text != "" {
		services = number(text)
	}
	ctx, cancel := context.WithTimeout(b.Context(), 30*time.Minute)
	defer cancel()
	must := func(err error) {
		b.Helper()
		if err != nil {
			b.Fatal(err)
		}
	}
	cfg := lab.DefaultConfig()
	cfg.Prefix, cfg.Backends = fmt.Sprintf("kps-%d", os.Getpid()), 1
	network := lab.New(cfg)
	must(network.Up(ctx))
	b.Cleanup(func() { must(network.Down()) })
	host := network.Backends[0]
	host.Stop()
	dir, err := os.MkdirTemp("/dev/shm", "kproxy-scale-")
	must(err)
	defer os.RemoveAll(dir)
	s := apiserver.New(programs, filepath.Clean(dir), host.Namespace, host.Addresses[0], serviceNetworks, "--allow-privileged")
	s.Etcd.Output, s.API.Output = keep("scale-etcd"), keep("scale-kube-apiserver")
	b.Cleanup(func() { must(errors.Join(s.API.Kill(), s.Etcd.Kill())) }) // nothing that they hold is needed any more
	must(s.Start(ctx))
	c, err := newClients(s.Config(), s.HTTP)
	must(err)
	must(fill(ctx, c, services))

	for _, kproxys := range []int{1, 10, 50, 100, 200} {
		b.Run(fmt.Sprintf("services=%d/kproxys=%d", services, kproxys), func(b *testing.B) {
			for b.Loop() {
				measure(ctx, b, s, c, services, kproxys)
			}
		})
	}
}

// changes is how many are measured.
const changes = 200

func measure(ctx context.Context, b *testing.B, s *apiserver.Server, c clients, services, kproxys int) {
	var received atomic.Int64
	access := s.Config()
	access.Dial = func(ctx context.Context, network, address string) (net.Conn, error) {
		conn, err := s.Namespace.Dial(ctx, network, address)
		if err != nil {
			return nil, err
		}
		return &counted{conn, &received}, nil
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	defer running.Wait()
	defer cancel()
	sources := make([]*kube.Source, kproxys)
	began, cpu := time.Now(), cpuTime(s.API)
	for i := range sources {
		k, err := kube.Open(kube.Config{Access: access, Node: nodeName(i), NodeAddresses: []netip.Addr{netip.MustParseAddr("192.0.2.1")}, QPS: -1})
		if err != nil {
			b.Fatal(err)
		}
		sources[i] = k
		running.Go(func() { _ = k.Run(ctx) })
	}
	all := func(what string, heard func(*service.Snapshot) bool) {
		b.Helper()
		for _, k := range sources {
			for wait := time.Now(); k.Latest() == nil || !heard(k.Latest()); time.Sleep(5 * time.Millisecond) {
				if time.Since(wait) > 5*time.Minute {
					b.Fatalf("a kproxy hasn't heard of %s in five minutes: %+v", what, k.Status())
				}
			}
		}
	}
	all("all Services", func(s *service.Snapshot) bool { return s.Len() >= services })
	b.ReportMetric(time.Since(began).Seconds(), "s/start")
	b.ReportMetric(float64(received.Load())/float64(kproxys)/float64(services), "B/service")
	b.ReportMetric((cpuTime(s.API)-cpu).Seconds()*1e3/float64(kproxys), "CPU-ms/start")

	received.Store(0)
	began, cpu = time.Now(), cpuTime(s.API)
	name := service.Key{Namespace: "default", Name: serviceName(0), Port: "http", Protocol: service.TCP}
	var last netip.AddrPort
	for n := range changes {
		slice := sliceOf(0)
		slice.Endpoints[0].Addresses[0] = fmt.Sprintf("10.%d.%d.%d", 128+kproxys%100, n/250, 1+n%250)
		last = netip.AddrPortFrom(netip.MustParseAddr(slice.Endpoints[0].Addresses[0]), 8080)
		if _, err := c.discovery.EndpointSlices("default").Update(ctx, slice, metav1.UpdateOptions{}); err != nil {
			b.Fatal(err)
		}
	}
	made := time.Since(began)
	all("the last change", func(s *service.Snapshot) bool {
		_, endpoints, ok := s.Get(name)
		for i := range endpoints {
			if ok && endpoints[i].Address == last {
				return true
			}
		}
		return false
	})
	b.ReportMetric(changes/made.Seconds(), "changes/s")
	b.ReportMetric(float64(received.Load())/float64(kproxys)/changes, "B/change")
	b.ReportMetric((cpuTime(s.API)-cpu).Seconds()*1e6/float64(kproxys)/changes, "CPU-µs/change")
	b.ReportMetric((cpuTime(s.API)-cpu).Seconds()*1e3/changes, "CPU-ms/change-all")
	b.ReportMetric(float64(residentOf(s.API))/(1<<20), "API-MiB")
	b.ReportMetric(0, "ns/op")
}

// counted counts what is read of a connection.
type counted struct {
	net.Conn
	n *atomic.Int64
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.n.Add(int64(n))
	return n, err
}

func nodeName(i int) string    { return fmt.Sprintf("node-%d", i) }
func serviceName(i int) string { return fmt.Sprintf("service-%05d", i) }

// sliceOf is the EndpointSlice of a Service, of three Pods, as its controller makes them.
func sliceOf(i int) *discoveryv1.EndpointSlice {
	yes, port, protocol, portName := true, int32(8080), corev1.ProtocolTCP, "http"
	s := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Name: serviceName(i) + "-abcde", Namespace: "default",
			Labels: map[string]string{discoveryv1.LabelServiceName: serviceName(i), discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io"},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: &portName, Port: &port, Protocol: &protocol}},
	}
	for e := range 3 {
		node, zone := nodeName(e), fmt.Sprintf("zone-%d", e)
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{netip.AddrFrom4([4]byte{10, byte(64 + e), byte(i / 250), byte(1 + i%250)}).String()},
			Conditions: discoveryv1.EndpointConditions{Ready: &yes, Serving: &yes},
			NodeName:   &node, Zone: &zone,
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: fmt.Sprintf("%s-6d5f8c7b9d-%05d", serviceName(i), e), UID: "3f2b6c1e-7a4d-4f5e-9b8a-0c1d2e3f4a5b"},
		})
	}
	return s
}

// fill makes Nodes and Services with endpoints, many at a time.
func fill(ctx context.Context, c clients, services int) error {
	for i := range 200 {
		node := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName(i), Labels: map[string]string{corev1.LabelTopologyZone: "zone-1"}}}
		if _, err := c.core.Nodes().Create(ctx, node, metav1.CreateOptions{}); err != nil {
			return err
		}
	}
	var wg sync.WaitGroup
	failed := make([]error, 16)
	for worker := range failed {
		wg.Go(func() {
			for i := worker; i < services && failed[worker] == nil; i += len(failed) {
				s := &corev1.Service{
					ObjectMeta: metav1.ObjectMeta{Name: serviceName(i), Namespace: "default", Labels: map[string]string{"app": serviceName(i)}},
					Spec:       corev1.ServiceSpec{Ports: []corev1.ServicePort{{Name: "http", Port: 80}}},
				}
				_, err := c.core.Services("default").Create(ctx, s, metav1.CreateOptions{})
				if err == nil {
					_, err = c.discovery.EndpointSlices("default").Create(ctx, sliceOf(i), metav1.CreateOptions{})
				}
				failed[worker] = err
			}
		})
	}
	wg.Wait()
	for _, err := range failed {
		if err != nil {
			return err
		}
	}
	return nil
}

// residentOf is a program's memory, in bytes, as it says in proc(5).
func residentOf(p *lab.Process) int {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", p.PID()))
	var size, resident int
	if _, scan := fmt.Sscan(string(text), &size, &resident); err != nil || scan != nil {
		return 0
	}
	return resident * os.Getpagesize()
}
