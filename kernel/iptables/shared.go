package iptables

import (
	"fmt"
	"net/netip"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// The shared chains. A name may be used in several tables.
const (
	chainServices    = kernel.Prefix + "SERVICES"
	chainPortal      = kernel.Prefix + "PORTAL"
	chainDispatch    = kernel.Prefix + "DISPATCH"
	chainNodePorts   = kernel.Prefix + "NODEPORTS"
	chainPostrouting = kernel.Prefix + "POSTROUTING"
	chainPrerouting  = kernel.Prefix + "PREROUTING"
	chainInput       = kernel.Prefix + "INPUT"
	chainForward     = kernel.Prefix + "FORWARD"
	chainOutput      = kernel.Prefix + "OUTPUT"
	chainRefuse      = kernel.Prefix + "REFUSE"
	chainAccept      = kernel.Prefix + "ACCEPT"
	chainShort       = kernel.Prefix + "SHORT"
)

// The chains of what only some packets need: those that begin a connection, or
// that conntrack can't place, and those between kproxy and endpoints. Others pass
// one rule that leads there.
const (
	chainPreroutingNew = chainPrerouting + "-NEW"
	chainOutputNew     = chainOutput + "-NEW"
	chainOutputOwn     = chainOutput + "-OWN"
	chainAnswers       = kernel.Prefix + "ANSWERS"
	chainInputNew      = chainInput + "-NEW"
	chainForwarded     = kernel.Prefix + "FORWARDED"
	chainRefuseNode    = chainRefuse + "-NODE"
	chainReject        = kernel.Prefix + "REJECT"
	chainUnserved      = kernel.Prefix + "UNSERVED"
)

// userProtocols are what userspace serves, and node-port bitmaps exist for.
var userProtocols = [2]service.Protocol{service.TCP, service.UDP}

// shared renders what doesn't depend on services. Without a kernel data plane
// beneath (mode userspace) only the portal is left. What packets of IPVS need
// is in chains of kernel/ipvs; here are the rules that lead there.
//
// Every packet of the host passes some of these rules, and the kernel evaluates
// a rule's matches in the order that they are written in, until one fails. So
// what fails most often and what costs least comes first: addresses, protocol,
// ports and marks, then states of conntrack, then sets and look-ups of routes,
// which cost as much as several others. The comment, which always matches, but
// is a match of its own (xt_comment), comes last, and the rules that each packet of
// userspace's matches have none. Packets of established connections find what they
// need in the first rules.
type shared struct {
	Options
	family         service.Family
	iptables, ipvs bool // lie beneath services
	short          bool // the portal tells pods and this node from others
	policy         *plan.Policy
	limited        bool // node ports answer only on the node's addresses in SetNodes
}

// beneath reports whether the kernel carries anything.
func (s shared) beneath() bool { return s.iptables || s.ipvs }

// accepted is the mark of connections that were let through: the lower bit of the
// own mark, which means nothing by itself on packets. Those of IPVS bear it from
// the first packet on, because for conntrack they aren't rewritten (no DNAT).
func (s shared) accepted() string {
	bit := s.Marks.Accepted()
	return fmt.Sprintf("-m connmark --mark %#x/%#x", bit, bit)
}

// rewritten matches connections whose destination the kernel rewrites: a match
// for each data plane, together with a set of endpoints.
func (s shared) rewritten() []string {
	var out []string
	if s.iptables {
		out = append(out, "-m conntrack --ctstate DNAT")
	}
	if s.ipvs {
		out = append(out, s.accepted())
	}
	return out
}

// toNode matches packets to those of the node's own addresses that node ports
// answer on; loopback says whether it is for loopback addresses too, if node ports
// answer there at all. The addresses on kproxy's link are local as well, but
// services' only. The protocol may be empty.
func (s shared) toNode(loopback bool, protocol string) string {
	out := ""
	if !loopback || s.policy.NoLocalhostNodePorts {
		out = "! -d " + kernel.Loopback[s.family] + " "
	}
	if protocol != "" {
		out += "-p " + protocol + " "
	}
	out += "-m addrtype --dst-type LOCAL"
	if s.ipvs {
		out += " " + kernel.NotInSet(s.set(kernel.SetVIP), "dst")
	}
	return out + s.answering()
}

// answering matches addresses that node ports answer on, of those of this node.
func (s shared) answering() string {
	if !s.limited {
		return ""
	}
	return " " + kernel.InSet(s.set(kernel.SetNodes), "dst")
}

func (s shared) set(base string) string { return kernel.FamilySet(base, s.family) }

// jumps have no comments: a comment is a match, which every packet of the host
// would pass at every jump, and chains' names say whose they are. What leads to
// chainAccept is last, so a rule of the host that drops wins.
func (s shared) jumps() []kernel.Jump {
	jump := func(table, from, to string) kernel.Jump {
		return kernel.Jump{Table: table, From: from, Rule: "-j " + to, Last: to == chainAccept}
	}
	out := []kernel.Jump{
		jump("filter", "INPUT", chainInput),
		jump("filter", "FORWARD", chainForward),
		jump("filter", "OUTPUT", chainOutput),
		jump("mangle", "PREROUTING", chainPrerouting),
		jump("mangle", "OUTPUT", chainOutput),
		jump("nat", "PREROUTING", chainServices),
		jump("nat", "OUTPUT", chainServices),
	}
	if s.iptables {
		out = append(out, jump("filter", "FORWARD", chainAccept))
	}
	if s.ipvs {
		// IPVS takes packets on their way into the node and sends them on their way out.
		out = append(out, jump("filter", "INPUT", chainAccept), jump("filter", "OUTPUT", chainAccept))
	}
	if s.beneath() {
		out = append(out, jump("nat", "POSTROUTING", chainPostrouting))
	}
	return out
}

func (s shared) chains() []kernel.Chain {
	chain := func(table, name string, rules ...string) kernel.Chain {
		return kernel.Chain{Table: table, Name: name, Rules: rules}
	}
	out := []kernel.Chain{
		chain("filter", chainForward, s.forward()...),
		chain("filter", chainInput, s.input()...),
		chain("filter", chainInputNew, s.inputNew()...),
		chain("filter", chainOutput, s.output()...),
		chain("filter", chainOutputNew, s.outputNew()...),
		chain("filter", chainRefuse, s.refusals()...),
		chain("filter", chainRefuseNode, s.refusalsNode()...),
		chain("filter", chainReject, s.reject()...),
		chain("filter", chainUnserved, s.unserved()...),
		chain("mangle", chainOutput, s.mangleOutput()...),
		chain("mangle", chainOutputNew, s.mangleOutputNew()...),
		chain("mangle", chainOutputOwn, s.mangleOutputOwn()...),
		chain("mangle", chainAnswers, s.manglePreroutingAnswers()...),
		chain("mangle", chainPrerouting, s.manglePrerouting()...),
		chain("mangle", chainPreroutingNew, s.manglePreroutingNew()...),
		chain("nat", chainPortal, s.portal()...),
		chain("nat", chainServices, s.services()...),
	}
	if s.iptables {
		out = append(out, chain("filter", chainForwarded, s.forwarded()...))
	}
	if s.beneath() {
		out = append(out,
			chain("filter", chainAccept, s.accept()...),
			chain("filter", chainInvalid, s.drop()...),
			chain("nat", chainPostrouting, s.postrouting()...))
	}
	if s.short {
		out = append(out, chain("nat", chainShort, s.shorts()...))
	}
	return out
}

// services is the way of every new connection. The own mark comes first, or
// kproxy's connection to an endpoint that is a service address of its own would
// come back to it. Then those that aren't new, but forgotten by conntrack: they
// go on where they were.
func (s shared) services() []string {
	own := s.Marks.Own()
	out := []string{
		kernel.HasMark(own, own) + " " + kernel.Comment("connections of kproxy to endpoints") + " -j RETURN",
		"-p tcp " + notSYN + " " + kernel.InSet(s.set(kernel.SetHeld), "src,src,dst") + " " + kernel.Comment("forgotten by conntrack") + s.redirect(0),
		kernel.InSet(s.set(kernel.SetAlive), "src") + " " + kernel.Comment("a live kproxy serves these in userspace") + " -j " + chainPortal,
	}
	if s.ipvs {
		out = append(out, kernel.Comment("IPVS takes those to its virtual servers")+" -j "+kernel.ChainVirtual)
	}
	if s.iptables {
		out = append(out,
			kernel.Comment("all others by destination address")+" -j "+chainDispatch,
			s.toNode(false, "")+" "+kernel.Comment("then by node port")+" -j "+chainNodePorts)
	}
	return out
}

// portal redirects to the shared listener. Node ports on loopback addresses are
// always served in userspace: DNAT would need route_localnet, which opens the
// node's own loopback services to its neighbours (CVE-2020-8558). And only this
// node's clients are: a redirect in PREROUTING comes before the kernel drops what
// others send to loopback addresses (ip_route_input_slow, net/ipv4/route.c).
func (s shared) portal() []string {
	var out []string
	for i, p := range userProtocols {
		if s.policy.NoLocalhostNodePorts {
			break
		}
		out = append(out, "-d "+kernel.Loopback[s.family]+" -p "+p.String()+" -m addrtype --src-type LOCAL"+s.answering()+" "+kernel.InSet(kernel.NodePortSet(kernel.SetLocal, p, s.family), "dst")+s.redirect(i))
	}
	for i, p := range userProtocols {
		out = append(out, "-p "+p.String()+" "+kernel.InSet(s.set(kernel.SetUser), "dst,dst")+s.redirect(i))
	}
	for i, p := range userProtocols {
		out = append(out, s.toNode(false, p.String())+" "+kernel.InSet(kernel.NodePortSet(kernel.SetUser, p, s.family), "dst")+s.redirect(i))
	}
	if s.short {
		out = append(out,
			kernel.PodRule(s.policy, s.family, "pods may use endpoints of every node", "-j "+chainShort),
			"-m addrtype --src-type LOCAL "+kernel.Comment("and so may this node")+" -j "+chainShort)
	}
	return out
}

// shorts are the rules for pods and this node itself.
func (s shared) shorts() []string {
	var out []string
	for i, p := range userProtocols {
		out = append(out, "-p "+p.String()+" "+kernel.InSet(s.set(kernel.SetShort), "dst,dst")+s.redirect(i))
	}
	for i, p := range userProtocols {
		out = append(out, s.toNode(false, p.String())+" "+kernel.InSet(kernel.NodePortSet(kernel.SetShort, p, s.family), "dst")+s.redirect(i))
	}
	return out
}

// listener is the shared listeners' address as rules have it.
func (s shared) listener() string { return kernel.HostPrefix(kernel.ListenerAddress[s.family]) }

// redirect is the target of the i-th of userProtocols.
func (s shared) redirect(i int) string {
	return " -j DNAT --to-destination " + netip.AddrPortFrom(kernel.ListenerAddress[s.family], [2]uint16{s.TCPPort, s.UDPPort}[i]).String()
}

// postrouting masquerades what is marked, and hairpin connections: an endpoint
// that reaches itself through a service would see its own address as the
// client's and answer itself. kproxy's own connections have the right address
// already: they bear no masquerade bit, and nothing rewrites their destination.
func (s shared) postrouting() []string {
	m := s.Marks
	masquerade := "-j MASQUERADE"
	if s.RandomFully {
		masquerade += " --random-fully"
	}
	mark := kernel.SetMark(m.Masquerade, m.Masquerade)
	endpoint := kernel.InSet(s.set(kernel.SetEndpoint), "dst,dst,dst")
	var out []string
	for _, rewritten := range s.rewritten() {
		out = append(out, rewritten+" "+kernel.InSet(s.set(kernel.SetEndpoint), "dst,dst,src")+" "+kernel.Comment("hairpin: an endpoint that reaches itself")+" "+mark)
		for _, l := range s.policy.Links {
			if service.FamilyOf(l.Addr()) == s.family {
				out = append(out, fmt.Sprintf("-s %s -d %s %s %s %s %s", l, l,
					rewritten, endpoint, kernel.Comment("the endpoint would answer without passing this node"), mark))
			}
		}
	}
	if s.ipvs {
		out = append(out, kernel.InSet(s.set(kernel.SetVIP), "src")+" "+endpoint+" "+kernel.Comment("this node takes a service address on its link as its own")+" "+mark)
	}
	return append(out,
		fmt.Sprintf("-m mark ! --mark %#x/%#x -j RETURN", m.Masquerade, m.Masquerade),
		kernel.SetMark(m.Masquerade, 0),
		masquerade)
}
