package leftovers

import (
	"context"
	"fmt"
	"net/netip"
	"os"

	"github.com/hashicorp/go-multierror"
	"github.com/moby/ipvs"
	"github.com/vishvananda/netlink"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// server is a virtual server.
type server struct {
	proto uint16
	at    netip.AddrPort
}

// lookIPVS finds the link, kube-proxy's virtual servers, and why others that may
// look like them stay.
func lookIPVS(ctx context.Context, run kernel.Runner, sets []string) (link bool, servers []server, kept []string, err error) {
	kubeProxys, kproxys, err := dummies()
	link = kubeProxys != 0
	if err != nil || !link && len(sets) == 0 {
		return link, nil, nil, err
	}
	if _, err := os.Stat("/proc/net/ip_vs"); err != nil { // asking by netlink would load the module
		return link, nil, nil, nil
	}
	h, err := ipvs.New("")
	if err != nil {
		return link, nil, nil, fmt.Errorf("open table of virtual servers: %w", err)
	}
	defer h.Close()
	all, err := h.GetServices()
	if err != nil {
		return link, nil, nil, fmt.Errorf("list virtual servers: %w", err)
	}
	v := view{sets: tellingSets(sets)}
	if err := v.look(kubeProxys, kproxys); err != nil {
		return link, nil, nil, err
	}
	if v.named, v.kproxys, err = namedBy(ctx, run, sets); err != nil {
		return link, nil, nil, err
	}
	for _, x := range all {
		ip, ok := netip.AddrFromSlice(x.Address)
		if !ok || x.FWMark != 0 {
			continue
		}
		s := server{x.Protocol, netip.AddrPortFrom(ip.Unmap(), x.Port)}
		switch own, doubtful := v.judge(s); {
		case own:
			servers = append(servers, s)
		case doubtful:
			kept = append(kept, fmt.Sprintf("the virtual server %s/%s stays, because none of kube-proxy's ipsets names it, though its address is on %s", s.at, service.Protocol(s.proto), ipvsLink))
		}
	}
	return link, servers, kept, nil
}

func removeIPVS(link bool, servers []server) error {
	var errs *multierror.Error
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
				errs = multierror.Append(errs, fmt.Errorf("remove virtual server %s: %w", s.at, err))
			}
		}
	}
	if link {
		if l, err := netlink.LinkByName(ipvsLink); err != nil {
			errs = multierror.Append(errs, fmt.Errorf("remove link %s: %w", ipvsLink, err))
		} else if err := netlink.LinkDel(l); err != nil {
			errs = multierror.Append(errs, fmt.Errorf("remove link %s: %w", ipvsLink, err))
		}
	}
	return errs.ErrorOrNil()
}
