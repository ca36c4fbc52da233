package kernel

import (
	"maps"
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
	b, err := os.ReadFile("/proc/sys/net/bridge/" + name)
	return err == nil && strings.TrimSpace(string(b)) == "1"
}
