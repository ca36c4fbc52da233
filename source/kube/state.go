package kube

import (
	"cmp"
	"net/netip"
	"slices"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/types"

	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/service/wake"
	"kproxy.dev/kproxy/source"
)

// state holds what the API has said so far, and which Services are to be converted
// anew. Safe for concurrent use.
type state struct {
	node      string
	addresses []netip.Addr
	kick      chan struct{} // 1 slot: there is something to convert
	triggers  triggers

	mu       sync.Mutex // the tables' too: a Service and its slices are read together
	services *table[*corev1.Service]
	slices   *table[*discoveryv1.EndpointSlice]
	nodes    *table[*corev1.Node]
	cidrs    *table[*networkingv1.ServiceCIDR]
	heardOf  bool              // whether there are ServiceCIDRs has been asked, whatever the answer
	of       map[name][]string // the names of each Service's slices
	dirty    map[name]bool     // Services that changed, or their slices
	restored bool              // there is a saved state to convert
	// own is this node with what was last known of it; nil before. A Node that is deleted and made anew by its kubelet has
	// neither addresses nor networks for a moment, and the node itself hasn't lost them.
	own *corev1.Node
}

func newState(cfg Config) *state {
	s := &state{
		node: cfg.Node, addresses: cfg.NodeAddresses, kick: make(chan struct{}, 1), triggers: triggers{since: time.Now()},
		of: map[name][]string{}, dirty: map[name]bool{},
	}
	s.services = newTable(&s.mu, fresh[corev1.Service], trimService, func(o *corev1.Service) *corev1.Service { return &corev1.Service{ObjectMeta: o.ObjectMeta} }, s.serviceChanged)
	s.slices = newTable(&s.mu, fresh[discoveryv1.EndpointSlice], trimSlice, func(o *discoveryv1.EndpointSlice) *discoveryv1.EndpointSlice {
		return &discoveryv1.EndpointSlice{ObjectMeta: o.ObjectMeta, AddressType: o.AddressType}
	}, s.sliceChanged)
	s.nodes = newTable(&s.mu, fresh[corev1.Node], trimNode, func(o *corev1.Node) *corev1.Node { return o }, s.nodeChanged)
	s.cidrs = newTable(&s.mu, fresh[networkingv1.ServiceCIDR], trimServiceCIDR, func(o *networkingv1.ServiceCIDR) *networkingv1.ServiceCIDR { return o }, func(_, _ *networkingv1.ServiceCIDR) { s.wake() })
	return s
}

// heardOfCIDRs notes that the API has answered whether there are ServiceCIDRs, or can't.
func (s *state) heardOfCIDRs() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.heardOf {
		s.heardOf = true
		s.wake()
	}
}

func fresh[T any]() *T { return new(T) }

// wake says that there is something to convert.
func (s *state) wake() { wake.Up(s.kick) }

func (s *state) serviceChanged(was, is *corev1.Service) {
	if o := cmp.Or(is, was); o != nil {
		s.dirty[nameOf(o)] = true
	}
	s.wake()
}

func (s *state) sliceChanged(was, is *discoveryv1.EndpointSlice) {
	if was != nil {
		k := serviceOf(was)
		s.of[k] = slices.DeleteFunc(s.of[k], func(n string) bool { return n == was.Name })
		if len(s.of[k]) == 0 {
			delete(s.of, k)
		}
		s.dirty[k] = true
	}
	if is != nil {
		k := serviceOf(is)
		s.triggers.changed(was, is)
		s.of[k] = append(s.of[k], is.Name)
		s.dirty[k] = true
	}
	s.wake()
}

func (s *state) nodeChanged(_, is *corev1.Node) {
	if is != nil && is.Name == s.node {
		s.own = withFacts(is, s.own)
	}
	s.wake()
}

func serviceOf(s *discoveryv1.EndpointSlice) name {
	return name{Namespace: s.Namespace, Name: s.Labels[discoveryv1.LabelServiceName]}
}

// synced reports whether the API has said once what there is of everything
// that a Snapshot needs, and of ServiceCIDRs, if it can: else a kproxy that starts
// would open for a moment what its predecessor has closed.
func (s *state) synced() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.services.synced && s.slices.synced && s.nodes.synced && (s.cidrs.synced || s.heardOf)
}

// next returns the Snapshot after last, nil for one from scratch, and what
// triggered the changes in it.
func (s *state) next(last *service.Snapshot) (*service.Snapshot, [2][]time.Time) {
	o, dirty, triggered := s.take(last == nil)
	part := source.Build(o, s.node)
	if last == nil {
		return part, triggered
	}
	changed := make([]service.Name, 0, len(dirty))
	for k := range dirty {
		changed = append(changed, service.Name{Namespace: k.Namespace, Name: k.Name})
	}
	return last.With(part, changed), triggered
}

// take returns what to convert, everything or what changed since the last
// call, the names of the Services concerned, and what triggered the changes.
func (s *state) take(everything bool) (source.Objects, map[name]bool, [2][]time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	dirty, triggered := s.dirty, s.triggers.take()
	s.dirty = map[name]bool{}
	o := source.Objects{NodeAddresses: s.addresses}
	if s.own != nil {
		o.Nodes = []*corev1.Node{s.own}
	}
	for k := range s.cidrs.objects {
		c, _ := s.cidrs.get(k)
		o.ServiceCIDRs = append(o.ServiceCIDRs, c)
	}
	add := func(k name) {
		svc, ok := s.services.get(k)
		if !ok {
			return
		}
		o.Services = append(o.Services, svc)
		for _, n := range s.of[k] {
			if slice, ok := s.slices.get(name{Namespace: k.Namespace, Name: n}); ok {
				o.EndpointSlices = append(o.EndpointSlices, slice)
			}
		}
	}
	if everything {
		for k := range s.services.objects {
			add(k)
		}
		return o, dirty, triggered
	}
	for k := range dirty {
		add(k)
	}
	return o, dirty, triggered
}

// uid returns the UID of a Service, empty for one that isn't known.
func (s *state) uid(k name) types.UID {
	s.mu.Lock()
	defer s.mu.Unlock()
	if svc, ok := s.services.get(k); ok {
		return svc.UID
	}
	return ""
}

// ownNode returns this node's Node; known is false before the API has said
// whether there is one.
func (s *state) ownNode() (n *corev1.Node, known bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	n, _ = s.nodes.get(name{Name: s.node})
	return n, s.nodes.synced
}

// toBeDeletedTaint is how the cluster autoscaler marks a node that it is about
// to delete (KEP-3836).
const toBeDeletedTaint = "ToBeDeletedByClusterAutoscaler"

// eligible reports whether load balancers may send this node new connections,
// as in kube-proxy's /healthz. n is nil for a node that the API doesn't
// know. While it hasn't been heard yet (known is false), a node counts as
// eligible: that the API can't be reached is no reason to take a node out of
// service whose kernel still holds every rule.
func eligible(n *corev1.Node, known bool) bool {
	if !known {
		return true
	}
	if n == nil || n.DeletionTimestamp != nil {
		return false
	}
	return !slices.ContainsFunc(n.Spec.Taints, func(t corev1.Taint) bool { return t.Key == toBeDeletedTaint })
}

// withFacts returns n, and where it lacks addresses or pod networks those of was,
// which may be nil.
func withFacts(n, was *corev1.Node) *corev1.Node {
	if was == nil {
		return n
	}
	out := *n
	if len(out.Status.Addresses) == 0 {
		out.Status.Addresses = was.Status.Addresses
	}
	if out.Spec.PodCIDR == "" && len(out.Spec.PodCIDRs) == 0 {
		out.Spec.PodCIDR, out.Spec.PodCIDRs = was.Spec.PodCIDR, was.Spec.PodCIDRs
	}
	return &out
}
