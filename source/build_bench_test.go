package source

import (
	"fmt"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// manyServices returns n Services with one port and three endpoints each.
func manyServices(n int) Objects {
	var o Objects
	for i := range n {
		name := fmt.Sprintf("svc-%d", i)
		o.Services = append(o.Services, &corev1.Service{
			ObjectMeta: metav1.ObjectMeta{Namespace: "bench", Name: name},
			Spec: corev1.ServiceSpec{
				Type:      corev1.ServiceTypeClusterIP,
				ClusterIP: fmt.Sprintf("10.96.%d.%d", i/250, i%250+1),
				Ports:     []corev1.ServicePort{{Name: "http", Port: 80, Protocol: corev1.ProtocolTCP}},
			},
		})
		s := &discoveryv1.EndpointSlice{
			ObjectMeta: metav1.ObjectMeta{
				Namespace: "bench", Name: name + "-1",
				Labels: map[string]string{discoveryv1.LabelServiceName: name},
			},
			AddressType: discoveryv1.AddressTypeIPv4,
			Ports:       []discoveryv1.EndpointPort{{Name: new("http"), Port: new(int32(8080)), Protocol: new(corev1.ProtocolTCP)}},
		}
		for j := range 3 {
			s.Endpoints = append(s.Endpoints, discoveryv1.Endpoint{
				Addresses: []string{fmt.Sprintf("10.2.%d.%d", i/80, i%80*3+j+1)},
				NodeName:  new("node-1"),
				Zone:      new("zone-a"),
			})
		}
		o.EndpointSlices = append(o.EndpointSlices, s)
	}
	return o
}

func BenchmarkBuild(b *testing.B) {
	for _, n := range []int{10, 100, 1_000, 10_000} {
		o := manyServices(n)
		b.Run(fmt.Sprintf("services=%d", n), func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				if s := Build(o, "node-1"); s.Len() != n {
					b.Fatalf("built %d service ports, want %d", s.Len(), n)
				}
			}
		})
	}
}
