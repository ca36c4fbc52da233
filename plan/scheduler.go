package plan

import (
	"cmp"

	"kproxy.dev/kproxy/service"
)

// standIn is the scheduler of virtual servers whose own can't be had. It is part
// of IPVS on every kernel that has it (net/netfilter/ipvs/Kconfig: default m).
const standIn = "rr"

// schedulers are the kernel's names for algorithms. wlc rather than lc, because
// kproxy's least connections goes by weight; there is no random scheduler
// (net/netfilter/ipvs/Kconfig).
var schedulers = map[service.Algorithm]string{
	service.RoundRobin:         "rr",
	service.WeightedRoundRobin: "wrr",
	service.LeastConnections:   "wlc",
	service.SourceHash:         "sh",
	service.Maglev:             "mh",
}

// Scheduler returns the scheduler of IPVS that p asks for: its own, or its
// algorithm's; empty if IPVS has none. The one that a plan decided on, which
// heeds what this host has, is [Service.Scheduler].
func Scheduler(p *service.Port) string {
	return cmp.Or(p.Scheduler, schedulers[p.Algorithm])
}

// schedulerOf is Scheduler under a policy: its scheduler is for services that
// ask for none, nor for an algorithm.
func schedulerOf(p *service.Port, policy *Policy) string {
	if p.Scheduler == "" && !p.AlgorithmGiven && policy.Scheduler != "" {
		return policy.Scheduler
	}
	return Scheduler(p)
}

// weightless reports whether weights other than 0 mean nothing to s: plain round
// robin goes by none. In userspace and iptables the algorithm decides, in IPVS
// the scheduler.
func (s *Service) weightless() bool {
	return s.Port.Algorithm == service.RoundRobin && (s.Beneath != IPVS || s.Scheduler == "rr")
}
