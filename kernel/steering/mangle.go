package steering

import (
	"fmt"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// ranges drops, before any rewriting, clients that an address isn't for
// (loadBalancerSourceRanges), in every data plane alike.
func (s Rules) ranges() string {
	return kernel.InSet(s.Set(kernel.SetRanged), "dst,dst") + " " + state("NEW") + " " +
		kernel.NotInSet(s.Set(kernel.SetAllow), "dst,dst,src") + " " + kernel.Comment(kernel.ReasonOutside) + " -j " + ChainOutside
}

// manglePrerouting marks packets to sockets that bear a client's address, so
// that the route of that mark delivers them here. The connection tells, not the
// socket: a socket of an earlier connection, in TIME_WAIT, may have the same
// addresses and ports as one that the kernel forwards now, and the kernel may
// have given kproxy's own another port to keep the two apart. Only where the
// connection has been forgotten (conntrack -F) is the socket asked. What kproxy
// sends comes by here as well where it goes over the loopback, and keeps its mark.
//
// The answers are half of what comes in for userspace, so they are first, and meet
// nothing else: they are of a connection that conntrack knows, begin none, and
// nothing has rewritten where it goes.
func (s Rules) manglePrerouting() []string {
	return append([]string{
		s.answer() + " -g " + chainAnswers,
		state("INVALID,NEW,UNTRACKED") + " -j " + chainPreroutingNew,
	}, s.catchRefusals()...)
}

// manglePreroutingAnswers is the end of the table for them.
func (s Rules) manglePreroutingAnswers() []string {
	return []string{kernel.SetMark(s.Marks.Transparent, s.Marks.Own())}
}

// manglePreroutingNew asks for a socket only where an answer is possible, which
// what begins a TCP connection isn't.
func (s Rules) manglePreroutingNew() []string {
	out := []string{s.ranges()}
	if s.SocketMatch {
		for _, of := range []string{"-p tcp " + notSYN, "-p udp"} {
			out = append(out, of+" -m socket --transparent "+kernel.Comment("answers to kproxy, forgotten by conntrack")+" "+
				kernel.SetMark(s.Marks.Transparent, s.Marks.Own()))
		}
	}
	return out
}

// answer matches what comes back on kproxy's own connections. It goes by the
// packet's own mark, not by conntrack's direction: where conntrack has forgotten
// a connection and picks it up from an answer, the answer is the original
// direction. Most packets of a node fail the first of the two matches.
func (s Rules) answer() string {
	t, own := s.Marks.Transparent, s.Marks.Own()
	return fmt.Sprintf("-m connmark --mark %#x/%#x -m mark ! --mark %#x/%#x", t, own, own, own)
}

// mangleOutput does the same for endpoints on the node itself. What the listener
// answers, half of what goes out for userspace, needs nothing here: its rules are
// first, and cost least, as they match nothing but headers. Their address tells them
// from kproxy's sockets towards endpoints, which may have the same port.
func (s Rules) mangleOutput() []string {
	own := s.Marks.Own()
	return append([]string{
		fmt.Sprintf("-s %s -p tcp %s --sport %d -j RETURN", s.listener(), notSYN, s.TCPPort),
		fmt.Sprintf("-s %s -p udp -m udp --sport %d -j RETURN", s.listener(), s.UDPPort),
		kernel.HasMark(own, own) + " -g " + chainOutputOwn,
		state("NEW") + " -j " + chainOutputNew,
		s.answer() + " " + kernel.SetMark(s.Marks.Returned(), own),
	}, s.catchRefusals()...)
}

// mangleOutputOwn marks kproxy's connections to endpoints, not only by their first
// packet: where conntrack has picked a connection up from an answer, what kproxy
// sends is never new.
func (s Rules) mangleOutputOwn() []string {
	own, t := s.Marks.Own(), s.Marks.Transparent
	return []string{
		fmt.Sprintf("-m connmark --mark %#x/%#x -j RETURN", t, own),
		fmt.Sprintf("-j CONNMARK --set-xmark %#x/%#x", t, own),
		state("NEW") + " -j " + chainOutputNew,
	}
}

func (s Rules) mangleOutputNew() []string {
	return append([]string{s.ranges()}, s.each(func(w *PlaneRules) []string { return w.OutputNew })...)
}

// ResetOfSYN are the flags of a reset in answer to a SYN: in answer to what has an ACK, which is of a connection, a reset
// has none (RFC 9293, 3.10.7.1).
const ResetOfSYN = "RST,ACK RST,ACK"

// catchRefusals drops an endpoint's reset that is its first packet, the answer
// to a SYN: it refuses the connection. conntrack has forgotten the connection by
// then (tcp_packet in nf_conntrack_proto_tcp.c kills it), so the client's next
// SYN, a second later, is a new one and goes to another endpoint, because the
// agent hears of it and ejects this one, which is in [kernel.SetLeaving] while a refusal is
// on its way. Without a live kproxy a refusal passes as it is: no other endpoint would be found if
// all refuse. So does that of an endpoint that kproxy says so of, see
// [kernel.Exceptions].
func (s Rules) catchRefusals() []string {
	if !s.CatchRefusals {
		return nil
	}
	return s.each(func(w *PlaneRules) (out []string) {
		if !w.NAT {
			return w.Refusals
		}
		for _, reset := range FirstReset(s.Family) {
			out = append(out, "-p tcp -m tcp --tcp-flags "+ResetOfSYN+" "+w.rewritten()+" "+reset+" -j DROP")
		}
		return out
	})
}

// FirstReset returns two continuations of a match of conntrack, either of which matches an endpoint's reset that is its first packet.
func FirstReset(f service.Family) (out []string) {
	for _, from := range fromEndpoint(f) {
		out = append(out, "--ctdir REPLY -m connbytes --connbytes 1:1 --connbytes-mode packets --connbytes-dir reply "+
			kernel.InSet(kernel.FamilySet(kernel.SetAlive, f), "dst")+" "+from+" "+kernel.NotInSet(kernel.FamilySet(kernel.SetLet, f), "src,src")+" "+
			kernel.Comment("refused: the next SYN of the client finds another endpoint"))
	}
	return out
}

// fromEndpoint matches, one or the other, what endpoints send that get new connections, and those that don't any more.
func fromEndpoint(f service.Family) [2]string {
	return [2]string{kernel.InSet(kernel.FamilySet(kernel.SetEndpoint, f), "src,src,src"), kernel.InSet(kernel.FamilySet(kernel.SetLeaving, f), "src,src")}
}
