package agent

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/source/file"
)

// RenderOptions says what `kproxy render` renders.
type RenderOptions struct {
	Mode      plan.Mode
	Manifests []string
	Node      string
	// Config is what `kproxy run` would be told besides; nil for its defaults.
	Config *config.Config
}

func (o *RenderOptions) config() config.Config {
	if o.Config != nil {
		return *o.Config
	}
	return config.Default()
}

// Section is one part of what would be programmed.
type Section struct {
	Name string // "plan", "sets", "iptables-ipv4", "iptables-ipv6", "ipvs"
	Text string
}

// Render returns the plan for manifests on a host that has everything, and what
// would be programmed for it. Services stand as at the first start: in
// userspace, with their fallback rules. Equal manifests give equal text.
func Render(o RenderOptions) ([]Section, error) {
	if err := checkMode(o.Mode); err != nil {
		return nil, err
	}
	snapshot, problems, err := file.Load(o.Manifests, o.Node)
	if err != nil {
		return nil, err
	}
	if len(problems) > 0 {
		return nil, fmt.Errorf("%s (kproxy check prints every problem)", problems[0])
	}
	policy := renderPolicy(o)
	addresses, assumed := nodeAddresses(snapshot.Node())
	policy.NodeAddresses = addresses
	ps := planesOf(o.config()).assume()
	caps := plan.Caps{Planes: ps.abilities(nil, time.Time{})}
	p, _ := plan.Compute(nil, plan.Inputs{Now: time.Unix(0, 0).UTC(), Snapshot: snapshot, Policy: policy, Caps: caps})
	e := steering.Env{Options: steering.DefaultOptions()}
	o.complete(&e, ps)
	want := ps.renderer(&e).Fresh(p)
	sets := steering.Sets(p)
	var own []Section // of data planes that have more than rules and sets
	for _, r := range ps {
		s, ok := r.driver.(interface {
			Show(kernel.Ruleset) ([]kernel.Set, string)
		})
		if !ok {
			continue
		}
		more, text := s.Show(want)
		if sets = append(sets, more...); !p.Uses(r.name) {
			continue
		}
		if assumed && caps.Plane(r.name).LocalAddresses {
			text = assumption(p, r.name) + text
		}
		own = append(own, Section{string(r.name), text})
	}
	sections := []Section{{"plan", planText(p)}, {"sets", setsText(sets, want.Sets)}}
	for _, f := range service.Families {
		sections = append(sections, Section{"iptables-" + f.String(), rulesText(want.Chains[f], want.Jumps[f])})
	}
	return append(sections, own...), nil
}

// complete adds to e what `kproxy run` would be told, and every data plane's way.
func (o *RenderOptions) complete(e *steering.Env, ps planes) {
	c := o.config()
	e.TCPPort, e.UDPPort, e.Ways = uint16(c.ListenTCPPort), uint16(c.ListenUDPPort), ps.ways()
	e.Marks = kernel.Marks{Masquerade: c.MasqueradeMark(), Transparent: c.TransparentMark()}
}

func renderPolicy(o RenderOptions) plan.Policy {
	p := policyOf(o.config())
	p.Mode = o.Mode
	return p
}

// nodeAddresses are those on which n's node ports answer: its own, or where
// nothing says which those are, a documentation address of each family (RFC
// 5737, RFC 3849) that stands for them.
func nodeAddresses(n service.Node) (addresses []netip.Addr, assumed bool) {
	if len(n.Addresses) == 0 {
		return []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("2001:db8::1")}, true
	}
	return slices.SortedFunc(slices.Values(n.Addresses), netip.Addr.Compare), false
}

// assumption says that node addresses are assumed, where a data plane answers on them.
func assumption(p *plan.Plan, plane plan.DataPlane) string {
	if !slices.ContainsFunc(p.Services, func(s *plan.Service) bool {
		return s.Kernel == plane && slices.ContainsFunc(s.Frontends, func(f plan.Frontend) bool { return f.Kind == plan.NodePort })
	}) {
		return ""
	}
	var names []string
	for _, a := range p.Policy.NodeAddresses {
		names = append(names, a.String())
	}
	return "# no Node object says which addresses this node has: " + strings.Join(names, " and ") + " stand for them\n"
}

// RenderText is Render for people: every section with a heading.
func RenderText(o RenderOptions) (string, error) {
	sections, err := Render(o)
	if err != nil {
		return "", err
	}
	var b strings.Builder
	for i, s := range sections {
		if i > 0 {
			b.WriteByte('\n')
		}
		fmt.Fprintf(&b, "# %s\n%s", s.Name, s.Text)
	}
	return b.String(), nil
}

// planText prints the decisions, a block a service port.
func planText(p *plan.Plan) string {
	var b strings.Builder
	for _, s := range p.Services {
		fmt.Fprintf(&b, "%s %s: %s, %s: %s\n", s.Port.Key, s.Port.Protocol, s.DataPlane, s.State, s.Reason)
		for _, problem := range s.Problems {
			fmt.Fprintf(&b, "  problem: %s\n", problem)
		}
		if s.Kernel != p.Kernel && s.State != plan.StateExcluded {
			fmt.Fprintf(&b, "  beneath: %s, because %s\n", s.Kernel, s.KernelReason)
		}
		if s.Degraded != "" {
			fmt.Fprintf(&b, "  beneath: %s\n", s.Degraded)
		}
		for i := range s.Frontends {
			fmt.Fprintf(&b, "  %s\n", frontendText(&s.Frontends[i]))
		}
		for _, f := range service.Families {
			groupText(&b, "cluster", s.Groups[f].Cluster)
			groupText(&b, "local", s.Groups[f].Local)
		}
	}
	return b.String()
}

func frontendText(f *plan.Frontend) string {
	address := f.Address.String()
	if f.Kind == plan.NodePort {
		address = fmt.Sprintf("%s *:%d", f.Family, f.Address.Port())
	}
	text := fmt.Sprintf("%s %s: %s, masquerade %s", f.Kind, address, f.Verdict, f.Masquerade)
	if f.Local {
		text += ", local endpoints"
	}
	if f.ShortCircuit {
		text += ", all endpoints for clients on this node"
	}
	if len(f.SourceRanges) > 0 {
		text += fmt.Sprintf(", only from %v", f.SourceRanges)
	}
	return text
}

func groupText(b *strings.Builder, name string, group []plan.Backend) {
	for _, e := range group {
		local := ""
		if e.Local {
			local = ", on this node"
		}
		fmt.Fprintf(b, "  %s endpoint %s, weight %d%s\n", name, e.Address, e.Weight, local)
	}
}

// setsText prints sets as `ipset save` does, each where it is first. Empty sets are
// listed in one line.
func setsText(sets ...[]kernel.Set) string {
	var b strings.Builder
	var empty []string
	seen := map[string]bool{}
	for _, s := range slices.Concat(sets...) {
		if seen[s.Name] {
			continue
		}
		seen[s.Name] = true
		if len(s.Entries) == 0 {
			empty = append(empty, s.Name)
			continue
		}
		fmt.Fprintf(&b, "create %s %s\n", s.Name, s.Type)
		for _, e := range s.Entries {
			fmt.Fprintf(&b, "add %s %s\n", s.Name, e)
		}
	}
	if len(empty) > 0 {
		fmt.Fprintf(&b, "# empty: %s\n", strings.Join(empty, " "))
	}
	return b.String()
}

// rulesText prints chains and jumps as iptables-save does.
func rulesText(chains []kernel.Chain, jumps []kernel.Jump) string {
	var b strings.Builder
	for _, table := range []string{"mangle", "nat", "filter"} {
		fmt.Fprintf(&b, "*%s\n", table)
		for _, c := range chains {
			if c.Table == table {
				fmt.Fprintf(&b, ":%s - [0:0]\n", c.Name)
			}
		}
		for _, j := range jumps {
			if j.Table == table {
				fmt.Fprintf(&b, "-A %s %s\n", j.From, j.Rule)
			}
		}
		for _, c := range chains {
			for _, r := range c.Text() {
				if c.Table == table {
					fmt.Fprintf(&b, "-A %s %s\n", c.Name, r)
				}
			}
		}
		b.WriteString("COMMIT\n")
	}
	return b.String()
}

// RenderDiff says how what the kernel holds differs from what a kproxy with o would
// program on this host while every endpoint is up: a line that begins with "+" for what
// it lacks, with "-" for what it has besides. Sets that a running kproxy fills as it goes
// aren't compared. It changes nothing and returns "" where nothing differs.
func RenderDiff(ctx context.Context, o RenderOptions) (string, error) {
	snapshot, problems, err := file.Load(o.Manifests, o.Node)
	if err != nil {
		return "", err
	}
	if len(problems) > 0 {
		return "", fmt.Errorf("%s (kproxy check prints every problem)", problems[0])
	}
	ps := planesOf(o.config())
	host, _, err := probeApart(ctx, ps)
	if err == nil {
		err = errors.Join(host.Missing(), ps.missing(o.Mode))
	}
	if err != nil {
		return "", err
	}
	policy := renderPolicy(o)
	links, bridged, linksErr := kernel.Links()
	addresses, addressesErr := kernel.NodeAddresses()
	if err := errors.Join(linksErr, addressesErr); err != nil {
		return "", fmt.Errorf("look up this node's addresses: %w", err)
	}
	policy.Links, policy.BridgedLinks, policy.NodeAddresses = links, bridged, addresses
	caps := plan.Caps{Planes: ps.abilities(nil, time.Time{}), Forwarding: kernel.Forwarding()}
	p, _ := plan.Compute(nil, plan.Inputs{Now: time.Now(), Snapshot: snapshot, Policy: policy, Caps: caps})
	sets, err := kernel.OpenIPSets()
	if err != nil {
		return "", err
	}
	defer sets.Close()
	e := steering.EnvOf(host, kernel.Unchanged{SetStore: sets})
	o.complete(&e, ps)
	e.ReadOnly = true
	layer, _, err := ps.open(&e, o.Mode)
	if err != nil {
		return "", err
	}
	have, err := layer.Observe(ctx)
	if err != nil {
		return "", err
	}
	return diffText(have, kernel.Diff(have, ps.renderer(&e).Fresh(p))), nil
}

// diffText prints ops, which lead from have to what is wanted.
func diffText(have kernel.Ruleset, ops kernel.Ops) string {
	var b strings.Builder
	line := func(sign, format string, args ...any) { fmt.Fprintf(&b, sign+" "+format+"\n", args...) }
	for _, f := range service.Families {
		for _, c := range ops.Chains[f] {
			diffChain(line, f, have.Chains[f], c)
		}
		for _, c := range ops.DelChains[f] {
			line("-", "%s %s chain %s", f, c.Table, c.Name)
		}
		for _, j := range ops.AddJumps[f] {
			line("+", "%s %s %s: %s", f, j.Table, j.From, j.Rule)
		}
		for _, j := range ops.DelJumps[f] {
			line("-", "%s %s %s: %s", f, j.Table, j.From, j.Rule)
		}
	}
	for _, s := range ops.CreateSets {
		line("+", "set %s %s", s.Name, s.Type)
	}
	entries := func(sign string, sets []kernel.SetEntries) {
		for _, s := range sets {
			for _, e := range s.Entries {
				line(sign, "set %s: %s", s.Set.Name, e)
			}
		}
	}
	entries("+", ops.AddEntries)
	entries("-", ops.DelEntries)
	for _, name := range ops.DestroySets {
		line("-", "set %s", name)
	}
	for _, v := range ops.Virtuals {
		diffVirtual(line, v)
	}
	for _, a := range ops.AddAddresses {
		line("+", "link %s: %s", kernel.DummyLink, a)
	}
	for _, a := range ops.DelAddresses {
		line("-", "link %s: %s", kernel.DummyLink, a)
	}
	return b.String()
}

// diffChain prints the rules that a chain lacks, and those that it has besides; all of
// them where only their order differs.
func diffChain(line func(sign, format string, args ...any), f service.Family, have []kernel.Chain, want kernel.Chain) {
	i := slices.IndexFunc(have, func(h kernel.Chain) bool { return kernel.CompareChains(h, want) == 0 })
	if i < 0 {
		line("+", "%s %s chain %s", f, want.Table, want.Name)
		have, i = []kernel.Chain{{}}, 0
	}
	is, should := have[i].Text(), want.Text()
	without := func(rules, others []string) []string {
		return slices.DeleteFunc(slices.Clone(rules), func(r string) bool {
			return slices.ContainsFunc(others, func(o string) bool { return kernel.SameRule(r, o) })
		})
	}
	less, more := without(is, should), without(should, is)
	if len(less)+len(more) == 0 {
		less, more = is, should
	}
	for _, r := range less {
		line("-", "%s %s %s: %s", f, want.Table, want.Name, r)
	}
	for _, r := range more {
		line("+", "%s %s %s: %s", f, want.Table, want.Name, r)
	}
}

func diffVirtual(line func(sign, format string, args ...any), v kernel.VirtualChange) {
	name := fmt.Sprintf("virtual server %s %s", v.Protocol, v.Address)
	switch {
	case v.Remove:
		line("-", "%s", name)
	case v.Settings:
		line("+", "%s, scheduler %s", name, v.Scheduler)
	}
	for _, r := range v.Drain {
		line("-", "%s: real server %s", name, r.Address)
	}
	for _, r := range v.Set {
		line("+", "%s: real server %s, weight %d", name, r.Address, r.Weight)
	}
}
