package kube

import (
	"fmt"
	"runtime"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"
)

// many fills a state with n Services of ten endpoints on 500 nodes, each object
// decoded from what the API sends, as a watch decodes it.
func many(b testing.TB, n int) *state {
	b.Helper()
	s := newState(Config{Node: node})
	managed := []metav1.ManagedFieldsEntry{{Manager: "kube-controller-manager", FieldsV1: metav1.NewFieldsV1(string(make([]byte, 600)))}}
	for i := range n {
		svc := fullService()
		svc.ObjectMeta = meta(fmt.Sprintf("service-%d", i), map[string]string{"app": "web"}, nil)
		svc.ManagedFields = managed
		svc.Spec.Type, svc.Spec.ClusterIPs = corev1.ServiceTypeClusterIP, []string{fmt.Sprintf("10.96.%d.%d", i/250, i%250+1)}
		svc.Spec.ClusterIP = svc.Spec.ClusterIPs[0]
		svc.Spec.ExternalIPs, svc.Spec.LoadBalancerSourceRanges, svc.Status = nil, nil, corev1.ServiceStatus{}
		check(b, s.services.Add(decoded(b, svc, &corev1.Service{})))
		check(b, s.slices.Add(decoded(b, tenEndpoints(i, 0), &discoveryv1.EndpointSlice{})))
	}
	return s
}

func tenEndpoints(i, revision int) *discoveryv1.EndpointSlice {
	s := fullSlice()
	svc := fmt.Sprintf("service-%d", i)
	s.ObjectMeta = meta(svc+"-abcde", map[string]string{discoveryv1.LabelServiceName: svc, discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io"},
		map[string]string{"endpoints.kubernetes.io/last-change-trigger-time": "2026-01-01T00:00:00Z"})
	s.ResourceVersion = fmt.Sprint(revision)
	s.Endpoints = nil
	for j := range 10 {
		s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
			Addresses: []string{fmt.Sprintf("10.%d.%d.%d", 128+i/2500, i/10%250, i%10*10+j)},
			NodeName:  ptr.To(fmt.Sprintf("worker-%d.example.com", (i+j)%500)), Zone: ptr.To(fmt.Sprintf("zone-%d", j%3)),
			Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(j > 0 || revision%2 == 0), Serving: ptr.To(true), Terminating: ptr.To(false)},
			TargetRef:  &corev1.ObjectReference{Kind: "Pod", Namespace: "default", Name: fmt.Sprintf("%s-7d4b9c-%d", svc, j), UID: types.UID(fmt.Sprint("7d4b9c00-0000-4000-8000-", j))},
		})
	}
	return s
}

// decoded returns o as it comes from the wire, in what it shares and what not.
func decoded[T interface {
	Marshal() ([]byte, error)
	Unmarshal([]byte) error
}](b testing.TB, o, into T) T {
	b.Helper()
	text, err := o.Marshal()
	check(b, err)
	check(b, into.Unmarshal(text))
	return into
}

func check(b testing.TB, err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

// BenchmarkHeap says what is kept of 10,000 Services with ten endpoints each.
// It is meant for -benchtime 1x.
func BenchmarkHeap(b *testing.B) {
	heap := func() float64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return float64(m.HeapAlloc) / 1e6
	}
	for b.Loop() {
		before := heap()
		s := many(b, 10_000)
		objects := heap()
		snapshot, _ := s.next(nil)
		b.ReportMetric(objects-before, "objects-MB")
		b.ReportMetric(heap()-objects, "snapshot-MB")
		runtime.KeepAlive(snapshot)
		runtime.KeepAlive(s)
	}
}

// BenchmarkScratch converts everything, as at the start.
func BenchmarkScratch(b *testing.B) {
	s := many(b, 10_000)
	for b.Loop() {
		if got, _ := s.next(nil); got.Len() != 10_000 {
			b.Fatalf("%d service ports", got.Len())
		}
	}
}

// BenchmarkChange takes a change of one endpoint among 100,000.
func BenchmarkChange(b *testing.B) {
	s := many(b, 10_000)
	last, _ := s.next(nil)
	for i := 1; b.Loop(); i++ {
		check(b, s.slices.Update(tenEndpoints(i%10_000, i)))
		next, _ := s.next(last)
		if next.Len() != last.Len() {
			b.Fatalf("%d service ports", next.Len())
		}
		last = next
	}
}
