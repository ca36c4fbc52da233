package iptables

import (
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Abilities returns what iptables can do on a host of which host says whether its
// rules work. It chooses endpoints with `statistic --mode nth` and `--mode random`,
// and has nothing that knows of connections or hashes.
func Abilities(host plan.Capability) plan.Abilities {
	return plan.Abilities{
		Plane: plan.IPTables, Title: "iptables", Host: host,
		Algorithms:   map[service.Algorithm]string{service.RoundRobin: "", service.WeightedRoundRobin: "", service.Random: ""},
		Otherwise:    "random choice",
		TellsClients: true, DestinationNAT: true,
	}
}
