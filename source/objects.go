package source

import (
	"net/netip"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"

	"kproxy.dev/kproxy/service"
)

// ProxyNameLabel on a Service names another service proxy that serves it;
// kproxy leaves such Services alone, whatever the value.
const ProxyNameLabel = "service.kubernetes.io/service-proxy-name"

// Endpoints is the predecessor of EndpointSlice. Manifests written by hand still
// use it, and so do controllers that predate Kubernetes 1.21.
type Endpoints = corev1.Endpoints //lint:ignore SA1019 it is deprecated, but it is there

// Objects holds what a source has at one moment, in any order. Of two objects of
// one kind, namespace and name the first is in force.
type Objects struct {
	Services       []*corev1.Service
	EndpointSlices []*discoveryv1.EndpointSlice
	Endpoints      []*Endpoints // used by Services without an EndpointSlice
	Nodes          []*corev1.Node
	ServiceCIDRs   []*networkingv1.ServiceCIDR

	// Where says where a Service was read, for service.Port.Source. Nil says
	// nothing.
	Where func(*corev1.Service) string
	// NodeAddresses are this node's, whatever its Node object says; empty for
	// those of the object.
	NodeAddresses []netip.Addr
}

// Build converts o for the node named node.
//
// Left out are Services that are headless, of type ExternalName or without a
// cluster IP, and those another proxy serves. Addresses, ranges and endpoints
// of an IP family in which a Service has no cluster IP are left out too, as
// each of kube-proxy's per-family proxies does.
func Build(o Objects, node string) *service.Snapshot {
	var b service.Builder
	n := buildNode(o.Nodes, node)
	if len(o.NodeAddresses) > 0 {
		n.Addresses = o.NodeAddresses
	}
	b.SetNode(n)
	for _, c := range o.ServiceCIDRs {
		b.AddServiceCIDRs(Prefixes(c.Spec.CIDRs)...)
	}
	ix := newIndex(&o)
	for _, svc := range o.Services {
		if !Serves(svc) {
			continue
		}
		where := ""
		if o.Where != nil {
			where = o.Where(svc)
		}
		addService(&b, svc, ix.of(svc), where)
	}
	return b.Build()
}

// addService adds svc's ports and their endpoints.
func addService(b *service.Builder, svc *corev1.Service, be backing, where string) {
	base := basePort(svc)
	base.Source = where
	weights := make([]weights, len(be.slices))
	for i, s := range be.slices {
		var problem string
		if weights[i], problem = sliceWeights(s); problem != "" {
			base.Problems = append(base.Problems, problem)
		}
	}
	base.Problems = few(base.Problems)
	want := familiesOf(base.ClusterIPs)
	for i := range svc.Spec.Ports {
		p, ok := finishPort(base, svc, &svc.Spec.Ports[i])
		if !ok || b.AddPort(p) != nil {
			continue // refused: the key is taken, and the first is in force
		}
		for j, s := range be.slices {
			addSlice(b, p.Key, s, weights[j], want)
		}
		if be.endpoints != nil {
			addEndpoints(b, p.Key, be.endpoints, want)
		}
	}
}

// Serves reports whether kproxy serves svc at all.
func Serves(svc *corev1.Service) bool {
	if _, other := svc.Labels[ProxyNameLabel]; other {
		return false
	}
	return svc.Spec.Type != corev1.ServiceTypeExternalName && familiesOf(clusterIPs(svc)) != families{}
}

// backing holds the objects that name a Service's endpoints.
type backing struct {
	slices    []*discoveryv1.EndpointSlice // by name
	endpoints *Endpoints                   // nil if there is a slice
}

// index finds the backing of a Service.
type index struct {
	slices    map[types.NamespacedName][]*discoveryv1.EndpointSlice
	endpoints map[types.NamespacedName]*Endpoints
}

func newIndex(o *Objects) index {
	ix := index{
		slices:    make(map[types.NamespacedName][]*discoveryv1.EndpointSlice, len(o.Services)),
		endpoints: make(map[types.NamespacedName]*Endpoints, len(o.Endpoints)),
	}
	for _, s := range o.EndpointSlices {
		if _, headless := s.Labels[corev1.IsHeadlessService]; headless {
			continue // written when the Service was headless; kube-proxy doesn't watch them
		}
		if name := s.Labels[discoveryv1.LabelServiceName]; name != "" {
			k := types.NamespacedName{Namespace: s.Namespace, Name: name}
			ix.slices[k] = append(ix.slices[k], s)
		}
	}
	for k, list := range ix.slices {
		slices.SortStableFunc(list, func(a, b *discoveryv1.EndpointSlice) int { return strings.Compare(a.Name, b.Name) })
		ix.slices[k] = slices.CompactFunc(list, func(a, b *discoveryv1.EndpointSlice) bool { return a.Name == b.Name })
	}
	for _, e := range o.Endpoints {
		k := types.NamespacedName{Namespace: e.Namespace, Name: e.Name}
		if _, dup := ix.endpoints[k]; !dup {
			ix.endpoints[k] = e
		}
	}
	return ix
}

func (ix index) of(svc *corev1.Service) backing {
	k := types.NamespacedName{Namespace: svc.Namespace, Name: svc.Name}
	if list := ix.slices[k]; len(list) > 0 {
		return backing{slices: list}
	}
	return backing{endpoints: ix.endpoints[k]}
}

// buildNode returns what is known of the node named name: its name alone, if
// there is no such object.
func buildNode(nodes []*corev1.Node, name string) service.Node {
	out := service.Node{Name: name}
	for _, n := range nodes {
		if n.Name != name {
			continue
		}
		out.Zone = n.Labels[corev1.LabelTopologyZone]
		out.Addresses = nodeAddresses(n)
		out.PodCIDRs = podCIDRs(n)
		break
	}
	return out
}

// nodeAddresses are n's internal addresses, in a family without one its external.
func nodeAddresses(n *corev1.Node) []netip.Addr {
	var out []netip.Addr
	want := families{true, true}
	for _, kind := range []corev1.NodeAddressType{corev1.NodeInternalIP, corev1.NodeExternalIP} {
		var list []string
		for _, a := range n.Status.Addresses {
			if a.Type == kind {
				list = append(list, a.Address)
			}
		}
		found := addrs(list, want)
		has := familiesOf(found)
		for f := range want {
			want[f] = want[f] && !has[f]
		}
		out = append(out, found...)
	}
	return out
}

func podCIDRs(n *corev1.Node) []netip.Prefix {
	list := n.Spec.PodCIDRs
	if len(list) == 0 {
		list = []string{n.Spec.PodCIDR}
	}
	return Prefixes(list)
}

// Status holds what is known of one place that objects come from: a configured
// path, or the Kubernetes API.
type Status struct {
	Name   string   // the path, or the API server's URL
	Synced bool     // it has been read at least once
	Errors []string // what is wrong now, a line each: "file:line: what" of a file
	// Saved is not zero where, as it couldn't be read yet, what was saved of it then is served.
	Saved time.Time
}
