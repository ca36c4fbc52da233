package kube

import (
	"testing"

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
