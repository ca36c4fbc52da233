package ipvs

import (
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// schedulers are the kernel's names for algorithms. wlc rather than lc, because
// kproxy's least connections goes by weight; there is no random scheduler
// (net/netfilter/ipvs/Kconfig).
var schedulers = map[service.Algorithm]string{
	service.RoundRobin:         "rr", // on every kernel that has IPVS (default m)
	service.WeightedRoundRobin: "wrr",
	service.LeastConnections:   "wlc",
	service.SourceHash:         "sh",
	service.Maglev:             "mh",
}

// Schedulers returns the given scheduler, if any, and those of the algorithms.
func Schedulers(given string) []string {
	var out []string
	if given != "" {
		out = append(out, given)
	}
	for _, a := range service.Algorithms {
		if name := schedulers[a]; name != "" && name != given {
			out = append(out, name)
		}
	}
	return out
}

// Abilities returns what IPVS can do on a host of which host says whether it has
// IPVS. scheduler is for services that ask for none, nor for an algorithm;
// missing says why schedulers can't be used, as [ProbeSchedulers] does. A virtual
// server is chosen by its address, not by the client.
func Abilities(host plan.Capability, scheduler string, missing map[string]string) plan.Abilities {
	return plan.Abilities{
		Plane: plan.IPVS, Title: "IPVS", Host: host,
		Algorithms: schedulers, Otherwise: "scheduler " + schedulers[service.RoundRobin],
		Schedulers: true, Scheduler: scheduler, MissingSchedulers: missing,
		Drains: true, LocalAddresses: true,
	}
}
