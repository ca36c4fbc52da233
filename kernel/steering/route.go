package steering

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/hashicorp/go-multierror"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// Routing brings packets to userspace's sockets: by a route that makes
// [ListenerAddress] this node's, for clients' packets, and, for endpoints' answers
// to sockets that bear a client's address, by rules that send marked packets to one
// table, whose only route delivers everything locally. Its methods work in the
// network namespace of the calling thread.
type Routing struct {
	Marks    kernel.Marks
	Table    int // number of the table
	Priority int // of the rules, and one less and one more; between the local table's 0 and the main table's 32766
	SkipIPv6 bool
}

// DefaultRouting numbers both after kube-proxy's metrics port.
func DefaultRouting() Routing {
	return Routing{Marks: kernel.DefaultMarks(), Table: 10249, Priority: 10249}
}

// families returns the address families that the kernel has, without IPv6 where SkipIPv6 is set.
func (r Routing) families() []service.Family {
	if _, ok := ipv6Off(); r.SkipIPv6 || !ok {
		return []service.Family{service.IPv4}
	}
	return service.Families[:]
}

// wanted are the families that have routes. IPv6 has none while it is switched off on the loopback
// link, which takes none then (fib6_nh_init in net/ipv6/route.c): so it is on nodes where
// net.ipv6.conf.all.disable_ipv6 is set.
func (r Routing) wanted() []service.Family {
	off, _ := ipv6Off()
	r.SkipIPv6 = r.SkipIPv6 || off != 0
	return r.families()
}

// ipv6Off reports whether IPv6 is switched off on the loopback link; ok is false where the kernel has none.
func ipv6Off() (off int, ok bool) {
	return kernel.ReadSysctl("net", "ipv6", "conf", "lo", "disable_ipv6")
}

// rules are in the order that they are added in: the target of a jump before the
// jump, which the kernel ignores otherwise.
//
// Where src_valid_mark is set (wg-quick does so), the kernel looks up the way back
// to a packet's source with the packet's mark, and drops the packet if that leads
// to a local route (__fib_validate_source in net/ipv4/fib_frontend.c). Such a
// look-up, as one for what this node sends, comes from the loopback
// (LOOPBACK_IFINDEX), so there the mark of what comes in jumps past its rule. What
// this node sends to those sockets, answers of its own endpoints, bears a mark
// of its own.
func (r Routing) rules(f service.Family) []netlink.Rule {
	mask := r.Marks.Own()
	rule := func(priority int, mark uint32, from string) netlink.Rule {
		out := netlink.NewRule()
		out.Family, out.Priority, out.Mark, out.Mask, out.IifName = int(f.Number()), priority, mark, &mask, from
		return *out
	}
	in := rule(r.Priority, r.Marks.Transparent, "")
	out := rule(r.Priority+1, r.Marks.Returned(), "lo")
	in.Table, out.Table = r.Table, r.Table
	jump := rule(r.Priority-1, r.Marks.Transparent, "lo")
	jump.Goto = out.Priority
	return []netlink.Rule{in, out, jump}
}

// sameRule reports whether the kernel's rule have is what want says.
func sameRule(have, want netlink.Rule) bool {
	return have.Priority == want.Priority && have.Mark == want.Mark && have.Mask != nil && *have.Mask == *want.Mask &&
		have.IifName == want.IifName && have.Goto == want.Goto && (want.Goto >= 0 || have.Table == want.Table)
}

// present are kproxy's rules in the kernel, also those of an earlier configuration:
// nobody else has both the priority and the table, or the jump's target.
func (r Routing) present(f service.Family) ([]netlink.Rule, error) {
	all, err := netlink.RuleList(int(f.Number()))
	if err != nil {
		return nil, fmt.Errorf("list %s routing rules: %w", f, err)
	}
	return slices.DeleteFunc(all, func(have netlink.Rule) bool {
		return !slices.ContainsFunc(r.rules(f), func(want netlink.Rule) bool {
			return have.Priority == want.Priority && have.Goto == want.Goto && (want.Goto >= 0 || have.Table == want.Table)
		})
	}), nil
}

// Present says what is there, a line each: what Remove would remove.
func (r Routing) Present() ([]string, error) {
	var out []string
	if r.Table == 0 {
		return nil, nil
	}
	for _, f := range r.families() {
		rules, err := r.present(f)
		if err != nil {
			return nil, err
		}
		for _, rule := range rules {
			to := fmt.Sprintf("table %d", rule.Table)
			if rule.Goto >= 0 {
				to = fmt.Sprintf("rule %d", rule.Goto)
			}
			out = append(out, fmt.Sprintf("%s routing rule %d to %s", f, rule.Priority, to))
		}
		routes, err := r.routes(f)
		if err != nil {
			return nil, err
		}
		for _, route := range routes {
			out = append(out, fmt.Sprintf("%s local route %s in table %d", f, route.Dst, r.Table))
		}
		if listenerIsLocal(f) {
			out = append(out, fmt.Sprintf("%s route to the listener's address %s", f, ListenerAddress[f]))
		}
	}
	return out, nil
}

// Missing says what isn't there, a phrase each.
func (r Routing) Missing() ([]string, error) {
	var out []string
	for _, f := range r.wanted() {
		have, err := r.present(f)
		if err != nil {
			return nil, err
		}
		for _, want := range r.rules(f) {
			if !slices.ContainsFunc(have, func(have netlink.Rule) bool { return sameRule(have, want) }) {
				out = append(out, fmt.Sprintf("%s rule %d to table %d", f, want.Priority, r.Table))
			}
		}
		routes, err := r.routes(f)
		if err != nil {
			return nil, err
		}
		if len(routes) == 0 {
			out = append(out, fmt.Sprintf("%s route in table %d", f, r.Table))
		}
		if !listenerIsLocal(f) {
			out = append(out, fmt.Sprintf("%s route to the listener's address %s", f, ListenerAddress[f]))
		}
	}
	return out, nil
}

// RoutingWatch asks what of a Routing is missing when something may have changed, for one caller. The Routing may be nil.
type RoutingWatch struct {
	*Routing
	events  kernel.RouteEvents
	missing []string // when it was asked last
}

// Missing is [Routing.Missing] of now.
func (w *RoutingWatch) Missing() ([]string, error) {
	if len(w.missing) > 0 {
		w.events.Again()
	}
	err := w.events.Look(func() (err error) {
		w.missing, err = w.Routing.Missing()
		return err
	})
	return slices.Clone(w.missing), err
}

// listenerIsLocal asks for one route: a list of table local is as long as the node
// has addresses, ten thousand where IPVS serves as many services.
func listenerIsLocal(f service.Family) bool {
	routes, err := netlink.RouteGet(ListenerAddress[f].AsSlice())
	return err == nil && len(routes) > 0 && routes[0].Type == unix.RTN_LOCAL
}

func listenerRoute(f service.Family, lo int) *netlink.Route {
	return &netlink.Route{
		Table: unix.RT_TABLE_LOCAL, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST, LinkIndex: lo,
		Dst: &net.IPNet{IP: ListenerAddress[f].AsSlice(), Mask: net.CIDRMask(f.Bits(), f.Bits())},
	}
}

func (r Routing) routes(f service.Family) ([]netlink.Route, error) {
	routes, err := netlink.RouteListFiltered(int(f.Number()),
		&netlink.Route{Table: r.Table, Type: unix.RTN_LOCAL}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE)
	if err != nil {
		return nil, fmt.Errorf("list %s routes of table %d: %w", f, r.Table, err)
	}
	return routes, nil
}

// Ensure adds what is missing, routes before what leads to them.
func (r Routing) Ensure() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find loopback: %w", err)
	}
	for _, f := range r.wanted() {
		route := &netlink.Route{
			Table: r.Table, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST, LinkIndex: lo.Attrs().Index,
			Dst: &net.IPNet{IP: make(net.IP, f.Bits()/8), Mask: net.CIDRMask(0, f.Bits())},
		}
		if err := netlink.RouteReplace(route); err != nil {
			return fmt.Errorf("add %s route to table %d: %w", f, r.Table, err)
		}
		if err := netlink.RouteReplace(listenerRoute(f, lo.Attrs().Index)); err != nil {
			return fmt.Errorf("make %s this node's: %w", ListenerAddress[f], err)
		}
		if err := r.ensureRules(f); err != nil {
			return err
		}
	}
	return nil
}

// ensureRules adds the rules, and deletes those of an earlier configuration.
func (r Routing) ensureRules(f service.Family) error {
	have, err := r.present(f)
	if err != nil {
		return err
	}
	for _, want := range r.rules(f) {
		if !slices.ContainsFunc(have, func(have netlink.Rule) bool { return sameRule(have, want) }) {
			if err := netlink.RuleAdd(&want); err != nil && !errors.Is(err, unix.EEXIST) {
				return fmt.Errorf("add %s routing rule %d: %w", f, want.Priority, err)
			}
		}
	}
	for _, old := range have {
		if !slices.ContainsFunc(r.rules(f), func(want netlink.Rule) bool { return sameRule(old, want) }) {
			if err := netlink.RuleDel(&old); err != nil {
				return fmt.Errorf("delete old %s routing rule: %w", f, err)
			}
		}
	}
	return nil
}

// Remove removes rules and routes, and nothing else that may be in the table.
func (r Routing) Remove() error {
	var errs *multierror.Error
	if r.Table == 0 {
		return nil
	}
	for _, f := range r.families() {
		rules, err := r.present(f)
		errs = multierror.Append(errs, err)
		for _, rule := range rules {
			if err := netlink.RuleDel(&rule); err != nil && !errors.Is(err, unix.ENOENT) {
				errs = multierror.Append(errs, fmt.Errorf("delete %s routing rule: %w", f, err))
			}
		}
		routes, err := r.routes(f)
		errs = multierror.Append(errs, err)
		for _, route := range routes {
			if err := netlink.RouteDel(&route); err != nil && !errors.Is(err, unix.ESRCH) {
				errs = multierror.Append(errs, fmt.Errorf("delete %s route: %w", f, err))
			}
		}
		if !listenerIsLocal(f) {
			continue
		}
		if lo, err := netlink.LinkByName("lo"); err != nil {
			errs = multierror.Append(errs, fmt.Errorf("find loopback: %w", err))
		} else if err := netlink.RouteDel(listenerRoute(f, lo.Attrs().Index)); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = multierror.Append(errs, fmt.Errorf("delete route to %s: %w", ListenerAddress[f], err))
		}
	}
	return errs.ErrorOrNil()
}

// ListenerAddress is where the rules send connections that userspace serves, with
// the shared listeners' ports: an address of this node that is on no interface.
// [Routing] makes it local by a route in the kernel's own table local.
//
// REDIRECT has none to send to on an interface without an address, and drops
// (nf_nat_redirect_ipv4 in net/netfilter/nf_nat_redirect.c); on one that has only
// a link-local address, listeners can't answer datagrams from that. TPROXY leaves
// the service's address in the packet, which IPVS takes to its virtual server
// before a socket gets it (ip_vs_in_hook at LOCAL_IN).
//
// The IPv4 address is link-local (RFC 3927) and the IPv6 one unique local (RFC
// 4193): no router forwards the former, and none has the latter unless somebody
// spells kproxy in ASCII too.
var ListenerAddress = [2]netip.Addr{
	service.IPv4: netip.MustParseAddr("169.254.102.49"),
	service.IPv6: netip.MustParseAddr("fd4b:5052:4f58:59::1"),
}
