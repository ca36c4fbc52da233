package trace

import (
	"cmp"
	"fmt"
	"net/netip"

	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace/netfilter"
)

// answer follows the endpoint's answer back: what stops it
// stops the connection. It returns how the way ends, which is several ways where
// a rule drops some answers, or may.
func (t *tracer) answer(w way, r *route) []end {
	in, home := r.link, t.client.Node || w.userspace
	endpoint := w.packet.Dst
	to := netip.AddrPortFrom(t.client.Address, clientPort) // as rules see it behind PREROUTING's translation back
	if home {
		to = w.packet.OrigSrc
	}
	p := netfilter.Packet{
		Protocol: t.req.Protocol, Src: endpoint, Dst: to, In: in, State: netfilter.Established, Reply: true,
		OrigSrc: w.packet.OrigSrc, OrigDst: w.packet.OrigDst, ConnMark: w.packet.ConnMark,
		DNAT: w.packet.DNAT, SNAT: w.packet.SNAT, DstDone: true, SrcDone: true, Reversed: netfilter.Yes,
	}
	t.near(&p, r)
	if home {
		p.Holder = netfilter.Socket{Found: true, Transparent: w.transparent}
	}
	hooks := []netfilter.Hook{netfilter.Prerouting, netfilter.Forward, netfilter.Postrouting}
	if home {
		hooks = []netfilter.Hook{netfilter.Prerouting, netfilter.Input}
	}
	var out []end
	for i, h := range hooks {
		if i == 1 { // the routing decision, behind PREROUTING
			if stop := t.answerRouted(endpoint.Addr(), in, home, p.Mark); stop != nil {
				return append(out, end{w, Dropped, stop})
			}
		}
		if h == netfilter.Forward {
			q := query{to: t.client.Address, from: endpoint.Addr(), in: in, mark: p.Mark}
			if _, stop := t.wayBack(q, fmt.Sprintf("the answers of %s don't come back", q.from),
				fmt.Sprintf("look at the routes (ip route show to match %s, ip rule) for what comes from %s", q.to, q.from)); stop != nil {
				return append(out, end{w, Dropped, stop})
			}
			p.Out = t.client.Interface
			if !p.Hop() {
				return append(out, end{w, Dropped, t.usedUp(fmt.Sprintf("the answers of %s", endpoint.Addr()))})
			}
		}
		if h == netfilter.Input && w.userspace {
			if stop := t.notDelivered(&p); stop != nil {
				return append(out, end{w, Dropped, stop})
			}
		}
		var stopped []end
		w, p, stopped = t.answerPasses(w, p, h)
		if out = append(out, stopped...); w.share < 1e-9 {
			return out
		}
	}
	return append(out, end{w, Forwarded, nil})
}

// accepts follows the answer of a socket of this node's to a client elsewhere, and ends what is
// stopped of it. It returns what is left of w. whose says whose answers they are.
func (t *tracer) accepts(w way, whose string) way {
	if t.client.Node {
		return w
	}
	from, endpoint := w.packet.Dst, w.endpoint
	back, stop := t.wayBack(query{to: t.client.Address}, whose+" answers don't get to the client", "")
	if stop != nil {
		t.finish(w, Dropped, stop)
		w.share = 0
		return w
	}
	p := netfilter.Packet{
		Protocol: t.req.Protocol, Src: from, Dst: w.packet.OrigSrc, Out: back.link, State: netfilter.Established, Reply: true,
		OrigSrc: w.packet.OrigSrc, OrigDst: w.packet.OrigDst, ConnMark: w.packet.ConnMark, DNAT: w.packet.DNAT, DstDone: true, SrcDone: true,
	}
	w.endpoint = from
	for _, h := range []netfilter.Hook{netfilter.Output, netfilter.Postrouting} {
		var stopped []end
		w, p, stopped = t.answerPasses(w, p, h)
		for _, e := range stopped {
			e.way.endpoint = endpoint
			t.finish(e.way, e.verdict, e.stop)
		}
	}
	w.endpoint = endpoint
	return w
}

// answerRouted says why the kernel doesn't take an endpoint's answer that comes
// in on a link; nil if it does.
func (t *tracer) answerRouted(endpoint netip.Addr, in string, home bool, mark uint32) *Finding {
	if rp := t.host.reversePath(endpoint, in, mark); rp.refused {
		return &Finding{SeverityError, fmt.Sprintf("the reverse path filter drops the answers of %s: they come in on %s, but the way there is %s", endpoint, in, rp.back.String()),
			rp.String(), rp.remedy()}
	}
	if home {
		return nil
	}
	if off := t.host.forwarding(service.FamilyOf(endpoint), in); off != "" {
		f := t.notForwarding(off, in)
		f.What += ", so that answers don't come back"
		return f
	}
	return nil
}

// notDelivered says why the kernel sends an endpoint's answer to kproxy on, to the
// client whose address it bears; nil if it doesn't.
func (t *tracer) notDelivered(p *netfilter.Packet) *Finding {
	back := t.host.route(query{to: p.Dst.Addr(), from: p.Src.Addr(), in: p.In, mark: p.Mark})
	if back.local() || back.err != nil {
		return nil
	}
	return &Finding{SeverityError, fmt.Sprintf("the answers of %s don't reach kproxy, which connects from the client's address: the kernel sends them to %s", p.Src.Addr(), back.to), back.command(),
		"look whether kproxy's rules mark them (iptables -t mangle -S KPROXY-PREROUTING, or nft list chain ip kproxy prerouting), and whether the mark leads to kproxy's table of routes (ip rule); kproxy repairs what is its own"}
}

// wayBack asks for an answer's route to the client, and says why the answer doesn't get there; nil
// if it does. The remedy is for a missing route; empty for the usual one.
func (t *tracer) wayBack(q query, what, remedy string) (route, *Finding) {
	back := t.host.route(q)
	f := &Finding{SeverityError, fmt.Sprintf("no way to %s: %s", back.to, back.failure()), back.command(), cmp.Or(remedy, t.routeRemedy(back.to))}
	if back.passes() {
		f = t.noHop(&back)
	}
	if f != nil {
		f.What = what + ": " + f.What
	}
	return back, f
}

// answerPasses takes an answer through a hook: what is left of w with the packet
// as it goes on, and what is stopped.
func (t *tracer) answerPasses(w way, p netfilter.Packet, h netfilter.Hook) (way, netfilter.Packet, []end) {
	walk := t.host.walk(p, h, netfilter.Whole)
	t.noteAssumed(walk)
	t.metBack = append(t.metBack, walk.Steps...)
	left, on := w, 0
	var out []end
	for i := range walk.Outcomes {
		o := &walk.Outcomes[i]
		if o.Verdict == netfilter.Accept {
			if on++; on == 1 {
				p = o.Packet
			}
			continue
		}
		verdict := Dropped // the sender of what is rejected is the endpoint
		if o.Verdict == netfilter.Unknown {
			verdict = Undetermined
		}
		stopped := w.next(walk, &netfilter.Outcome{Packet: w.packet, Probability: o.Probability, Certain: o.Certain, Rewrote: -1, Masked: -1, Doubts: o.Doubts})
		if o.Certain {
			left.share -= stopped.share
		} else {
			left.certain, left.doubt = false, stopped.doubt
		}
		f := t.stoppedBy(walk, o)
		f.What += fmt.Sprintf(" (the answer of %s)", w.endpoint)
		out = append(out, end{stopped, verdict, f})
	}
	if on == 0 {
		left.share = 0
	}
	return left, p, out
}
