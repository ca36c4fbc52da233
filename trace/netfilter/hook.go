package netfilter

import "math"

// Hook is a place in the kernel where packets meet base chains, in the words of
// iptables.
type Hook string

// The hooks of IPv4 and IPv6 (enum nf_inet_hooks in include/uapi/linux/netfilter.h),
// and those of single devices, which come before and after them: walking
// [Prerouting] begins with [Ingress], walking [Postrouting] ends with [Egress].
const (
	Ingress     Hook = "INGRESS"
	Prerouting  Hook = "PREROUTING"
	Input       Hook = "INPUT"
	Forward     Hook = "FORWARD"
	Output      Hook = "OUTPUT"
	Postrouting Hook = "POSTROUTING"
	Egress      Hook = "EGRESS"
)

// Priorities of base chains: lower ones come first (enum nf_ip_hook_priorities
// in include/uapi/linux/netfilter_ipv4.h, the same for IPv6). Conntrack looks
// packets up at its priority, in PREROUTING and OUTPUT.
const (
	priorityRaw       = -300
	priorityConntrack = -200
	priorityMangle    = -150
	priorityNATDst    = -100
	priorityFilter    = 0
	prioritySecurity  = 50
	priorityNATSrc    = 100
	priorityBridged   = 0 // NF_BR_PRI_BRNF
)

// Span is the part of a hook's base chains whose priority is at least From and
// less than Before.
type Span struct{ From, Before int }

// The whole of a hook, and its parts before and after IPVS takes packets: at
// LOCAL_IN with priority NF_IP_PRI_NAT_SRC - 1, after filtering; at LOCAL_OUT with
// NF_IP_PRI_NAT_DST + 2, before it (ip_vs_ops4 in net/netfilter/ipvs/ip_vs_core.c).
var (
	Whole                 = Span{math.MinInt, math.MaxInt}
	InputBeforeBalancing  = Span{math.MinInt, priorityNATSrc - 1}
	InputAfterBalancing   = Span{priorityNATSrc - 1, math.MaxInt}
	OutputBeforeBalancing = Span{math.MinInt, priorityNATDst + 2}
	OutputAfterBalancing  = Span{priorityNATDst + 2, math.MaxInt}
)

// The parts of a hook of bridges before, at and after the priority at which br_netfilter shows packets to the hooks of IP
// (br_nf_ops in net/bridge/br_netfilter_hooks.c).
var (
	BridgeBeforeIP = Span{math.MinInt, priorityBridged}
	BridgeWithIP   = Span{priorityBridged, priorityBridged + 1}
	BridgeAfterIP  = Span{priorityBridged + 1, math.MaxInt}
)

// Stages returns the parts of a span between which conntrack finds the connection of a packet that isn't its first, and then
// translates the packet's addresses (nf_nat_inet_fn in net/netfilter/nf_nat_core.c). Some may be empty.
func (s Span) Stages(h Hook) [3]Span {
	found, translated := math.MinInt, math.MaxInt
	switch h {
	case Prerouting, Output:
		found, translated = priorityConntrack, priorityNATDst
	case Input, Postrouting:
		translated = priorityNATSrc
	}
	found, translated = min(max(found, s.From), s.Before), min(max(translated, s.From), s.Before)
	return [3]Span{{s.From, found}, {found, translated}, {translated, s.Before}}
}

// priority is that of an iptables table's built-in chain, and whether the table
// has one at the hook at all (the valid_hooks of net/ipv4/netfilter/iptable_*.c).
func priority(table string, h Hook) (int, bool) {
	destination, filters := h == Prerouting || h == Output, h == Input || h == Forward || h == Output
	switch {
	case table == "raw":
		return priorityRaw, destination
	case table == "mangle":
		return priorityMangle, filters || h == Prerouting || h == Postrouting
	case table == "nat" && destination:
		return priorityNATDst, true
	case table == "nat":
		return priorityNATSrc, h == Input || h == Postrouting
	case table == "filter":
		return priorityFilter, filters
	case table == "security":
		return prioritySecurity, filters
	}
	return 0, false
}
