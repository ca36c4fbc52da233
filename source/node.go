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
	var out []netip.Prefix
	for _, s := range list {
		if p, err := ParsePrefix(s); err == nil {
			out = append(out, p)
		}
	}
	return out
}
