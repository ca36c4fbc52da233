package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"

	vnetlink "github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/service"
)

// Networks holds what decisions depend on of a host's links and addresses. Its lists are sorted.
type Networks struct {
	// Addresses are those on which node ports answer: of every link that is up but
	// kproxy's own. A node's address may be on the loopback link (BGP to the host,
	// anycast); left out are those that never leave the node, those that have a
	// meaning only on their link, and those that can't be connected to.
	Addresses []netip.Addr
	// Links are the networks that the host is directly connected to and whose hosts
	// answer each other without passing it. One behind a bridge of the node's own is
	// Bridged where what passes the bridge passes netfilter as well
	// (net.bridge.bridge-nf-call-*tables, as on Kubernetes nodes): there rules see every
	// answer, and sockets none that isn't for the node.
	Links, Bridged []netip.Prefix
}

// ReadNetworks reads those of the network namespace of the calling thread. The kernel tells of the
// addresses of single links (NETLINK_GET_STRICT_CHK, Linux 5.0) and not of thousands that may be on
// kproxy's own; an older one tells of all, and the others are passed over.
func ReadNetworks() (n Networks, err error) {
	links, err := vnetlink.LinkList()
	for i := 1; i < addressDumps && errors.Is(err, vnetlink.ErrDumpInterrupted); i++ {
		links, err = vnetlink.LinkList()
	}
	if err != nil {
		return n, fmt.Errorf("list links: %w", err)
	}
	s, err := netlink.Open(unix.NETLINK_ROUTE, 64<<10)
	if err != nil {
		return n, fmt.Errorf("list addresses: %w", err)
	}
	defer s.Close()
	_ = unix.SetsockoptInt(s.FD, unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1) // older kernels don't have it
	for _, l := range links {
		if l.Attrs().Flags&net.FlagUp == 0 || l.Attrs().Name == DummyLink {
			continue
		}
		for _, f := range service.Families {
			found, err := addressesOf(s, f, l.Attrs().Index)
			for i := 1; i < addressDumps && errors.Is(err, netlink.ErrInterrupted); i++ {
				found, err = addressesOf(s, f, l.Attrs().Index)
			}
			if err != nil && !errors.Is(err, unix.EAFNOSUPPORT) && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.ENODEV) { // a kernel without IPv6, or the link is gone
				return n, fmt.Errorf("list addresses: %w", err)
			}
			for _, a := range found {
				n.add(l, a)
			}
		}
	}
	slices.SortFunc(n.Addresses, netip.Addr.Compare)
	n.Addresses, n.Links, n.Bridged = slices.Compact(n.Addresses), sorted(n.Links), sorted(n.Bridged)
	return n, nil
}

// add adds an address of a link.
func (n *Networks) add(l vnetlink.Link, x linkAddress) {
	if a := x.address; !(a.Is6() && a.IsLinkLocalUnicast()) && !a.IsLoopback() && !a.IsMulticast() && !a.IsUnspecified() {
		n.Addresses = append(n.Addresses, a)
	}
	p, ok := shared(x)
	switch {
	case !ok || l.Attrs().Flags&(net.FlagLoopback|net.FlagPointToPoint) != 0:
	case l.Type() == "bridge" && BridgeCallsNetfilter(service.FamilyOf(p.Addr())):
		n.Bridged = append(n.Bridged, p)
	default:
		n.Links = append(n.Links, p)
	}
}

// linkAddress is an address of a link.
type linkAddress struct {
	address netip.Addr
	network netip.Prefix // of the other end on a point-to-point link
}

// addressDumps is how often a list is asked for that other changes interrupt.
const addressDumps = 5

func addressesOf(s *netlink.Socket, f service.Family, link int) (out []linkAddress, err error) {
	err = s.Dump(func(b []byte) []byte {
		b = append(netlink.AppendRequest(b, unix.RTM_GETADDR, unix.NLM_F_DUMP), f.Number(), 0, 0, 0) // struct ifaddrmsg
		return binary.NativeEndian.AppendUint32(b, uint32(link))
	}, func(m []byte) {
		if len(m) >= unix.SizeofIfAddrmsg && m[0] == f.Number() && binary.NativeEndian.Uint32(m[4:]) == uint32(link) {
			out = append(out, parseAddress(m[unix.SizeofIfAddrmsg:], int(m[1])))
		}
	})
	return out, err
}

// parseAddress reads attributes: IFA_ADDRESS is the other end's where that is
// another than IFA_LOCAL, and the length belongs to it.
func parseAddress(attributes []byte, bits int) linkAddress {
	var out linkAddress
	for typ, value := range netlink.Attributes(attributes) {
		switch a, ok := netip.AddrFromSlice(value); {
		case typ == unix.IFA_LOCAL:
			out.address = a
		case typ == unix.IFA_ADDRESS && ok:
			out.network = netip.PrefixFrom(a, bits)
		}
	}
	if !out.address.IsValid() {
		out.address = out.network.Addr()
	}
	return out
}

// sorted returns networks in order, each once.
func sorted(networks []netip.Prefix) []netip.Prefix {
	slices.SortFunc(networks, func(a, b netip.Prefix) int { return strings.Compare(a.String(), b.String()) })
	return slices.Compact(networks)
}

// shared returns the network of an address if others may be in it.
func shared(a linkAddress) (netip.Prefix, bool) {
	if a.network.Addr() != a.address {
		return netip.Prefix{}, false // a point-to-point address
	}
	p := a.network.Masked()
	return p, p.IsValid() && !p.IsSingleIP() && !p.Addr().IsLinkLocalUnicast()
}

// BridgeCallsNetfilter reports whether packets between two ports of a bridge
// pass iptables. Without the module br_netfilter there is no such setting.
func BridgeCallsNetfilter(f service.Family) bool {
	name := [2]string{service.IPv4: "bridge-nf-call-iptables", service.IPv6: "bridge-nf-call-ip6tables"}[f]
	n, _ := ReadSysctl("net", "bridge", name)
	return n == 1
}
