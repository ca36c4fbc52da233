package plan

import (
	"slices"
	"strings"

	"kproxy.dev/kproxy/service"
)

// off reports whether c was looked for and isn't there. A Capability that
// nobody filled in says nothing against the host.
func (c *Capability) off() bool { return c.Name != "" && !c.Supported }

// unforwarded returns the families in which s serves, but this host doesn't
// forward. The kernel's data planes only rewrite a connection's destination:
// without forwarding, those of other hosts end on this node without an answer.
// Userspace makes connections of its own and needs none.
func (c *computation) unforwarded(s *Service) []service.Family {
	var out []service.Family
	for _, fam := range service.Families {
		if !c.in.Caps.Forwarding[fam].off() {
			continue
		}
		if slices.ContainsFunc(s.Frontends, func(f Frontend) bool { return f.Family == fam && s.Serves(&f) }) {
			out = append(out, fam)
		}
	}
	return out
}

// heedForwarding says in s and f what it means that this host doesn't forward
// in all of s's families; nothing where it does. It doesn't change the rules
// beneath: they are right as soon as forwarding is on.
func (c *computation) heedForwarding(s *Service, f *facts) {
	if s.Beneath == None {
		return
	}
	fams := c.unforwarded(s)
	if len(fams) == 0 {
		return
	}
	why := c.forwardingText(fams)
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

// forwardingText says what is off, and which settings that are.
func (c *computation) forwardingText(fams []service.Family) string {
	verb := " is"
	if len(fams) > 1 {
		verb = " are"
	}
	names := joined(fams, func(f service.Family) string { return c.in.Caps.Forwarding[f].Name })
	reasons := joined(fams, func(f service.Family) string { return c.in.Caps.Forwarding[f].Reason })
	return names + verb + " off on this node (" + reasons + ")"
}

func joined(fams []service.Family, text func(service.Family) string) string {
	out := make([]string, len(fams))
	for i, f := range fams {
		out[i] = text(f)
	}
	return strings.Join(out, " and ")
}
