package kernel

import (
	"net/netip"

	"kproxy.dev/kproxy/service"
)

// ListenerAddress is where the rules send connections that userspace serves, with
// the shared listeners' ports: an address of this node that is on no interface.
// [Routing] makes it local by a route in the kernel's own table local.
//
// REDIRECT has none to send to on an interface without an address, and drops
// (nf_nat_redirect_ipv4 in net/netfilter/nf_nat_redirect.c); on one that has only
// a link-local address, listeners can't answer datagrams from that. TPROXY leaves
// the service's address in the packet, which IPVS takes to its virtual server
// before a socket gets it (ip_vs_in_hook at LOCAL_IN).
//
// The IPv4 address is link-local (RFC 3927) and the IPv6 one unique local (RFC
// 4193): no router forwards the former, and none has the latter unless somebody
// spells kproxy in ASCII too.
var ListenerAddress = [2]netip.Addr{
	service.IPv4: netip.MustParseAddr("169.254.102.49"),
	service.IPv6: netip.MustParseAddr("fd4b:5052:4f58:59::1"),
}
