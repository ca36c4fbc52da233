package kube

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// followServiceCIDRs watches ServiceCIDRs once the API has them (Kubernetes
// 1.33 and later). It asks when the API server answers for the first time, and
// whenever one of the other watches had to be set up anew after a failure: an
// API server learns a new kind of object by being restarted.
func (s *Source) followServiceCIDRs(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-s.contact:
		}
		there, err := s.client.hasServiceCIDRs(ctx)
		if err != nil {
			s.log.Debug("the Kubernetes API can't say whether it has ServiceCIDRs", "error", plain(err))
			continue
		}
		if there {
			follower[*networkingv1.ServiceCIDRList, *networkingv1.ServiceCIDR]{
				api: s.client.networking.ServiceCIDRs(), health: s.cidrs, table: s.state.cidrs, example: &networkingv1.ServiceCIDR{}, retries: &s.retries,
			}.run(ctx)
			return
		}
		s.log.Debug("the Kubernetes API has no ServiceCIDRs")
	}
}

// hasServiceCIDRs asks for the kinds of networking.k8s.io/v1.
func (c *client) hasServiceCIDRs(ctx context.Context) (bool, error) {
	text, err := c.networking.RESTClient().Get().AbsPath("/apis", networkingv1.SchemeGroupVersion.String()).
		SetHeader("Accept", asJSON).DoRaw(ctx)
	if err != nil {
		return false, fmt.Errorf("list the kinds of %s: %w", networkingv1.SchemeGroupVersion, err)
	}
	var kinds metav1.APIResourceList
	if err := json.Unmarshal(text, &kinds); err != nil {
		return false, fmt.Errorf("read the kinds of %s: %w", networkingv1.SchemeGroupVersion, err)
	}
	return slices.ContainsFunc(kinds.APIResources, func(r metav1.APIResource) bool { return r.Name == "servicecidrs" }), nil
}
