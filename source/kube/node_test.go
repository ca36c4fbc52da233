package kube

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestEligible(t *testing.T) {
	now := metav1.Now()
	tainted := func(keys ...string) *corev1.Node {
		n := &corev1.Node{}
		for _, k := range keys {
			n.Spec.Taints = append(n.Spec.Taints, corev1.Taint{Key: k})
		}
		return n
	}
	tests := []struct {
		name  string
		node  *corev1.Node
		known bool
		want  bool
	}{
		{"the API wasn't heard yet", nil, false, true},
		{"no such node", nil, true, false},
		{"a node", tainted(), true, true},
		{"other taints", tainted("node.kubernetes.io/unschedulable", "DeletionCandidateOfClusterAutoscaler"), true, true},
		{"about to be deleted by the autoscaler", tainted("a", "ToBeDeletedByClusterAutoscaler"), true, false},
		{"being deleted", &corev1.Node{ObjectMeta: metav1.ObjectMeta{DeletionTimestamp: &now}}, true, false},
		{"cordoned", &corev1.Node{Spec: corev1.NodeSpec{Unschedulable: true}}, true, true},
		{"not ready", &corev1.Node{Status: corev1.NodeStatus{
			Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionFalse}},
		}}, true, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := eligible(tt.node, tt.known); got != tt.want {
				t.Errorf("eligible: %v, want %v", got, tt.want)
			}
		})
	}
}

// TestNodeKeepsWhatItHad: a Node that was made anew has what the last one had,
// until its kubelet and the controllers have written it again.
func TestNodeKeepsWhatItHad(t *testing.T) {
	node := func(address, network string) *corev1.Node {
		n := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node-1"}}
		if address != "" {
			n.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeInternalIP, Address: address}}
		}
		if network != "" {
			n.Spec.PodCIDR, n.Spec.PodCIDRs = network, []string{network}
		}
		return n
	}
	s := newState(Config{Node: "node-1"})
	for _, step := range []struct {
		is, want *corev1.Node // nil: there is none
	}{
		{nil, nil},
		{node("192.168.0.1", ""), node("192.168.0.1", "")},
		{node("192.168.0.1", "10.1.0.0/24"), node("192.168.0.1", "10.1.0.0/24")},
		{nil, node("192.168.0.1", "10.1.0.0/24")},
		{node("", ""), node("192.168.0.1", "10.1.0.0/24")},
		{node("192.168.0.2", ""), node("192.168.0.2", "10.1.0.0/24")},
	} {
		var list []any
		if step.is != nil {
			list = append(list, step.is)
		}
		if err := s.nodes.Replace(list, ""); err != nil {
			t.Fatal(err)
		}
		var got *corev1.Node
		if o, _, _ := s.take(false); len(o.Nodes) > 0 {
			got = o.Nodes[0]
		}
		if diff := cmp.Diff(step.want, got); diff != "" {
			t.Errorf("after %v (-want +got):\n%s", step.is, diff)
		}
	}
}
