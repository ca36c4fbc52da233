// Package cluster asks the kproxys of all nodes of a Kubernetes cluster. It goes by the API server with the rights of
// its user, and needs nothing else: questions that only read go through a port forward to the address on the node's
// loopback that serves the dashboard, all others are commands that are executed in kproxy's pod. What the nodes answer
// is what their own commands say; this package merges it. A node that doesn't answer is part of every result, with
// the reason. Everything is safe for concurrent use.
package cluster

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	core "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	corev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

// Config says which cluster it is, and who asks. Zero values are kubectl's defaults.
type Config struct {
	Kubeconfig string // a file; else $KUBECONFIG, ~/.kube/config, or the service account of this pod
	Context    string // of the kubeconfig
	Namespace  string // of what is named without one
	// PodNamespace is where kproxy's pods are.
	PodNamespace string
	// Timeout bounds the wait for each node's answer.
	Timeout time.Duration
}

// Cluster is a cluster as a user sees it.
type Cluster struct {
	Namespace    string // of what is named without one
	rest         *rest.Config
	core         corev1.CoreV1Interface
	podNamespace string
	timeout      time.Duration
}

// Open reads the kubeconfig. It doesn't ask the API server.
func Open(cfg Config) (*Cluster, error) {
	rules := clientcmd.NewDefaultClientConfigLoadingRules()
	rules.ExplicitPath = cfg.Kubeconfig
	overrides := &clientcmd.ConfigOverrides{CurrentContext: cfg.Context}
	overrides.Context.Namespace = cfg.Namespace
	loader := clientcmd.NewNonInteractiveDeferredLoadingClientConfig(rules, overrides)
	access, err := loader.ClientConfig()
	if err != nil {
		return nil, fmt.Errorf("find the cluster: %w", err)
	}
	c := &Cluster{rest: access, podNamespace: cfg.PodNamespace, timeout: cfg.Timeout}
	if c.Namespace, _, err = loader.Namespace(); err != nil {
		return nil, fmt.Errorf("find the cluster: %w", err)
	}
	access.QPS = -1 // two requests for lists, and a connection a node
	access.WarningHandler = rest.NoWarnings{}
	c.core, err = corev1.NewForConfig(access)
	return c, err
}

// podLabel selects kproxy's pods: the DaemonSet's selector, which can't change.
const podLabel = "k8s-app=kproxy"

// Node is a node and the pod of kproxy that answers for it.
type Node struct {
	Name string
	Pod  string // empty where there is none
	// Addresses are the node's own, which pods with the node's network have too.
	Addresses []netip.Addr
	args      []string // of the container that runs kproxy
	image     string   // of it
	// Trouble is why the node can't be asked; nil if it can.
	Trouble *Trouble
}

// Nodes returns those of the given names, or all that may have a kproxy, in the order of their names.
func (c *Cluster) Nodes(ctx context.Context, names []string) ([]Node, error) {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	nodes, err := c.core.Nodes().List(ctx, meta.ListOptions{})
	if err != nil {
		return nil, c.inWords("list nodes", err)
	}
	pods, err := c.core.Pods(c.podNamespace).List(ctx, meta.ListOptions{LabelSelector: podLabel})
	if err != nil {
		return nil, c.inWords("list kproxy's pods", err)
	}
	var out []Node
	for i := range nodes.Items {
		name := nodes.Items[i].Name
		if nodes.Items[i].Labels[core.LabelOSStable] == "windows" || len(names) > 0 && !slices.Contains(names, name) {
			continue
		}
		n := nodeWith(name, c.podNamespace, pods.Items)
		for _, of := range nodes.Items[i].Status.Addresses {
			if a, err := netip.ParseAddr(of.Address); err == nil { // else a name
				n.Addresses = append(n.Addresses, a.Unmap())
			}
		}
		out = append(out, n)
	}
	for _, name := range names {
		if !slices.ContainsFunc(out, func(n Node) bool { return n.Name == name }) {
			return nil, fmt.Errorf("%w %s", ErrNoNode, name)
		}
	}
	slices.SortFunc(out, func(a, b Node) int { return cmp.Compare(a.Name, b.Name) })
	return out, nil
}

// ErrNoNode is about a name that no node has.
var ErrNoNode = errors.New("there is no node")

// nodeWith finds the pod of a node that answers: while one takes over from another both are there, and share the
// control socket.
func nodeWith(name, namespace string, pods []core.Pod) Node {
	n := Node{Name: name}
	var best *core.Pod
	for i := range pods {
		if p := &pods[i]; p.Spec.NodeName == name && (best == nil || rank(p) > rank(best)) {
			best = p
		}
	}
	switch {
	case best == nil:
		n.Trouble = &Trouble{Absent, fmt.Sprintf("no pod of kproxy in namespace %s is on the node", namespace)}
		return n
	case rank(best) == 0:
		n.Trouble = &Trouble{Absent, fmt.Sprintf("pod %s doesn't run: %s", best.Name, phaseOf(best))}
	}
	n.Pod = best.Name
	for i := range best.Spec.Containers {
		if best.Spec.Containers[i].Name == container {
			n.args, n.image = best.Spec.Containers[i].Args, best.Spec.Containers[i].Image
		}
	}
	return n
}

// container is the one of a pod that runs kproxy.
const container = "kproxy"

// rank is 0 for a pod that doesn't run, and the higher the likelier it answers.
func rank(p *core.Pod) int {
	rank := 0
	for i := range p.Status.ContainerStatuses {
		if s := &p.Status.ContainerStatuses[i]; s.Name == container && s.State.Running != nil {
			rank = 1
			if s.Ready {
				rank = 2
			}
		}
	}
	if rank > 0 && p.DeletionTimestamp == nil {
		rank += 2
	}
	return rank
}

// phaseOf says what a pod that doesn't run waits for.
func phaseOf(p *core.Pod) string {
	for _, list := range [][]core.ContainerStatus{p.Status.InitContainerStatuses, p.Status.ContainerStatuses} {
		for i := range list {
			if w := list[i].State.Waiting; w != nil && w.Reason != "" && w.Reason != "PodInitializing" {
				return strings.TrimSuffix(w.Reason+": "+w.Message, ": ")
			}
		}
	}
	return string(p.Status.Phase)
}

// Answer holds what a node said, or why it said nothing.
type Answer[T any] struct {
	Node    Node
	Value   T
	Trouble *Trouble // nil if it answered
}

// atOnce is how many nodes are asked at the same time.
const atOnce = 64

// Ask asks nodes by f, many at a time, and returns an answer for each, in their order. A node that doesn't answer within
// the time that the cluster was opened with holds up no other one for longer than that.
func Ask[T any](ctx context.Context, c *Cluster, nodes []Node, f func(context.Context, Node) (T, error)) []Answer[T] {
	out := make([]Answer[T], len(nodes))
	slots := make(chan struct{}, atOnce)
	var wg sync.WaitGroup
	for i, n := range nodes {
		out[i].Node = n
		if n.Trouble != nil {
			out[i].Trouble = n.Trouble
			continue
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			var err error
			ctx, cancel := context.WithTimeout(ctx, c.timeout)
			defer cancel()
			out[i].Value, err = until(ctx, func(ctx context.Context) (T, error) { return f(ctx, n) })
			out[i].Trouble = troubleOf(err, c.timeout)
		})
	}
	wg.Wait()
	return out
}

// until leaves f behind where ctx ends first: client-go's dialers of upgraded connections have none.
func until[T any](ctx context.Context, f func(context.Context) (T, error)) (T, error) {
	type result struct {
		value T
		err   error
	}
	done := make(chan result, 1)
	go func() {
		value, err := f(ctx)
		done <- result{value, err}
	}()
	select {
	case r := <-done:
		return r.value, r.err
	case <-ctx.Done():
		var none T
		return none, ctx.Err()
	}
}

// Pod is a pod as a client of services.
type Pod struct {
	Namespace, Name, Node string

	Addresses []string // none where it has the node's network
}

// FindPod looks up a pod that runs.
func (c *Cluster) FindPod(ctx context.Context, namespace, name string) (Pod, error) {
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	p, err := c.core.Pods(namespace).Get(ctx, name, meta.GetOptions{})
	switch {
	case apierrors.IsNotFound(err):
		return Pod{}, fmt.Errorf("there is no pod %s in namespace %s", name, namespace)
	case err != nil:
		return Pod{}, c.inWords("look up pod "+namespace+"/"+name, err)
	case p.Spec.NodeName == "" || p.Status.PodIP == "":
		return Pod{}, fmt.Errorf("pod %s/%s has no address yet: it is %s", namespace, name, phaseOf(p))
	}
	out := Pod{Namespace: namespace, Name: name, Node: p.Spec.NodeName}
	for _, ip := range p.Status.PodIPs {
		if !p.Spec.HostNetwork {
			out.Addresses = append(out.Addresses, ip.IP)
		}
	}
	return out, nil
}

// lastLines is how many lines of a pod's log are kept.
const lastLines = 500

// LastWords returns the last lines that a node's pod logged, of the container that runs and of the one before it, as the API server
// has them; where it can't be had, why.
func (c *Cluster) LastWords(ctx context.Context, n Node) string {
	if n.Pod == "" {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	var out strings.Builder
	lines, limit := int64(lastLines), int64(1<<20)
	for _, before := range []bool{true, false} {
		text, err := c.core.Pods(c.podNamespace).GetLogs(n.Pod, &core.PodLogOptions{Container: container, Previous: before, TailLines: &lines, LimitBytes: &limit}).DoRaw(ctx)
		if err != nil {
			text = []byte(c.inWords("read the log of pod "+n.Pod, err).Error() + "\n")
		}
		fmt.Fprintf(&out, "# log of pod %s, of the container before this one: %v\n%s\n", n.Pod, before, text)
	}
	return out.String()
}
