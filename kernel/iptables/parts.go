package iptables

import (
	"bytes"
	"fmt"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// iptables-nft-restore keeps the chains that a commit names, or leads to, in a
// sorted list and searches it from its beginning at every rule
// (cache_chain_list_insert, iptables/nft-cache.c): 10,000 services take 4.8 s in
// one commit and 1.3 s in commits of partRules rules. But at every commit the
// kernel walks all rules that a packet can reach (nft_chain_validate), so a
// commit is no smaller than partShare of the rules that are there.
//
// The legacy variant reads and replaces the table at every commit, whatever its
// size: there one is best.
const (
	partRules = 2000
	partShare = 8
)

// parts cuts chains, which are sorted by table, into lists for one commit each.
// A list leads only to chains that are in it, in an earlier one, or in the
// kernel. What is in a chain doesn't depend on other chains, so those services
// that chains old and new agree about are served at every point in between.
func (b *Backend) parts(chains []kernel.Chain) [][]kernel.Chain {
	var out [][]kernel.Chain
	limit := max(partRules, b.written/partShare)
	for _, group := range groupBy(chains, tableOf) {
		rules := 0
		for i := range group {
			rules += group[i].Len()
		}
		if b.env.Variant.Name == "legacy" || rules <= limit {
			out = append(out, group)
		} else {
			out = append(out, cut(leadFirst(group), limit)...)
		}
	}
	return out
}

func tableOf(c kernel.Chain) string { return c.Table }

// cut divides chains into lists of about limit rules.
func cut(chains []kernel.Chain, limit int) [][]kernel.Chain {
	var out [][]kernel.Chain
	start, rules := 0, 0
	for i := range chains {
		if rules += chains[i].Len(); rules >= limit || i == len(chains)-1 {
			out = append(out, chains[start:i+1])
			start, rules = i+1, 0
		}
	}
	return out
}

// leadFirst orders chains of one table so that each comes after those it leads
// to. A service's chains lead to no others than its own.
func leadFirst(chains []kernel.Chain) []kernel.Chain {
	index := make(map[string]int, len(chains))
	of := make(map[service.Key]int, len(chains))
	for i := range chains {
		index[chains[i].Name] = i
		of[chains[i].Owner]++
	}
	out := make([]kernel.Chain, 0, len(chains))
	seen := make([]bool, len(chains))
	var visit func(int)
	visit = func(i int) {
		if seen[i] {
			return
		}
		seen[i] = true
		if c := &chains[i]; c.Owner == (service.Key{}) || of[c.Owner] > 1 {
			for _, r := range c.Text() {
				if to, ok := index[target(r)]; ok {
					visit(to)
				}
			}
		}
		out = append(out, chains[i])
	}
	for i := range chains {
		visit(i)
	}
	return out
}

// usualRule is about how long a rule is with the chain it is in, in bytes.
const usualRule = 140

// restoreText is the input of iptables-restore for parts.
func restoreText(parts [][]kernel.Chain) []byte {
	rules := 0
	for _, part := range parts {
		for i := range part {
			rules += 1 + part[i].Len()
		}
	}
	text := bytes.NewBuffer(make([]byte, 0, usualRule*rules))
	for _, part := range parts {
		fmt.Fprintf(text, "*%s\n", part[0].Table)
		for i := range part {
			fmt.Fprintf(text, ":%s - [0:0]\n", part[i].Name)
		}
		for i := range part {
			for _, r := range part[i].Text() {
				for _, s := range []string{"-A ", part[i].Name, " ", r, "\n"} { // without the time that fmt takes
					text.WriteString(s)
				}
			}
		}
		text.WriteString("COMMIT\n")
	}
	return text.Bytes()
}
