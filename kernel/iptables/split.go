package iptables

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/lb"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// split renders the rules that divide connections among a group's backends.
// Clients with affinity go to their endpoint first.
func (b *builder) split(group []plan.Backend) []string {
	var rules []string
	if b.s.Port.Affinity > 0 {
		for _, e := range group {
			rules = append(rules, kernel.InSet(kernel.AffinitySet(b.s.Port.Key, e.Address), "src")+" -j "+b.endpointChain(e.Address))
		}
	}
	switch b.s.Port.Algorithm {
	case service.RoundRobin, "":
		return append(rules, b.inTurn(group, slices.Repeat([]uint32{1}, len(group)))...)
	case service.WeightedRoundRobin:
		return append(rules, b.inTurn(group, weights(group))...)
	}
	// Random, and what stands in for what rules can't express.
	return append(rules, b.atRandom(group)...)
}

func weights(group []plan.Backend) []uint32 {
	out := make([]uint32, len(group))
	for i, e := range group {
		out[i] = e.Weight
	}
	return out
}

// inTurn gives every slot its turn: the first of n rules takes each n-th
// connection, the second each (n-1)th of those that are left, and so on.
func (b *builder) inTurn(group []plan.Backend, weights []uint32) []string {
	slots := lb.Slots(weights, b.SlotLimit)
	rules := make([]string, len(slots))
	for i, slot := range slots {
		match := ""
		if left := len(slots) - i; left > 1 {
			match = "-m statistic --mode nth --every " + strconv.Itoa(left) + " --packet 0 "
		}
		rules[i] = b.to(group[slot].Address, match)
	}
	return rules
}

func (b *builder) atRandom(group []plan.Backend) []string {
	rules := make([]string, len(group))
	for i, p := range lb.Probabilities(weights(group)) {
		match := ""
		if p < 1 {
			match = "-m statistic --mode random --probability " + probability(p) + " "
		}
		rules[i] = b.to(group[i].Address, match)
	}
	return rules
}

// probability prints p as iptables-save does, after the kernel's 31-bit fixed
// point (xt_statistic, libxt_statistic.c).
func probability(p float64) string {
	const one = 1 << 31
	return fmt.Sprintf("%.11f", math.Round(p*one)/one)
}

// to sends a connection to an endpoint, by way of its chain where clients stay
// with their endpoints.
func (b *builder) to(endpoint netip.AddrPort, match string) string {
	if b.s.Port.Affinity > 0 {
		return match + "-j " + b.endpointChain(endpoint)
	}
	return "-p " + b.s.Port.Protocol.String() + " " + match + "-j DNAT --to-destination " + endpoint.String()
}

func (b *builder) endpointChain(endpoint netip.AddrPort) string {
	return kernel.Prefix + kindEndpoint + "-" + kernel.Hash(b.s.Port.Key, endpoint.String())
}

// sticky renders an endpoint's chain: every new connection prolongs the
// client's stay.
func (b *builder) sticky(endpoint netip.AddrPort) {
	set := EndpointAffinity(b.s.Port.Key, endpoint)
	b.out.sets = append(b.out.sets, set)
	seconds := max(1, int64((b.s.Port.Affinity+time.Second-1)/time.Second))
	b.add(b.endpointChain(endpoint), []string{
		fmt.Sprintf("%s -j SET --add-set %s src --exist --timeout %d", kernel.Comment(b.s.Port.Key.String()), set.Name, seconds),
		fmt.Sprintf("-p %s -j DNAT --to-destination %s", b.s.Port.Protocol, endpoint),
	})
}
