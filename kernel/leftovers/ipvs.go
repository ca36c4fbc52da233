package leftovers

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/hashicorp/go-multierror"
	"github.com/vishvananda/netlink"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/service"
)

// server is the place of a virtual server.
type server struct {
	proto service.Protocol
	at    netip.AddrPort
}

func (s server) virtual() kernel.Virtual {
	return kernel.Virtual{Protocol: s.proto, Address: s.at}
}

// findIPVS finds the link, kube-proxy's virtual servers, and why others that may
// look like them stay.
func findIPVS(sets []string) (link bool, servers []server, kept []string, err error) {
	kubeProxys, kproxys, err := dummies()
	link = kubeProxys != 0
	if err != nil || !link && len(sets) == 0 || !ipvs.Loaded() {
		return link, nil, nil, err
	}
	table, err := ipvs.OpenTable()
	if err != nil {
		return link, nil, nil, err
	}
	defer table.Close()
	all, err := table.List()
	if err != nil {
		return link, nil, nil, err
	}
	store, err := kernel.OpenIPSets()
	if err != nil {
		return link, nil, nil, err
	}
	defer store.Close()
	o := owners{sets: serviceSets(sets)}
	if err := o.readAddresses(kubeProxys, kproxys); err != nil {
		return link, nil, nil, err
	}
	if err := o.readSets(store.ReadAny, sets); err != nil {
		return link, nil, nil, err
	}
	for _, x := range all {
		s := server{x.Protocol, x.Address}
		switch own, doubtful := o.of(s); {
		case own:
			servers = append(servers, s)
		case doubtful:
			kept = append(kept, fmt.Sprintf("the virtual server %s/%s stays, because none of kube-proxy's ipsets names it, though its address is on %s", s.at, s.proto, ipvsLink))
		}
	}
	return link, servers, kept, nil
}

func removeIPVS(link bool, servers []server) error {
	var errs *multierror.Error
	if len(servers) > 0 {
		table, err := ipvs.OpenTable()
		if err != nil {
			return err
		}
		defer table.Close()
		var requests []ipvs.Request
		for _, s := range servers {
			requests = append(requests, ipvs.Request{Do: ipvs.Delete, Virtual: s.virtual()})
		}
		errs = multierror.Append(errs, table.Change(requests...)...)
	}
	if link {
		l, err := netlink.LinkByName(ipvsLink)
		if err == nil {
			err = netlink.LinkDel(l)
		}
		if err != nil {
			errs = multierror.Append(errs, fmt.Errorf("remove link %s: %w", ipvsLink, err))
		}
	}
	return errs.ErrorOrNil()
}

// owners tell whose a virtual server is.
type owners struct {
	link    map[netip.Addr]bool // addresses of kube-ipvs0
	node    map[netip.Addr]bool // the node's own
	named   map[server]bool     // by kube-proxy's sets; node ports at the unspecified address
	sets    [2]bool             // by service.Family: whether they name servers at kube-ipvs0's addresses
	kproxys map[server]bool
}

// of reports whether a virtual server is kube-proxy's: one that its sets name,
// node ports at the node's own addresses only. Without those sets, all at the
// addresses of its link are; with them, others there are doubtful. Others may have
// virtual servers with a node port's number elsewhere.
func (o owners) of(s server) (own, doubtful bool) {
	f, ip := service.FamilyOf(s.at.Addr()), s.at.Addr()
	nodePort := server{s.proto, netip.AddrPortFrom(unspecified[f], s.at.Port())}
	switch {
	case o.kproxys[s]:
		return false, false
	case o.named[s], o.node[ip] && o.named[nodePort]:
		return true, false
	case o.link[ip]:
		return !o.sets[f], o.sets[f]
	}
	return false, false
}

// unspecified stands for the node's own addresses of a family.
var unspecified = [2]netip.Addr{service.IPv4: netip.IPv4Unspecified(), service.IPv6: netip.IPv6Unspecified()}

// serviceSets reports the families for which there is the set of service
// addresses. kube-proxy makes all of its sets at once.
func serviceSets(sets []string) [2]bool {
	return [2]bool{service.IPv4: slices.Contains(sets, "KUBE-CLUSTER-IP"), service.IPv6: slices.Contains(sets, "KUBE-6-CLUSTER-IP")}
}

// readSets reads the addresses and node ports in kube-proxy's sets, and what kproxy's own
// sets name.
func (o *owners) readSets(read func(string) (kernel.AnySet, error), sets []string) error {
	o.named, o.kproxys = map[server]bool{}, map[server]bool{}
	into := func(servers map[server]bool, name string) error {
		set, err := read(name)
		for _, e := range set.Entries {
			s := server{service.Protocol(e.Protocol), netip.AddrPortFrom(e.Net.Addr(), e.Port)}
			if !e.Net.IsValid() { // the name of a set of node ports tells the protocol and the family
				s.at = netip.AddrPortFrom(unspecified[service.IPv4], e.Port)
				if strings.HasPrefix(name, "KUBE-6-") {
					s.at = netip.AddrPortFrom(unspecified[service.IPv6], e.Port)
				}
				if s.proto, err = service.ParseProtocol(name[strings.LastIndex(name, "-")+1:]); err != nil {
					return fmt.Errorf("read ipset %s: %w", name, err)
				}
			}
			servers[s] = true
		}
		return err
	}
	for _, name := range sets {
		switch base := baseOf(name); {
		case strings.HasPrefix(base, "NODE-PORT-"), base == "CLUSTER-IP", strings.HasPrefix(base, "EXTERNAL-IP"), base == "LOAD-BALANCER", base == "LOAD-BALANCER-LOCAL":
			if err := into(o.named, name); err != nil {
				return err
			}
		}
	}
	for _, f := range service.Families {
		if err := into(o.kproxys, kernel.FamilySet(kernel.SetVirtual, f)); err != nil && !errors.Is(err, kernel.ErrNotFound) {
			return err
		}
	}
	return nil
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

// readAddresses lists the addresses: of kube-ipvs0, and of all other links but kproxy's,
// also of those that are down and of loopback, where kube-proxy or a former
// version of it serves node ports as well. So kernel.ReadNetworks won't do.
func (o *owners) readAddresses(kubeProxys, kproxys int) error {
	o.link, o.node = map[netip.Addr]bool{}, map[netip.Addr]bool{}
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
			o.link[ip.Unmap()] = true
		default:
			o.node[ip.Unmap()] = true
		}
	}
	return nil
}

// addressDumps is how often the list is asked for that changes interrupt.
const addressDumps = 5
