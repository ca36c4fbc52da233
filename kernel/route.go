package kernel

import (
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/hashicorp/go-multierror"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/service"
)

// Routing is what brings endpoints' answers to sockets that bear a client's
// address: one rule per family that sends packets marked transparent to one
// table, whose only route delivers everything locally. Its methods work in the
// network namespace of the calling thread.
type Routing struct {
	Marks    Marks
	Table    int // number of the table
	Priority int // of the rule; between the local table's 0 and the main table's 32766
	SkipIPv6 bool
}

// DefaultRouting numbers both after kube-proxy's metrics port.
func DefaultRouting() Routing {
	return Routing{Marks: DefaultMarks(), Table: 10249, Priority: 10249}
}

func (r Routing) families() []service.Family {
	if r.SkipIPv6 {
		return []service.Family{service.IPv4}
	}
	return service.Families[:]
}

// Missing says what isn't there, a phrase each.
func (r Routing) Missing() ([]string, error) {
	var out []string
	for _, f := range r.families() {
		rule, err := r.hasRule(f)
		if err != nil {
			return nil, err
		}
		if !rule {
			out = append(out, fmt.Sprintf("%s rule to table %d", f, r.Table))
		}
		route, err := r.hasRoute(f)
		if err != nil {
			return nil, err
		}
		if !route {
			out = append(out, fmt.Sprintf("%s route in table %d", f, r.Table))
		}
	}
	return out, nil
}

func (r Routing) hasRule(f service.Family) (bool, error) {
	rules, err := r.rules(f)
	if err != nil {
		return false, err
	}
	return slices.ContainsFunc(rules, r.current), nil
}

// rules are kproxy's rules: nobody else has its priority and its table.
func (r Routing) rules(f service.Family) ([]netlink.Rule, error) {
	all, err := netlink.RuleList(int(familyNumber[f]))
	if err != nil {
		return nil, fmt.Errorf("list %s routing rules: %w", f, err)
	}
	return slices.DeleteFunc(all, func(have netlink.Rule) bool {
		return have.Table != r.Table || have.Priority != r.Priority
	}), nil
}

// current reports whether a rule has the marks that are configured now.
func (r Routing) current(have netlink.Rule) bool {
	return have.Mark == r.Marks.Transparent && have.Mask != nil && *have.Mask == r.Marks.Own()
}

func (r Routing) hasRoute(f service.Family) (bool, error) {
	routes, err := r.routes(f)
	return len(routes) > 0, err
}

func (r Routing) routes(f service.Family) ([]netlink.Route, error) {
	routes, err := netlink.RouteListFiltered(int(familyNumber[f]),
		&netlink.Route{Table: r.Table, Type: unix.RTN_LOCAL}, netlink.RT_FILTER_TABLE|netlink.RT_FILTER_TYPE)
	if err != nil {
		return nil, fmt.Errorf("list %s routes of table %d: %w", f, r.Table, err)
	}
	return routes, nil
}

// Ensure adds what is missing, the route before the rule that leads to it.
func (r Routing) Ensure() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find loopback: %w", err)
	}
	for _, f := range r.families() {
		route := &netlink.Route{
			Table: r.Table, Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST, LinkIndex: lo.Attrs().Index,
			Dst: &net.IPNet{IP: make(net.IP, f.Bits()/8), Mask: net.CIDRMask(0, f.Bits())},
		}
		if err := netlink.RouteReplace(route); err != nil {
			return fmt.Errorf("add %s route to table %d: %w", f, r.Table, err)
		}
		if err := r.ensureRule(f); err != nil {
			return err
		}
	}
	return nil
}

// ensureRule adds the rule, and deletes those of an earlier configuration.
func (r Routing) ensureRule(f service.Family) error {
	rules, err := r.rules(f)
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(rules, r.current) {
		if err := netlink.RuleAdd(r.rule(f)); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("add %s routing rule: %w", f, err)
		}
	}
	for _, old := range rules {
		if !r.current(old) {
			if err := netlink.RuleDel(&old); err != nil {
				return fmt.Errorf("delete old %s routing rule: %w", f, err)
			}
		}
	}
	return nil
}

func (r Routing) rule(f service.Family) *netlink.Rule {
	mask := r.Marks.Own()
	rule := netlink.NewRule()
	rule.Family, rule.Mark, rule.Mask = int(familyNumber[f]), r.Marks.Transparent, &mask
	rule.Table, rule.Priority = r.Table, r.Priority
	return rule
}

// Remove removes rules and routes, and nothing else that may be in the table.
func (r Routing) Remove() error {
	var errs *multierror.Error
	for _, f := range r.families() {
		rules, err := r.rules(f)
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
	}
	return errs.ErrorOrNil()
}
