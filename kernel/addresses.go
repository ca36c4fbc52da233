package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel/nlmsg"
	"kproxy.dev/kproxy/service"
)

// NodeAddresses returns the addresses of the network namespace of the calling
// thread, on which node ports answer, sorted: those of every link that is up but
// kproxy's own. A node's address may be on the loopback link (BGP to the host,
// anycast); left out are those that never leave the node, those that have a
// meaning only on their link, and those that nobody can connect to.
func NodeAddresses() ([]netip.Addr, error) {
	links, err := linksThat(func(l *netlink.LinkAttrs) bool {
		return l.Flags&net.FlagUp != 0 && l.Name != DummyLink
	})
	if err != nil {
		return nil, err
	}
	indexes := make([]int, len(links))
	for i, l := range links {
		indexes[i] = l.Attrs().Index
	}
	addresses, err := addressesOf(indexes)
	if err != nil {
		return nil, err
	}
	var out []netip.Addr
	for _, of := range addresses {
		for _, x := range of {
			if a := x.address; !(a.Is6() && a.IsLinkLocalUnicast()) && !a.IsLoopback() && !a.IsMulticast() && !a.IsUnspecified() {
				out = append(out, a)
			}
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return slices.Compact(out), nil
}

// linksThat lists the links that f picks.
func linksThat(f func(*netlink.LinkAttrs) bool) ([]netlink.Link, error) {
	links, err := netlink.LinkList()
	for i := 1; i < addressDumps && errors.Is(err, netlink.ErrDumpInterrupted); i++ {
		links, err = netlink.LinkList()
	}
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	return slices.DeleteFunc(links, func(l netlink.Link) bool { return !f(l.Attrs()) }), nil
}

// linkAddress is an address of a link.
type linkAddress struct {
	address netip.Addr
	network netip.Prefix // of the other end on a point-to-point link
}

// addressesOf lists the addresses of links, by index. The kernel tells of these
// only (NETLINK_GET_STRICT_CHK, Linux 5.0) and not of thousands that may be on
// kproxy's own; an older one tells of all, and the others are passed over.
func addressesOf(links []int) (map[int][]linkAddress, error) {
	s, err := nlmsg.Open(unix.NETLINK_ROUTE, 64<<10)
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	defer s.Close()
	_ = unix.SetsockoptInt(s.FD, unix.SOL_NETLINK, unix.NETLINK_GET_STRICT_CHK, 1) // older kernels don't have it
	out := make(map[int][]linkAddress, len(links))
	for _, link := range links {
		for _, family := range [...]uint8{unix.AF_INET, unix.AF_INET6} {
			found, err := addressesOfLink(s, family, link)
			for i := 1; i < addressDumps && errors.Is(err, nlmsg.ErrInterrupted); i++ {
				found, err = addressesOfLink(s, family, link)
			}
			if errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.ENODEV) {
				continue // a kernel without IPv6, or the link is gone
			}
			if err != nil {
				return nil, fmt.Errorf("list addresses: %w", err)
			}
			out[link] = append(out[link], found...)
		}
	}
	return out, nil
}

// addressDumps is how often a list is asked for that other changes interrupt.
const addressDumps = 5

func addressesOfLink(s *nlmsg.Socket, family uint8, link int) ([]linkAddress, error) {
	var out []linkAddress
	err := s.Dump(func(b []byte) []byte {
		b = append(nlmsg.AppendRequest(b, unix.RTM_GETADDR, unix.NLM_F_DUMP), family, 0, 0, 0) // struct ifaddrmsg
		return binary.NativeEndian.AppendUint32(b, uint32(link))
	}, func(m []byte) {
		if len(m) >= unix.SizeofIfAddrmsg && m[0] == family && binary.NativeEndian.Uint32(m[4:]) == uint32(link) {
			out = append(out, parseAddress(m[unix.SizeofIfAddrmsg:], int(m[1])))
		}
	})
	return out, err
}

// parseAddress reads attributes: IFA_ADDRESS is the other end's where that is
// another than IFA_LOCAL, and the length belongs to it.
func parseAddress(attributes []byte, bits int) linkAddress {
	var out linkAddress
	for typ, value := range nlmsg.Attributes(attributes) {
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

// Links returns the networks that the namespace of the calling thread is
// directly connected to and whose hosts answer each other without passing it,
// sorted. A network behind a bridge of the node's own is bridged where what passes
// the bridge passes netfilter as well (net.bridge.bridge-nf-call-*tables, as on
// Kubernetes nodes): there rules see every answer, and sockets none that isn't for
// the node.
func Links() (links, bridged []netip.Prefix, err error) {
	all, err := linksThat(func(l *netlink.LinkAttrs) bool {
		return l.Flags&net.FlagUp != 0 && l.Flags&(net.FlagLoopback|net.FlagPointToPoint) == 0 && l.Name != DummyLink
	})
	if err != nil {
		return nil, nil, err
	}
	bridge := make(map[int]bool, len(all)) // by index
	for _, l := range all {
		bridge[l.Attrs().Index] = l.Type() == "bridge"
	}
	addresses, err := addressesOf(slices.Collect(maps.Keys(bridge)))
	if err != nil {
		return nil, nil, err
	}
	for link, of := range addresses {
		for _, x := range of {
			p, ok := shared(x)
			switch {
			case !ok:
			case bridge[link] && BridgeCallsNetfilter(service.FamilyOf(p.Addr())):
				bridged = append(bridged, p)
			default:
				links = append(links, p)
			}
		}
	}
	return sorted(links), sorted(bridged), nil
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
