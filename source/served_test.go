package source

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestAddressesNoServiceCanHave: what manifests are refused for isn't served from
// the API either, which takes any address in status.
func TestAddressesNoServiceCanHave(t *testing.T) {
	for address, what := range map[string]string{
		"127.0.0.1":        "127.0.0.1 is a loopback address",
		"127.8.9.10":       "127.8.9.10 is a loopback address",
		"::1":              "::1 is a loopback address",
		"::ffff:127.0.0.1": "127.0.0.1 is a loopback address",
		"0.0.0.0":          "0.0.0.0 is unspecified",
		"::":               ":: is unspecified",
		"169.254.169.254":  "169.254.169.254 is a link-local address",
		"fe80::1":          "fe80::1 is a link-local address",
		"224.0.0.1":        "224.0.0.1 is a multicast address",
		"ff02::1":          "ff02::1 is a multicast address",
	} {
		svc := &corev1.Service{ObjectMeta: metav1.ObjectMeta{Namespace: "shop", Name: "web"}}
		svc.Spec.Type = corev1.ServiceTypeLoadBalancer
		svc.Spec.ClusterIPs = []string{"10.96.0.10", "fd00:96::10"}
		svc.Spec.ExternalIPs = []string{address, "192.0.2.1"}
		svc.Spec.Ports = []corev1.ServicePort{{Port: 80}}
		svc.Status.LoadBalancer.Ingress = []corev1.LoadBalancerIngress{{IP: "192.0.2.2"}, {IP: address}}
		p, _, _ := Build(Objects{Services: []*corev1.Service{svc}}, "n").At(0)
		if diff := cmp.Diff(ips("192.0.2.1"), p.ExternalIPs, compareNetip); diff != "" {
			t.Errorf("%s: external IPs (-want +got):\n%s", address, diff)
		}
		if diff := cmp.Diff(ips("192.0.2.2"), p.LoadBalancerIPs, compareNetip); diff != "" {
			t.Errorf("%s: load balancer's addresses (-want +got):\n%s", address, diff)
		}
		want := []string{
			"spec.externalIPs: " + what + ", which no service can have; it isn't served",
			"status.loadBalancer.ingress: " + what + ", which no service can have; it isn't served",
		}
		if diff := cmp.Diff(want, p.Problems); diff != "" {
			t.Errorf("%s: problems (-want +got):\n%s", address, diff)
		}
	}
}
