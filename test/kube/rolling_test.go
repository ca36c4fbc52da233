package kube

import (
	"context"
	"fmt"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"
	"kproxy.dev/kproxy/lab"
)

// kubelet plays scheduler and kubelet: it gives each Pod of a label a backend of
// the lab that serves, and when a Pod is told to end, lets it serve for a grace,
// stops the backend and removes the Pod.
type kubelet struct {
	w        *world
	selector string
	grace    time.Duration

	free    []*lab.Backend // used in turn, so that an address rests before it is used again
	running map[types.UID]*lab.Backend
	ending  map[types.UID]time.Time
}

// run works until ctx ends.
func (k *kubelet) run(ctx context.Context) error {
	k.running, k.ending = map[types.UID]*lab.Backend{}, map[types.UID]time.Time{}
	for tick := time.NewTicker(50 * time.Millisecond); ; {
		select {
		case <-ctx.Done():
			tick.Stop()
			return nil
		case <-tick.C:
		}
		if err := k.pass(ctx); err != nil && ctx.Err() == nil {
			return err
		}
	}
}

func (k *kubelet) pass(ctx context.Context) error {
	list, err := k.w.client.core.Pods(namespace).List(ctx, metav1.ListOptions{LabelSelector: k.selector})
	if err != nil {
		return fmt.Errorf("list pods: %w", err)
	}
	for _, p := range list.Items {
		switch {
		case p.DeletionTimestamp != nil:
			err = k.end(ctx, &p)
		case k.running[p.UID] == nil:
			err = k.begin(ctx, &p)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (k *kubelet) begin(ctx context.Context, p *corev1.Pod) error {
	if len(k.free) == 0 {
		return nil
	}
	api := k.w.client.core.Pods(namespace)
	if p.Spec.NodeName == "" {
		err := api.Bind(ctx, &corev1.Binding{
			ObjectMeta: metav1.ObjectMeta{Name: p.Name}, Target: corev1.ObjectReference{Kind: "Node", Name: "node"},
		}, metav1.CreateOptions{})
		if err != nil {
			return fmt.Errorf("bind pod: %w", err)
		}
		return nil // the next pass sees it bound
	}
	b := k.free[0]
	if err := b.Start(ctx); err != nil {
		return err
	}
	if _, err := api.UpdateStatus(ctx, withStatus(p, b, corev1.ConditionTrue), metav1.UpdateOptions{}); err != nil {
		return fmt.Errorf("write status of pod: %w", err)
	}
	k.free = k.free[1:]
	k.running[p.UID] = b
	return nil
}

func (k *kubelet) end(ctx context.Context, p *corev1.Pod) error {
	b := k.running[p.UID]
	if _, ok := k.ending[p.UID]; !ok {
		k.ending[p.UID] = time.Now()
	}
	if b != nil && time.Since(k.ending[p.UID]) < k.grace {
		return nil
	}
	if b != nil {
		b.Stop()
		k.free = append(k.free, b)
		delete(k.running, p.UID)
	}
	err := k.w.client.core.Pods(namespace).Delete(ctx, p.Name, metav1.DeleteOptions{GracePeriodSeconds: new(int64)})
	return ignoreNotFound(err)
}

// testRollingUpdate replaces the Pods of a Deployment, by its controller, one
// after the other and twice, while requests go on.
func testRollingUpdate(w *world) {
	labels := map[string]string{"app": "rolling"}
	for _, b := range w.net.Backends[:pods] {
		b.Stop()
	}
	defer func() {
		for _, b := range w.net.Backends[:pods] {
			w.must(b.Start(w.ctx))
		}
	}()
	ctx, cancel := context.WithCancel(w.ctx)
	ended := make(chan error, 1)
	node := &kubelet{w: w, selector: "app=rolling", grace: 2 * time.Second, free: append([]*lab.Backend(nil), w.net.Backends[:pods]...)}
	go func() { ended <- node.run(ctx) }()
	defer func() {
		cancel()
		w.must(<-ended)
	}()

	s := w.create(newService("rolling", labels))
	deployments := w.client.apps.Deployments(namespace)
	_, err := deployments.Create(w.ctx, newDeployment("rolling", labels), metav1.CreateOptions{})
	w.must(err)
	w.awaitRollout("rolling")
	w.everywhere(s, "b1", "b2", "b3")
	w.eventually("all endpoints", func() error {
		for _, a := range []string{"10.2.0.2:9000", "10.2.0.3:9000", "10.2.0.4:9000", "[fd00:2::2]:9000"} {
			if err := w.endpoint("rolling", a, "usable"); err != nil {
				return err
			}
		}
		return nil
	})
	traffic := []*lab.Traffic{w.traffic(frontends(s)[0], 50), w.traffic(frontends(s)[1], 50)}
	for round := range 2 {
		patch := fmt.Appendf(nil, `{"spec":{"template":{"metadata":{"annotations":{"round":"%d"}}}}}`, round)
		_, err := deployments.Patch(w.ctx, "rolling", types.StrategicMergePatchType, patch, metav1.PatchOptions{})
		w.must(err)
		w.awaitRollout("rolling")
	}
	for _, tr := range traffic {
		w.noneFailed("during two rolling updates", tr.Stop())
		if n := len(tr.Results().ByBackend()); n < pods {
			w.Errorf("%d backends have answered, want all %d", n, pods)
		}
	}
	w.must(deployments.Delete(w.ctx, "rolling", metav1.DeleteOptions{}))
	w.nowhere(s)
}

func newDeployment(name string, labels map[string]string) *appsv1.Deployment {
	one, none := intstr.FromInt32(1), intstr.FromInt32(0)
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: namespace},
		Spec: appsv1.DeploymentSpec{
			Replicas: new(int32(3)),
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Strategy: appsv1.DeploymentStrategy{
				Type:          appsv1.RollingUpdateDeploymentStrategyType,
				RollingUpdate: &appsv1.RollingUpdateDeployment{MaxSurge: &one, MaxUnavailable: &none},
			},
			Template: corev1.PodTemplateSpec{
				ObjectMeta: metav1.ObjectMeta{Labels: labels},
				Spec:       corev1.PodSpec{Containers: []corev1.Container{{Name: "server", Image: "server"}}},
			},
		},
	}
}

// awaitRollout waits until all of a Deployment's Pods are new, and the old ones gone.
func (w *world) awaitRollout(name string) {
	w.Helper()
	w.eventually("the rollout of "+name, func() error {
		d, err := w.client.apps.Deployments(namespace).Get(w.ctx, name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		st := d.Status
		if st.ObservedGeneration < d.Generation || st.UpdatedReplicas != 3 || st.AvailableReplicas != 3 || st.Replicas != 3 {
			return fmt.Errorf("%d updated, %d available of %d", st.UpdatedReplicas, st.AvailableReplicas, st.Replicas)
		}
		list, err := w.client.core.Pods(namespace).List(w.ctx, metav1.ListOptions{LabelSelector: "app=" + name})
		if err == nil && len(list.Items) != 3 {
			err = fmt.Errorf("%d pods", len(list.Items))
		}
		return err
	})
}
