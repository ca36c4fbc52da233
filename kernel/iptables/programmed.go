package iptables

import (
	"slices"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Programmed returns the KernelHash of every service of p whose rules in have,
// the kernel's, are those in want, which was rendered of p: its own chains and
// every rule on the way to them.
func (*Renderer) Programmed(have, want kernel.Ruleset, p *plan.Plan) map[service.Key]uint64 {
	out := map[service.Key]uint64{}
	for _, s := range p.Services {
		if s.Kernel == plan.IPTables {
			out[s.Port.Key] = s.KernelHash
		}
	}
	for f := range service.Families {
		for _, j := range want.Jumps[f] {
			if j.Table == "nat" && !kernel.HasJump(have.Jumps[f], j) {
				return map[service.Key]uint64{}
			}
		}
		c := comparison{have: natChains(have.Chains[f]), want: natChains(want.Chains[f]), out: out}
		c.own()
		c.leftovers(p)
		c.walk(steering.ChainServices, true)
	}
	return out
}

func natChains(chains []kernel.Chain) map[string]kernel.Chain {
	out := make(map[string]kernel.Chain, len(chains))
	for _, c := range chains {
		if c.Table == "nat" {
			out[c.Name] = c
		}
	}
	return out
}

// comparison strikes services off out whose rules differ in one family.
type comparison struct {
	have, want map[string]kernel.Chain
	out        map[service.Key]uint64
}

// own compares the chains that belong to services.
func (c *comparison) own() {
	for name, w := range c.want {
		h, ok := c.have[name]
		if w.Owner != (service.Key{}) && (!ok || !h.SameText(&w)) {
			delete(c.out, w.Owner)
		}
	}
}

// leftovers finds chains of services that aren't wanted any more, which
// connections may still be led to.
func (c *comparison) leftovers(p *plan.Plan) {
	gone := map[string]bool{}
	for name := range c.have {
		if _, wanted := c.want[name]; !wanted {
			gone[suffix(name)] = true
		}
	}
	if len(gone) == 0 {
		return
	}
	for _, s := range p.Services {
		if gone[kernel.Hash(s.Port.Key)] {
			delete(c.out, s.Port.Key)
		}
	}
}

// suffix is the hash that ends the name of a service's chain.
func suffix(name string) string { return name[max(0, len(name)-16):] }

// walk follows the shared chains to the services' and strikes off those that a
// missing rule cuts off.
func (c *comparison) walk(name string, reached bool) {
	have := map[string]bool{}
	h, w := c.have[name], c.want[name]
	rules := h.Text()
	for _, r := range rules {
		have[r] = true
	}
	there := func(r string) bool {
		return have[r] || slices.ContainsFunc(rules, func(h string) bool { return kernel.SameRule(h, r) })
	}
	for _, r := range w.Text() {
		next, ok := c.want[target(r)]
		switch {
		case !ok:
		case next.Owner == (service.Key{}):
			c.walk(next.Name, reached && there(r))
		case !reached || !there(r):
			delete(c.out, next.Owner)
		}
	}
}

// Adopted returns the service ports of s that have chains, and that [steering.Adopted] tells of.
func (*Renderer) Adopted(have kernel.Ruleset, s *service.Snapshot) map[service.Key]bool {
	chains := map[string]bool{}
	for f := range service.Families {
		for _, c := range have.Chains[f] {
			if c.Table == "nat" {
				chains[suffix(c.Name)] = true
			}
		}
	}
	return steering.Adopted(have, s, func(p *service.Port) bool { return chains[kernel.Hash(p.Key)] })
}
