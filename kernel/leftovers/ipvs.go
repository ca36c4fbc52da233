package leftovers

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"

	"github.com/moby/ipvs"
	"github.com/vishvananda/netlink"

	"kproxy.dev/kproxy/kernel"
)

// server is a virtual server.
type server struct {
	proto uint16
	at    netip.AddrPort
}

// lookIPVS finds the link, and kube-proxy's virtual servers: at the addresses of
// the link, and those that its sets name, which are at the node's own addresses.
// Others stay, kproxy's among them.
func lookIPVS(ctx context.Context, run kernel.Runner, sets []string) (link bool, servers []server, err error) {
	at := map[netip.Addr]bool{}
	l, err := netlink.LinkByName(ipvsLink)
	switch {
	case errors.As(err, &netlink.LinkNotFoundError{}):
	case err != nil:
		return false, nil, fmt.Errorf("look for link %s: %w", ipvsLink, err)
	default:
		link = true
		addrs, err := netlink.AddrList(l, netlink.FAMILY_ALL)
		if err != nil {
			return link, nil, fmt.Errorf("list addresses of %s: %w", ipvsLink, err)
		}
		for _, a := range addrs {
			if ip, ok := netip.AddrFromSlice(a.IP); ok {
				at[ip.Unmap()] = true
			}
		}
	}
	if !link && len(sets) == 0 {
		return false, nil, nil
	}
	if _, err := os.Stat("/proc/net/ip_vs"); err != nil { // asking by netlink would load the module
		return link, nil, nil
	}
	h, err := ipvs.New("")
	if err != nil {
		return link, nil, fmt.Errorf("open table of virtual servers: %w", err)
	}
	defer h.Close()
	all, err := h.GetServices()
	if err != nil {
		return link, nil, fmt.Errorf("list virtual servers: %w", err)
	}
	named, mine, err := namedBy(ctx, run, sets)
	if err != nil {
		return link, nil, err
	}
	for _, v := range all {
		ip, ok := netip.AddrFromSlice(v.Address)
		if !ok || v.FWMark != 0 {
			continue
		}
		s := server{v.Protocol, netip.AddrPortFrom(ip.Unmap(), v.Port)}
		anywhere := server{v.Protocol, netip.AddrPortFrom(netip.Addr{}, v.Port)}
		if !mine[s] && (at[ip.Unmap()] || named[s] || named[anywhere]) {
			servers = append(servers, s)
		}
	}
	return link, servers, nil
}

func removeIPVS(link bool, servers []server) error {
	var errs []error
	if len(servers) > 0 {
		h, err := ipvs.New("")
		if err != nil {
			return fmt.Errorf("open table of virtual servers: %w", err)
		}
		defer h.Close()
		for _, s := range servers {
			v := &ipvs.Service{Address: s.at.Addr().AsSlice(), Protocol: s.proto, Port: s.at.Port(), AddressFamily: netlink.FAMILY_V4}
			if s.at.Addr().Is6() {
				v.AddressFamily = netlink.FAMILY_V6
			}
			if err := h.DelService(v); err != nil {
				errs = append(errs, fmt.Errorf("remove virtual server %s: %w", s.at, err))
			}
		}
	}
	if link {
		if l, err := netlink.LinkByName(ipvsLink); err != nil {
			errs = append(errs, fmt.Errorf("remove link %s: %w", ipvsLink, err))
		} else if err := netlink.LinkDel(l); err != nil {
			errs = append(errs, fmt.Errorf("remove link %s: %w", ipvsLink, err))
		}
	}
	return errors.Join(errs...)
}
