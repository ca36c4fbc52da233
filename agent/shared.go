package agent

import (
	"slices"
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// withShared returns have with the sets, chains and jumps that all services
// share. A chain that is empty in shared is one that services fill: if there is
// one, an earlier kproxy filled it, and it stays. So do the virtual servers and
// addresses, all of which are services', and the rules that lead to chains which
// shared doesn't have: those of a data plane that an earlier kproxy used, whose
// services this one will program another way.
func withShared(have, shared kernel.Ruleset) kernel.Ruleset {
	out := kernel.Ruleset{Sets: slices.Clone(have.Sets), Virtuals: have.Virtuals, Addresses: have.Addresses}
	for _, s := range shared.Sets {
		if !slices.ContainsFunc(have.Sets, func(h kernel.Set) bool { return h.Name == s.Name }) {
			out.Sets = append(out.Sets, s)
		}
	}
	slices.SortFunc(out.Sets, func(a, b kernel.Set) int { return strings.Compare(a.Name, b.Name) })
	for f := range service.Families {
		chains := slices.Clone(have.Chains[f])
		for _, c := range shared.Chains[f] {
			i := slices.IndexFunc(chains, sameChain(c))
			switch {
			case i < 0:
				chains = append(chains, c)
			case c.Len() > 0:
				former := waysOut(chains[i], have.Chains[f], shared.Chains[f])
				chains[i] = c
				chains[i].Rules = slices.Concat(c.Text(), former)
			}
		}
		slices.SortFunc(chains, kernel.CompareChains)
		out.Chains[f] = chains
		out.Jumps[f] = slices.Clone(have.Jumps[f])
		for _, j := range shared.Jumps[f] {
			if !slices.Contains(out.Jumps[f], j) {
				out.Jumps[f] = append(out.Jumps[f], j)
			}
		}
	}
	return out
}

// waysOut are the rules of c that lead to a chain which have has and shared
// doesn't.
func waysOut(c kernel.Chain, have, shared []kernel.Chain) []string {
	var out []string
	for _, r := range c.Text() {
		words := kernel.Words(r)
		if len(words) < 2 || words[len(words)-2] != "-j" {
			continue
		}
		to := sameChain(kernel.Chain{Table: c.Table, Name: words[len(words)-1]})
		if slices.ContainsFunc(have, to) && !slices.ContainsFunc(shared, to) {
			out = append(out, r)
		}
	}
	return out
}

// sameChain returns a test for chains of c's name.
func sameChain(c kernel.Chain) func(kernel.Chain) bool {
	return func(o kernel.Chain) bool { return o.Table == c.Table && o.Name == c.Name }
}

// asWanted returns what was read back, with the entries of sets left out of
// account that want leaves out as well.
func asWanted(have, want kernel.Ruleset) kernel.Ruleset {
	out := have
	out.Sets = slices.Clone(have.Sets)
	for i := range out.Sets {
		s := &out.Sets[i]
		at, found := slices.BinarySearchFunc(want.Sets, s.Name, func(w kernel.Set, name string) int { return strings.Compare(w.Name, name) })
		s.Dynamic = !found || want.Sets[at].Dynamic
	}
	return out
}
