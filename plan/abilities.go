package plan

import (
	"cmp"
	"maps"
	"slices"
	"strings"

	"kproxy.dev/kproxy/service"
)

// Abilities lists what a kernel data plane can do for services on this host. Compute
// compares them with what each service asks for. Host, Scheduler and MissingSchedulers are
// about this host and its configuration; the rest follows from Plane.
type Abilities struct {
	Plane DataPlane
	Title string     // its name in sentences about the host
	Host  Capability // whether this host has it

	// Algorithms are those that it can do, each with the name of its scheduler if it
	// has Schedulers. It can always do round robin.
	Algorithms map[service.Algorithm]string
	// Otherwise is how it chooses endpoints where it can't as asked, for a sentence.
	Otherwise string
	// Elsewhere says after "can't do …" in which mode it may be done; may be empty.
	Elsewhere string
	// Schedulers: services may ask for its schedulers by name.
	Schedulers bool
	// Scheduler is for services that ask for none, nor for an algorithm; empty for
	// that of the default algorithm.
	Scheduler string
	// MissingSchedulers says, for schedulers that were tried, why they can't be used; empty if
	// they can. One that wasn't tried is taken to work.
	MissingSchedulers map[string]string

	// TellsClients: it can choose endpoints by client, as externalTrafficPolicy
	// Local asks for pods and this node.
	TellsClients bool
	// Drains: it keeps endpoints that get no new connection for the connections they
	// have, also where no frontend serves anybody any more.
	Drains bool
	// LocalAddresses: it answers on addresses of this node only. Service addresses
	// are put on kproxy's link unless they are the node's own, and node ports
	// are one for each of [Policy.NodePortAddresses].
	LocalAddresses bool
	// DestinationNAT: a rule rewrites the destinations of its connections, as conntrack
	// sees them.
	DestinationNAT bool
	// Atomic: its rules change in the transaction that changes who carries services, so that
	// userspace needn't stand in for it.
	Atomic bool
}

// same reports whether both say the same of services.
func (a *Abilities) same(b *Abilities) bool {
	return a.Plane == b.Plane && a.Host == b.Host && a.Scheduler == b.Scheduler && maps.Equal(a.MissingSchedulers, b.MissingSchedulers)
}

// schedulerOf returns the scheduler that p asks for; empty if it can't be named.
func (a *Abilities) schedulerOf(p *service.Port) string {
	if p.Scheduler == "" && !p.AlgorithmGiven && a.Scheduler != "" {
		return a.Scheduler
	}
	return cmp.Or(p.Scheduler, a.Algorithms[p.Algorithm])
}

// scheduler returns the scheduler that p gets, which is round robin's where its
// own can't be had; empty without schedulers.
func (a *Abilities) scheduler(p *service.Port) string {
	if !a.Schedulers {
		return ""
	}
	if name := a.schedulerOf(p); name != "" && a.MissingSchedulers[name] == "" {
		return name
	}
	return a.Algorithms[service.RoundRobin]
}

// weightless reports whether weights other than 0 mean nothing to s: plain round
// robin goes by none. Its scheduler decides if it has one, else the algorithm.
func (a *Abilities) weightless(s *Service) bool {
	return s.Port.Algorithm == service.RoundRobin && s.Scheduler == a.Algorithms[service.RoundRobin]
}

// shortfall is one way in which a kernel data plane falls short of a
// specification.
type shortfall struct {
	why      string // completes "it isn't carried by the kernel because …"
	degraded string // what becomes of its connections that only the kernel carries
	// bridged: userspace carries the connections that the kernel would get wrong,
	// and those only, so that the service needn't stay there as a whole.
	bridged bool
}

// shortfalls returns the shortfalls of a that follow from p's specification; nil if there are none.
func (c *computation) shortfalls(a *Abilities, p *service.Port) []shortfall {
	if a.Plane == "" {
		return nil
	}
	var out []shortfall
	if s, ok := c.choosing(a, p); !ok {
		out = append(out, s)
	}
	if p.ProxyProtocol != 0 {
		out = append(out, shortfall{
			why:      string(a.Plane) + " can't send PROXY protocol headers",
			degraded: "endpoints get no PROXY protocol header" + meanwhile(p),
		})
	}
	return out
}

// choosing reports whether a can choose endpoints as p asks, and how it falls short.
func (c *computation) choosing(a *Abilities, p *service.Port) (shortfall, bool) {
	_, known := a.Algorithms[p.Algorithm]
	wanted, why, instead := algorithmText(p.Algorithm), "", a.Otherwise
	if p.Scheduler != "" {
		wanted = "scheduler " + p.Scheduler
	}
	switch name := a.schedulerOf(p); {
	case !a.Schedulers && p.Scheduler != "":
		why = "has no " + c.schedulersTitle + "scheduler " + p.Scheduler
		if known {
			instead = algorithmText(p.Algorithm)
		}
	case !a.Schedulers && !known, a.Schedulers && name == "":
		why = "can't do " + wanted + a.Elsewhere
	case a.MissingSchedulers[name] != "":
		why = "has no scheduler " + name + " here: " + a.MissingSchedulers[name]
		if p.Scheduler == "" && name != a.Algorithms[p.Algorithm] {
			wanted = "scheduler " + name // the configured one
		}
	default:
		return shortfall{}, true
	}
	return shortfall{why: string(a.Plane) + " " + why, degraded: wanted + " falls back to " + instead + meanwhile(p)}, false
}

// shortCircuits is the shortfall of a data plane that doesn't tell clients apart
// where pods and this node use other endpoints than the rest. Userspace bridges it.
func (a *Abilities) shortCircuits(p *service.Port, pods bool) shortfall {
	who := "clients on this node"
	if pods {
		who = "pods and " + who
	}
	return shortfall{
		why:      string(a.Plane) + " can't choose endpoints by client, as externalTrafficPolicy Local asks",
		degraded: who + " reach only endpoints on this node through its external addresses" + meanwhile(p),
		bridged:  true,
	}
}

// compareShortfalls compares by what keeps a service in userspace, then by all the
// rest: less is better.
func compareShortfalls(a, b []shortfall) int {
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

// keptBack says why a service stays in userspace; empty if nothing keeps it there.
func keptBack(all []shortfall) string {
	for i := range all {
		if !all[i].bridged {
			return all[i].why
		}
	}
	return ""
}

// degraded says how rules fall short; empty if they don't.
func degraded(all []shortfall) string {
	texts := make([]string, len(all))
	for i := range all {
		texts[i] = all[i].degraded
	}
	return strings.Join(texts, "; ")
}

// meanwhile says when a shortfall shows, to end a sentence; empty where it always does.
func meanwhile(p *service.Port) string {
	if p.Protocol == service.SCTP {
		return "" // the kernel's rules are all it has
	}
	return " while kproxy is down"
}

// kernelChoice says which kernel data planes a mode leads to on this host.
type kernelChoice struct {
	planes []Abilities // in order of preference
	why    string      // there is none; empty if there is one
	only   string      // why mode auto has one only; empty if it has more
}

// chooseKernel returns the kernel data planes that mode m leads to: those of the given
// ones that the mode allows and the host has.
func chooseKernel(m Mode, planes []Abilities) kernelChoice {
	k := kernelChoice{why: "mode userspace offloads nothing"}
	for _, a := range planes {
		switch {
		case !m.Allows(a.Plane):
		case !a.Host.Supported:
			k.only = "this host can't do " + a.Title
			if a.Host.Reason != "" {
				k.only += ": " + a.Host.Reason
			}
			k.why = k.only
		default:
			k.planes = append(k.planes, a)
		}
	}
	if len(k.planes) > 0 {
		k.why = ""
	}
	if len(k.planes) != 1 {
		k.only = ""
	}
	return k
}

func (k *kernelChoice) names() []DataPlane {
	out := make([]DataPlane, len(k.planes))
	for i := range k.planes {
		out[i] = k.planes[i].Plane
	}
	return out
}

var noAbilities Abilities

func (k *kernelChoice) any(can func(*Abilities) bool) bool {
	return slices.ContainsFunc(k.planes, func(a Abilities) bool { return can(&a) })
}

func (k *kernelChoice) same(o *kernelChoice) bool {
	return k.why == o.why && k.only == o.only && slices.EqualFunc(k.planes, o.planes, func(a, b Abilities) bool { return a.same(&b) })
}

// choosePlane picks the kernel data plane whose rules s gets, the first of those that fall
// least short, and records its limitations in s. It returns why that one can't carry s;
// empty if it can.
func (c *computation) choosePlane(s *Service) (*Abilities, string) {
	if len(c.kernel.planes) == 0 {
		s.Kernel = None
		return &noAbilities, ""
	}
	short := slices.ContainsFunc(s.Frontends, func(f Frontend) bool { return f.Local && f.ShortCircuit })
	var few [4][]shortfall
	all, best := few[:0], 0
	for i := range c.kernel.planes {
		a := &c.kernel.planes[i]
		lacking := c.shortfalls(a, s.Port)
		if short && !a.TellsClients {
			lacking = append(lacking, a.shortCircuits(s.Port, c.detects[0] || c.detects[1]))
		}
		if all = append(all, lacking); compareShortfalls(lacking, all[best]) < 0 {
			best = i
		}
	}
	a := &c.kernel.planes[best]
	s.Kernel, s.KernelReason = a.Plane, c.kernel.only
	if c.in.Policy.Mode == ModeAuto && s.KernelReason == "" {
		s.KernelReason = whyChosen(a, all, best)
	}
	s.Degraded, s.Scheduler, s.TellsClients = degraded(all[best]), a.scheduler(s.Port), a.TellsClients
	if !a.TellsClients && s.Port.Protocol == service.SCTP {
		for i := range s.Frontends {
			s.Frontends[i].ShortCircuit = false // userspace can't carry it out
		}
	}
	return a, keptBack(all[best])
}

// whyChosen says why a, the best of those that fall short as in all, was chosen: because the
// preferred one can't, or it does everything, or the others can't either.
func whyChosen(a *Abilities, all [][]shortfall, best int) string {
	switch {
	case best > 0:
		return all[0][0].why
	case len(all[0]) == 0:
		return string(a.Plane) + " does all that it asks for"
	}
	var whys []string
	for i, lacking := range all {
		if i > 0 || len(all) == 1 || slices.ContainsFunc(all[1:], func(o []shortfall) bool { return compareShortfalls(o, all[0]) == 0 }) {
			whys = append(whys, lacking[0].why)
		}
	}
	return strings.Join(whys, "; ")
}
