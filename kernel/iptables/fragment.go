package iptables

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"strconv"
	"time"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/lb"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Kinds of a service port's own chains; see the package comment.
const (
	kindCluster  = "SVC"
	kindLocal    = "LOC"
	kindExternal = "EXT"
	kindInternal = "INT"
	kindEndpoint = "SEP"
)

// leaf is a rule that leads from the dispatch tree to a service port. The zero
// Addr stands for the node's own addresses.
type leaf struct {
	addr  netip.Addr
	proto service.Protocol
	port  uint16
	rule  string
}

// fragment holds what one service port contributes. It depends on nothing but the
// service's KernelHash and the options; see [known].
type fragment struct {
	chains    [2][]kernel.Chain
	leaves    [2][]leaf // by address
	ports     [2][]leaf // node ports
	endpoints [2][]string
	sets      []kernel.Set
}

// treatment says how frontends lead to endpoints. Frontends that are treated
// alike share a chain.
type treatment struct {
	local, shortCircuit bool
	masquerade          plan.Masquerade
}

// builder renders one service port in one family.
type builder struct {
	*steering.Options
	policy   *plan.Policy
	s        *plan.Service
	family   service.Family
	out      *fragment
	groups   map[string][]plan.Backend // by kind of chain, those with weight only
	users    map[string]int            // treatments that lead to a group
	rendered map[string]bool
}

func renderService(s *plan.Service, p *plan.Policy, o *steering.Options) *fragment {
	out := &fragment{}
	for _, f := range o.Families() {
		renderFamily(out, s, p, o, f)
	}
	return out
}

func renderFamily(out *fragment, s *plan.Service, p *plan.Policy, o *steering.Options, f service.Family) {
	if !slices.ContainsFunc(s.Frontends, func(fe plan.Frontend) bool { return fe.Family == f }) {
		return
	}
	b := &builder{Options: o, policy: p, s: s, family: f, out: out, rendered: map[string]bool{}}
	b.groups = map[string][]plan.Backend{
		kindCluster: withWeight(s.Groups[f].Cluster),
		kindLocal:   withWeight(s.Groups[f].Local),
	}
	b.render()
}

// withWeight leaves out backends of weight 0, which take no new connection.
func withWeight(in []plan.Backend) []plan.Backend {
	light := func(b plan.Backend) bool { return b.Weight == 0 }
	if !slices.ContainsFunc(in, light) {
		return in
	}
	return slices.DeleteFunc(slices.Clone(in), light)
}

func (b *builder) render() {
	entries := b.entries()
	if len(entries) == 0 {
		return
	}
	name := b.s.Port.Key.String()
	for i := range b.s.Frontends {
		f := &b.s.Frontends[i]
		entry, ok := entries[of(f)]
		if f.Family != b.family || !ok || !b.s.Serves(f) {
			continue
		}
		l := leaf{addr: f.Address.Addr(), proto: f.Protocol, port: f.Address.Port()}
		if f.Kind == plan.NodePort {
			l.addr = netip.Addr{}
		}
		l.rule = toPort(l.addr, l.proto, l.port, name) + " -j " + entry
		if f.Kind == plan.NodePort {
			b.out.ports[b.family] = append(b.out.ports[b.family], l)
		} else {
			b.out.leaves[b.family] = append(b.out.leaves[b.family], l)
		}
	}
	b.endpoints()
}

func of(f *plan.Frontend) treatment {
	return treatment{f.Local, f.Local && f.ShortCircuit, f.Masquerade}
}

func (t treatment) kind() string {
	if t.local {
		return kindLocal
	}
	return kindCluster
}

// entries renders a chain for each treatment and returns its name.
func (b *builder) entries() map[treatment]string {
	var order []treatment
	kinds := map[treatment]plan.Kind{}
	b.users = map[string]int{}
	for i := range b.s.Frontends {
		f := &b.s.Frontends[i]
		t := of(f)
		if _, seen := kinds[t]; f.Family != b.family || seen || !b.s.Serves(f) {
			continue
		}
		kinds[t] = f.Kind
		order = append(order, t)
		b.users[t.kind()]++
		if t.shortCircuit {
			b.users[kindCluster]++
		}
	}
	out := map[treatment]string{}
	used := map[string]int{}
	for _, t := range order {
		kind := kindExternal
		if kinds[t] == plan.ClusterIP {
			kind = kindInternal
		}
		if used[kind]++; used[kind] > 1 {
			kind = fmt.Sprintf("%.2s%d", kind, used[kind])
		}
		out[t] = b.entry(t, kind)
	}
	return out
}

// entry renders the chain of one treatment. It is the group's own chain where
// nobody else uses that one; else a chain of its own that leads there.
func (b *builder) entry(t treatment, kind string) string {
	rules := b.masquerade(t.masquerade)
	if t.shortCircuit && len(b.groups[kindCluster]) > 0 {
		cluster := b.group(kindCluster)
		rules = append(rules,
			steering.PodRule(b.policy, b.family, "pods may use endpoints of every node", "-g "+cluster),
			"-m addrtype --src-type LOCAL "+kernel.Comment("and so may this node")+" -g "+cluster)
	}
	if len(rules) == 0 {
		return b.group(t.kind())
	}
	if b.users[t.kind()] == 1 {
		return b.chain(t.kind(), append(rules, b.split(b.groups[t.kind()])...))
	}
	if len(b.groups[t.kind()]) > 0 {
		rules = append(rules, "-j "+b.group(t.kind()))
	}
	return b.chain(kind, rules)
}

// group renders a group's chain, once, and returns its name.
func (b *builder) group(kind string) string {
	if !b.rendered[kind] {
		b.rendered[kind] = true
		b.chain(kind, b.split(b.groups[kind]))
	}
	return kernel.ChainName(kind, b.s.Port.Key)
}

func (b *builder) chain(kind string, rules []string) string {
	name := kernel.ChainName(kind, b.s.Port.Key)
	b.add(name, rules)
	return name
}

func (b *builder) add(name string, rules []string) {
	b.out.chains[b.family] = append(b.out.chains[b.family],
		kernel.Chain{Table: "nat", Name: name, Rules: rules, Owner: b.s.Port.Key})
}

func (b *builder) masquerade(m plan.Masquerade) []string {
	mark := kernel.SetMark(b.Marks.Masquerade, b.Marks.Masquerade)
	switch m {
	case plan.MasqueradeAlways:
		return []string{kernel.Comment("masquerade every client") + " " + mark}
	case plan.MasqueradeUnlessPod:
		return []string{steering.OtherRule(b.policy, b.family, "masquerade clients outside the pod network", "", mark)}
	case plan.MasqueradeNodeLocal:
		return []string{"-m addrtype --src-type LOCAL " + kernel.Comment("masquerade this node itself") + " " + mark}
	}
	return nil
}

// endpoints renders what belongs to each endpoint once, whichever groups it is in.
func (b *builder) endpoints() {
	seen := make(map[netip.AddrPort]bool, len(b.groups[kindCluster]))
	for _, kind := range []string{kindCluster, kindLocal} {
		if b.users[kind] == 0 {
			continue
		}
		b.out.endpoints[b.family] = slices.Grow(b.out.endpoints[b.family], len(b.groups[kind]))
		for _, e := range b.groups[kind] {
			if seen[e.Address] {
				continue
			}
			seen[e.Address] = true
			b.out.endpoints[b.family] = append(b.out.endpoints[b.family], kernel.EndpointEntry(b.s.Port.Protocol, e.Address))
			if b.s.Port.Affinity > 0 {
				b.sticky(e.Address)
			}
		}
	}
}

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
	slots := lb.Slots(weights, lb.SlotLimit)
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
