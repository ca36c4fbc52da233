package steering

import "kproxy.dev/kproxy/kernel"

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
func (s Rules) invalid() []string {
	to := " " + kernel.Comment("invalid packet from an endpoint") + " -j " + ChainInvalid
	return []string{
		state("INVALID") + " " + kernel.InSet(s.Set(kernel.SetEndpoint), "src,src,src") + to,
		state("INVALID") + " " + kernel.InSet(s.Set(kernel.SetLeaving), "src,src") + to,
	}
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
	if !s.DropInvalid || len(s.ways) == 0 {
		return nil
	}
	var out []string
	if s.SocketMatch {
		out = append(out, "-p tcp "+state("INVALID")+" -m socket "+kernel.Comment("TCP knows better")+" -j RETURN")
	}
	return append(out, s.invalid()...)
}

// drop is the end of them, in a chain of its own: its counter tells how many.
func (s Rules) drop() []string { return []string{"-j DROP"} }
