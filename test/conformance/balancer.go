package main

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	typed "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"

	"kproxy.dev/kproxy/lab"
)

// finalizer keeps a Service until its load balancer is gone, as a cloud's controller does.
const finalizer = "service.kubernetes.io/load-balancer-cleanup"

// balancer plays a cloud's load balancer: it gives Services of that type addresses, and routes these
// to the nodes; with the external policy Local to those whose health check says 200. With affinity
// it keeps all to one node, as affinity is each node's own.
type balancer struct {
	core   typed.CoreV1Interface
	nodes  []*node
	health http.Client
	given  map[string][]string // addresses, by the Service's UID
	routes map[string]string   // next hops, by address
	last   int                 // number of the address that was given last: none is given again soon
}

func newBalancer(config *rest.Config, nodes []*node) (*balancer, error) {
	core, err := typed.NewForConfig(config)
	return &balancer{core: core, nodes: nodes, health: http.Client{Timeout: time.Second}, given: map[string][]string{}, routes: map[string]string{}}, err
}

// run balances until the context ends.
func (b *balancer) run(ctx context.Context) {
	for ctx.Err() == nil {
		if err := b.sync(ctx); err != nil && ctx.Err() == nil {
			log.Printf("load balancer: %v", err)
		}
		_ = lab.Sleep(ctx, time.Second) // the loop asks whether it has ended
	}
}

func (b *balancer) sync(ctx context.Context) error {
	services, err := b.core.Services("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return err
	}
	wanted := map[string]bool{}
	for i := range services.Items {
		s := &services.Items[i]
		mine := s.Spec.Type == corev1.ServiceTypeLoadBalancer && s.Spec.LoadBalancerClass == nil && s.DeletionTimestamp == nil
		switch {
		case mine:
			wanted[string(s.UID)] = true
			err = b.give(ctx, s)
		case slices.Contains(s.Finalizers, finalizer):
			err = b.take(ctx, s)
		}
		if err != nil { // it may have been changed or deleted meanwhile
			log.Printf("load balancer: service %s/%s: %v", s.Namespace, s.Name, err)
		}
	}
	for uid, addresses := range b.given {
		if !wanted[uid] {
			for _, a := range addresses {
				_, _ = run(ctx, "ip", "route", "del", a)
				delete(b.routes, a)
			}
			delete(b.given, uid)
		}
	}
	return nil
}

// give gives a Service its addresses, and leads them to nodes.
func (b *balancer) give(ctx context.Context, s *corev1.Service) error {
	addresses, ok := b.given[string(s.UID)]
	if !ok {
		for _, family := range s.Spec.IPFamilies {
			b.last++
			if family == corev1.IPv6Protocol {
				addresses = append(addresses, fmt.Sprintf("fd00:32::%x", b.last))
			} else {
				addresses = append(addresses, fmt.Sprintf("172.32.%d.%d", b.last/250%250, b.last%250+1))
			}
		}
		b.given[string(s.UID)] = addresses
	}
	for _, a := range addresses {
		if err := b.route(ctx, a, b.nodesFor(ctx, s)); err != nil {
			return err
		}
	}
	client := b.core.Services(s.Namespace)
	var err error
	if !slices.Contains(s.Finalizers, finalizer) {
		s.Finalizers = append(s.Finalizers, finalizer)
		if s, err = client.Update(ctx, s, metav1.UpdateOptions{}); err != nil {
			return err
		}
	}
	var ingress []corev1.LoadBalancerIngress
	for _, a := range addresses {
		ingress = append(ingress, corev1.LoadBalancerIngress{IP: a})
	}
	same := func(x, y corev1.LoadBalancerIngress) bool { return x.IP == y.IP }
	if !slices.EqualFunc(ingress, s.Status.LoadBalancer.Ingress, same) {
		s.Status.LoadBalancer.Ingress = ingress
		_, err = client.UpdateStatus(ctx, s, metav1.UpdateOptions{})
	}
	return err
}

// take takes them from a Service that is deleted or of another type now.
func (b *balancer) take(ctx context.Context, s *corev1.Service) (err error) {
	client := b.core.Services(s.Namespace)
	if len(s.Status.LoadBalancer.Ingress) > 0 && s.DeletionTimestamp == nil {
		s.Status.LoadBalancer = corev1.LoadBalancerStatus{}
		if s, err = client.UpdateStatus(ctx, s, metav1.UpdateOptions{}); err != nil {
			return err
		}
	}
	s.Finalizers = slices.DeleteFunc(s.Finalizers, func(f string) bool { return f == finalizer })
	_, err = client.Update(ctx, s, metav1.UpdateOptions{})
	return err
}

// nodesFor are the nodes that connections to a Service are spread over.
func (b *balancer) nodesFor(ctx context.Context, s *corev1.Service) (nodes []*node) {
	for _, n := range b.nodes {
		if s.Spec.ExternalTrafficPolicy != corev1.ServiceExternalTrafficPolicyLocal || b.healthy(ctx, n, s.Spec.HealthCheckNodePort) {
			nodes = append(nodes, n)
		}
	}
	if s.Spec.SessionAffinity == corev1.ServiceAffinityClientIP && len(nodes) > 1 {
		nodes = nodes[:1]
	}
	return nodes
}

func (b *balancer) healthy(ctx context.Context, n *node, port int32) bool {
	_, err := lab.Get(ctx, &b.health, fmt.Sprintf("http://%s:%d/healthz", n.address4(), port))
	return err == nil
}

// route leads an address to nodes, from a client that isn't of their network.
func (b *balancer) route(ctx context.Context, address string, nodes []*node) error {
	six := strings.Contains(address, ":")
	source := outside4
	if six {
		source = outside6
	}
	args := []string{"route", "replace", address, "src", source}
	for _, n := range nodes {
		via := n.address4()
		if six {
			via = n.address6()
		}
		args = append(args, "nexthop", "via", via)
	}
	if len(nodes) == 0 { // then it isn't answered
		args = nil
	}
	if key := strings.Join(args, " "); b.routes[address] != key {
		if b.routes[address] != "" { // of IPv6, replace adds hops to those that are there
			_, _ = run(ctx, "ip", "route", "del", address)
			delete(b.routes, address)
		}
		if args == nil {
			return nil
		}
		if _, err := run(ctx, "ip", args...); err != nil {
			return err
		}
		b.routes[address] = key
	}
	return nil
}
