package plan

import (
	"cmp"
	"strings"

	"kproxy.dev/kproxy/service"
)

// shortfall is one way in which a kernel data plane falls short of a
// specification.
type shortfall struct {
	why      string // completes "it isn't carried by the kernel because …"
	degraded string // what becomes of its connections that only the kernel carries
	// bridged: userspace carries the connections that the kernel would get wrong,
	// and those only, so that the service needn't stay there as a whole.
	bridged bool
}

// keptBack says why a service stays in userspace; empty if nothing keeps it there.
func keptBack(lacking []shortfall) string {
	for i := range lacking {
		if !lacking[i].bridged {
			return lacking[i].why
		}
	}
	return ""
}

// degraded says how rules fall short; empty if they don't.
func degraded(lacking []shortfall) string {
	switch len(lacking) {
	case 0:
		return ""
	case 1:
		return lacking[0].degraded
	}
	all := make([]string, len(lacking))
	for i := range lacking {
		all[i] = lacking[i].degraded
	}
	return strings.Join(all, "; ")
}

// shortfalls are those of kernel data plane d that follow from p's own
// specification, nil if there are none.
func shortfalls(d DataPlane, p *service.Port, in *Inputs) []shortfall {
	var out []shortfall
	switch d {
	case IPTables:
		if why := unchosen(p); why != "" {
			out = append(out, shortfall{why: "iptables " + why, degraded: wanted(p) + " falls back to " + chosenInstead(p) + meanwhile(p)})
		}
	case IPVS:
		name := schedulerOf(p, &in.Policy)
		if why := unusable(name, p, in); why != "" {
			what := wanted(p)
			if name != "" && name != Scheduler(p) {
				what = "scheduler " + name
			}
			out = append(out, shortfall{why: "ipvs " + why, degraded: what + " falls back to scheduler " + standIn + meanwhile(p)})
		}
	default:
		return nil
	}
	if p.ProxyProtocol != 0 {
		out = append(out, shortfall{
			why:      string(d) + " can't send PROXY protocol headers",
			degraded: "endpoints get no PROXY protocol header" + meanwhile(p),
		})
	}
	return out
}

// unchosen says why iptables can't choose endpoints as p asks; empty if it can.
func unchosen(p *service.Port) string {
	switch {
	case p.Scheduler != "":
		return "has no IPVS scheduler " + p.Scheduler
	case !statistic(p.Algorithm):
		return "can't do " + algorithmText(p.Algorithm)
	}
	return ""
}

// chosenInstead is how the rules of iptables choose where they can't as p asks.
func chosenInstead(p *service.Port) string {
	if statistic(p.Algorithm) {
		return algorithmText(p.Algorithm)
	}
	return "random choice"
}

// statistic reports whether iptables can do a: it has `statistic --mode nth` and
// `--mode random` and nothing that knows of connections or hashes.
func statistic(a service.Algorithm) bool {
	return a == service.RoundRobin || a == service.WeightedRoundRobin || a == service.Random
}

// unusable says why IPVS can't use the scheduler named, which is p's; empty if it can.
func unusable(name string, p *service.Port, in *Inputs) string {
	if name == "" {
		return "can't do " + algorithmText(p.Algorithm)
	}
	if reason := in.Caps.Schedulers[name]; reason != "" {
		return "has no scheduler " + name + " here: " + reason
	}
	return ""
}

// shortCircuits is that of IPVS for a traffic policy Local: IPVS looks at the
// virtual server and not at the client, so one that pods and this node use
// differently than others can't be told apart. Userspace bridges it.
func shortCircuits(p *service.Port, pods bool) shortfall {
	who := "clients on this node"
	if pods {
		who = "pods and " + who
	}
	return shortfall{
		why:      "ipvs can't choose endpoints by client, as externalTrafficPolicy Local asks",
		degraded: who + " reach only endpoints on this node through its external addresses" + meanwhile(p),
		bridged:  true,
	}
}

// meanwhile is when a shortfall shows.
func meanwhile(p *service.Port) string {
	if p.Protocol == service.SCTP {
		return "" // the kernel's rules are all it has
	}
	return " while kproxy is down"
}

// wanted names how p wants endpoints chosen.
func wanted(p *service.Port) string {
	return cmp.Or(schedulerText(p.Scheduler), algorithmText(p.Algorithm))
}

func schedulerText(name string) string {
	if name == "" {
		return ""
	}
	return "scheduler " + name
}
