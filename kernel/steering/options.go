package steering

import (
	"fmt"
	"slices"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Options holds what rules depend on besides the plan.
type Options struct {
	Marks   kernel.Marks
	TCPPort uint16 // of the shared listener
	UDPPort uint16
	// RandomFully masquerades with random source ports (iptables 1.6.2, Linux 3.13).
	RandomFully bool
	// SocketMatch says that the host has xt_socket, which transparent upstream
	// connections need.
	SocketMatch bool
	// CatchRefusals says that the host has xt_connbytes and counts packets
	// (net.netfilter.nf_conntrack_acct), so that a connection which an endpoint
	// refuses can go to another.
	CatchRefusals bool
	// DropInvalid drops packets of endpoints that conntrack takes for invalid. It
	// must not where the host has conntrack be liberal
	// (net.netfilter.nf_conntrack_tcp_be_liberal).
	DropInvalid bool
	// LogRefusals says that the host has xt_NFLOG and xt_limit, by which rules tell of
	// clients that they refuse ([kernel.RefusalLog]).
	LogRefusals bool
	// PassiveHealth has rules tell of connections to endpoints that may have no answer, by that log.
	PassiveHealth bool
	// SkipIPv6 renders nothing for IPv6, for hosts without ip6tables.
	SkipIPv6 bool
	// Planes are all that a plan may use.
	Planes []Plane
}

// DefaultOptions returns options for a host that has everything. The
// listener's ports and the planes are the caller's to fill in.
func DefaultOptions() Options {
	return Options{Marks: kernel.DefaultMarks(), RandomFully: true, SocketMatch: true, CatchRefusals: true, DropInvalid: true, LogRefusals: true, PassiveHealth: true}
}

// Families returns the address families that rules are rendered for.
func (o Options) Families() []service.Family {
	if o.SkipIPv6 {
		return []service.Family{service.IPv4}
	}
	return service.Families[:]
}

// Accepted matches connections that were let through by their mark: the lower bit of the
// own mark, which means nothing by itself on packets.
func (o Options) Accepted() string {
	bit := o.Marks.Accepted()
	return fmt.Sprintf("-m connmark --mark %#x/%#x", bit, bit)
}

// Render returns the rules and sets that all services share. It is pure: equal plans and
// options give equal rulesets. Entries of redirect sets aren't part of it; those follow
// the plan on their own ([Sets]).
func Render(p *plan.Plan, o Options) kernel.Ruleset {
	out := kernel.Ruleset{Sets: EmptySetsOf(p)}
	for _, f := range o.Families() {
		s := newRules(p, f, o)
		if nodes, limited := NodePortNetworks(&p.Policy, f); limited {
			out.Sets = append(out.Sets, nodes)
		}
		out.Sets = append(out.Sets, PodNetworks(p, f))
		out.Jumps[f], out.Chains[f] = s.jumps(), s.chains()
		slices.SortFunc(out.Chains[f], kernel.CompareChains)
	}
	slices.SortFunc(out.Sets, kernel.CompareSets)
	return out
}

// PlaneRules says what the rules of all services do for the connections of one kernel data plane:
// how they are told from others, and what is to happen to them in which chain. A plane
// that rewrites destinations in table nat names its two chains, and is otherwise served by
// what conntrack knows. One that takes packets elsewhere has rules for each place, in the
// form that iptables-save prints.
type PlaneRules struct {
	// NAT: destinations are rewritten in table nat, so that connections have the state DNAT.
	NAT                 bool
	Dispatch, NodePorts string   // where NAT looks for a service: by address, and by node port
	AcceptIn            []string // built-in chains of table filter at whose end connections are accepted

	// What follows is for planes without NAT.

	Rewritten   string   // matches connections to endpoints
	Untaken     string   // a match, with a space before, of what isn't to an address that it serves
	NotNode     string   // likewise of addresses that aren't the node's own, though they are local
	Services    []string // nat: new connections that userspace doesn't get
	Postrouting []string // nat: before what is marked is masqueraded
	Passing     []string // filter FORWARD, INPUT and OUTPUT
	Accept      []string // filter, at the end of AcceptIn
	InputNew    []string // filter: what begins a connection
	OutputNew   []string // mangle: likewise
	Refusals    []string // mangle: what endpoints send; where resets are caught
}

func (w *PlaneRules) rewritten() string {
	if w.NAT {
		return "-m conntrack --ctstate DNAT"
	}
	return w.Rewritten
}

// Plane holds what steering knows of a kernel data plane.
type Plane struct {
	Name plan.DataPlane
	// Rules makes the rules for its connections in one family; policy and options are those of r.
	Rules func(r Rules) PlaneRules
}

// newRules returns the rules of p in one family, with those of the planes that p uses, in
// the order given.
func newRules(p *plan.Plan, f service.Family, o Options) Rules {
	s := Rules{Options: o, Family: f, short: !p.TellsClients, policy: &p.Policy}
	_, s.limited = NodePortNetworks(&p.Policy, f)
	for _, plane := range o.Planes {
		if p.Uses(plane.Name) {
			s.planes = append(s.planes, plane.Rules(s))
		}
	}
	return s
}
