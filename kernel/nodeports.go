package kernel

import (
	"slices"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// NodePortNetworks is the set of the networks of this node's addresses of family
// f that node ports answer on; there is none where they answer on all.
func NodePortNetworks(p *plan.Policy, f service.Family) (s Set, limited bool) {
	within, limited := p.NodePortsWithin(f)
	if !limited {
		return Set{}, false
	}
	s = Set{Name: FamilySet(SetNodes, f), Type: HashNet, Family: f}
	for _, n := range within {
		s.Entries = append(s.Entries, netEntries(n.Masked())...)
	}
	slices.Sort(s.Entries)
	s.Entries = slices.Compact(s.Entries)
	return s, true
}
