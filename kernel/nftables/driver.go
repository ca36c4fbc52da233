package nftables

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Driver is the [kernel.Driver] of nftables.
type Driver struct {
	host     plan.Capability
	skipIPv6 bool
	plane    *Plane          // made by Steering
	through  func(conn) conn // what tests put in front of the kernel; else nil

	elsewhere string
	flowtable bool // is wanted
	without   bool // the kernel has none
	silent    bool // nor a log of refusals
}

var _ kernel.Driver = (*Driver)(nil)

// NewDriver returns the driver of a host of which nothing is known yet. What it can't do
// may be done elsewhere, see [plan.Abilities]. With a flowtable, established connections pass by
// that, where the kernel has one.
func NewDriver(elsewhere string, flowtable bool) *Driver {
	return &Driver{elsewhere: elsewhere, flowtable: flowtable}
}

// Assume implements [kernel.Driver].
func (d *Driver) Assume() {
	d.host = plan.Capability{Name: string(plan.NFTables), Supported: true}
}

// Probe implements [kernel.Driver]. The kernel checks everything that may be programmed, in
// a transaction that isn't carried out.
func (d *Driver) Probe(_ context.Context, _ plan.Mode, trial bool) (kernel.Facts, error) {
	d.host = plan.Capability{Name: string(plan.NFTables)}
	var err, flowtable, log error
	look := func() error {
		o := DefaultOptions()
		if log = d.try(service.IPv4, o); log != nil {
			o.LogRefusals = false
			err = d.try(service.IPv4, o)
		}
		if err == nil {
			d.skipIPv6 = d.try(service.IPv6, o) != nil
		}
		if err == nil && d.flowtable {
			o.Flowtable = true
			flowtable = d.try(service.IPv4, o)
		}
		return nil
	}
	if !trial {
		kernel.KeepAccounting(func() { _ = look() })
	} else if apart := kernel.Apart(look); apart != nil {
		err = apart
	}
	ipv6 := plan.Capability{Name: "ip6 nftables", Supported: err == nil && !d.skipIPv6}
	if errors.Is(err, kernel.ErrPermission) {
		return kernel.Facts{Missing: kernel.NoPermission(err), Capabilities: []plan.Capability{d.host}}, nil
	}
	if d.host.Supported = err == nil; err != nil {
		d.host.Reason = err.Error()
	} else {
		d.host.Reason = "every rule works"
	}
	facts := kernel.Facts{Capabilities: []plan.Capability{d.host, ipv6}}
	if d.silent = log != nil; err == nil {
		c := plan.Capability{Name: "log of refusals", Supported: log == nil, Reason: "rules tell which clients they refuse"}
		if log != nil {
			c.Reason = fmt.Sprintf("the kernel lacks CONFIG_NFT_LOG, CONFIG_NFT_LIMIT or CONFIG_NETFILTER_NETLINK_LOG (%v); nothing names the clients that rules refuse", log)
		}
		facts.Capabilities = append(facts.Capabilities, c)
	}
	if d.flowtable && err == nil {
		c := plan.Capability{Name: "flowtables", Supported: flowtable == nil, Reason: "established connections to endpoints pass by one"}
		if flowtable != nil {
			c.Reason = fmt.Sprintf("the kernel lacks CONFIG_NF_FLOW_TABLE, CONFIG_NF_FLOW_TABLE_INET or CONFIG_NFT_FLOW_OFFLOAD (%v), so connections take the usual way", flowtable)
		}
		facts.Capabilities, d.without = append(facts.Capabilities, c), !c.Supported
	}
	if err == nil {
		// A firewall that can't be read is taken to let services through: status tells of it later.
		chains, _ := droppingChains()
		facts.Dropping = yields(chains)
	} else {
		release, _ := kernel.Release()
		facts.Missing = &kernel.Missing{What: "nftables", How: "run Linux 5.13 or later (this is " + release + ") with CONFIG_NF_TABLES, CONFIG_NFT_NAT, _MASQ, _FIB_IPV4, _SOCKET, _NUMGEN, _REJECT, _CT, or choose another --mode", Err: err}
	}
	return facts, nil
}

// try has the kernel check the rules of a family, and nothing else.
func (d *Driver) try(f service.Family, o Options) error {
	t, err := openTables([]service.Family{f})
	if err != nil {
		return err
	}
	defer t.close()
	if d.through != nil {
		t.socket = d.through(t.socket)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	requests, err := t.setUp()
	if err != nil {
		return err
	}
	if o.Flowtable {
		requests = append(requests, newFlowtable(f))
	}
	networks := []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/64")}
	policy := plan.Policy{BridgedLinks: networks, CloseClusterIPs: true, ServiceCIDRs: networks}
	r := newRules(&o, f, &policy)
	more, _, _ := t.writeChains(f, append(r.chains(), r.treat(treatment{endpoints: 2, pods: 3, masquerade: plan.MasqueradeUnlessPod, affinity: 60})...))
	requests = append(requests, more...)
	refusals, err := t.socket.Refusals(unix.NFNL_SUBSYS_NFTABLES, requests)
	if len(refusals) > 0 {
		err = requestError(requests, &refusals[0])
	}
	return classify(err)
}

// Load implements [kernel.Driver]: the kernel loads what rules need when it checks them.
func (d *Driver) Load(ctx context.Context, m plan.Mode) ([]plan.Capability, error) {
	if !m.Allows(plan.NFTables) {
		return nil, nil
	}
	_, err := d.Probe(ctx, m, true)
	return []plan.Capability{d.host}, err
}

// Planes implements [kernel.Driver].
func (*Driver) Planes() []plan.DataPlane { return []plan.DataPlane{plan.NFTables} }

// Abilities implements [kernel.Driver].
func (d *Driver) Abilities(*service.Snapshot, time.Time) []plan.Abilities {
	a := Abilities(d.host)
	a.Elsewhere = d.elsewhere
	return []plan.Abilities{a}
}

// Sysctls implements [kernel.Driver].
func (*Driver) Sysctls() []kernel.Sysctl { return nil }

func (d *Driver) options(s kernel.Settings) Options {
	o := DefaultOptions()
	o.Marks, o.TCPPort, o.UDPPort, o.SkipIPv6, o.Flowtable = s.Marks, s.TCPPort, s.UDPPort, d.skipIPv6, d.flowtable && !d.without
	o.LogRefusals, o.PassiveHealth = !d.silent, s.PassiveHealth
	o.CatchRefusals = o.CatchRefusals && s.PassiveHealth // else the client would find no other endpoint
	return o
}

func (d *Driver) routing(s kernel.Settings) *steering.Routing {
	r := steering.DefaultRouting()
	r.Marks, r.Table, r.SkipIPv6 = s.Marks, s.RouteTable, d.skipIPv6
	return &r
}

// Steering implements [kernel.Driver].
func (d *Driver) Steering(s kernel.Settings) (_ kernel.Steering, err error) {
	d.plane, err = Open(d.options(s), d.routing(s))
	return d.plane, err
}

// Plane implements [kernel.Driver]: it is the steering.
func (d *Driver) Plane(kernel.Settings) (kernel.Plane, error) {
	d.plane.options.DropInvalid = !kernel.LiberalConntrack()
	return d.plane, nil
}

// Render implements [kernel.Driver].
func (d *Driver) Render(p *plan.Plan, s kernel.Settings) []kernel.Section {
	o := d.options(s)
	var b strings.Builder
	for _, f := range o.Families() {
		b.WriteString(tableText(p, &o, f))
	}
	return []kernel.Section{{Name: string(plan.NFTables), Text: b.String()}}
}

// tableText prints what is programmed for p in one family: the table as nft lists it, and
// the elements of its sets as commands of nft.
func tableText(p *plan.Plan, o *Options, f service.Family) string {
	scope := newScope(true)
	all := scope.whole([]service.Family{f}, nil, p, nil)
	var b strings.Builder
	fmt.Fprintf(&b, "table %s %s {\n\tcomment %q\n", nfWord(f), Name, layout)
	for _, c := range counters {
		fmt.Fprintf(&b, "\tcounter %s {\n\t}\n", c)
	}
	bySet := map[string]*Set{}
	for _, s := range sets(f) {
		bySet[s.Name] = &s
		b.WriteString(s.text())
	}
	if o.Flowtable {
		b.WriteString(flowtableText())
	}
	for _, c := range newRules(o, f, &p.Policy).withTreatments(scope.treatments[f]) {
		b.WriteString(c.text())
	}
	b.WriteString("}\n")
	slices.SortFunc(all.come, func(x, y member) int { return x.place().compare(y.place()) })
	for _, e := range all.come {
		fmt.Fprintf(&b, "add element %s %s %s { %s }\n", nfWord(f), Name, e.set, bySet[e.set].textOf(&e.Element))
	}
	return b.String()
}

func typesText(types []Type) string {
	names := make([]string, len(types))
	for i, t := range types {
		names[i] = t.Name
	}
	return strings.Join(names, " . ")
}

// text prints s.
func (s *Set) text() string {
	kind, typ := "set", typesText(s.Key)
	if s.Verdicts {
		kind, typ = "map", typ+" : verdict"
	} else if len(s.Data) > 0 {
		kind, typ = "map", typ+" : "+typesText(s.Data)
	}
	var flags []string
	for _, f := range []struct {
		name string
		on   bool
	}{{"dynamic", s.Dynamic}, {"interval", s.Intervals}, {"timeout", s.Timeouts}} {
		if f.on {
			flags = append(flags, f.name)
		}
	}
	out := fmt.Sprintf("\t%s %s {\n\t\ttype %s\n", kind, s.Name, typ)
	if s.Dynamic {
		out += fmt.Sprintf("\t\tsize %d\n", dynamicElements)
	}
	if len(flags) > 0 {
		out += "\t\tflags " + strings.Join(flags, ",") + "\n"
	}
	out += fmt.Sprintf("\t\tcomment %q\n", s.Comment)
	return out + "\t}\n"
}

// text prints c.
func (c *Chain) text() string {
	out := "\tchain " + c.Name + " {\n"
	if c.Base {
		hook := []string{"prerouting", "input", "forward", "output", "postrouting"}[c.Hook]
		priority := map[int32]string{-150: "mangle", -100: "dstnat", 0: "filter", 100: "srcnat"}[c.Priority]
		if priority == "dstnat" && hook != "prerouting" {
			priority = "-100"
		}
		out += fmt.Sprintf("\t\ttype %s hook %s priority %s; policy accept;\n", c.Type, hook, priority)
	}
	for i := range c.Rules {
		out += "\t\t" + c.Rules[i].String() + "\n"
	}
	return out + "\t}\n"
}

// Diff implements [kernel.Driver], by what is in sets and maps, and which chains there are. Which services are in
// userspace isn't compared: a kproxy that runs decides that as it goes.
func (d *Driver) Diff(_ context.Context, p *plan.Plan, s kernel.Settings) (string, error) {
	o := d.options(s)
	o.DropInvalid = !kernel.LiberalConntrack()
	t, err := openTables(o.Families())
	if err != nil {
		return "", err
	}
	defer t.close()
	t.mu.Lock()
	defer t.mu.Unlock()
	scope := newScope(true)
	have, err := t.elements(scope.names...)
	if err != nil {
		return "", err
	}
	chains, err := t.readRules()
	if err != nil {
		return "", err
	}
	x := scope.whole(t.families, have, p, nil)
	var lines []string
	add := func(sign string, list []member) {
		for _, e := range list {
			if e.set == setUserspace {
				continue
			}
			lines = append(lines, fmt.Sprintf("%s %s %s: %s\n", sign, nfWord(e.family), e.set, t.sets[e.family][e.set].textOf(&e.Element)))
		}
	}
	add("-", x.gone)
	add("+", x.come)
	for _, f := range t.families {
		wanted := map[string]bool{}
		for _, c := range newRules(&o, f, &p.Policy).withTreatments(scope.treatments[f]) {
			wanted[c.Name] = true
			if is, there := chains[f][c.Name]; !there {
				lines = append(lines, fmt.Sprintf("+ %s chain %s\n", nfWord(f), c.Name))
			} else if is.rules != len(c.Rules) {
				lines = append(lines, fmt.Sprintf("+ %s chain %s: %s\n", nfWord(f), c.Name, countText(len(c.Rules))), fmt.Sprintf("- %s chain %s: %s\n", nfWord(f), c.Name, countText(is.rules)))
			}
		}
		for name := range chains[f] {
			if !wanted[name] && !isTreatment(name) { // those are kept for a while when nothing leads there any more
				lines = append(lines, fmt.Sprintf("- %s chain %s\n", nfWord(f), name))
			}
		}
	}
	slices.Sort(lines)
	return strings.Join(lines, ""), nil
}

// Explainers implements [kernel.Driver].
func (*Driver) Explainers() []kernel.Explainer { return nil }

// Preview implements [kernel.Driver].
func (d *Driver) Preview(_ context.Context, routeTable int) (out []string, err error) {
	r := d.routing(kernel.Settings{Marks: kernel.DefaultMarks(), RouteTable: routeTable})
	if out, err = r.Present(); err != nil {
		return nil, err
	}
	err = d.each(func(t *tables, f service.Family) error {
		found, err := t.find(f)
		if found >= old {
			out = append(out, fmt.Sprintf("nftables table %s %s", nfWord(f), Name))
		}
		return err
	})
	return out, err
}

// Remove implements [kernel.Driver].
func (d *Driver) Remove(_ context.Context, routeTable int) error {
	return errors.Join(d.each(func(t *tables, f service.Family) error {
		found, err := t.find(f)
		if found >= old {
			err = t.commit([][]byte{deleteTable(f)})
		}
		return err
	}), d.routing(kernel.Settings{Marks: kernel.DefaultMarks(), RouteTable: routeTable}).Remove())
}

// Retire implements [kernel.Driver]. Conntrack rewrites what belongs to connections without rules.
func (d *Driver) Retire(ctx context.Context) (kernel.Drainer, error) { return nil, d.Remove(ctx, 0) }

// each calls f for both families. A kernel without nf_tables has nothing.
func (d *Driver) each(f func(*tables, service.Family) error) error {
	t, err := openTables(service.Families[:])
	if err != nil {
		return nil
	}
	defer t.close()
	t.mu.Lock()
	defer t.mu.Unlock()
	var errs error
	for _, family := range t.families {
		if err := f(t, family); err != nil && !errors.Is(err, unix.EOPNOTSUPP) && !errors.Is(err, unix.EINVAL) {
			errs = errors.Join(errs, err)
		}
	}
	return errs
}
