package kube

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
	"k8s.io/utils/ptr"

	"kproxy.dev/kproxy/source"
)

// meta returns what an API server and its clients write into every object.
func meta(n string, labels, annotations map[string]string) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Namespace: "default", Name: n, GenerateName: n, UID: "uid", ResourceVersion: "7", Generation: 3,
		CreationTimestamp: metav1.NewTime(time.Unix(1e9, 0).UTC()), Labels: labels, Annotations: annotations,
		OwnerReferences: []metav1.OwnerReference{{Name: "owner"}}, Finalizers: []string{"finalizer"},
		ManagedFields: []metav1.ManagedFieldsEntry{{Manager: "manager", FieldsV1: &metav1.FieldsV1{}}},
	}
}

// fullService has every field that a Service can have.
func fullService() *corev1.Service {
	return &corev1.Service{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Service"},
		ObjectMeta: meta("web", map[string]string{"app": "web"}, map[string]string{
			"kproxy.dev/algorithm": "maglev", "kubectl.kubernetes.io/last-applied-configuration": "{much}",
		}),
		Spec: corev1.ServiceSpec{
			Ports: []corev1.ServicePort{{
				Name: "http", Protocol: corev1.ProtocolTCP, AppProtocol: ptr.To("http"), Port: 80, TargetPort: intstr.FromString("web"), NodePort: 30080,
			}},
			Selector: map[string]string{"app": "web"}, ClusterIP: "10.96.0.1", ClusterIPs: []string{"10.96.0.1", "fd00::1"},
			Type: corev1.ServiceTypeLoadBalancer, ExternalIPs: []string{"192.0.2.1"},
			SessionAffinity: corev1.ServiceAffinityClientIP, LoadBalancerIP: "192.0.2.2",
			SessionAffinityConfig:         &corev1.SessionAffinityConfig{ClientIP: &corev1.ClientIPConfig{TimeoutSeconds: ptr.To(int32(99))}},
			LoadBalancerSourceRanges:      []string{"10.0.0.0/8"},
			ExternalTrafficPolicy:         corev1.ServiceExternalTrafficPolicyLocal,
			InternalTrafficPolicy:         ptr.To(corev1.ServiceInternalTrafficPolicyLocal),
			HealthCheckNodePort:           31000,
			PublishNotReadyAddresses:      true,
			IPFamilies:                    []corev1.IPFamily{corev1.IPv4Protocol, corev1.IPv6Protocol},
			IPFamilyPolicy:                ptr.To(corev1.IPFamilyPolicyPreferDualStack),
			AllocateLoadBalancerNodePorts: ptr.To(true),
			LoadBalancerClass:             ptr.To("class"),
			TrafficDistribution:           ptr.To("PreferClose"),
		},
		Status: corev1.ServiceStatus{
			LoadBalancer: corev1.LoadBalancerStatus{Ingress: []corev1.LoadBalancerIngress{
				{IP: "192.0.2.3"}, {IP: "192.0.2.4", IPMode: ptr.To(corev1.LoadBalancerIPModeProxy)},
			}},
			Conditions: []metav1.Condition{{Type: "condition"}},
		},
	}
}

func fullSlice() *discoveryv1.EndpointSlice {
	return &discoveryv1.EndpointSlice{
		TypeMeta: metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta: meta("web-1", map[string]string{discoveryv1.LabelServiceName: "web", discoveryv1.LabelManagedBy: "controller"},
			map[string]string{"kproxy.dev/weights": "10.2.0.1=3", "endpoints.kubernetes.io/last-change-trigger-time": "now"}),
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("http"), Port: ptr.To(int32(8080)), Protocol: ptr.To(corev1.ProtocolTCP), AppProtocol: ptr.To("http")}},
		Endpoints: []discoveryv1.Endpoint{
			{
				Addresses: []string{"10.2.0.1"}, Hostname: ptr.To("pod"), NodeName: ptr.To("node-1"), Zone: ptr.To("zone-a"),
				Conditions:         discoveryv1.EndpointConditions{Ready: ptr.To(false), Serving: ptr.To(true), Terminating: ptr.To(true)},
				TargetRef:          &corev1.ObjectReference{Kind: "Pod", Name: "pod"},
				DeprecatedTopology: map[string]string{"a": "b"},
				Hints:              &discoveryv1.EndpointHints{ForZones: []discoveryv1.ForZone{{Name: "zone-a"}}, ForNodes: []discoveryv1.ForNode{{Name: "node-1"}}},
			},
			{Addresses: []string{"10.2.0.2"}, NodeName: ptr.To("node-1"), Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true)}},
		},
	}
}

func fullNode() *corev1.Node {
	n := &corev1.Node{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: meta("node-1", map[string]string{corev1.LabelTopologyZone: "zone-a", corev1.LabelHostname: "node-1"}, map[string]string{"a": "b"}),
		Spec: corev1.NodeSpec{
			PodCIDR: "10.2.0.0/24", PodCIDRs: []string{"10.2.0.0/24"}, ProviderID: "cloud", Unschedulable: true,
			Taints: []corev1.Taint{{Key: "taint"}},
		},
		Status: corev1.NodeStatus{
			Addresses:  []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: "192.0.2.9"}},
			Images:     []corev1.ContainerImage{{Names: []string{"image"}}},
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady}},
			Capacity:   corev1.ResourceList{},
		},
	}
	n.Namespace = ""
	n.DeletionTimestamp = ptr.To(metav1.NewTime(time.Unix(2e9, 0).UTC()))
	return n
}

// Whatever source.Build reads of an object is still there after trimming.
func TestTrimLosesNothing(t *testing.T) {
	full := source.Objects{
		Services: []*corev1.Service{fullService()}, EndpointSlices: []*discoveryv1.EndpointSlice{fullSlice()}, Nodes: []*corev1.Node{fullNode()},
	}
	trimmed := source.Objects{
		Services:       []*corev1.Service{trimService(full.Services[0])},
		EndpointSlices: []*discoveryv1.EndpointSlice{trimSlice(full.EndpointSlices[0])},
		Nodes:          []*corev1.Node{trimNode(full.Nodes[0])},
	}
	want, got := source.Build(full, "node-1"), source.Build(trimmed, "node-1")
	if got.Hash() != want.Hash() {
		for p, e := range want.All() {
			q, f, _ := got.Get(p.Key)
			t.Errorf("port %+v\nbecame %+v\nendpoints %+v\nbecame %+v", p, q, e, f)
		}
	}
	if want.Len() != 1 || len(want.Node().Addresses) != 1 {
		t.Errorf("%d service ports, node %+v: nothing to compare", want.Len(), want.Node())
	}
}

// What is left is spelled out, so that a change that adds to it shows what it costs.
func TestTrim(t *testing.T) {
	svc, slice, n := fullService(), fullSlice(), fullNode()
	wantService := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: "web", UID: "uid", CreationTimestamp: svc.CreationTimestamp,
			Annotations: map[string]string{"kproxy.dev/algorithm": "maglev"},
		},
		Spec: corev1.ServiceSpec{
			Type: svc.Spec.Type, ClusterIP: svc.Spec.ClusterIP, ClusterIPs: svc.Spec.ClusterIPs, ExternalIPs: svc.Spec.ExternalIPs,
			Ports:           []corev1.ServicePort{{Name: "http", Protocol: corev1.ProtocolTCP, Port: 80, NodePort: 30080}},
			SessionAffinity: svc.Spec.SessionAffinity, SessionAffinityConfig: svc.Spec.SessionAffinityConfig,
			LoadBalancerSourceRanges: svc.Spec.LoadBalancerSourceRanges, ExternalTrafficPolicy: svc.Spec.ExternalTrafficPolicy,
			InternalTrafficPolicy: svc.Spec.InternalTrafficPolicy, HealthCheckNodePort: svc.Spec.HealthCheckNodePort,
		},
		Status: corev1.ServiceStatus{LoadBalancer: svc.Status.LoadBalancer},
	}
	wantSlice := &discoveryv1.EndpointSlice{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: "default", Name: "web-1", UID: "uid",
			Labels: map[string]string{discoveryv1.LabelServiceName: "web"}, Annotations: map[string]string{"kproxy.dev/weights": "10.2.0.1=3", "endpoints.kubernetes.io/last-change-trigger-time": "now"},
		},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("http"), Port: ptr.To(int32(8080)), Protocol: ptr.To(corev1.ProtocolTCP)}},
		Endpoints: []discoveryv1.Endpoint{
			{
				Addresses: []string{"10.2.0.1"}, NodeName: ptr.To("node-1"),
				Conditions: slice.Endpoints[0].Conditions, Hints: slice.Endpoints[0].Hints,
			},
			slice.Endpoints[1],
		},
	}
	wantNode := &corev1.Node{
		ObjectMeta: metav1.ObjectMeta{
			Name: "node-1", UID: "uid", DeletionTimestamp: n.DeletionTimestamp,
			Labels: map[string]string{corev1.LabelTopologyZone: "zone-a"},
		},
		Spec:   corev1.NodeSpec{PodCIDR: n.Spec.PodCIDR, PodCIDRs: n.Spec.PodCIDRs, Taints: n.Spec.Taints},
		Status: corev1.NodeStatus{Addresses: n.Status.Addresses},
	}
	for _, d := range []string{
		cmp.Diff(wantService, trimService(svc)), cmp.Diff(wantService, trimService(trimService(svc))),
		cmp.Diff(wantSlice, trimSlice(slice)), cmp.Diff(wantSlice, trimSlice(trimSlice(slice))),
		cmp.Diff(wantNode, trimNode(n)), cmp.Diff(wantNode, trimNode(trimNode(n))),
		cmp.Diff(fullService(), svc), cmp.Diff(fullSlice(), slice), cmp.Diff(fullNode(), n), // left alone
	} {
		if d != "" {
			t.Errorf("(-want +got):\n%s", d)
		}
	}
}

// Whatever is left after trimming is there after packing.
func TestPackLosesNothing(t *testing.T) {
	s := newState(Config{Node: "node-1"})
	for _, err := range []error{
		s.services.Add(fullService()), s.slices.Add(fullSlice()), s.nodes.Add(fullNode()),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	svc, _ := s.services.get(nameOf(fullService()))
	slice, _ := s.slices.get(nameOf(fullSlice()))
	n, _ := s.nodes.get(nameOf(fullNode()))
	for _, d := range []string{
		cmp.Diff(trimService(fullService()), svc), cmp.Diff(trimSlice(fullSlice()), slice), cmp.Diff(trimNode(fullNode()), n),
	} {
		if d != "" {
			t.Errorf("(-want +got):\n%s", d)
		}
	}
	if _, ok := s.slices.get(name{Name: "another"}); ok {
		t.Error("an object that was never there")
	}
}

// TestContentDecides: an object that says something else is a change, though its version is the one that was there, as after
// a restore of the API's database; a version that says the same of all that is kept is none.
func TestContentDecides(t *testing.T) {
	s := newState(Config{Node: "node-1"})
	woken := func() bool {
		select {
		case <-s.kick:
			return true
		default:
			return false
		}
	}
	if err := s.services.Replace([]any{fullService()}, "7"); err != nil || !woken() {
		t.Fatalf("a first object is no change (%v)", err)
	}
	other := fullService()
	other.Spec.Ports[0].Port = 81
	if err := s.services.Replace([]any{other}, "7"); err != nil || !woken() {
		t.Errorf("another port is no change (%v)", err)
	}
	later := other.DeepCopy()
	later.ResourceVersion, later.Labels["app"] = "8", "shop"
	if err := s.services.Update(later); err != nil || woken() {
		t.Errorf("a label that isn't kept is a change (%v)", err)
	}
	if got, _ := s.services.get(nameOf(other)); got == nil || got.Spec.Ports[0].Port != 81 {
		t.Errorf("kept is %+v", got)
	}
}
