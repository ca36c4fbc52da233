package ipvs

import (
	"net/netip"
	"slices"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Programmed returns the KernelHash of every service of p that IPVS can carry as
// have, the kernel, is now: want was rendered of p, and have holds the
// service's virtual servers, real servers, addresses and entries of sets, and
// the rules and jumps that all virtual servers share.
func Programmed(have, want kernel.Ruleset, p *plan.Plan) map[service.Key]uint64 {
	out := map[service.Key]uint64{}
	for _, s := range p.Services {
		if s.Kernel == plan.IPVS {
			out[s.Port.Key] = s.KernelHash
		}
	}
	if len(out) == 0 {
		return out
	}
	for f := range service.Families {
		have.Chains[f], want.Chains[f] = onTheWay(have.Chains[f]), onTheWay(want.Chains[f])
	}
	ops := kernel.Diff(have, want)
	for f := range service.Families {
		if len(ops.AddJumps[f])+len(ops.Chains[f]) > 0 {
			return map[service.Key]uint64{}
		}
	}
	for _, c := range ops.Virtuals {
		if !c.Remove {
			delete(out, c.Owner) // also for a real server too many, whose connections aren't for it
		}
	}
	for i := range want.Virtuals {
		w := &want.Virtuals[i]
		if _, missing := slices.BinarySearchFunc(ops.AddAddresses, w.Address.Addr(), netip.Addr.Compare); missing {
			delete(out, w.Owner)
		}
	}
	deleteLacking(out, ops.AddEntries, p)
	return out
}

// onTheWay picks the chains that packets to virtual servers pass, besides those of the
// redirect sets.
func onTheWay(chains []kernel.Chain) []kernel.Chain {
	names := map[string][]string{
		"filter": {steering.ChainInput, steering.ChainForward, steering.ChainOutput, chainVirtual, chainVIP},
		"nat":    {steering.ChainServices, steering.ChainPostrouting, chainVirtual},
	}
	return slices.DeleteFunc(slices.Clone(chains), func(c kernel.Chain) bool { return !slices.Contains(names[c.Table], c.Name) })
}

// deleteLacking deletes services from out that lack an entry of a set. Which entries are
// whose isn't in a ruleset, so they are made again.
func deleteLacking(out map[service.Key]uint64, lacking []kernel.SetEntries, p *plan.Plan) {
	missing := map[kernel.SetEntry]bool{}
	for _, e := range lacking {
		for _, entry := range e.Entries {
			missing[kernel.SetEntry{Set: e.Set.Name, Entry: entry}] = true
		}
	}
	if len(missing) == 0 {
		return
	}
	for _, s := range p.Services {
		if _, ok := out[s.Port.Key]; !ok {
			continue
		}
		fr := renderService(s, &p.Policy, steering.Options{})
		if slices.ContainsFunc(fr.entries, func(e kernel.SetEntry) bool { return missing[e] }) {
			delete(out, s.Port.Key)
		}
	}
}

// Adopted returns the service ports of s that have a virtual server at one of their
// addresses, and that [steering.Adopted] tells of.
func Adopted(have kernel.Ruleset, s *service.Snapshot) map[service.Key]bool {
	virtuals := make(map[key]bool, len(have.Virtuals))
	for i := range have.Virtuals {
		v := &have.Virtuals[i]
		virtuals[key{v.Protocol, v.Address}] = true
		if _, onLink := slices.BinarySearchFunc(have.Addresses, v.Address.Addr(), netip.Addr.Compare); !onLink {
			virtuals[key{v.Protocol, netip.AddrPortFrom(netip.Addr{}, v.Address.Port())}] = true
		}
	}
	return steering.Adopted(have, s, func(p *service.Port) bool {
		return slices.ContainsFunc(places(p), func(at key) bool { return virtuals[at] })
	})
}

// places returns where virtual servers of a service port can be; the zero Addr stands for the
// node's own addresses.
func places(p *service.Port) []key {
	var out []key
	for _, a := range slices.Concat(p.ClusterIPs, p.ExternalIPs, p.LoadBalancerIPs) {
		out = append(out, key{p.Protocol, netip.AddrPortFrom(a, p.Number)})
	}
	if p.NodePort != 0 {
		out = append(out, key{p.Protocol, netip.AddrPortFrom(netip.Addr{}, p.NodePort)})
	}
	return out
}
