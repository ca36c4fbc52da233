package plan

import (
	"fmt"
	"net/netip"
	"slices"

	"kproxy.dev/kproxy/service"
)

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

// NodePortAddresses are those of NodeAddresses of family f that node ports answer on.
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
		why := "none is in " + joinedText(within)
		if len(within) == 0 {
			why = "its Node object has none"
		}
		out = append(out, fmt.Sprintf("node port %d answers on no %s address of this node: %s", f.Address.Port(), familyText(f.Family), why))
	}
	return out
}
