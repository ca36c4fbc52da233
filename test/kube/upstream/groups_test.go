package upstream

import (
	"fmt"
	"net/netip"
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/kubernetes/pkg/proxy"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// kind describes an endpoint, as far as the choice of endpoints depends on it.
type kind struct {
	ready, serving, terminating bool
	here                        bool
	zone, node                  string // hints
}

// kinds are all there are.
func kinds() (out []kind) {
	for _, conditions := range []kind{
		{ready: true, serving: true},
		{ready: true, serving: true, terminating: true}, // publishNotReadyAddresses
		{serving: true, terminating: true},
		{serving: true},
		{terminating: true},
		{},
	} {
		for _, here := range []bool{true, false} {
			for _, hint := range []kind{{}, {zone: thisZone}, {zone: "zone-b"}, {node: thisNode}, {node: "another", zone: thisZone}} {
				k := conditions
				k.here, k.zone, k.node = here, hint.zone, hint.node
				out = append(out, k)
			}
		}
	}
	return out
}

// policies are all that a Service can have.
var policies = []struct {
	internal corev1.ServiceInternalTrafficPolicy
	external corev1.ServiceExternalTrafficPolicy // empty for a Service without external addresses
}{
	{corev1.ServiceInternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyLocal},
	{corev1.ServiceInternalTrafficPolicyLocal, ""},
	{corev1.ServiceInternalTrafficPolicyCluster, ""},
	{corev1.ServiceInternalTrafficPolicyCluster, corev1.ServiceExternalTrafficPolicyCluster},
	{corev1.ServiceInternalTrafficPolicyLocal, corev1.ServiceExternalTrafficPolicyCluster},
	{corev1.ServiceInternalTrafficPolicyLocal, corev1.ServiceExternalTrafficPolicyLocal},
}

// TestGroups compares the endpoints that each traffic policy may use with upstream's
// CategorizeEndpoints, for every Service of up to two endpoints of any kind under every
// policy, and of three under that which uses all of them.
func TestGroups(t *testing.T) {
	var o objects
	all := kinds()
	add := func(of ...kind) {
		for i := range policies {
			if len(of) < 3 || i == 0 {
				o.addKinds(i, of)
			}
		}
	}
	add()
	for i, a := range all {
		add(a)
		for j, b := range all[i:] {
			add(a, b)
			for _, c := range all[i+j:] {
				add(a, b, c)
			}
		}
	}
	services, endpoints := upstreamMaps(&o)
	for _, w := range []world{{name: "in a zone"}, {name: "in no zone", zoneless: true}} {
		t.Run(w.name, func(t *testing.T) { w.compareGroups(t, &o, services, endpoints) })
	}
	t.Logf("%d services", len(o.services))
}

func (w *world) compareGroups(t *testing.T, o *objects, services proxy.ServicePortMap, endpoints proxy.EndpointsMap) {
	p := w.plans(o)[0]
	wrong := 0
	for _, s := range o.services {
		key := proxy.ServicePortName{NamespacedName: types.NamespacedName{Namespace: s.Namespace, Name: s.Name}, Protocol: corev1.ProtocolTCP}
		cluster, local, _, anywhere := proxy.CategorizeEndpoints(endpoints[key], services[key], thisNode, w.labels())
		want := groups{endpointNames(cluster), endpointNames(local), anywhere}
		got := groupsOf(p.Find(service.Key{Namespace: s.Namespace, Name: s.Name, Protocol: service.TCP}))
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("%s, %s (-upstream +kproxy):\n%s", s.Name, s.Annotations["kinds"], diff)
			if wrong++; wrong == 10 {
				t.Fatal("there may be more")
			}
		}
	}
}

// groups holds the endpoints as CategorizeEndpoints groups them.
type groups struct {
	Cluster, Local []string
	Anywhere       bool // some node has an endpoint to use
}

func groupsOf(s *plan.Service) groups {
	names := func(g []plan.Backend) (out []string) {
		for _, b := range g {
			out = append(out, b.Address.String())
		}
		return out
	}
	g := groups{Cluster: names(s.Groups[service.IPv4].Cluster), Local: names(s.Groups[service.IPv4].Local), Anywhere: true}
	for _, f := range s.Frontends {
		g.Anywhere = g.Anywhere && f.Verdict != plan.Reject
	}
	return g
}

func endpointNames(list []proxy.Endpoint) (out []string) {
	for _, e := range list {
		out = append(out, e.String())
	}
	slices.Sort(out)
	return out
}

// addKinds adds a Service with one endpoint of each kind, in the order of their addresses.
func (o *objects) addKinds(policy int, of []kind) {
	n := len(o.services)
	address := netip.AddrFrom4([4]byte{10, 96 + byte(n>>16), byte(n >> 8), byte(n)}).String()
	s := &corev1.Service{
		ObjectMeta: metav1.ObjectMeta{Namespace: "default", Name: fmt.Sprintf("s%d", n), Annotations: map[string]string{"kinds": fmt.Sprintf("%+v", of)}},
		Spec: corev1.ServiceSpec{
			Type: corev1.ServiceTypeClusterIP, ClusterIP: address, ClusterIPs: []string{address}, IPFamilies: []corev1.IPFamily{corev1.IPv4Protocol},
			InternalTrafficPolicy: &policies[policy].internal, ExternalTrafficPolicy: policies[policy].external,
			Ports: []corev1.ServicePort{{Port: 80, Protocol: corev1.ProtocolTCP}},
		},
	}
	if policies[policy].external != "" {
		s.Spec.ExternalIPs = []string{netip.AddrFrom4([4]byte{172, 16 + byte(n>>16), byte(n >> 8), byte(n)}).String()}
	}
	slice := &discoveryv1.EndpointSlice{
		ObjectMeta:  metav1.ObjectMeta{Namespace: "default", Name: s.Name, Labels: map[string]string{discoveryv1.LabelServiceName: s.Name}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: new(""), Port: new(int32(9000)), Protocol: new(corev1.ProtocolTCP)}},
	}
	for i, k := range of {
		e := discoveryv1.Endpoint{
			Addresses: []string{fmt.Sprintf("10.2.0.%d", 1+i)}, NodeName: new("another"),
			Conditions: discoveryv1.EndpointConditions{Ready: &k.ready, Serving: &k.serving, Terminating: &k.terminating}, Hints: &discoveryv1.EndpointHints{},
		}
		if k.here {
			e.NodeName = new(thisNode)
		}
		if k.zone != "" {
			e.Hints.ForZones = []discoveryv1.ForZone{{Name: k.zone}}
		}
		if k.node != "" {
			e.Hints.ForNodes = []discoveryv1.ForNode{{Name: k.node}}
		}
		slice.Endpoints = append(slice.Endpoints, e)
	}
	o.services, o.slices = append(o.services, s), append(o.slices, slice)
}

// upstreamMaps are o as upstream's proxiers have them.
func upstreamMaps(o *objects) (proxy.ServicePortMap, proxy.EndpointsMap) {
	services, endpoints := proxy.ServicePortMap{}, proxy.EndpointsMap{}
	changed := proxy.NewServiceChangeTracker(corev1.IPv4Protocol, nil, nil)
	for _, s := range o.services {
		changed.Update(nil, s)
	}
	services.Update(changed)
	moved := proxy.NewEndpointsChangeTracker(corev1.IPv4Protocol, thisNode, nil, nil)
	for _, s := range o.slices {
		moved.EndpointSliceUpdate(s, false)
	}
	endpoints.Update(moved)
	return services, endpoints
}
