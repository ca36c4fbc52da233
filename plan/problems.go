package plan

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"kproxy.dev/kproxy/service"
)

// problems says what is wrong with p's specification, or isn't what its
// author may believe.
func (c *computation) problems(s *Service, a *Abilities) []string {
	p := s.Port
	out := slices.Concat(p.Problems, c.in.Health.Defaults().Refused(p.Health))
	out = append(out, c.conflicts.sentences(p)...)
	has := families(p)
	for _, addrs := range [][]netip.Addr{p.ExternalIPs, p.LoadBalancerIPs} {
		for _, a := range addrs {
			if f := service.FamilyOf(a); !has[f] {
				out = append(out, fmt.Sprintf("%s is not served: the service has no %s cluster address", a, familyText(f)))
			}
		}
	}
	out = append(out, c.leftToOthers(s)...)
	out = append(out, c.nowhere(s)...)
	out = append(out, c.ownAddresses(s, a)...)
	for _, f := range service.Families {
		if unrestricted(p, f) {
			out = append(out, fmt.Sprintf("its source ranges don't restrict %s clients: none of them is %s", familyText(f), familyText(f)))
		}
	}
	if p.Algorithm == service.RoundRobin && weighted(s.Endpoints) {
		text := "its weights have no effect"
		if !a.weightless(s) {
			text += " in userspace"
		}
		out = append(out, text+": the algorithm is round-robin, not weighted-round-robin")
	}
	return out
}

// ownAddresses says which addresses of s are this node's already, where its data
// plane answers on them. Other service addresses are on a link that is only kproxy's,
// and nothing but services can be reached there.
func (c *computation) ownAddresses(s *Service, a *Abilities) []string {
	if !a.LocalAddresses {
		return nil
	}
	var out []string
	for i := range s.Frontends {
		f := &s.Frontends[i]
		if f.Kind != NodePort && c.in.Policy.ownAddress(f.Address.Addr()) {
			out = append(out, fmt.Sprintf("%s is this node's own address: the service answers there on port %d, the node's own ports stay reachable there, and the address is left where it is",
				f.Address.Addr(), f.Address.Port()))
		}
	}
	return out
}

// unrestricted reports whether p restricts its clients, but not those of
// family f, although it has a load balancer address there. kube-proxy admits
// these too.
func unrestricted(p *service.Port, f service.Family) bool {
	inFamily := func(a netip.Addr) bool { return service.FamilyOf(a) == f }
	return len(p.SourceRanges) > 0 && families(p)[f] &&
		slices.ContainsFunc(p.LoadBalancerIPs, inFamily) &&
		!slices.ContainsFunc(p.SourceRanges, func(r netip.Prefix) bool { return inFamily(r.Addr()) })
}

// weighted reports whether two endpoints that take connections differ in weight.
func weighted(rows []Endpoint) bool {
	var first uint16
	for i := range rows {
		w := rows[i].Weight
		if first == 0 {
			first = w
		}
		if w != 0 && w != first {
			return true
		}
	}
	return false
}

func familyText(f service.Family) string {
	if f == service.IPv6 {
		return "IPv6"
	}
	return "IPv4"
}

// unforwarded returns the families in which s serves, but this host doesn't
// forward. The kernel's data planes only rewrite a connection's destination:
// without forwarding, those of other hosts end on this node without an answer.
// Userspace makes connections of its own and needs none.
func (c *computation) unforwarded(s *Service) []service.Family {
	var out []service.Family
	for _, fam := range service.Families {
		serves := func(f Frontend) bool { return f.Family == fam && s.Serves(&f) }
		// A Capability that is zero says nothing against the host.
		if on := &c.in.Caps.Forwarding[fam]; on.Name != "" && !on.Supported && slices.ContainsFunc(s.Frontends, serves) {
			out = append(out, fam)
		}
	}
	return out
}

// keepFromForwarding says in s and f what it means that this host doesn't forward
// in all of s's families; nothing where it does. It doesn't change the rules
// themselves: they are right as soon as forwarding is on.
func (c *computation) keepFromForwarding(s *Service, f *facts) {
	if s.Kernel == None {
		return
	}
	fams := c.unforwarded(s)
	if len(fams) == 0 {
		return
	}
	verb := " is"
	if len(fams) > 1 {
		verb = " are"
	}
	names := joined(fams, func(f service.Family) string { return c.in.Caps.Forwarding[f].Name })
	settings := joined(fams, func(f service.Family) string { return c.in.Caps.Forwarding[f].Reason })
	why := names + verb + " off on this node (" + settings + ")"
	if s.Port.Protocol == service.SCTP { // the kernel's rules are all it has
		s.Problems = append(s.Problems, why+": clients on other hosts aren't served")
		return
	}
	if f.inexpressible == "" {
		f.inexpressible = why + ": clients on other hosts couldn't be served by the kernel"
	}
	if s.Degraded != "" {
		s.Degraded += "; "
	}
	s.Degraded += "only clients on this node are served while kproxy is down (" + joined(fams, familyText) + ")"
}

// joined lists things by their texts: "a", "a and b".
func joined[T any](all []T, text func(T) string) string {
	out := make([]string, len(all))
	for i, x := range all {
		out[i] = text(x)
	}
	return strings.Join(out, " and ")
}

// AnswersAt returns an endpoint of s that is an address at which s itself answers:
// a process in the node's own network that listens on the service's node port,
// or on one of its external addresses.
func (s *Service) AnswersAt(p *Policy) (netip.AddrPort, bool) {
	for i := range s.Endpoints {
		a := s.Endpoints[i].Address
		for j := range s.Frontends {
			f := &s.Frontends[j]
			if f.Address == a || f.Kind == NodePort && f.Address.Port() == a.Port() && f.Family == service.FamilyOf(a.Addr()) &&
				slices.Contains(p.NodePortAddresses(f.Family), a.Addr()) {
				return a, true
			}
		}
	}
	return netip.AddrPort{}, false
}

// keepFromOwnAddress keeps s in userspace where its data plane answers on local addresses
// and one of its endpoints is such an address. The data plane would get the
// connections that are on their way to the endpoint, from its other services and
// from userspace alike, and share them out again. So it doesn't answer there, and
// a connection to that address without a live kproxy reaches that endpoint.
func (c *computation) keepFromOwnAddress(s *Service, f *facts, a *Abilities) {
	if !a.LocalAddresses {
		return
	}
	at, ok := s.AnswersAt(&c.in.Policy)
	if !ok {
		return
	}
	if f.inexpressible == "" {
		f.inexpressible = string(a.Plane) + " can't lead connections to endpoint " + at.String() + ", where the service itself answers"
	}
	if s.Degraded != "" {
		s.Degraded += "; "
	}
	s.Degraded += "connections to " + at.String() + " reach only the endpoint there" + meanwhile(s.Port)
}
