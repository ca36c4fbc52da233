package plan

import (
	"slices"

	"kproxy.dev/kproxy/service"
)

// kernelChoice is which kernel data planes a mode leads to on this host.
type kernelChoice struct {
	// planes are the preferred one, and a second for what the first can't express.
	planes []Abilities
	why    string // there is none; empty if there is one
	only   string // why mode auto has no second; empty if it has one
}

// chooseKernel returns the kernel data planes that mode m leads to: the first two
// of those given, in order of preference, that the mode allows and the host has.
func chooseKernel(m Mode, planes []Abilities) kernelChoice {
	k := kernelChoice{why: "mode userspace offloads nothing"}
	for _, a := range planes {
		switch {
		case m != ModeAuto && string(m) != string(a.Plane):
		case !a.Host.Supported:
			k.only = "this host can't do " + a.Title
			if a.Host.Reason != "" {
				k.only += ": " + a.Host.Reason
			}
			k.why = k.only
		case len(k.planes) < 2:
			k.planes = append(k.planes, a)
		}
	}
	switch len(k.planes) {
	case 0:
		k.only = ""
	case 1:
		k.why = ""
	default:
		k.why, k.only = "", ""
	}
	return k
}

// at is the i-th data plane in order of preference; None if there are fewer.
func (k *kernelChoice) at(i int) DataPlane {
	if i < len(k.planes) {
		return k.planes[i].Plane
	}
	return None
}

// abilities returns those of d; none if it isn't among the planes.
func (k *kernelChoice) abilities(d DataPlane) *Abilities {
	for i := range k.planes {
		if k.planes[i].Plane == d {
			return &k.planes[i]
		}
	}
	return &noAbilities
}

var noAbilities Abilities

func (k *kernelChoice) any(can func(*Abilities) bool) bool {
	return slices.ContainsFunc(k.planes, func(a Abilities) bool { return can(&a) })
}

func (k *kernelChoice) same(o *kernelChoice) bool {
	return k.why == o.why && k.only == o.only && slices.EqualFunc(k.planes, o.planes, func(a, b Abilities) bool { return a.same(&b) })
}

// choosePlane picks the kernel data plane whose rules s gets and records its
// limitations in s. It returns why that one can't carry s; empty if it can.
func (c *computation) choosePlane(s *Service) (*Abilities, string) {
	short := slices.ContainsFunc(s.Frontends, func(f Frontend) bool { return f.Local && f.ShortCircuit })
	lacks := func(a *Abilities) []shortfall {
		out := c.shortfalls(a, s.Port)
		if short && a.Plane != "" && !a.TellsClients {
			out = append(out, a.shortCircuits(s.Port, c.detects[0] || c.detects[1]))
		}
		return out
	}
	s.Beneath, s.BeneathReason = c.kernel.at(0), c.kernel.only
	a := c.kernel.abilities(s.Beneath)
	lacking := lacks(a)
	if len(c.kernel.planes) > 1 {
		second := &c.kernel.planes[1]
		other := lacks(second)
		switch order := compareShortfalls(other, lacking); {
		case order < 0:
			s.BeneathReason = lacking[0].why
			a, lacking = second, other
		case len(lacking) == 0:
			s.BeneathReason = string(a.Plane) + " does all that it asks for"
		case order == 0:
			s.BeneathReason = lacking[0].why + "; " + other[0].why
		default:
			s.BeneathReason = other[0].why
		}
		s.Beneath = a.Plane
	}
	s.Degraded, s.Scheduler, s.TellsClients = degraded(lacking), a.scheduler(s.Port), a.TellsClients
	if a.Plane != "" && !a.TellsClients && s.Port.Protocol == service.SCTP {
		for i := range s.Frontends {
			s.Frontends[i].ShortCircuit = false // userspace can't carry it out
		}
	}
	return a, keptBack(lacking)
}
