package iptables

import (
	"slices"
	"strings"
	"sync/atomic"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Render returns what p wants of steering, and of the services that iptables carries. It
// is pure: equal plans and options give equal rulesets.
func Render(p *plan.Plan, o steering.Options) kernel.Ruleset {
	out := NewRenderer(o).Render(p, plan.Between(nil, p))
	for f := range out.Chains {
		for i := range out.Chains[f] {
			c := &out.Chains[f][i]
			c.Rules, c.Maker, c.Count = c.Text(), nil, 0
		}
	}
	return out
}

// Renderer renders like [Render] and remembers what it rendered last, so that a
// change of one service port costs little, however many there are: what didn't
// change is in the next ruleset as it was in the last. The rules of services are made when they are asked for ([kernel.RuleMaker]). It
// isn't safe for concurrent use. Its rulesets share memory and must not be
// modified.
type Renderer struct {
	options  steering.Options
	carries  bool // the last plan used iptables
	known    map[service.Key]*known
	affinity []kernel.Set // of services, sorted
	families [2]rendered
}

// rendered is one family as it was rendered last.
type rendered struct {
	trees     trees
	chains    []kernel.Chain
	shared    []kernel.Chain
	endpoints kernel.Multiset[string] // entries of all services
}

// NewRenderer returns a Renderer that remembers nothing yet.
func NewRenderer(o steering.Options) *Renderer {
	r := &Renderer{options: o}
	r.forget()
	return r
}

func (r *Renderer) forget() {
	r.known, r.affinity, r.families = map[service.Key]*known{}, nil, [2]rendered{}
}

// Render returns what steering wants, and what p wants of services that iptables carries.
// d leads there from the plan that was rendered last.
func (r *Renderer) Render(p *plan.Plan, d plan.Delta) kernel.Ruleset {
	base := steering.Render(p, r.options)
	carries := p.Uses(plan.IPTables)
	if r.carries != carries {
		r.forget()
	}
	r.carries = carries
	gone, come := r.follow(p, d)
	out := kernel.Ruleset{Sets: slices.Concat(base.Sets, r.affinity), Jumps: base.Jumps}
	for _, f := range r.options.Families() {
		part := &r.families[f]
		part.change(f, gone, come, base.Chains[f], carries)
		if out.Chains[f] = part.chains; carries {
			out.Sets = append(out.Sets, kernel.Set{Name: kernel.FamilySet(kernel.SetEndpoint, f), Type: kernel.HashIPPortIP, Family: f, Entries: part.endpoints.Unique})
		}
	}
	slices.SortFunc(out.Sets, kernel.CompareSets)
	return out
}

// follow renders the services that iptables carries and that need other rules than
// before, as they were and as they are. A hash of 0 says that the plan has none.
func (r *Renderer) follow(p *plan.Plan, d plan.Delta) (gone, come []*fragment) {
	policy := p.Policy // not the plan with it, which others outlive
	remove := func(key service.Key) {
		if old := r.known[key]; old != nil {
			gone = append(gone, old.fragment())
			delete(r.known, key)
		}
	}
	if d.Full {
		for key := range r.known {
			if p.Find(key) == nil {
				remove(key)
			}
		}
	}
	for _, c := range d.Changes {
		key, is := c.Key(), c.Is
		wanted := is != nil && is.Kernel == plan.IPTables
		if old := r.known[key]; old != nil && wanted && old.hash == is.KernelHash && old.hash != 0 {
			old.service.Store(is)
			continue
		}
		remove(key)
		if wanted {
			k := newKnown(is, &policy, &r.options)
			r.known[key] = k
			come = append(come, k.fragment())
		}
	}
	var less, more []kernel.Set
	for _, fr := range gone {
		less = append(less, fr.sets...)
	}
	for _, fr := range come {
		more = append(more, fr.sets...)
	}
	r.affinity = kernel.Patch(r.affinity, less, more, kernel.CompareSets)
	return gone, come
}

// change makes a family's part what the services that are gone and come, and the
// shared chains, make it. Its slices are replaced, never written to.
func (r *rendered) change(f service.Family, gone, come []*fragment, shared []kernel.Chain, carries bool) {
	var was, is fragment
	for _, fr := range gone {
		was.add(f, fr)
	}
	for _, fr := range come {
		is.add(f, fr)
	}
	less, more := was.chains[f], is.chains[f]
	if carries {
		goneChains, comeChains := r.trees.change(was.leaves[f], is.leaves[f], was.ports[f], is.ports[f])
		less, more = append(less, goneChains...), append(more, comeChains...)
	}
	if !slices.EqualFunc(r.shared, shared, func(a, b kernel.Chain) bool { return kernel.CompareChains(a, b) == 0 && a.SameText(&b) }) {
		less, more = append(less, r.shared...), append(more, shared...)
		r.shared = shared
	}
	r.chains = kernel.Patch(r.chains, less, more, kernel.CompareChains)
	r.endpoints.Change(was.endpoints[f], is.endpoints[f], strings.Compare)
}

// add adds one family of another fragment.
func (fr *fragment) add(f service.Family, o *fragment) {
	fr.chains[f] = append(fr.chains[f], o.chains[f]...)
	fr.leaves[f] = append(fr.leaves[f], o.leaves[f]...)
	fr.ports[f] = append(fr.ports[f], o.ports[f]...)
	fr.endpoints[f] = append(fr.endpoints[f], o.endpoints[f]...)
}

// known is a service port that was rendered: what its fragment is made of, in the
// place of the fragment, which is many times larger. Safe for concurrent use.
type known struct {
	hash uint64
	// service is the latest of the KernelHash, so that plans that are gone can be
	// forgotten.
	service atomic.Pointer[plan.Service]
	policy  *plan.Policy
	options *steering.Options
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

func newKnown(s *plan.Service, p *plan.Policy, o *steering.Options) *known {
	k := &known{hash: s.KernelHash, policy: p, options: o}
	k.service.Store(s)
	for f := range k.makers {
		k.makers[f] = maker{k, service.Family(f)}
	}
	return k
}

// fragment returns what the service port contributes. The rules of its chains are made
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
