package iptables

import (
	"fmt"

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

// userProtocols are what userspace serves, and node-port bitmaps exist for.
var userProtocols = [2]service.Protocol{service.TCP, service.UDP}

// shared renders what doesn't depend on services. Without a kernel data plane
// beneath (mode userspace) only the portal is left. What packets of IPVS need
// is in chains of kernel/ipvs; here are the rules that lead there.
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

// toNode is a rule for packets to those of the node's own addresses that node
// ports answer on; loopback says whether it is for loopback addresses too, if node
// ports answer there at all. The addresses on kproxy's link are local as well, but
// services' only. The rule is in the order of iptables-save: what is in match
// comes after the protocol and the comment, both of which may be empty.
func (s shared) toNode(loopback bool, protocol, comment, match string) string {
	out := ""
	if !loopback || s.policy.NoLocalhostNodePorts {
		out = "! -d " + kernel.Loopback[s.family] + " "
	}
	if protocol != "" {
		out += "-p " + protocol + " "
	}
	if comment != "" {
		out += kernel.Comment(comment) + " "
	}
	out += "-m addrtype --dst-type LOCAL"
	if s.ipvs {
		out += " " + kernel.NotInSet(s.set(kernel.SetVIP), "dst")
	}
	return out + s.answering() + match
}

// answering matches addresses that node ports answer on, of those of this node.
func (s shared) answering() string {
	if !s.limited {
		return ""
	}
	return " " + kernel.InSet(s.set(kernel.SetNodes), "dst")
}

func (s shared) set(base string) string { return kernel.FamilySet(base, s.family) }

func (s shared) jumps() []kernel.Jump {
	jump := func(table, from, to, why string) kernel.Jump {
		return kernel.Jump{Table: table, From: from, Rule: kernel.Comment("kproxy: "+why) + " -j " + to, Last: to == chainAccept}
	}
	out := []kernel.Jump{
		jump("filter", "INPUT", chainInput, "services"),
		jump("filter", "FORWARD", chainForward, "services"),
		jump("filter", "OUTPUT", chainOutput, "services"),
		jump("mangle", "PREROUTING", chainPrerouting, "services"),
		jump("mangle", "OUTPUT", chainOutput, "services"),
		jump("nat", "PREROUTING", chainServices, "services"),
		jump("nat", "OUTPUT", chainServices, "services"),
	}
	if s.iptables {
		out = append(out, jump("filter", "FORWARD", chainAccept, "to endpoints, unless a rule above drops it"))
	}
	if s.ipvs {
		// IPVS takes packets on their way into the node and sends them on their way out.
		out = append(out,
			jump("filter", "INPUT", chainAccept, "to services, unless a rule above drops it"),
			jump("filter", "OUTPUT", chainAccept, "to endpoints, unless a rule above drops it"))
	}
	if s.beneath() {
		out = append(out, jump("nat", "POSTROUTING", chainPostrouting, "masquerade"))
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
		chain("filter", chainOutput, s.output()...),
		chain("filter", chainRefuse, s.refusals()...),
		chain("mangle", chainOutput, s.mangleOutput()...),
		chain("mangle", chainPrerouting, s.manglePrerouting()...),
		chain("nat", chainPortal, s.portal()...),
		chain("nat", chainServices, s.services()...),
	}
	if s.beneath() {
		out = append(out,
			chain("filter", chainAccept, s.accept()...),
			chain("filter", chainInvalid, s.drop()...),
			chain("nat", chainPostrouting, s.postrouting()...))
	}
	if s.short {
		out = append(out, chain("nat", chainShort, s.redirects(kernel.SetShort)...))
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
		"-p tcp " + notSYN + " " + kernel.Comment("forgotten by conntrack") + " " + kernel.InSet(s.set(kernel.SetHeld), "src,src,dst") + s.redirect(0),
		kernel.InSet(s.set(kernel.SetAlive), "src") + " " + kernel.Comment("a live kproxy serves these in userspace") + " -j " + chainPortal,
	}
	if s.ipvs {
		out = append(out, kernel.Comment("IPVS takes those to its virtual servers")+" -j "+kernel.ChainVirtual)
	}
	if s.iptables {
		out = append(out,
			kernel.Comment("all others by destination address")+" -j "+chainDispatch,
			s.toNode(false, "", "then by node port", " -j "+chainNodePorts))
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
	out = append(out, s.redirects(kernel.SetUser)...)
	if s.short {
		out = append(out,
			kernel.PodRule(s.policy, s.family, "pods may use endpoints of every node", "-j "+chainShort),
			kernel.Comment("and so may this node")+" -m addrtype --src-type LOCAL -j "+chainShort)
	}
	return out
}

// redirects are the rules for who is in one kind of the portal's sets.
func (s shared) redirects(base string) []string {
	var out []string
	for i, p := range userProtocols {
		out = append(out, "-p "+p.String()+" "+kernel.InSet(s.set(base), "dst,dst")+s.redirect(i))
	}
	for i, p := range userProtocols {
		out = append(out, s.toNode(false, p.String(), "", " "+kernel.InSet(kernel.NodePortSet(base, p, s.family), "dst")+s.redirect(i)))
	}
	return out
}

// redirect is the target of the i-th of userProtocols.
func (s shared) redirect(i int) string {
	return fmt.Sprintf(" -j REDIRECT --to-ports %d", [2]uint16{s.TCPPort, s.UDPPort}[i])
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
		out = append(out, kernel.Comment("hairpin: an endpoint that reaches itself")+" "+rewritten+" "+kernel.InSet(s.set(kernel.SetEndpoint), "dst,dst,src")+" "+mark)
		for _, l := range s.policy.Links {
			if service.FamilyOf(l.Addr()) == s.family {
				out = append(out, fmt.Sprintf("-s %s -d %s %s %s %s %s", l, l,
					kernel.Comment("the endpoint would answer without passing this node"), rewritten, endpoint, mark))
			}
		}
	}
	if s.ipvs {
		out = append(out, kernel.Comment("this node takes a service address on its link as its own")+" "+kernel.InSet(s.set(kernel.SetVIP), "src")+" "+endpoint+" "+mark)
	}
	return append(out,
		fmt.Sprintf("-m mark ! --mark %#x/%#x -j RETURN", m.Masquerade, m.Masquerade),
		kernel.SetMark(m.Masquerade, 0),
		masquerade)
}

func (s shared) refuse() string {
	return "-m conntrack --ctstate NEW -j " + chainRefuse
}

// refusals meet connections whose destination nothing has rewritten. TCP is
// refused with a reset: ICMP is rate limited per client, and a client that a
// router has just redirected would learn nothing for a second.
func (s shared) refusals() []string {
	reset := " -j REJECT --reject-with tcp-reset"
	unreachable := " -j REJECT --reject-with " + kernel.RejectWith[s.family]
	out := []string{
		kernel.Comment("endpoints exist, but the traffic policy allows none here") + " " + kernel.InSet(s.set(kernel.SetDrop), "dst,dst") + " -j DROP",
		"-p tcp " + kernel.Comment("no usable endpoint") + " " + kernel.InSet(s.set(kernel.SetReject), "dst,dst") + reset,
		kernel.Comment("no usable endpoint") + " " + kernel.InSet(s.set(kernel.SetReject), "dst,dst") + unreachable,
	}
	for _, p := range userProtocols {
		reject := unreachable
		if p == service.TCP {
			reject = reset
		}
		out = append(out,
			s.toNode(true, p.String(), "", " "+kernel.InSet(kernel.NodePortSet(kernel.SetDrop, p, s.family), "dst")+" -j DROP"),
			s.toNode(true, p.String(), "", " "+kernel.InSet(kernel.NodePortSet(kernel.SetReject, p, s.family), "dst")+reject))
	}
	return out
}

// forward accepts, as kube-proxy does, what is masqueraded and what is
// established, where the host's policy is to drop; but only connections to
// endpoints: others' rewritten ones (Docker's published ports) are others' to
// let through. Connections are marked when they begin, because an endpoint may
// leave the set before its connections end.
func (s shared) forward() []string {
	out := append([]string{s.refuse()}, s.invalidForward()...)
	if s.iptables {
		m, accepted := s.Marks.Masquerade, s.Marks.Accepted()
		out = append(out,
			"-m conntrack --ctstate NEW -m conntrack --ctstate DNAT "+kernel.InSet(s.set(kernel.SetEndpoint), "dst,dst,dst")+
				fmt.Sprintf(" -j CONNMARK --set-xmark %#x/%#x", accepted, accepted),
			"-m conntrack --ctstate DNAT "+kernel.HasMark(m, m)+" "+kernel.Comment("to endpoints, masqueraded")+" -j ACCEPT",
			"-m conntrack --ctstate ESTABLISHED -m conntrack --ctstate DNAT "+s.accepted()+" "+
				kernel.Comment("connections that were let through")+" -j ACCEPT",
			"-m conntrack --ctstate RELATED -m conntrack --ctstate DNAT "+kernel.Comment("and errors about them")+" -j ACCEPT")
	}
	return append(out, s.virtual()...)
}

// virtual leads to what the connections of IPVS need wherever they pass.
func (s shared) virtual() []string {
	if !s.ipvs {
		return nil
	}
	return []string{s.accepted() + " -j " + kernel.ChainVirtual}
}

// accept is for the end of built-in chains. On its way into the node or out of it
// a connection of IPVS is accepted only if it is somebody else's: what this
// node's own programs may do is for the host to say, in every data plane.
func (s shared) accept() []string {
	var out []string
	if s.iptables {
		out = append(out, "-m conntrack --ctstate DNAT "+kernel.InSet(s.set(kernel.SetEndpoint), "dst,dst,dst")+" -j ACCEPT")
	}
	if s.ipvs {
		out = append(out, s.accepted()+" -m addrtype ! --src-type LOCAL -j ACCEPT")
	}
	return out
}

// notSYN matches what doesn't begin a TCP connection.
const notSYN = "-m tcp ! --tcp-flags FIN,SYN,RST,ACK SYN"

// output lets through what kproxy and IPVS send, where the host's policy is to
// drop. An answer of the listener's that conntrack knows no connection for must
// not pass: it would bear the listener's address, and the client would reset the
// connection, while kproxy has the connection tracked again in a moment.
func (s shared) output() []string {
	own := s.Marks.Own()
	forgotten := kernel.Comment("answers that conntrack has forgotten whom to") + " -m conntrack --ctstate INVALID,NEW -j DROP"
	return append([]string{
		fmt.Sprintf("-p tcp %s --sport %d %s", notSYN, s.TCPPort, forgotten),
		fmt.Sprintf("-p udp -m udp --sport %d %s", s.UDPPort, forgotten),
		s.refuse(), kernel.Comment("connections of kproxy to endpoints") + " " + kernel.HasMark(own, own) + " -j ACCEPT"}, s.virtual()...)
}

// input lets redirected connections reach the listener and endpoints' answers
// reach kproxy, where the host's policy is to drop. The listener's ports
// themselves stay closed: only redirected connections have the state DNAT, and
// kproxy's own on the loopback, by which the heartbeat tries the listener: they
// bear their mark on that side as well. The answers are replies of a connection
// that is marked.
func (s shared) input() []string {
	own := s.Marks.Own()
	out := []string{s.refuse(), "-i lo " + kernel.HasMark(own, own) + " " + kernel.Comment("connections of kproxy to this node") + " -j ACCEPT"}
	if s.ipvs && s.family == service.IPv4 {
		// Whoever could reach the daemon could lead connections anywhere.
		out = append(out, fmt.Sprintf("-d %s/32 -p udp %s -j DROP", kernel.SyncGroup.Addr(), kernel.Comment("only kproxy tells IPVS of clients")))
	}
	out = append(out, "-p tcp "+kernel.Comment("load balancers ask for health")+" "+kernel.InSet(kernel.NodePortSet(kernel.SetHealth, service.TCP, s.family), "dst")+" -j ACCEPT")
	for i, port := range []uint16{s.TCPPort, s.UDPPort} {
		p := userProtocols[i]
		out = append(out, fmt.Sprintf("-p %s %s -m %s --dport %d -m conntrack --ctstate DNAT -j ACCEPT", p, kernel.Comment("redirected to kproxy"), p, port))
	}
	out = append(out, kernel.HasMark(s.Marks.Transparent, s.Marks.Own())+" "+kernel.Comment("answers of endpoints to kproxy")+" -j ACCEPT")
	if s.ipvs {
		out = append(append(out, s.virtual()...), kernel.InSet(s.set(kernel.SetVIP), "dst")+" -j "+kernel.ChainVIP)
	}
	return append(out, s.invalidInput()...)
}

// ranges drops, before any rewriting, clients that an address isn't for
// (loadBalancerSourceRanges), in every data plane alike.
func (s shared) ranges() string {
	return kernel.Comment("not in the source ranges") + " -m conntrack --ctstate NEW " +
		kernel.InSet(s.set(kernel.SetRanged), "dst,dst") + " " + kernel.NotInSet(s.set(kernel.SetAllow), "dst,dst,src") + " -j DROP"
}

// manglePrerouting marks packets to sockets that bear a client's address, so
// that the route of that mark delivers them here. The connection tells, not the
// socket: a socket of an earlier connection, in TIME_WAIT, may have the same
// addresses and ports as one that the kernel forwards now, and the kernel may
// have given kproxy's own another port to keep the two apart. Only where the
// connection has been forgotten (conntrack -F) is the socket asked. What kproxy
// sends comes by here as well where it goes over the loopback, and keeps its mark.
func (s shared) manglePrerouting() []string {
	t := s.Marks.Transparent
	mark := kernel.SetMark(t, s.Marks.Own())
	out := []string{
		s.ranges(),
		s.answers(),
	}
	if s.SocketMatch {
		for _, p := range userProtocols {
			out = append(out, "-p "+p.String()+" "+kernel.Comment("answers to kproxy, forgotten by conntrack")+
				" -m conntrack --ctstate INVALID,NEW,UNTRACKED -m socket --transparent "+mark)
		}
	}
	return append(out, s.catchRefusals()...)
}

// answers marks what comes back on a connection of kproxy's. It goes by the
// packet's own mark, not by conntrack's direction: where conntrack has forgotten
// a connection and picks it up from an answer, the answer is the original
// direction.
func (s shared) answers() string {
	t, own := s.Marks.Transparent, s.Marks.Own()
	return fmt.Sprintf("-m mark ! --mark %#x/%#x -m connmark --mark %#x/%#x %s %s", own, own, t, t, kernel.Comment("answers to kproxy"), kernel.SetMark(t, own))
}

// mangleOutput does the same for endpoints on the node itself.
func (s shared) mangleOutput() []string {
	own, t := s.Marks.Own(), s.Marks.Transparent
	out := []string{
		s.ranges(),
		fmt.Sprintf("%s %s -j CONNMARK --set-xmark %#x/%#x", kernel.HasMark(own, own), kernel.Comment("connections of kproxy to endpoints"), t, t),
		s.answers(),
	}
	if s.ipvs {
		out = append(out, s.dropOwn())
	}
	return append(out, s.catchRefusals()...)
}

// dropOwn drops what this node sends to a service that is to be silent. IPVS takes
// such packets before the filter table sees them (ip_vs_local_request at LOCAL_OUT,
// before NF_IP_PRI_FILTER), and refuses them where a virtual server is left to
// endpoints that drain. Those in SHORT are userspace's.
func (s shared) dropOwn() string {
	return kernel.Comment("the traffic policy allows no endpoint here") + " -m conntrack --ctstate NEW " +
		kernel.InSet(s.set(kernel.SetVIP), "dst") + " " + kernel.InSet(s.set(kernel.SetDrop), "dst,dst") + " " +
		kernel.NotInSet(s.set(kernel.SetShort), "dst,dst") + " -j DROP"
}

// catchRefusals drops an endpoint's reset that is its first packet, the answer
// to a SYN: it refuses the connection. conntrack has forgotten the connection by
// then (tcp_packet in nf_conntrack_proto_tcp.c kills it), so the client's next
// SYN, a second later, is a new one and goes to another endpoint, or to
// userspace, because the agent hears of it and recalls the service. Without a
// live kproxy a refusal passes as it is: nobody would find another endpoint if
// all refuse. So does that of an endpoint that kproxy says so of, see
// [kernel.LetRefusals].
func (s shared) catchRefusals() []string {
	if !s.CatchRefusals {
		return nil
	}
	var out []string
	if s.iptables {
		out = append(out, "-p tcp "+kernel.Comment("refused: the next SYN of the client finds another endpoint")+
			" -m tcp --tcp-flags RST RST -m conntrack --ctstate DNAT --ctdir REPLY"+
			" -m connbytes --connbytes 1:1 --connbytes-mode packets --connbytes-dir reply "+
			kernel.InSet(s.set(kernel.SetAlive), "dst")+" "+kernel.InSet(s.set(kernel.SetEndpoint), "src,src,src")+" "+
			kernel.NotInSet(s.set(kernel.SetLet), "src,src")+" -j DROP")
	}
	if s.ipvs {
		out = append(out, "-p tcp -m tcp --tcp-flags RST RST "+s.accepted()+" -j "+kernel.ChainRefused)
	}
	return out
}
