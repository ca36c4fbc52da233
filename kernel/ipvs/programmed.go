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
		if s.Beneath == plan.IPVS {
			out[s.Port.Key] = s.KernelHash
		}
	}
	if same(have, want) || len(out) == 0 {
		return out
	}
	if !sameRules(have, want) {
		return map[service.Key]uint64{}
	}
	strikeVirtuals(out, have, want)
	strikeEntries(out, have, want, p)
	return out
}

// same reports whether a and b share their memory, as when a pass has gone through.
func same(a, b kernel.Ruleset) bool {
	sameVirtuals := len(a.Virtuals) == len(b.Virtuals) && (len(a.Virtuals) == 0 || &a.Virtuals[0] == &b.Virtuals[0])
	sameSets := len(a.Sets) == len(b.Sets) && (len(a.Sets) == 0 || &a.Sets[0] == &b.Sets[0])
	return sameVirtuals && sameSets
}

// onTheWay are the chains that packets to virtual servers pass, by table; the
// portal, which they pass as well, is on another one.
var onTheWay = map[string][]string{
	"filter": {steering.ChainInput, steering.ChainForward, steering.ChainOutput, chainVirtual, chainVIP},
	"nat":    {steering.ChainServices, steering.ChainPostrouting, chainVirtual},
}

// sameRules reports whether have has those of want's chains that lie on the way of
// packets to virtual servers, and its jumps.
func sameRules(have, want kernel.Ruleset) bool {
	for f := range service.Families {
		for _, j := range want.Jumps[f] {
			if !kernel.HasJump(have.Jumps[f], j) {
				return false
			}
		}
		for _, w := range want.Chains[f] {
			if !slices.Contains(onTheWay[w.Table], w.Name) {
				continue
			}
			if !slices.ContainsFunc(have.Chains[f], func(h kernel.Chain) bool {
				return h.Table == w.Table && h.Name == w.Name && h.SameText(&w)
			}) {
				return false
			}
		}
	}
	return true
}

// strikeVirtuals strikes services off out whose virtual servers, or whose
// addresses, aren't in have as they are in want.
func strikeVirtuals(out map[service.Key]uint64, have, want kernel.Ruleset) {
	for i := range want.Virtuals {
		w := &want.Virtuals[i]
		h, ok := have.Virtual(w.Protocol, w.Address)
		if !ok || !sameVirtual(&h, w) {
			delete(out, w.Owner)
			continue
		}
		a := w.Address.Addr()
		_, wanted := slices.BinarySearchFunc(want.Addresses, a, netip.Addr.Compare)
		if _, there := slices.BinarySearchFunc(have.Addresses, a, netip.Addr.Compare); wanted && !there {
			delete(out, w.Owner)
		}
	}
}

// sameVirtual reports whether h serves as w does. A real server too many would
// get connections that aren't for it; those that drain aren't part of h.
func sameVirtual(h, w *kernel.Virtual) bool {
	return h.Scheduler == w.Scheduler && h.SchedFlags == w.SchedFlags && h.Persistence == w.Persistence && slices.Equal(h.Reals, w.Reals)
}

// strikeEntries strikes off services with an address or an endpoint that a set of
// have lacks. Which entries are whose isn't in a ruleset, so they are made again.
func strikeEntries(out map[service.Key]uint64, have, want kernel.Ruleset, p *plan.Plan) {
	missing := map[kernel.SetEntry]bool{}
	for _, e := range kernel.DiffSets(have.Sets, want.Sets).Add {
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
		fr := renderService(s, &p.Policy, Options{})
		if slices.ContainsFunc(fr.entries, func(e kernel.SetEntry) bool { return missing[e] }) {
			delete(out, s.Port.Key)
		}
	}
}

// Adopted returns the service ports of s that IPVS was serving when have was
// read: they have a virtual server at one of their addresses, and none of their
// addresses is in a userspace set. A kproxy that starts leaves them where they
// are.
func Adopted(have kernel.Ruleset, s *service.Snapshot) map[service.Key]bool {
	virtuals := make(map[place]bool, len(have.Virtuals))
	for i := range have.Virtuals {
		v := &have.Virtuals[i]
		virtuals[place{v.Protocol, v.Address}] = true
		if _, onLink := slices.BinarySearchFunc(have.Addresses, v.Address.Addr(), netip.Addr.Compare); !onLink {
			virtuals[place{v.Protocol, netip.AddrPortFrom(netip.Addr{}, v.Address.Port())}] = true
		}
	}
	user := map[string]map[string]bool{}
	for _, set := range have.Sets {
		entries := make(map[string]bool, len(set.Entries))
		for _, e := range set.Entries {
			entries[e] = true
		}
		user[set.Name] = entries
	}
	out := map[service.Key]bool{}
	if user[kernel.FamilySet(kernel.SetUser, service.IPv4)] == nil {
		return out // no portal: nothing says who served them
	}
	for p := range s.All() {
		served := slices.ContainsFunc(places(p), func(at place) bool { return virtuals[at] })
		if served && !slices.ContainsFunc(steering.UserEntries(p), func(e kernel.SetEntry) bool { return user[e.Set][e.Entry] }) {
			out[p.Key] = true
		}
	}
	return out
}

// place is where a virtual server can be; the zero Addr stands for the node's own
// addresses.
type place struct {
	protocol service.Protocol
	address  netip.AddrPort
}

// places are those of a service port.
func places(p *service.Port) []place {
	var out []place
	for _, addrs := range [][]netip.Addr{p.ClusterIPs, p.ExternalIPs, p.LoadBalancerIPs} {
		for _, a := range addrs {
			out = append(out, place{p.Protocol, netip.AddrPortFrom(a, p.Number)})
		}
	}
	if p.NodePort != 0 {
		out = append(out, place{p.Protocol, netip.AddrPortFrom(netip.Addr{}, p.NodePort)})
	}
	return out
}
