package iptables

import (
	"slices"
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Render returns everything p wants in the kernel, but for what IPVS does: the
// rules for all services alike, the portal's among them, and those of services
// that iptables carries. It is pure: equal plans and options give equal
// rulesets. Entries of the portal's sets aren't part of it; those follow the
// plan on their own ([kernel.Portal]).
func Render(p *plan.Plan, o Options) kernel.Ruleset { return NewRenderer(o).Render(p) }

// Renderer renders like [Render] and remembers what it rendered for each service
// port, so that a change of one costs little. It isn't safe for concurrent
// use. Its rulesets share memory and must not be modified.
type Renderer struct {
	options Options
	known   map[service.Key]known
}

type known struct {
	hash     uint64
	fragment *fragment
}

// NewRenderer returns a Renderer that remembers nothing yet.
func NewRenderer(o Options) *Renderer {
	return &Renderer{options: o, known: map[service.Key]known{}}
}

// Render returns everything p wants in the kernel.
func (r *Renderer) Render(p *plan.Plan) kernel.Ruleset {
	beneath := p.Uses(plan.IPTables)
	out := kernel.Ruleset{Sets: kernel.PortalSetsOf(p)}
	var fragments []*fragment
	if beneath {
		fragments = r.fragments(p)
	}
	for _, f := range service.Families {
		if f == service.IPv6 && r.options.SkipIPv6 {
			continue
		}
		s := shared{Options: r.options, family: f, iptables: beneath, ipvs: p.Uses(plan.IPVS), short: kernel.Shorts(p), policy: &p.Policy}
		if nodes, limited := kernel.NodePortNetworks(&p.Policy, f); limited {
			s.limited = true
			out.Sets = append(out.Sets, nodes)
		}
		out.Jumps[f] = s.jumps()
		out.Chains[f] = s.chains()
		if beneath {
			out.Chains[f] = append(out.Chains[f], collect(f, fragments)...)
			out.Sets = append(out.Sets, kernel.PodNetworks(p, f), endpointSet(f, fragments))
		} else if !s.ipvs { // which has the set as well
			out.Sets = append(out.Sets, kernel.PodNetworks(p, f))
		}
		slices.SortFunc(out.Chains[f], kernel.CompareChains)
	}
	for _, fr := range fragments {
		out.Sets = append(out.Sets, fr.sets...)
	}
	slices.SortFunc(out.Sets, func(a, b kernel.Set) int { return strings.Compare(a.Name, b.Name) })
	return out
}

// fragments renders the services whose rules lie beneath the portal, and
// forgets those that are gone. A hash of 0 says that the plan has none.
func (r *Renderer) fragments(p *plan.Plan) []*fragment {
	var out []*fragment
	next := make(map[service.Key]known, len(r.known))
	for _, s := range p.Services {
		if s.Beneath != plan.IPTables {
			continue
		}
		k, ok := r.known[s.Port.Key]
		if !ok || k.hash != s.KernelHash || k.hash == 0 {
			k = known{s.KernelHash, renderService(s, &p.Policy, r.options)}
		}
		next[s.Port.Key] = k
		out = append(out, k.fragment)
	}
	r.known = next
	return out
}

// collect gathers the services' chains and grows the dispatch tree over them.
func collect(f service.Family, fragments []*fragment) []kernel.Chain {
	var chains []kernel.Chain
	var leaves, ports []leaf
	for _, fr := range fragments {
		chains = append(chains, fr.chains[f]...)
		leaves = append(leaves, fr.leaves[f]...)
		ports = append(ports, fr.ports[f]...)
	}
	return append(chains, dispatch(f, leaves, ports)...)
}

func endpointSet(f service.Family, fragments []*fragment) kernel.Set {
	s := kernel.Set{Name: kernel.FamilySet(kernel.SetEndpoint, f), Type: kernel.HashIPPortIP, Family: f}
	for _, fr := range fragments {
		s.Entries = append(s.Entries, fr.endpoints[f]...)
	}
	slices.Sort(s.Entries)
	s.Entries = slices.Compact(s.Entries)
	return s
}
