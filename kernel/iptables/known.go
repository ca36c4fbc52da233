package iptables

import (
	"sync/atomic"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// known is a service port that was rendered: what its fragment is made of, in the
// place of the fragment, which is many times larger. Safe for concurrent use.
type known struct {
	hash uint64
	// service is the latest of the KernelHash, so that plans that are gone can be
	// forgotten.
	service atomic.Pointer[plan.Service]
	policy  *plan.Policy
	options *Options
	makers  [2]maker
}

// maker makes the rules of one family's chains.
type maker struct {
	of     *known
	family service.Family
}

// MakeRules implements [kernel.RuleMaker].
func (m *maker) MakeRules(chain string) []string {
	var out fragment
	renderFamily(&out, m.of.service.Load(), m.of.policy, m.of.options, m.family)
	for i := range out.chains[m.family] {
		if c := &out.chains[m.family][i]; c.Name == chain {
			return c.Rules
		}
	}
	return nil
}

func newKnown(s *plan.Service, p *plan.Policy, o *Options) *known {
	k := &known{hash: s.KernelHash, policy: p, options: o}
	k.service.Store(s)
	for f := range k.makers {
		k.makers[f] = maker{k, service.Family(f)}
	}
	return k
}

// fragment is what the service port contributes. The rules of its chains are made
// when they are needed.
func (k *known) fragment() *fragment {
	out := renderService(k.service.Load(), k.policy, k.options)
	for f := range out.chains {
		for i := range out.chains[f] {
			c := &out.chains[f][i]
			c.Count, c.Rules, c.Maker = len(c.Rules), nil, &k.makers[f]
		}
	}
	return out
}

var _ kernel.RuleMaker = (*maker)(nil)
