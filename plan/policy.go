package plan

import (
	"fmt"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	"kproxy.dev/kproxy/service"
)

// The detector of local traffic tells pods from other clients: by their address
// (PodCIDRs), or by the interface that their packets come in on (PodBridge,
// PodInterfacePrefix). Pods reach cluster addresses with their own address, and
// every endpoint of a service whose traffic policy is Local. Without a detector
// no client is known to be a pod.

// Detects reports whether anything tells pods of family f from other clients.
func (p *Policy) Detects(f service.Family) bool {
	return p.DetectsInterface() || slices.ContainsFunc(p.PodCIDRs, func(n netip.Prefix) bool { return service.FamilyOf(n.Addr()) == f })
}

// DetectsInterface reports whether pods are known by the interface that their
// packets come in on, so that a [Client] needs its Interface.
func (p *Policy) DetectsInterface() bool { return p.PodBridge != "" || p.PodInterfacePrefix != "" }

// IsPod reports whether c is known to be a pod. What this node sends itself comes
// in on no interface.
func (p *Policy) IsPod(c Client) bool {
	if contains(p.PodCIDRs, c.Address) {
		return true
	}
	if c.Node || c.Interface == "" {
		return false
	}
	return c.Interface == p.PodBridge || p.PodInterfacePrefix != "" && strings.HasPrefix(c.Interface, p.PodInterfacePrefix)
}

// Equal reports whether all of two policies is the same.
func (p *Policy) Equal(o *Policy) bool { return reflect.DeepEqual(p, o) }

// SameDetector reports whether both tell the same clients to be pods.
func (p *Policy) SameDetector(o *Policy) bool {
	return p.PodBridge == o.PodBridge && p.PodInterfacePrefix == o.PodInterfacePrefix && slices.Equal(p.PodCIDRs, o.PodCIDRs)
}

// Detector says how pods are told from other clients, for status output.
func (p *Policy) Detector() Capability {
	c := Capability{Name: "local traffic detector", Supported: true}
	switch {
	case p.PodBridge != "":
		c.Reason = "pods' packets come in on interface " + p.PodBridge
	case p.PodInterfacePrefix != "":
		c.Reason = "pods' packets come in on interfaces whose names begin with " + p.PodInterfacePrefix
	case len(p.PodCIDRs) > 0:
		c.Reason = "pods have addresses in " + joined(p.PodCIDRs, netip.Prefix.String)
	default:
		c.Supported = false
		c.Reason = "nothing tells pods from other clients, so no client is masqueraded towards cluster addresses, and a traffic policy Local holds for pods too: "
		if p.NodePodCIDRs {
			c.Reason += "the Node object has no podCIDRs"
		} else {
			c.Reason += "set --cluster-cidr, or another --detect-local-mode"
		}
	}
	return c
}

// of returns p with what it takes from the Node object and the ServiceCIDRs filled in.
func (p Policy) of(s *service.Snapshot, n *service.Node) Policy {
	p.ServiceCIDRs = outermost(slices.Concat(p.ServiceCIDRs, s.ServiceCIDRs()))
	if p.NodePodCIDRs {
		p.PodCIDRs = n.PodCIDRs
	}
	if p.PrimaryNodePorts {
		p.NodePortNetworks = slices.Clone(p.NodePortNetworks)
		for _, a := range n.Addresses {
			p.NodePortNetworks = append(p.NodePortNetworks, netip.PrefixFrom(a, a.BitLen()))
		}
	}
	return p
}

// outermost returns networks in order, without those that lie within others. It modifies all.
func outermost(all []netip.Prefix) (out []netip.Prefix) {
	slices.SortFunc(all, netip.Prefix.Compare)
	for _, n := range all { // of two that overlap, the larger comes first
		if len(out) == 0 || !out[len(out)-1].Overlaps(n) {
			out = append(out, n)
		}
	}
	return out
}

// Closed returns the networks of family f in which an address that no Service has is nobody's, and the networks within
// them in which pods are, or hosts that this node reaches without a router: misconfigured clusters have some. A pod
// network that such a network lies within is no exception: there the cluster's addresses were taken out of it.
func (p *Policy) Closed(f service.Family) (closed, but []netip.Prefix) {
	if !p.CloseClusterIPs {
		return nil, nil
	}
	for _, n := range p.ServiceCIDRs {
		if service.FamilyOf(n.Addr()) == f {
			closed = append(closed, n)
		}
	}
	for _, n := range slices.Concat(p.PodCIDRs, p.Links, p.BridgedLinks) {
		if slices.ContainsFunc(closed, func(c netip.Prefix) bool { return c.Bits() < n.Bits() && c.Overlaps(n) }) {
			but = append(but, n)
		}
	}
	return closed, outermost(but)
}

// NodePortsWithin returns the networks of this node's addresses of family f that
// node ports answer on. Unless limited, they answer on every one: where no
// network of the family is named, as with kube-proxy, or one that is all of it.
func (p *Policy) NodePortsWithin(f service.Family) (within []netip.Prefix, limited bool) {
	for _, n := range p.NodePortNetworks {
		if service.FamilyOf(n.Addr()) != f {
			continue
		}
		if n.Bits() == 0 {
			return nil, false
		}
		within = append(within, n)
	}
	return within, p.PrimaryNodePorts || len(within) > 0
}

// AnswersNodePorts reports whether node ports answer on a, which is an address of
// this node's own.
func (p *Policy) AnswersNodePorts(a netip.Addr) bool {
	if a.IsLoopback() && p.NoLocalhostNodePorts {
		return false
	}
	within, limited := p.NodePortsWithin(service.FamilyOf(a))
	return !limited || contains(within, a)
}

// NodePortAddresses returns those of NodeAddresses of family f that node ports answer on.
func (p *Policy) NodePortAddresses(f service.Family) []netip.Addr {
	var out []netip.Addr
	for _, a := range p.NodeAddresses {
		if service.FamilyOf(a) == f && p.AnswersNodePorts(a) {
			out = append(out, a)
		}
	}
	return out
}

// sameNodePorts reports whether node ports answer on the same addresses.
func (p *Policy) sameNodePorts(o *Policy) bool {
	return p.PrimaryNodePorts == o.PrimaryNodePorts && p.NoLocalhostNodePorts == o.NoLocalhostNodePorts &&
		slices.Equal(p.NodePortNetworks, o.NodePortNetworks) && slices.Equal(p.NodeAddresses, o.NodeAddresses)
}

// nowhere says in which families the node port of s answers on no address of this
// node, although the node has some.
func (c *computation) nowhere(s *Service) []string {
	p := &c.in.Policy
	var out []string
	for i := range s.Frontends {
		f := &s.Frontends[i]
		within, limited := p.NodePortsWithin(f.Family)
		if f.Kind != NodePort || !limited || len(p.NodePortAddresses(f.Family)) > 0 ||
			!slices.ContainsFunc(p.NodeAddresses, func(a netip.Addr) bool { return service.FamilyOf(a) == f.Family }) {
			continue
		}
		why := "none is in " + joined(within, netip.Prefix.String)
		if len(within) == 0 {
			why = "its Node object has none"
		}
		out = append(out, fmt.Sprintf("node port %d answers on no %s address of this node: %s", f.Address.Port(), familyText(f.Family), why))
	}
	return out
}
