package iptables

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/service"
)

// Observe reads back kproxy's chains, the jumps into them, and its sets.
func (b *Backend) Observe(ctx context.Context) (kernel.Ruleset, error) {
	var out kernel.Ruleset
	var err error
	b.written = 0
	for _, f := range b.env.Families() {
		if out.Chains[f], out.Jumps[f], err = b.observeFamily(ctx, f); err != nil {
			return out, err
		}
		for i := range out.Chains[f] {
			b.written += len(out.Chains[f][i].Rules)
		}
	}
	out.Sets, err = kernel.ReadSets(b.env.Sets)
	return out, err
}

func (b *Backend) observeFamily(ctx context.Context, f service.Family) ([]kernel.Chain, []kernel.Jump, error) {
	text, err := b.env.Runner.Run(ctx, nil, b.env.Variant.Program[f]+"-save")
	if err != nil {
		return nil, nil, fmt.Errorf("read %s rules: %w", f, err)
	}
	chains, jumps := ParseSave(text)
	return chains, jumps, nil
}

// ownTables are the tables that kproxy has chains in.
var ownTables = []string{"filter", "mangle", "nat"}

// ParseSave picks kproxy's chains, and the rules of built-in chains that lead to
// one of them, out of what iptables-save printed.
func ParseSave(text []byte) ([]kernel.Chain, []kernel.Jump) {
	p := saveParser{index: map[string]int{}, closed: map[string]bool{}}
	for line := range kernel.SavedLines(string(text)) {
		p.line(line)
	}
	slices.SortFunc(p.chains, kernel.CompareChains)
	return p.chains, p.jumps
}

type saveParser struct {
	table  string // current one; empty for one that isn't kproxy's business
	chains []kernel.Chain
	index  map[string]int  // of this table's own chains
	closed map[string]bool // this table's built-in chains, from a rule on that nothing gets past
	jumps  []kernel.Jump
}

func (p *saveParser) line(s string) {
	switch {
	case strings.HasPrefix(s, "*"):
		clear(p.index)
		clear(p.closed)
		if p.table = s[1:]; !slices.Contains(ownTables, p.table) {
			p.table = ""
		}
	case p.table == "":
	case strings.HasPrefix(s, ":"):
		name, _, _ := strings.Cut(s[1:], " ")
		if kernel.Own(name) {
			p.index[name] = len(p.chains)
			p.chains = append(p.chains, kernel.Chain{Table: p.table, Name: name})
		}
	case strings.HasPrefix(s, "-A "):
		name, rule, _ := strings.Cut(s[3:], " ")
		if i, own := p.index[name]; own {
			p.chains[i].Rules = append(p.chains[i].Rules, rule)
		} else if t := target(rule); kernel.Own(t) {
			p.jumps = append(p.jumps, kernel.Jump{Table: p.table, From: name, Rule: rule, Last: t == steering.ChainAccept && !p.closed[name]})
		} else if refusesAll(rule) {
			p.closed[name] = true
		}
	}
}

// target returns the chain or target that a rule leads to; options of the target follow it.
func target(rule string) string {
	words := kernel.Words(rule)
	for i := range len(words) - 1 {
		if (words[i] == "-j" || words[i] == "-g") && (i == 0 || words[i-1] != "--comment") {
			return words[i+1]
		}
	}
	return ""
}
