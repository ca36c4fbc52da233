package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/kernel/ipvs"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/source/file"
)

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
	host, _, err := probeApart(ctx)
	if err == nil {
		err = host.Missing()
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
	row := modes[o.Mode]
	if err := row.missing(host.Caps); err != nil {
		return "", err
	}
	if virtuals := host.Caps.Plane(plan.IPVS).Host; row.ipvs {
		host.Caps.Planes = planes(host.Rules, virtuals, o.config().IPVS.Scheduler, nil)
	} else {
		host.Caps.Planes = planes(host.Rules, plan.Capability{}, "", nil)
	}
	host.Caps.Forwarding = kernel.Forwarding()
	p, _ := plan.Compute(nil, plan.Inputs{Now: time.Now(), Snapshot: snapshot, Policy: policy, Caps: host.Caps})
	rules := renderOptions(o)
	rules.RandomFully, rules.SocketMatch, rules.CatchRefusals = host.RandomFully, host.SocketMatch, host.CatchRefusals
	rules.SkipIPv6, rules.DropInvalid = !host.IPv6, !kernel.LiberalConntrack()
	virtuals := ipvs.DefaultOptions()
	virtuals.Marks, virtuals.CatchRefusals, virtuals.SkipIPv6 = rules.Marks, rules.CatchRefusals, rules.SkipIPv6
	want := kernel.Merge(iptables.Render(p, rules), ipvs.Render(p, virtuals))
	have, err := observe(ctx, host)
	if err != nil {
		return "", err
	}
	return diffText(have, kernel.Diff(have, want)), nil
}

// observe reads what the kernel holds, and changes nothing.
func observe(ctx context.Context, host *kernel.Host) (kernel.Ruleset, error) {
	open, err := kernel.OpenIPSets()
	if err != nil {
		return kernel.Ruleset{}, err
	}
	defer open.Close()
	sets := kernel.Unchanged{SetStore: open}
	c := iptables.DefaultConfig()
	c.Sets, c.Variant, c.SkipIPv6 = sets, host.Variant, !host.IPv6
	b, err := iptables.New(c)
	if err != nil {
		return kernel.Ruleset{}, err
	}
	if _, err := os.Stat("/proc/thread-self/net/ip_vs"); err != nil { // asking for it would load it
		return b.Observe(ctx)
	}
	var v virtualServers
	if v.table, err = ipvs.OpenTable(); err != nil {
		return kernel.Ruleset{}, err
	}
	defer v.table.Close()
	if v.link, err = ipvs.OpenLink(); err != nil {
		return kernel.Ruleset{}, err
	}
	defer v.link.Close()
	vc := v.config(time.Second)
	vc.Rules, vc.Sets = b, sets
	both, err := ipvs.New(vc)
	if err != nil {
		return kernel.Ruleset{}, err
	}
	return both.Observe(ctx)
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
