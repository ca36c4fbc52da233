package agent

import (
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
// userspace, with their rules beneath. Equal manifests give equal text.
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
