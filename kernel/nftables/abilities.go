package nftables

import (
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Abilities returns what nftables can do on a host of which host says whether it has it.
func Abilities(host plan.Capability) plan.Abilities {
	return plan.Abilities{
		Plane: plan.NFTables, Title: "nftables", Host: host,
		Algorithms:   map[service.Algorithm]string{service.RoundRobin: "", service.WeightedRoundRobin: "", service.Random: "", service.SourceHash: ""},
		Otherwise:    "random choice",
		TellsClients: true, DestinationNAT: true, Atomic: true,
	}
}
