package trace

import (
	"context"
	"fmt"
	"net/netip"
	"sync"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace/netfilter"
)

// hostState is what a trace reads of this host. The functions are the seam between
// following a packet and reading the kernel.
type hostState struct {
	addresses   addresses
	route       func(query) route
	walk        func(netfilter.Packet, netfilter.Hook, netfilter.Span) *netfilter.Walk
	rules       func(table, chain string) []string // of iptables
	listener    func(service.Protocol, netip.AddrPort) (listener, bool, error)
	forwarding  func(f service.Family, in string) string // the setting that keeps packets from being forwarded
	reversePath func(from netip.Addr, in string, mark uint32) reversePath
	conntrack   func() (count, limit int, err error)
	// sets lists sets of kproxy's with their entries.
	sets func(names func(string) bool) ([]kernel.SetState, error)
	// What is behind the routing decision; nil functions leave it unknown.
	hop            func(*route) (hop, error)
	throughDefault func(query) bool
	linksDown      func() []string
	neighbours     func() (neighbourhood, error)
	listens        func(*guest, service.Protocol, netip.AddrPort) (bool, error)
	guestRoute     func(*guest, query) (route, error)

	notes []string // of what couldn't be read
	close func()
}

// readHost reads what all packets of a family meet. The functions work in the network
// namespace of the calling thread.
func readHost(ctx context.Context, f service.Family, proxy *Proxy) (*hostState, error) {
	own, err := localAddresses()
	if err != nil {
		return nil, err
	}
	sets, err := kernel.OpenIPSets()
	if err != nil {
		return nil, fmt.Errorf("read sets: %w", err)
	}
	c := netfilter.DefaultConfig()
	c.Sets, c.Host = sets, matchHost{}
	if proxy != nil && proxy.Variant.Name != "" {
		c.Variant = proxy.Variant
	} // else the host's own; the other one is read as well
	tables, err := netfilter.Read(ctx, c, f)
	if err != nil {
		sets.Close()
		return nil, fmt.Errorf("read the rules of netfilter: %w", err)
	}
	return &hostState{
		addresses: own, route: askRoute, walk: tables.Walk, rules: tables.Rules, listener: listenerFor,
		forwarding: forwardingOff, reversePath: checkReversePath, conntrack: conntrack.Use, notes: tables.Notes,
		hop: readHop, throughDefault: throughDefault, linksDown: linksDown,
		neighbours: sync.OnceValues(neighbours), listens: (*guest).listens, guestRoute: (*guest).routeTo,
		sets: sets.List, close: func() { sets.Close() },
	}, nil
}

// local reports whether an address is this node's own.
func (s *hostState) local(a netip.Addr) bool {
	_, ok := s.addresses.links[a]
	return ok || a.IsLoopback()
}

// matchHost answers what rules ask about the host (netfilter.Host).
type matchHost struct{}

// AddressType implements netfilter.Host by asking for a route, as the match
// addrtype does (inet_addr_type in net/ipv4/fib_frontend.c).
func (matchHost) AddressType(a netip.Addr) (string, error) {
	if a.IsMulticast() {
		return "MULTICAST", nil
	}
	r := askRoute(query{to: a})
	if r.err != nil {
		return "UNICAST", nil // xt_addrtype: what has no route is unicast
	}
	switch r.kind {
	case unix.RTN_LOCAL:
		return "LOCAL", nil
	case unix.RTN_BROADCAST:
		return "BROADCAST", nil
	case unix.RTN_UNICAST:
		return "UNICAST", nil
	}
	return "", fmt.Errorf("find type of address %s: its route is of type %s", a, routeKinds[r.kind])
}

// InterfaceAddress implements netfilter.Host: the first address of a link, which
// REDIRECT takes (nf_nat_redirect_ipv4 in net/netfilter/nf_nat_redirect.c).
func (matchHost) InterfaceAddress(name string, f service.Family) (netip.Addr, error) {
	return linkAddress(name, f)
}

// MasqueradeAddress implements netfilter.Host: the source that the kernel would
// choose towards dst by that link.
func (matchHost) MasqueradeAddress(out string, dst netip.Addr) (netip.Addr, error) {
	r := askRoute(query{to: dst})
	if r.err == nil && r.link == out && r.source.IsValid() {
		return r.source, nil
	}
	return linkAddress(out, service.FamilyOf(dst))
}

// Listens implements netfilter.Host.
func (matchHost) Listens(proto service.Protocol, a netip.AddrPort) (bool, error) {
	all, err := listenersOn(proto, a.Port())
	for _, l := range all {
		if l.address.Addr().Unmap() == a.Addr() {
			return true, nil
		}
	}
	return false, err
}
