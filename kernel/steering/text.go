package steering

import (
	"fmt"
	"slices"
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

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
