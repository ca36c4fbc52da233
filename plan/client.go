package plan

import (
	"net/netip"
	"slices"

	"kproxy.dev/kproxy/service"
)

// isNode reports whether c is this node itself. A client with the service's own
// address is, even if kproxy doesn't know the address as the node's yet: once a
// service address is on the node's link, its kernel takes it as the source of
// connections there (the preferred source of a local route is its destination).
func (f *Frontend) isNode(c Client) bool { return c.Node || c.Address == f.Address.Addr() }

// Backends returns the endpoints a connection from c to f may go to. The
// kernel renderers express the same rule as chains.
func (s *Service) Backends(f *Frontend, c Client, p *Policy) []Backend {
	if s.UsesLocal(f, c, p) {
		return s.Groups[f.Family].Local
	}
	return s.Groups[f.Family].Cluster
}

// UsesLocal reports whether a connection from c to f goes to the Local group, else
// to the Cluster group.
func (s *Service) UsesLocal(f *Frontend, c Client, p *Policy) bool {
	short := f.ShortCircuit && takesConnections(s.Groups[f.Family].Cluster) && (f.isNode(c) || p.IsPod(c))
	return f.Local && !short
}

// VerdictFor returns what happens to a new connection from c to f, source
// ranges included: clients outside them are dropped, as kube-proxy does.
func (s *Service) VerdictFor(f *Frontend, c Client, p *Policy) Verdict {
	switch {
	case !f.Allows(c):
		return Drop
	case takesConnections(s.Backends(f, c, p)):
		return Forward
	}
	return f.Verdict
}

// Serves reports whether f forwards some client: every client where its
// verdict is Forward, short-circuited ones where only the Local group is empty.
func (s *Service) Serves(f *Frontend) bool {
	return f.Verdict == Forward || f.ShortCircuit && takesConnections(s.Groups[f.Family].Cluster)
}

// ShortCircuits reports whether f has clients that the kernel's rules would serve
// otherwise than specified: pods and this node itself, which may use every
// endpoint although f's traffic policy is Local. Where the data plane can't tell
// them from others, or there is none in the kernel, they are
// redirected to userspace as long as that is alive, whichever data plane carries the
// connections of other clients.
func (s *Service) ShortCircuits(f *Frontend) bool {
	return !s.TellsClients && s.Port.Protocol != service.SCTP &&
		f.Local && f.ShortCircuit && takesConnections(s.Groups[f.Family].Cluster)
}

// Masquerades reports whether the node's address replaces c's on the way to
// the endpoint at backend.
func (f *Frontend) Masquerades(c Client, backend netip.Addr, p *Policy) bool {
	if c.Address == backend || c.Address == f.Address.Addr() {
		return true // the reply would never come back through this node
	}
	if p.bypasses(p.Links, c, backend) {
		return true // nor would it here; this node's own answers can't pass it
	}
	switch f.Masquerade {
	case MasqueradeAlways:
		return true
	case MasqueradeUnlessPod:
		return !p.IsPod(c)
	case MasqueradeNodeLocal:
		return c.Node
	}
	return false
}

// bypasses reports whether a client and a backend are hosts of one of the networks
// given, and neither is this node.
func (p *Policy) bypasses(networks []netip.Prefix, c Client, backend netip.Addr) bool {
	return !c.Node && slices.ContainsFunc(networks, func(n netip.Prefix) bool {
		return n.Contains(c.Address) && n.Contains(backend)
	}) && !p.ownAddress(backend)
}

// Allows reports whether c passes f's source ranges.
func (f *Frontend) Allows(c Client) bool {
	return len(f.SourceRanges) == 0 || contains(f.SourceRanges, c.Address)
}

// Find returns the decision for the service port named k, or nil.
func (p *Plan) Find(k service.Key) *Service {
	i, found := slices.BinarySearchFunc(p.Services, k, func(s *Service, k service.Key) int { return s.Port.Key.Compare(k) })
	if !found {
		return nil
	}
	return p.Services[i]
}

// services returns p's services; none for nil.
func (p *Plan) services() []*Service {
	if p == nil {
		return nil
	}
	return p.Services
}

func contains(prefixes []netip.Prefix, a netip.Addr) bool {
	return slices.ContainsFunc(prefixes, func(p netip.Prefix) bool { return p.Contains(a) })
}
