package steering

import (
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Way is what the rules of all services do for the connections of one kernel data plane:
// how they are told from others, and what is to happen to them in which chain. A plane
// that rewrites destinations in table nat names its two chains, and is otherwise served by
// what conntrack knows. One that takes packets elsewhere has rules for each place, in the
// form that iptables-save prints.
type Way struct {
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
	Input       []string // filter
	InputNew    []string // filter: what begins a connection
	OutputNew   []string // mangle: likewise
	Refusals    []string // mangle: what endpoints send; where resets are caught
}

func (w *Way) rewritten() string {
	if w.NAT {
		return "-m conntrack --ctstate DNAT"
	}
	return w.Rewritten
}

// Waymaker makes the Way of a plane in one family; policy and options are those of r.
type Waymaker struct {
	Plane plan.DataPlane
	Make  func(r Rules) Way
}

// newRules returns the rules of p in one family, with the ways of those planes that p uses, in
// the order given.
func newRules(p *plan.Plan, f service.Family, o Options) Rules {
	s := Rules{Options: o, Family: f, short: !p.TellsClients, policy: &p.Policy}
	_, s.limited = NodePortNetworks(&p.Policy, f)
	for _, w := range o.Ways {
		if p.Uses(w.Plane) {
			s.ways = append(s.ways, w.Make(s))
		}
	}
	return s
}
