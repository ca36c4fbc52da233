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
	links, err := netlink.LinkList()
	if err != nil {
		return nil, fmt.Errorf("list links: %w", err)
	}
	var out []netip.Prefix
	for _, l := range links {
		a := l.Attrs()
		if a.Flags&net.FlagUp == 0 || a.Flags&(net.FlagLoopback|net.FlagPointToPoint) != 0 {
			continue
		}
		for _, f := range service.Families {
			if l.Type() == "bridge" && bridgeCallsNetfilter(f) {
				continue
			}
			addresses, err := netlink.AddrList(l, int(familyNumber[f]))
			if err != nil {
				return nil, fmt.Errorf("list %s addresses of %s: %w", f, a.Name, err)
			}
			for _, x := range addresses {
				if p, ok := shared(x); ok {
					out = append(out, p)
				}
			}
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
