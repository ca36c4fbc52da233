package kernel

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"
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
