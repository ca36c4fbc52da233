package plan

import (
	"cmp"
	"slices"

	"kproxy.dev/kproxy/service"
)

// kernelChoice is what a mode leads to on this host. It is comparable.
type kernelChoice struct {
	plane    DataPlane
	fallback DataPlane // for what plane can't express; None if there is no other
	why      string    // there is no plane; empty if there is one
	only     string    // why mode auto has no fallback; empty if it has one
}

// chooseKernel returns the kernel data planes that mode m leads to. Mode auto
// takes IPVS, and iptables for services that IPVS can't express; or the one
// that the host supports.
func chooseKernel(m Mode, caps Caps) kernelChoice {
	switch {
	case m == ModeAuto && caps.IPVS.Supported && caps.IPTables.Supported:
		return kernelChoice{plane: IPVS, fallback: IPTables}
	case m == ModeAuto && caps.IPVS.Supported:
		return kernelChoice{plane: IPVS, fallback: None, only: lacks("iptables", caps.IPTables)}
	case m == ModeAuto && caps.IPTables.Supported:
		return kernelChoice{plane: IPTables, fallback: None, only: lacks("IPVS", caps.IPVS)}
	case m == ModeIPVS && caps.IPVS.Supported:
		return kernelChoice{plane: IPVS, fallback: None}
	case m == ModeIPTables && caps.IPTables.Supported:
		return kernelChoice{plane: IPTables, fallback: None}
	case m == ModeIPVS:
		return kernelChoice{plane: None, fallback: None, why: lacks("IPVS", caps.IPVS)}
	case m == ModeIPTables || m == ModeAuto:
		return kernelChoice{plane: None, fallback: None, why: lacks("iptables", caps.IPTables)}
	}
	return kernelChoice{plane: None, fallback: None, why: "mode userspace offloads nothing"}
}

// uses reports whether rules of d may lie beneath services.
func (k *kernelChoice) uses(d DataPlane) bool { return k.plane == d || k.fallback == d }

func lacks(what string, c Capability) string {
	if c.Reason == "" {
		return "this host can't do " + what
	}
	return "this host can't do " + what + ": " + c.Reason
}

// lay decides which kernel data plane lies beneath s, and says in s how well it
// does. It returns why that one can't carry s; empty if it can.
func (c *computation) lay(s *Service) string {
	short := slices.ContainsFunc(s.Frontends, func(f Frontend) bool { return f.Local && f.ShortCircuit })
	s.Beneath, s.BeneathReason = c.kernel.plane, c.kernel.only
	lacking := c.lacking(s.Beneath, s.Port, short)
	if c.kernel.fallback != None {
		other := c.lacking(c.kernel.fallback, s.Port, short)
		switch order := compareLacking(other, lacking); {
		case order < 0:
			s.BeneathReason = lacking[0].why
			s.Beneath, lacking = c.kernel.fallback, other
		case len(lacking) == 0:
			s.BeneathReason = string(s.Beneath) + " does all that it asks for"
		case order == 0:
			s.BeneathReason = lacking[0].why + "; " + other[0].why
		default:
			s.BeneathReason = other[0].why
		}
	}
	s.Degraded = degraded(lacking)
	if s.Beneath == IPVS {
		s.Scheduler = schedulerOf(s.Port, &c.in.Policy)
		if unusable(s.Scheduler, s.Port, &c.in) != "" {
			s.Scheduler = standIn
		}
		if s.Port.Protocol == service.SCTP {
			for i := range s.Frontends {
				s.Frontends[i].ShortCircuit = false // nobody is there to carry it out
			}
		}
	}
	return keptBack(lacking)
}

// lacking is what s would lack on d: short says whether it short-circuits clients.
func (c *computation) lacking(d DataPlane, p *service.Port, short bool) []shortfall {
	out := shortfalls(d, p, &c.in)
	if short && d == IPVS {
		out = append(out, shortCircuits(p, c.detects[service.IPv4] || c.detects[service.IPv6]))
	}
	return out
}

// compareLacking compares by what keeps a service in userspace, then by all the
// rest: less is better.
func compareLacking(a, b []shortfall) int {
	grave := func(all []shortfall) (n int) {
		for i := range all {
			if !all[i].bridged {
				n++
			}
		}
		return n
	}
	return cmp.Or(cmp.Compare(grave(a), grave(b)), cmp.Compare(len(a), len(b)))
}
