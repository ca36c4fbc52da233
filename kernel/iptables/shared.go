package iptables

import (
	"fmt"
	"net/netip"

	"kproxy.dev/kproxy/kernel"
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
)

// userProtocols are what userspace serves, and node-port bitmaps exist for.
var userProtocols = [2]service.Protocol{service.TCP, service.UDP}

// shared renders what doesn't depend on services. Without the kernel's rules
// beneath (mode userspace) only the portal is left.
type shared struct {
	Options
	family  service.Family
	beneath bool
	links   []netip.Prefix // whose hosts answer each other without passing the node
}

func (s shared) set(base string) string { return kernel.FamilySet(base, s.family) }

func (s shared) jumps() []kernel.Jump {
	jump := func(table, from, to, why string) kernel.Jump {
		return kernel.Jump{Table: table, From: from, Rule: comment("kproxy: "+why) + " -j " + to, Last: to == chainAccept}
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
	if s.beneath {
		out = append(out,
			jump("filter", "FORWARD", chainAccept, "to endpoints, unless a rule above drops it"),
			jump("nat", "POSTROUTING", chainPostrouting, "masquerade"))
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
		chain("filter", chainOutput, s.refuse(), comment("connections of kproxy to endpoints")+" "+hasMark(s.Marks.Own(), s.Marks.Own())+" -j ACCEPT"),
		chain("filter", chainRefuse, s.refusals()...),
		chain("mangle", chainOutput, s.mangleOutput()...),
		chain("mangle", chainPrerouting, s.manglePrerouting()...),
		chain("nat", chainPortal, s.portal()...),
		chain("nat", chainServices, s.services()...),
	}
	if s.beneath {
		out = append(out,
			chain("filter", chainAccept, "-m conntrack --ctstate DNAT "+inSet(s.set(kernel.SetEndpoint), "dst,dst,dst")+" -j ACCEPT"),
			chain("nat", chainPostrouting, s.postrouting()...))
	}
	return out
}

// services is the way of every new connection. The own mark comes first, or
// kproxy's connection to an endpoint that is a service address of its own would
// come back to it.
func (s shared) services() []string {
	own := s.Marks.Own()
	out := []string{
		hasMark(own, own) + " " + comment("connections of kproxy to endpoints") + " -j RETURN",
		inSet(s.set(kernel.SetAlive), "src") + " " + comment("a live kproxy serves these in userspace") + " -j " + chainPortal,
	}
	if s.beneath {
		out = append(out,
			comment("all others by destination address")+" -j "+chainDispatch,
			"! -d "+loopback[s.family]+" "+comment("then by node port")+" -m addrtype --dst-type LOCAL -j "+chainNodePorts)
	}
	return out
}

// portal redirects to the shared listener. Node ports on loopback addresses are
// always served in userspace: DNAT would need route_localnet, which opens the
// node's own loopback services to its neighbours (CVE-2020-8558).
func (s shared) portal() []string {
	to := [2]string{fmt.Sprintf(" -j REDIRECT --to-ports %d", s.TCPPort), fmt.Sprintf(" -j REDIRECT --to-ports %d", s.UDPPort)}
	var out []string
	for i, p := range userProtocols {
		out = append(out, "-d "+loopback[s.family]+" -p "+p.String()+" "+inSet(kernel.NodePortSet(kernel.SetLocal, p), "dst")+to[i])
	}
	for i, p := range userProtocols {
		out = append(out, "-p "+p.String()+" "+inSet(s.set(kernel.SetUser), "dst,dst")+to[i])
	}
	for i, p := range userProtocols {
		out = append(out, "-p "+p.String()+" -m addrtype --dst-type LOCAL "+inSet(kernel.NodePortSet(kernel.SetUser, p), "dst")+to[i])
	}
	return out
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
	out := []string{
		comment("hairpin: an endpoint that reaches itself") + " -m conntrack --ctstate DNAT " + inSet(s.set(kernel.SetEndpoint), "dst,dst,src") + " " + setMark(m.Masquerade, m.Masquerade),
	}
	for _, l := range s.links {
		if service.FamilyOf(l.Addr()) == s.family {
			out = append(out, fmt.Sprintf("-s %s -d %s %s -m conntrack --ctstate DNAT %s %s", l, l,
				comment("the endpoint would answer without passing this node"), inSet(s.set(kernel.SetEndpoint), "dst,dst,dst"), setMark(m.Masquerade, m.Masquerade)))
		}
	}
	return append(out,
		fmt.Sprintf("-m mark ! --mark %#x/%#x -j RETURN", m.Masquerade, m.Masquerade),
		setMark(m.Masquerade, 0),
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
	unreachable := " -j REJECT --reject-with " + rejectWith[s.family]
	out := []string{
		comment("endpoints exist, but the traffic policy allows none here") + " " + inSet(s.set(kernel.SetDrop), "dst,dst") + " -j DROP",
		"-p tcp " + comment("no usable endpoint") + " " + inSet(s.set(kernel.SetReject), "dst,dst") + reset,
		comment("no usable endpoint") + " " + inSet(s.set(kernel.SetReject), "dst,dst") + unreachable,
	}
	for _, p := range userProtocols {
		reject := unreachable
		if p == service.TCP {
			reject = reset
		}
		local := "-p " + p.String() + " -m addrtype --dst-type LOCAL "
		out = append(out,
			local+inSet(kernel.NodePortSet(kernel.SetDrop, p), "dst")+" -j DROP",
			local+inSet(kernel.NodePortSet(kernel.SetReject, p), "dst")+reject)
	}
	return out
}

// forward accepts, as kube-proxy does, what is masqueraded and what is
// established, where the host's policy is to drop; but only connections to
// endpoints: others' rewritten ones (Docker's published ports) are others' to
// let through. Connections are marked when they begin, because an endpoint may
// leave the set before its connections end. The bit is the lower one of the own
// mark, which means nothing by itself on packets.
func (s shared) forward() []string {
	out := []string{s.refuse()}
	if s.beneath {
		m, accepted := s.Marks.Masquerade, s.Marks.Own()&^s.Marks.Transparent
		out = append(out,
			"-m conntrack --ctstate NEW -m conntrack --ctstate DNAT "+inSet(s.set(kernel.SetEndpoint), "dst,dst,dst")+
				fmt.Sprintf(" -j CONNMARK --set-xmark %#x/%#x", accepted, accepted),
			"-m conntrack --ctstate DNAT "+hasMark(m, m)+" "+comment("to endpoints, masqueraded")+" -j ACCEPT",
			"-m conntrack --ctstate ESTABLISHED -m conntrack --ctstate DNAT "+fmt.Sprintf("-m connmark --mark %#x/%#x ", accepted, accepted)+
				comment("connections that were let through")+" -j ACCEPT",
			"-m conntrack --ctstate RELATED -m conntrack --ctstate DNAT "+comment("and errors about them")+" -j ACCEPT")
	}
	return out
}

// input lets redirected connections reach the listener and endpoints' answers
// reach kproxy, where the host's policy is to drop. The listener's ports
// themselves stay closed: only redirected connections have the state DNAT, and
// kproxy's own on the loopback, by which the heartbeat tries the listener: they
// bear their mark on that side as well. The answers are replies of a connection
// that is marked.
func (s shared) input() []string {
	own := s.Marks.Own()
	out := []string{s.refuse(), "-i lo " + hasMark(own, own) + " " + comment("connections of kproxy to this node") + " -j ACCEPT"}
	for i, port := range []uint16{s.TCPPort, s.UDPPort} {
		p := userProtocols[i]
		out = append(out, fmt.Sprintf("-p %s %s -m %s --dport %d -m conntrack --ctstate DNAT -j ACCEPT", p, comment("redirected to kproxy"), p, port))
	}
	return append(out, hasMark(s.Marks.Transparent, s.Marks.Own())+" "+comment("answers of endpoints to kproxy")+" -j ACCEPT")
}

// ranges drops, before any rewriting, clients that an address isn't for
// (loadBalancerSourceRanges), in every data plane alike.
func (s shared) ranges() string {
	return comment("not in the source ranges") + " -m conntrack --ctstate NEW " +
		inSet(s.set(kernel.SetRanged), "dst,dst") + " " + notInSet(s.set(kernel.SetAllow), "dst,dst,src") + " -j DROP"
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
	mark := setMark(t, s.Marks.Own())
	out := []string{
		s.ranges(),
		s.answers(),
	}
	if s.SocketMatch {
		for _, p := range userProtocols {
			out = append(out, "-p "+p.String()+" "+comment("answers to kproxy, forgotten by conntrack")+
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
	return fmt.Sprintf("-m mark ! --mark %#x/%#x -m connmark --mark %#x/%#x %s %s", own, own, t, t, comment("answers to kproxy"), setMark(t, own))
}

// mangleOutput does the same for endpoints on the node itself.
func (s shared) mangleOutput() []string {
	own, t := s.Marks.Own(), s.Marks.Transparent
	out := []string{
		s.ranges(),
		fmt.Sprintf("%s %s -j CONNMARK --set-xmark %#x/%#x", hasMark(own, own), comment("connections of kproxy to endpoints"), t, t),
		s.answers(),
	}
	return append(out, s.catchRefusals()...)
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
	if !s.beneath || !s.CatchRefusals {
		return nil
	}
	return []string{"-p tcp " + comment("refused: the next SYN of the client finds another endpoint") +
		" -m tcp --tcp-flags RST RST -m conntrack --ctstate DNAT --ctdir REPLY" +
		" -m connbytes --connbytes 1:1 --connbytes-mode packets --connbytes-dir reply " +
		inSet(s.set(kernel.SetAlive), "dst") + " " + inSet(s.set(kernel.SetEndpoint), "src,src,src") + " " +
		notInSet(s.set(kernel.SetLet), "src,src") + " -j DROP"}
}
