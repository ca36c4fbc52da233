package kube

import (
	corev1 "k8s.io/api/core/v1"
)

// toBeDeletedTaint is how the cluster autoscaler marks a node that it is about
// to delete (KEP-3836).
const toBeDeletedTaint = "ToBeDeletedByClusterAutoscaler"

// eligible reports whether load balancers may send this node new connections,
// as kube-proxy's /healthz tells them. n is nil for a node that the API doesn't
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
	for _, t := range n.Spec.Taints {
		if t.Key == toBeDeletedTaint {
			return false
		}
	}
	return true
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
