package plan

import (
	"net/netip"

	"kproxy.dev/kproxy/service"
)

// StandIn is a network of addresses that nothing has, and the network behind a bridge
// whose addresses they stand for, bit by bit.
//
// A socket of this node's that bears the address of a client behind the bridge gets no
// answer from an endpoint there: the bridge hands it to the client. So the socket bears the
// stand-in's address, and rules give the packet the client's once it has left the socket
// (NETMAP). Then conntrack gives the answer the stand-in's address, and the bridge
// hands a packet whose destination has changed to this node (br_nf_pre_routing_finish in
// net/bridge/br_netfilter_hooks.c).
type StandIn struct{ Network, For netip.Prefix }

// reserved is where stand-ins are: 240.0.0.0/4 (RFC 1112, section 4), which Linux takes for
// unicast addresses, and 4000::/3, which IANA's registry of the IPv6 address space has as reserved.
var reserved = [2]netip.Prefix{service.IPv4: netip.MustParsePrefix("240.0.0.0/4"), service.IPv6: netip.MustParsePrefix("4000::/3")}

// standIn returns a with the first bits of the reserved space.
func standIn(a netip.Addr) netip.Addr {
	space, b := reserved[service.FamilyOf(a)], a.AsSlice()
	b[0] = b[0]&(0xff>>space.Bits()) | space.Addr().AsSlice()[0]
	out, _ := netip.AddrFromSlice(b)
	return out
}

// StandIns returns those for p's bridged links of a family, unless p is to have none. A link has none if it is in the
// reserved space itself, or if its stand-in would be another link's.
func (p *Policy) StandIns(f service.Family) (out []StandIn) {
links:
	for _, l := range p.BridgedLinks {
		if p.NoStandIns || service.FamilyOf(l.Addr()) != f || reserved[f].Overlaps(l) {
			continue
		}
		n := netip.PrefixFrom(standIn(l.Addr()), l.Bits())
		for _, o := range out {
			if n.Overlaps(o.Network) && !l.Overlaps(o.For) {
				continue links
			}
		}
		out = append(out, StandIn{n, l})
	}
	return out
}

// SocketAddress returns the address that a socket of the node's bears for c towards
// backend: c's own, or its stand-in where both are behind one bridge. It is invalid
// where there is none, so that the endpoint sees the node's.
func (p *Policy) SocketAddress(c Client, backend netip.Addr) netip.Addr {
	if !p.bypasses(p.BridgedLinks, c, backend) {
		return c.Address
	}
	for _, s := range p.StandIns(service.FamilyOf(c.Address)) {
		if s.For.Contains(c.Address) {
			return standIn(c.Address)
		}
	}
	return netip.Addr{}
}
