package leftovers

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"github.com/vishvananda/netlink"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// view is what tells whose a virtual server is.
type view struct {
	link    map[netip.Addr]bool // addresses of kube-ipvs0
	node    map[netip.Addr]bool // the node's own
	named   map[server]bool     // by kube-proxy's sets; node ports at the unspecified address
	sets    [2]bool             // by service.Family: whether they name servers at kube-ipvs0's addresses
	kproxys map[server]bool
}

// judge reports whether a virtual server is kube-proxy's: one that its sets name,
// node ports at the node's own addresses only. Without those sets, all at the
// addresses of its link are; with them, others there are doubtful. Others may have
// virtual servers with a node port's number elsewhere.
func (v view) judge(s server) (own, doubtful bool) {
	f, ip := service.FamilyOf(s.at.Addr()), s.at.Addr()
	nodePort := server{s.proto, netip.AddrPortFrom(anywhere(f), s.at.Port())}
	switch {
	case v.kproxys[s]:
		return false, false
	case v.named[s], v.node[ip] && v.named[nodePort]:
		return true, false
	case v.link[ip]:
		return !v.sets[f], v.sets[f]
	}
	return false, false
}

// anywhere stands for the node's own addresses of a family.
func anywhere(f service.Family) netip.Addr {
	if f == service.IPv6 {
		return netip.IPv6Unspecified()
	}
	return netip.IPv4Unspecified()
}

// tellingSets reports the families for which there is the set of service
// addresses. kube-proxy makes all of its sets at once.
func tellingSets(sets []string) (out [2]bool) {
	out[service.IPv4] = slices.Contains(sets, "KUBE-CLUSTER-IP")
	out[service.IPv6] = slices.Contains(sets, "KUBE-6-CLUSTER-IP")
	return out
}

// dummies are the indexes of kube-proxy's link and of kproxy's, 0 for none.
func dummies() (kubeProxys, kproxys int, err error) {
	for name, index := range map[string]*int{ipvsLink: &kubeProxys, kernel.DummyLink: &kproxys} {
		l, err := netlink.LinkByName(name)
		switch {
		case errors.As(err, &netlink.LinkNotFoundError{}):
		case err != nil:
			return 0, 0, fmt.Errorf("look for link %s: %w", name, err)
		default:
			*index = l.Attrs().Index
		}
	}
	return kubeProxys, kproxys, nil
}

// look lists the addresses: of kube-ipvs0, and of all other links but kproxy's,
// also of those that are down and of loopback, where kube-proxy or a former
// version of it serves node ports as well. So kernel.NodeAddresses won't do.
func (v *view) look(kubeProxys, kproxys int) error {
	v.link, v.node = map[netip.Addr]bool{}, map[netip.Addr]bool{}
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_ALL)
	for i := 1; i < addressDumps && errors.Is(err, netlink.ErrDumpInterrupted); i++ {
		addrs, err = netlink.AddrList(nil, netlink.FAMILY_ALL)
	}
	if err != nil {
		return fmt.Errorf("list addresses: %w", err)
	}
	for _, a := range addrs {
		ip, ok := netip.AddrFromSlice(a.IP)
		switch {
		case !ok, a.LinkIndex == kproxys:
		case a.LinkIndex == kubeProxys:
			v.link[ip.Unmap()] = true
		default:
			v.node[ip.Unmap()] = true
		}
	}
	return nil
}

// addressDumps is how often the list is asked for that changes interrupt.
const addressDumps = 5
