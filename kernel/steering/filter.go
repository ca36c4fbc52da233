package steering

import (
	"fmt"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// notSYN matches what doesn't begin a TCP connection.
const notSYN = "-m tcp ! --tcp-flags FIN,SYN,RST,ACK SYN"

func state(states string) string { return "-m conntrack --ctstate " + states }

func (s Rules) refuse() string { return state("NEW") + " -j " + chainRefuse }

// evidence are rules that tell of connections to endpoints which may have no answer, see health/passive: a SYN that
// comes a second time, and some of the UDP flows that begin. A connection's first packet has passed every hook before
// it is confirmed (nf_confirm), so a packet of one that is new and confirmed is sent again, or after the first.
// Where conntrack rewrites, nat says, any chain sees the endpoint's address; what IPVS has rewritten leaves by OUTPUT, and has
// the service's before, which would take the rate that is meant for endpoints.
func (s Rules) evidence(nat bool) []string {
	if !s.tells() {
		return nil
	}
	return s.each(func(w *PlaneRules) []string {
		match := w.rewritten() + " -m conntrack "
		switch {
		case w.NAT != nat:
			return nil
		case nat:
			match = w.rewritten() + " "
		}
		return []string{
			"-p tcp -m tcp --tcp-flags FIN,SYN,RST,ACK SYN " + match + "--ctstatus CONFIRMED " + kernel.LogUnanswered(),
			"-p udp " + match + "! --ctstatus CONFIRMED " + kernel.LogSample(),
		}
	})
}

// ownSamples is that of userspace's UDP flows.
func (s Rules) ownSamples() []string {
	if !s.tells() {
		return nil
	}
	return []string{"-p udp " + kernel.HasMark(s.Marks.Own(), s.Marks.Own()) + " -m conntrack ! --ctstatus CONFIRMED " + kernel.LogSample()}
}

func (s Rules) tells() bool { return s.LogRefusals && s.PassiveHealth }

// refusals meet connections whose destination nothing has rewritten. What is to
// an address of this node is told by a look-up of a route, so that is done once.
func (s Rules) refusals() []string {
	return append(s.evidence(true),
		kernel.InSet(s.Set(kernel.SetDrop), "dst,dst")+" "+kernel.Comment("endpoints exist, but the traffic policy allows none here")+" -j "+ChainElsewhere,
		kernel.InSet(s.Set(kernel.SetReject), "dst,dst")+" "+kernel.Comment("no usable endpoint")+" -j "+ChainReject,
		s.untaken()+" -j "+ChainUnserved,
		s.toNode(true, "")+" "+kernel.Comment("the same by node port")+" -j "+chainRefuseNode)
}

// untaken matches connections to a service in userspace that neither userspace
// has taken nor a data plane beneath, where there is any. Node ports need no such
// rule: nothing listens at them, and their packets stay on this node.
func (s Rules) untaken() string {
	own := s.Marks.Own()
	out := fmt.Sprintf("-m mark ! --mark %#x/%#x %s -m conntrack ! --ctstate DNAT", own, own, kernel.InSet(s.Set(kernel.SetUser), "dst,dst"))
	for _, w := range s.planes {
		out += w.Untaken
	}
	return out
}

// unserved refuses them at once, or they would leave by the default route. While a
// live kproxy serves, only its rules can be missing, or have been when the
// connection began: they are back in a moment, and the client's next packet passes
// once conntrack has forgotten this one. Likewise while a kproxy starts.
func (s Rules) unserved() []string {
	return append([]string{
		kernel.InSet(s.Set(kernel.SetAlive), "src") + " " + kernel.Comment("kproxy will take the next packet") + " -j DROP",
		kernel.InSet(s.Set(kernel.SetStarting), "src") + " " + kernel.Comment("kproxy starts") + " -j DROP",
	}, s.rejected(kernel.ReasonNoKproxy)...)
}

func (s Rules) refusalsNode() []string {
	var out []string
	for _, p := range userProtocols {
		out = append(out,
			"-p "+p.String()+" "+kernel.InSet(kernel.NodePortSet(kernel.SetDrop, p, s.Family), "dst")+" -j "+ChainElsewhere,
			"-p "+p.String()+" "+kernel.InSet(kernel.NodePortSet(kernel.SetReject, p, s.Family), "dst")+" -j "+ChainReject)
	}
	return out
}

// rejected logs and refuses: TCP with a reset, because ICMP is rate limited per client, and a
// client that a router has just redirected would learn nothing for a second.
func (s Rules) rejected(reason string) []string {
	return append(s.logs(reason),
		"-p tcp -j REJECT --reject-with tcp-reset",
		"-j REJECT --reject-with "+kernel.RejectWith[s.Family])
}

// dropped logs and drops.
func (s Rules) dropped(reason string) []string { return append(s.logs(reason), "-j DROP") }

func (s Rules) logs(reason string) []string {
	if !s.LogRefusals {
		return nil
	}
	return []string{kernel.LogRefusal(reason)}
}

// forward lets others' established connections pass at once.
func (s Rules) forward() []string {
	if !s.nat() {
		return append(append([]string{s.refuse()}, s.toClosed()...), s.passing()...)
	}
	return append([]string{state("INVALID,NEW,DNAT") + " -j " + chainForwarded}, s.passing()...)
}

// forwarded accepts, as kube-proxy does, what is masqueraded and what is
// established, where the host's policy is to drop; but only connections to
// endpoints: others' rewritten ones (Docker's published ports) are others' to
// let through. Connections are marked when they begin, because an endpoint may
// leave the set before its connections end. What is here is invalid, new, or has
// been rewritten, so what is established or related has.
func (s Rules) forwarded() []string {
	m, accepted := s.Marks.Masquerade, s.Marks.Own()
	out := []string{
		state("ESTABLISHED") + " " + s.Accepted() + " " + kernel.Comment("connections that were let through") + " -j ACCEPT",
		s.refuse(),
	}
	out = append(out, s.toClosed()...)
	return append(append(out, s.invalidForward()...),
		state("NEW")+" "+state("DNAT")+" "+kernel.InSet(s.Set(kernel.SetEndpoint), "dst,dst,dst")+
			fmt.Sprintf(" -j CONNMARK --set-xmark %#x/%#x", accepted, accepted),
		kernel.HasMark(m, m)+" "+state("DNAT")+" "+kernel.Comment("to endpoints, masqueraded")+" -j ACCEPT",
		state("RELATED")+" "+kernel.Comment("and errors about them")+" -j ACCEPT")
}

// passing returns the rules that the connections of planes need wherever they pass.
func (s Rules) passing() []string { return s.each(func(w *PlaneRules) []string { return w.Passing }) }

// accept is for the end of built-in chains.
func (s Rules) accept() []string {
	return s.each(func(w *PlaneRules) []string {
		if w.NAT {
			return []string{w.rewritten() + " " + kernel.InSet(s.Set(kernel.SetEndpoint), "dst,dst,dst") + " -j ACCEPT"}
		}
		return w.Accept
	})
}

// output lets through what kproxy and IPVS send, where the host's policy is to
// drop.
func (s Rules) output() []string {
	own := s.Marks.Own()
	return append([]string{
		state("INVALID,NEW") + " -j " + chainOutputNew,
		kernel.HasMark(own, own) + " -j ACCEPT",
	}, s.passing()...)
}

// outputNew drops an answer of the listener's that conntrack knows no connection
// for: it would bear the listener's address, and the client would reset the
// connection, while kproxy has the connection tracked again in a moment.
func (s Rules) outputNew() []string {
	forgotten := kernel.Comment("reply without conntrack entry") + " -j DROP"
	out := append([]string{
		fmt.Sprintf("-s %s -p tcp %s --sport %d %s", s.listener(), notSYN, s.TCPPort, forgotten),
		fmt.Sprintf("-s %s -p udp -m udp --sport %d %s", s.listener(), s.UDPPort, forgotten),
	}, append(s.ownSamples(), s.evidence(false)...)...)
	return append(append(out, s.refuse()), s.toClosed()...)
}

// toClosed is for connections that leave this node, or are forwarded, once all that serves or refuses services has seen
// them: what nothing has rewritten and kproxy doesn't send is to no service. Connections that had begun are let be, as
// with kube-proxy. Of other packets, none passes more than this rule.
func (s Rules) toClosed() []string {
	if !s.policy.CloseClusterIPs {
		return nil
	}
	own := s.Marks.Own()
	return []string{fmt.Sprintf("-m mark ! --mark %#x/%#x %s -m conntrack ! --ctstate DNAT -j %s", own, own, state("NEW"), chainClosed)}
}

// closed leads to the ends of what is to a cluster IP by a port that no service has there, and of what is to an address of the
// ServiceCIDRs that no service has: it would leave by the default route, for a host that has that address
// outside. noService are the rules for the latter; nil without such networks. What this node has itself, or its
// pods, is theirs. A chain that is gone to returns to where this one was jumped to.
func (s Rules) closed() (look, noService []string) {
	for _, w := range s.planes {
		if !w.NAT {
			look = append(look, w.Rewritten+" -j RETURN")
		}
	}
	look = append(look, kernel.InSet(s.Set(kernel.SetLeft), "dst,dst")+" -j RETURN")
	look = append(look, kernel.InSet(s.Set(kernel.SetCluster), "dst")+" "+kernel.Comment(kernel.ReasonNoPort)+" -g "+ChainNoPort)
	networks, but := s.policy.Closed(s.Family)
	for _, n := range networks {
		look = append(look, "-d "+n.String()+" "+kernel.Comment(kernel.ReasonNoService)+" -g "+ChainNoService)
	}
	if len(networks) == 0 {
		return look, nil
	}
	noService = []string{ownAddress}
	if out := podInterface(s.policy); out != "" {
		noService = append(noService, "-o "+out+" -j RETURN")
	}
	for _, n := range but {
		noService = append(noService, "-d "+n.String()+" -j RETURN")
	}
	return look, append(noService, s.dropped(kernel.ReasonNoService)...)
}

// ownAddress lets be what the node sends to an address of its own.
const ownAddress = "-m addrtype --dst-type LOCAL -j RETURN"

func (s Rules) noPort() []string {
	return append([]string{ownAddress}, s.rejected(kernel.ReasonNoPort)...)
}

// input lets redirected connections reach the listener and endpoints' answers
// reach kproxy, where the host's policy is to drop: first, as those are most of
// what userspace carries. The listener's ports themselves stay closed: only
// redirected connections have the state DNAT, and kproxy's own on the loopback,
// by which the heartbeat tries the listener: they bear their mark on that side as
// well, and OUTPUT has refused what is to be refused. The answers are replies of
// a connection that is marked.
func (s Rules) input() []string {
	own := s.Marks.Own()
	var out []string
	for i, port := range []uint16{s.TCPPort, s.UDPPort} {
		p := userProtocols[i]
		out = append(out, fmt.Sprintf("-p %s -m %s --dport %d %s -j ACCEPT", p, p, port, state("DNAT")))
	}
	out = append(out,
		kernel.HasMark(s.Marks.Transparent, own)+" -j ACCEPT",
		"-i lo "+kernel.HasMark(own, own)+" "+kernel.Comment("connections of kproxy to this node")+" -j ACCEPT",
		state("INVALID,NEW")+" -j "+chainInputNew)
	out = append(out, "-p tcp "+kernel.InSet(kernel.NodePortSet(kernel.SetHealth, service.TCP, s.Family), "dst")+" "+kernel.Comment("load balancers ask for health")+" -j ACCEPT")
	return append(out, s.passing()...)
}

// inputNew is for what begins a connection to this node, or is of none.
func (s Rules) inputNew() []string {
	out := append([]string{s.refuse()}, s.each(func(w *PlaneRules) []string { return w.InputNew })...)
	return append(out, s.invalidInput()...)
}

// A packet of an endpoint that conntrack takes for invalid, because it is
// outside of the TCP window for example, bears the endpoint's address where the
// client knows the service's: nothing translates it back. The client has no such
// connection and answers with a reset, which breaks the one that it has
// (kubernetes/kubernetes#74839). So it is dropped, where it is about to be
// forwarded to a client, and where it is for a client on the node itself or for
// one that was masqueraded (#117924). The endpoint sends it again.
//
// Only packets of endpoints are dropped: others' connections, of which a node
// may see one direction only (#94861), aren't touched. Where conntrack is liberal
// (net.netfilter.nf_conntrack_tcp_be_liberal), nothing is. Nor need it be in
// userspace, whose connections to endpoints have sockets.
func (s Rules) invalid() (out []string) {
	for _, from := range fromEndpoint(s.Family) {
		out = append(out, state("INVALID")+" "+from+" "+kernel.Comment("invalid packet from an endpoint")+" -j "+ChainInvalid)
	}
	return out
}

// invalidForward is for clients elsewhere. A plane that doesn't rewrite by conntrack knows
// its connections by itself, and translates what conntrack doesn't; its masqueraded ones
// end in INPUT.
func (s Rules) invalidForward() []string {
	if !s.DropInvalid || !s.nat() {
		return nil
	}
	return s.invalid()
}

// invalidInput is for clients on this node and masqueraded ones. A packet for
// which there is a socket is of a connection that nothing translates.
func (s Rules) invalidInput() []string {
	if !s.DropInvalid || len(s.planes) == 0 {
		return nil
	}
	var out []string
	if s.SocketMatch {
		out = append(out, "-p tcp "+state("INVALID")+" -m socket "+kernel.Comment("has a local socket: leave it to TCP")+" -j RETURN")
	}
	return append(out, s.invalid()...)
}
