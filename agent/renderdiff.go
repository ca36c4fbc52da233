package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
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
