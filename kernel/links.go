package kernel

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"

	"kproxy.dev/kproxy/service"
)

// Links returns the networks that the namespace of the calling thread is
// directly connected to and whose hosts answer each other without passing it,
// sorted. A network behind a bridge of the node's own isn't one where bridged
// packets pass netfilter as well (net.bridge.bridge-nf-call-*tables, as on
// Kubernetes nodes): there the node sees every answer.
func Links() ([]netip.Prefix, error) {
	links, err := interrupted(netlink.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	connects := make(map[int][2]bool, len(links)) // per family
	for _, l := range links {
		a := l.Attrs()
		up := a.Flags&net.FlagUp != 0 && a.Flags&(net.FlagLoopback|net.FlagPointToPoint) == 0
		for _, f := range service.Families {
			c := connects[a.Index]
			c[f] = up && (l.Type() != "bridge" || !bridgeCallsNetfilter(f))
			connects[a.Index] = c
		}
	}
	// One list for all links: there is no asking the kernel for those of one, and
	// kproxy's own may have thousands.
	addresses, err := interrupted(func() ([]netlink.Addr, error) { return netlink.AddrList(nil, netlink.FAMILY_ALL) })
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	var out []netip.Prefix
	for _, x := range addresses {
		if p, ok := shared(x); ok && connects[x.LinkIndex][service.FamilyOf(p.Addr())] {
			out = append(out, p)
		}
	}
	slices.SortFunc(out, func(a, b netip.Prefix) int { return strings.Compare(a.String(), b.String()) })
	return slices.Compact(out), nil
}

// shared returns the network of an address if others may be in it.
func shared(a netlink.Addr) (netip.Prefix, bool) {
	if a.IPNet == nil || a.Peer != nil && !a.Peer.IP.Equal(a.IP) {
		return netip.Prefix{}, false // a point-to-point address
	}
	ip, ok := netip.AddrFromSlice(a.IP)
	ones, _ := a.Mask.Size()
	p, err := ip.Unmap().Prefix(ones)
	if !ok || err != nil || p.IsSingleIP() || p.Addr().IsLinkLocalUnicast() {
		return netip.Prefix{}, false
	}
	return p, true
}

// bridgeCallsNetfilter reports whether packets between two ports of a bridge
// pass iptables. Without the module br_netfilter there is no such setting.
func bridgeCallsNetfilter(f service.Family) bool {
	name := [2]string{service.IPv4: "bridge-nf-call-iptables", service.IPv6: "bridge-nf-call-ip6tables"}[f]
	b, err := os.ReadFile("/proc/sys/net/bridge/" + name)
	return err == nil && strings.TrimSpace(string(b)) == "1"
}
