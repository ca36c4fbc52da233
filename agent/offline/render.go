// Package offline has what commands do that need no loops: check manifests and the host, render, and clean up. A kproxy may run, except
// where a function says otherwise.
package offline

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"time"

	"kproxy.dev/kproxy/agent/node"
	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/source/file"
	"kproxy.dev/kproxy/source/kube"
)

// RenderOptions says what `kproxy render` renders.
type RenderOptions struct {
	Config config.Config // what `kproxy run` would be told
	Node   string
	// Firewalled: as on a host with a firewall to which mode auto yields; see [node.Drivers.Probe].
	Firewalled bool
}

// load reads what Services come from: manifests, or the Kubernetes API, which is asked once.
func (o *RenderOptions) load(ctx context.Context) (*service.Snapshot, error) {
	if o.Config.Kubernetes() {
		ctx, cancel := context.WithTimeout(ctx, clusterTimeout)
		defer cancel()
		return kube.Read(ctx, node.KubeConfig(&o.Config, o.Node, "kproxy", slog.New(slog.DiscardHandler)))
	}
	snapshot, problems, err := file.Load(o.Config.Manifests, o.Node)
	if err == nil && len(problems) > 0 {
		err = fmt.Errorf("%s (kproxy check prints every problem)", problems[0])
	}
	return snapshot, err
}

// clusterTimeout is how long an API server is waited for that is away.
const clusterTimeout = 30 * time.Second

// Render returns the plan for a source's Services on a host that has everything, and what
// would be programmed for it. Services stand as at the first start: in
// userspace, with their fallback rules. Equal Services give equal text.
func Render(ctx context.Context, o RenderOptions) ([]kernel.Section, error) {
	snapshot, err := o.load(ctx)
	if err != nil {
		return nil, err
	}
	policy := node.PolicyOf(o.Config)
	addresses, assumed := nodeAddresses(snapshot.Node())
	policy.NodeAddresses = addresses
	var dropping []string
	if o.Firewalled {
		dropping = []string{"a firewall"}
	}
	driver := node.DriversOf(o.Config).Assume(policy.Mode, &o.Config, dropping...)
	caps := plan.Caps{Planes: driver.Abilities(nil, time.Time{})}
	p, _ := plan.Compute(nil, plan.Inputs{Now: time.Unix(0, 0).UTC(), Snapshot: snapshot, Policy: policy, Caps: caps})
	sections := append([]kernel.Section{{Name: "plan", Text: planText(p)}}, driver.Render(p, o.settings())...)
	for i := range sections {
		if plane := plan.DataPlane(sections[i].Name); assumed && caps.Plane(plane).LocalAddresses {
			sections[i].Text = assumption(p, plane) + sections[i].Text
		}
	}
	return sections, nil
}

// settings returns the settings that `kproxy run` would have.
func (o *RenderOptions) settings() kernel.Settings {
	s := node.SettingsOf(&o.Config)
	s.TCPPort, s.UDPPort = uint16(o.Config.ListenTCPPort), uint16(o.Config.ListenUDPPort)
	return s
}

// nodeAddresses returns the addresses on which n's node ports answer: its own, or
// where nothing says which those are, a documentation address of each family (RFC
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
func RenderText(ctx context.Context, o RenderOptions) (string, error) {
	sections, err := Render(ctx, o)
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
		if s.Kernel != p.Preferred() && s.State != plan.StateExcluded {
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

// RenderDiff says how what the kernel holds differs from what a kproxy with o would
// program on this host while every endpoint is up: a line that begins with "+" for what
// it lacks, with "-" for what it has besides. Sets that a running kproxy fills as it goes
// aren't compared. It changes nothing and returns "" where nothing differs.
func RenderDiff(ctx context.Context, o RenderOptions) (string, error) {
	snapshot, err := o.load(ctx)
	if err != nil {
		return "", err
	}
	policy := node.PolicyOf(o.Config)
	// In a container that may not make one, such as those of deploy/, there is a kproxy to compare with, which has
	// tried the same on the host itself.
	apart := kernel.Apart(func() error { return nil }) == nil
	host, err := node.DriversOf(o.Config).Probe(ctx, policy.Mode, &o.Config, apart)
	if err == nil {
		err = cmp.Or(host.Missing, node.Missing(host.Driver, policy.Mode)) // without permission nothing else is known
	}
	if err != nil {
		return "", err
	}
	n := node.Networks{Host: host.Facts}
	if _, err := n.Read(slog.New(slog.DiscardHandler)); err != nil {
		return "", fmt.Errorf("look up this node's addresses: %w", err)
	}
	n.Fill(&policy)
	caps := plan.Caps{Planes: host.Driver.Abilities(nil, time.Time{}), PassedOver: host.PassedOver, Forwarding: kernel.Forwarding()}
	p, _ := plan.Compute(nil, plan.Inputs{Now: time.Now(), Snapshot: snapshot, Policy: policy, Caps: caps})
	return host.Driver.Diff(ctx, p, o.settings())
}
