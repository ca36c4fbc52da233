package steering

import (
	"net/netip"
	"slices"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// PodRule is a rule for packets that pods send, as p tells them: text is what it
// is for, and target what becomes of them. By the interface that a packet comes
// in on, which packets of this node's own have none of (in OUTPUT), or by its
// source address.
func PodRule(p *plan.Policy, f service.Family, text, target string) string {
	if in := podInterface(p); in != "" {
		return "-i " + in + " " + kernel.Comment(text) + " " + target
	}
	return kernel.InSet(kernel.FamilySet(kernel.SetPods, f), "src") + " " + kernel.Comment(text) + " " + target
}

// OtherRule is a rule for all other packets, this node's own included; match is
// what else must hold of them, and may be empty.
func OtherRule(p *plan.Policy, f service.Family, text, match, target string) string {
	if match != "" {
		match += " "
	}
	if in := podInterface(p); in != "" {
		return "! -i " + in + " " + match + kernel.Comment(text) + " " + target
	}
	return match + kernel.NotInSet(kernel.FamilySet(kernel.SetPods, f), "src") + " " + kernel.Comment(text) + " " + target
}

// podInterface returns the pods' interface as iptables' option -i takes it: a name, or
// what names begin with and a plus sign (iptables(8)). It returns "" where no detector
// goes by it.
func podInterface(p *plan.Policy) string {
	if p.PodBridge == "" && p.PodInterfacePrefix != "" {
		return p.PodInterfacePrefix + "+"
	}
	return p.PodBridge
}

// PodNetworks is the set of the pod networks of family f in p's policy.
func PodNetworks(p *plan.Plan, f service.Family) kernel.Set {
	return networkSet(kernel.SetPods, f, p.Policy.PodCIDRs)
}

// networkSet is a set of those networks that are of its family.
func networkSet(base string, f service.Family, networks []netip.Prefix) kernel.Set {
	s := kernel.Set{Name: kernel.FamilySet(base, f), Type: kernel.HashNet, Family: f}
	for _, n := range networks {
		if service.FamilyOf(n.Addr()) == f {
			s.Entries = append(s.Entries, netEntries(n.Masked())...)
		}
	}
	slices.Sort(s.Entries)
	s.Entries = slices.Compact(s.Entries)
	return s
}

// NodePortNetworks is the set of the networks of this node's addresses of family
// f that node ports answer on; there is none where they answer on all.
func NodePortNetworks(p *plan.Policy, f service.Family) (s kernel.Set, limited bool) {
	within, limited := p.NodePortsWithin(f)
	return networkSet(kernel.SetNodes, f, within), limited
}
