package steering

import (
	"fmt"
	"net/netip"
	"slices"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// The chains. A name may be used in several tables. Those that other packages know have
// exported names: packets to every data plane pass them, or trace reads their counters.
const (
	ChainServices    = kernel.Prefix + "SERVICES"
	ChainPostrouting = kernel.Prefix + "POSTROUTING"
	ChainInput       = kernel.Prefix + "INPUT"
	ChainForward     = kernel.Prefix + "FORWARD"
	ChainOutput      = kernel.Prefix + "OUTPUT"
	ChainAccept      = kernel.Prefix + "ACCEPT"  // jumped to at the end of built-in chains
	ChainInvalid     = kernel.Prefix + "INVALID" // ends packets that conntrack can't place, in table filter
	ChainReject      = kernel.Prefix + "REJECT"
	ChainUnserved    = kernel.Prefix + "UNSERVED"   // of userspace, that no kproxy takes
	ChainElsewhere   = kernel.Prefix + "ELSEWHERE"  // drops what a traffic policy allows no endpoint
	ChainOutside     = kernel.Prefix + "OUTSIDE"    // drops clients outside the source ranges, in table mangle
	ChainNoPort      = kernel.Prefix + "NO-PORT"    // refuses what is to a cluster IP by a port that no service has there
	ChainNoService   = kernel.Prefix + "NO-SERVICE" // drops what is to an address of the ServiceCIDRs that no service has
	ChainRedirect    = kernel.Prefix + "PORTAL"
	ChainShort       = kernel.Prefix + "SHORT"

	chainPrerouting = kernel.Prefix + "PREROUTING"
	chainRefuse     = kernel.Prefix + "REFUSE"
	chainClosed     = kernel.Prefix + "CLOSED"
)

// The chains of what only some packets need: those that begin a connection, or
// that conntrack can't place, and those between kproxy and endpoints. Others pass
// one rule that leads there.
const (
	chainPreroutingNew = chainPrerouting + "-NEW"
	chainOutputNew     = ChainOutput + "-NEW"
	chainOutputOwn     = ChainOutput + "-OWN"
	chainAnswers       = kernel.Prefix + "ANSWERS"
	chainInputNew      = ChainInput + "-NEW"
	chainForwarded     = kernel.Prefix + "FORWARDED"
	chainRefuseNode    = chainRefuse + "-NODE"
)

// userProtocols are what userspace serves, and node-port bitmaps exist for.
var userProtocols = [2]service.Protocol{service.TCP, service.UDP}

// Rules renders what doesn't depend on services, in one address family. Without a kernel
// data plane (mode userspace) only what leads to userspace is left. What a data plane
// needs besides is in its [PlaneRules].
//
// Every packet of the host passes some of these rules, and the kernel evaluates
// a rule's matches in the order that they are written in, until one fails. So
// what fails most often and what costs least comes first: addresses, protocol,
// ports and marks, then states of conntrack, then sets and look-ups of routes,
// which cost as much as several others. The comment, which always matches, but
// is a match of its own (xt_comment), comes last, and the rules that each packet of
// userspace's matches have none. Packets of established connections find what they
// need in the first rules.
type Rules struct {
	Options
	Family  service.Family
	planes  []PlaneRules // of the planes in use
	short   bool         // pods and this node are told from others
	policy  *plan.Policy
	limited bool // node ports answer only on the node's addresses in SetNodes
}

// nat reports whether a plane rewrites destinations by conntrack.
func (s Rules) nat() bool {
	return slices.ContainsFunc(s.planes, func(w PlaneRules) bool { return w.NAT })
}

// each collects the rules that the planes in use have in one place.
func (s Rules) each(place func(*PlaneRules) []string) []string {
	var out []string
	for i := range s.planes {
		out = append(out, place(&s.planes[i])...)
	}
	return out
}

// toNode matches packets to those of the node's own addresses that node ports
// answer on; loopback says whether it is for loopback addresses too, if node ports
// answer there at all. The addresses on kproxy's link are local as well, but
// services' only. The protocol may be empty.
func (s Rules) toNode(loopback bool, protocol string) string {
	out := ""
	if !loopback || s.policy.NoLocalhostNodePorts {
		out = "! -d " + kernel.Loopback[s.Family] + " "
	}
	if protocol != "" {
		out += "-p " + protocol + " "
	}
	out += "-m addrtype --dst-type LOCAL"
	for _, w := range s.planes {
		out += w.NotNode
	}
	return out + s.answering()
}

// answering matches addresses that node ports answer on, of those of this node.
func (s Rules) answering() string {
	if !s.limited {
		return ""
	}
	return " " + kernel.InSet(s.Set(kernel.SetNodes), "dst")
}

// Set names a set of the family.
func (s Rules) Set(base string) string { return kernel.FamilySet(base, s.Family) }

// jumps have no comments: a comment is a match, which every packet of the host
// would pass at every jump, and chains' names say whose they are. What leads to
// ChainAccept is last, so a rule of the host that drops wins.
func (s Rules) jumps() []kernel.Jump {
	jump := func(table, from, to string) kernel.Jump {
		return kernel.Jump{Table: table, From: from, Rule: "-j " + to, Last: to == ChainAccept}
	}
	out := []kernel.Jump{
		jump("filter", "INPUT", ChainInput),
		jump("filter", "FORWARD", ChainForward),
		jump("filter", "OUTPUT", ChainOutput),
		jump("mangle", "PREROUTING", chainPrerouting),
		jump("mangle", "OUTPUT", ChainOutput),
		jump("nat", "PREROUTING", ChainServices),
		jump("nat", "OUTPUT", ChainServices),
	}
	for _, w := range s.planes {
		for _, from := range w.AcceptIn {
			out = append(out, jump("filter", from, ChainAccept))
		}
	}
	if len(s.postrouting()) > 0 {
		out = append(out, jump("nat", "POSTROUTING", ChainPostrouting))
	}
	return out
}

func (s Rules) chains() []kernel.Chain {
	chain := func(table, name string, rules ...string) kernel.Chain {
		return kernel.Chain{Table: table, Name: name, Rules: rules}
	}
	out := []kernel.Chain{
		chain("filter", ChainForward, s.forward()...),
		chain("filter", ChainInput, s.input()...),
		chain("filter", chainInputNew, s.inputNew()...),
		chain("filter", ChainOutput, s.output()...),
		chain("filter", chainOutputNew, s.outputNew()...),
		chain("filter", ChainElsewhere, s.dropped(kernel.ReasonElsewhere)...),
		chain("filter", chainRefuse, s.refusals()...),
		chain("filter", chainRefuseNode, s.refusalsNode()...),
		chain("filter", ChainReject, s.rejected(kernel.ReasonNoEndpoint)...),
		chain("filter", ChainUnserved, s.unserved()...),
		chain("mangle", ChainOutput, s.mangleOutput()...),
		chain("mangle", chainOutputNew, s.mangleOutputNew()...),
		chain("mangle", chainOutputOwn, s.mangleOutputOwn()...),
		chain("mangle", ChainOutside, s.dropped(kernel.ReasonOutside)...),
		chain("mangle", chainAnswers, s.manglePreroutingAnswers()...),
		chain("mangle", chainPrerouting, s.manglePrerouting()...),
		chain("mangle", chainPreroutingNew, s.manglePreroutingNew()...),
		chain("nat", ChainRedirect, s.redirects()...),
		chain("nat", ChainServices, s.services()...),
	}
	if s.nat() {
		out = append(out, chain("filter", chainForwarded, s.forwarded()...))
	}
	if s.policy.CloseClusterIPs {
		closed, noService := s.closed()
		out = append(out, chain("filter", chainClosed, closed...), chain("filter", ChainNoPort, s.noPort()...))
		if noService != nil {
			out = append(out, chain("filter", ChainNoService, noService...))
		}
	}
	if len(s.each(func(w *PlaneRules) []string { return w.OutputNew })) > 0 {
		out = append(out, chain("mangle", ChainElsewhere, s.dropped(kernel.ReasonElsewhere)...))
	}
	if len(s.planes) > 0 {
		out = append(out,
			chain("filter", ChainAccept, s.accept()...),
			chain("filter", ChainInvalid, "-j DROP")) // a chain of its own, whose counter tells how many
	}
	if rules := s.postrouting(); len(rules) > 0 {
		out = append(out, chain("nat", ChainPostrouting, rules...))
	}
	if s.short {
		out = append(out, chain("nat", ChainShort, s.shorts()...))
	}
	return out
}

// services is the way of every new connection. The own mark comes first, or
// kproxy's connection to an endpoint that is a service address of its own would
// come back to it. Then those that aren't new, but forgotten by conntrack: they
// go on where they were.
func (s Rules) services() []string {
	own := s.Marks.Own()
	out := []string{
		kernel.HasMark(own, own) + " " + kernel.Comment("connections of kproxy to endpoints") + " -j RETURN",
		"-p tcp " + notSYN + " " + kernel.InSet(s.Set(kernel.SetHeld), "src,src,dst") + " " + kernel.Comment("forgotten by conntrack") + s.redirect(0),
		kernel.InSet(s.Set(kernel.SetAlive), "src") + " " + kernel.Comment("a live kproxy serves these in userspace") + " -j " + ChainRedirect,
	}
	out = append(out, s.each(func(w *PlaneRules) []string { return w.Services })...)
	for _, w := range s.planes {
		if w.NAT {
			out = append(out,
				kernel.Comment("all others by destination address")+" -j "+w.Dispatch,
				s.toNode(false, "")+" "+kernel.Comment("then by node port")+" -j "+w.NodePorts)
		}
	}
	return out
}

// redirects leads to the shared listener. Node ports on loopback addresses are
// always served in userspace: DNAT would need route_localnet, which opens the
// node's own loopback services to its neighbours (CVE-2020-8558). And only this
// node's clients are: a redirect in PREROUTING comes before the kernel drops what
// others send to loopback addresses (ip_route_input_slow, net/ipv4/route.c).
func (s Rules) redirects() []string {
	var out []string
	for i, p := range userProtocols {
		if s.policy.NoLocalhostNodePorts {
			break
		}
		out = append(out, "-d "+kernel.Loopback[s.Family]+" -p "+p.String()+" -m addrtype --src-type LOCAL"+s.answering()+" "+kernel.InSet(kernel.NodePortSet(kernel.SetLocal, p, s.Family), "dst")+s.redirect(i))
	}
	for i, p := range userProtocols {
		out = append(out, "-p "+p.String()+" "+kernel.InSet(s.Set(kernel.SetUser), "dst,dst")+s.redirect(i))
	}
	for i, p := range userProtocols {
		out = append(out, s.toNode(false, p.String())+" "+kernel.InSet(kernel.NodePortSet(kernel.SetUser, p, s.Family), "dst")+s.redirect(i))
	}
	if s.short {
		out = append(out,
			PodRule(s.policy, s.Family, "pods may use endpoints of every node", "-j "+ChainShort),
			"-m addrtype --src-type LOCAL "+kernel.Comment("and so may this node")+" -j "+ChainShort)
	}
	return out
}

// shorts are the rules for pods and this node itself.
func (s Rules) shorts() []string {
	var out []string
	for i, p := range userProtocols {
		out = append(out, "-p "+p.String()+" "+kernel.InSet(s.Set(kernel.SetShort), "dst,dst")+s.redirect(i))
	}
	for i, p := range userProtocols {
		out = append(out, s.toNode(false, p.String())+" "+kernel.InSet(kernel.NodePortSet(kernel.SetShort, p, s.Family), "dst")+s.redirect(i))
	}
	return out
}

// listener is the shared listeners' address as rules have it.
func (s Rules) listener() string { return kernel.HostPrefix(ListenerAddress[s.Family]) }

// redirect is the target of the i-th of userProtocols.
func (s Rules) redirect(i int) string {
	return " -j DNAT --to-destination " + netip.AddrPortFrom(ListenerAddress[s.Family], [2]uint16{s.TCPPort, s.UDPPort}[i]).String()
}

// postrouting masquerades what is marked, and hairpin connections: an endpoint
// that reaches itself through a service would see its own address as the
// client's and answer itself. kproxy's own connections bear no masquerade bit, and
// nothing rewrites their destination: they have the right address already, but for
// those that bear a stand-in's.
func (s Rules) postrouting() []string {
	m := s.Marks
	masquerade := "-j MASQUERADE"
	if s.RandomFully {
		masquerade += " --random-fully"
	}
	mark := kernel.SetMark(m.Masquerade, m.Masquerade)
	endpoint := kernel.InSet(s.Set(kernel.SetEndpoint), "dst,dst,dst")
	var out []string
	for _, n := range s.policy.StandIns(s.Family) {
		out = append(out, fmt.Sprintf("-s %s -m mark --mark %#x/%#x %s -j NETMAP --to %s", n.Network, m.Own(), m.Own(), kernel.Comment("clients behind a bridge"), n.For))
	}
	if len(s.planes) == 0 {
		return out // nothing else rewrites packets
	}
	for _, w := range s.planes {
		rewritten := w.rewritten()
		out = append(out, rewritten+" "+kernel.InSet(s.Set(kernel.SetEndpoint), "dst,dst,src")+" "+kernel.Comment("hairpin: an endpoint that reaches itself")+" "+mark)
		for _, l := range s.policy.Links {
			if service.FamilyOf(l.Addr()) == s.Family {
				out = append(out, fmt.Sprintf("-s %s -d %s %s %s %s %s", l, l,
					rewritten, endpoint, kernel.Comment("the endpoint would answer without passing this node"), mark))
			}
		}
	}
	out = append(out, s.each(func(w *PlaneRules) []string { return w.Postrouting })...)
	return append(out,
		fmt.Sprintf("-m mark ! --mark %#x/%#x -j RETURN", m.Masquerade, m.Masquerade),
		kernel.SetMark(m.Masquerade, 0),
		masquerade)
}
