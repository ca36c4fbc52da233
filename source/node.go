package source

import (
	"net/netip"

	corev1 "k8s.io/api/core/v1"

	"kproxy.dev/kproxy/service"
)

// buildNode returns what is known of the node named name: its name alone, if
// there is no such object.
func buildNode(nodes []*corev1.Node, name string) service.Node {
	out := service.Node{Name: name}
	for _, n := range nodes {
		if n.Name != name {
			continue
		}
		out.Zone = n.Labels[corev1.LabelTopologyZone]
		for _, a := range n.Status.Addresses {
			if a.Type == corev1.NodeInternalIP {
				out.Addresses = append(out.Addresses, addrs([]string{a.Address}, families{true, true})...)
			}
		}
		out.PodCIDRs = podCIDRs(n)
		break
	}
	return out
}

func podCIDRs(n *corev1.Node) []netip.Prefix {
	list := n.Spec.PodCIDRs
	if len(list) == 0 {
		list = []string{n.Spec.PodCIDR}
	}
	var out []netip.Prefix
	for _, s := range list {
		if p, err := ParsePrefix(s); err == nil {
			out = append(out, p)
		}
	}
	return out
}
