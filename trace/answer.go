package trace

import (
	"cmp"
	"fmt"
	"net/netip"
	"strings"

	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace/netfilter"
)

// A connection is three packets: the client's first one, the answer, and what the client sends then. What stops one of them
// stops the connection, and each meets other rules: conntrack knows the connection by then, and translates the addresses
// itself, if it finds it.

// passage is a hook that the first packet passed.
type passage struct {
	hook           netfilter.Hook
	span           netfilter.Span
	before, behind netfilter.Packet
}

// replies returns the answer to w's packet as its receiver sends it.
func (w *way) replies() netfilter.Packet {
	to := w.packet.Src
	if !to.Addr().IsValid() {
		to = w.packet.OrigSrc // the address that a rule chose isn't known
	}
	return netfilter.Packet{
		Protocol: w.packet.Protocol, Src: w.packet.Dst, Dst: to, State: netfilter.Established, Reply: true,
		OrigSrc: w.packet.OrigSrc, OrigDst: w.packet.OrigDst, ConnMark: w.packet.ConnMark,
		DNAT: w.packet.DNAT, SNAT: w.packet.SNAT, DstDone: true, SrcDone: true, Reversed: netfilter.Yes,
	}
}

// answer follows the endpoint's answer back, and what the client sends then. It returns how the way ends, which is several
// ways where a rule drops some packets, or may.
func (t *tracer) answer(w way, r *route) []end {
	in, home := r.link, t.client.Node || w.userspace
	endpoint := w.packet.Dst
	p := w.replies()
	p.In = in
	t.near(&p, r)
	w.answer.set(&p)
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
			q := t.host.query(&p)
			q.to, q.from, q.in = t.client.Address, endpoint.Addr(), in
			back, v, stop := t.wayBack(q, fmt.Sprintf("the answers of %s don't come back", q.from),
				fmt.Sprintf("look at the routes (ip route show to match %s, ip rule) for what comes from %s", q.to, q.from))
			if stop != nil {
				return append(out, end{w, v, stop})
			}
			if stop := t.aside(&back, "the answers of "+endpoint.Addr().String()); stop != nil {
				return append(out, end{w, Undetermined, stop})
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
	w, stopped := t.goesOn(w, p.ConnMark)
	if out = append(out, stopped...); w.share < 1e-9 {
		return out
	}
	return append(out, end{w, Forwarded, nil})
}

// accepts follows the answer of a socket of this node's to a client, and what the client sends then, and ends what is
// stopped of it. It returns what is left of w. whose says whose answers they are.
func (t *tracer) accepts(w way, whose string) way {
	p, endpoint := w.replies(), w.endpoint
	if t.arrives {
		p.Near(0)
	}
	hooks := []netfilter.Hook{netfilter.Output, netfilter.Postrouting}
	if t.client.Node {
		p.Out, hooks = loopback, append(hooks, netfilter.Prerouting, netfilter.Input)
	} else {
		q := t.host.query(&p)
		if q.to, q.in = t.client.Address, ""; !t.host.local(q.from) {
			q.from = netip.Addr{}
		}
		back, v, stop := t.wayBack(q, whose+" answers don't get to the client", "")
		if stop == nil {
			v, stop = Undetermined, t.aside(&back, whose+" answers")
		}
		if stop != nil {
			t.finish(w, v, stop)
			w.share = 0
			return w
		}
		p.Out = back.link
	}
	w.endpoint = p.Src
	ends := func(stopped []end) {
		for _, e := range stopped {
			e.way.endpoint = endpoint
			t.finish(e.way, e.verdict, e.stop)
		}
	}
	var stopped []end
	for _, h := range hooks {
		if h == netfilter.Prerouting {
			p.In, p.Out = loopback, ""
		}
		w, p, stopped = t.answerPasses(w, p, h)
		if ends(stopped); w.share < 1e-9 {
			break
		}
	}
	if w.answer = (header{p.TTL, p.TOS}); w.share >= 1e-9 {
		w, stopped = t.goesOn(w, p.ConnMark)
		ends(stopped)
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
	back := t.host.route(t.host.query(p))
	switch {
	case back.local():
		return nil
	case back.err != nil:
		return &Finding{SeverityError, fmt.Sprintf("the answers of %s don't reach kproxy: %s", p.Src.Addr(), back.failure()), back.command(),
			fmt.Sprintf("find out who made that rule or route: ip rule and ip route show table all show it, for what comes from %s", p.Src.Addr())}
	}
	return &Finding{SeverityError, fmt.Sprintf("the answers of %s don't reach kproxy, which connects from the client's address: the kernel sends them to %s", p.Src.Addr(), back.to), back.command(),
		"look whether kproxy's rules mark them (iptables -t mangle -S KPROXY-PREROUTING, or nft list chain ip kproxy prerouting), and whether the mark leads to kproxy's table of routes (ip rule); kproxy repairs what is its own"}
}

// wayBack asks for an answer's route to the client, and says why the answer doesn't get there, and what becomes of it; nil
// if it does. The remedy is for a missing route; empty for the usual one.
func (t *tracer) wayBack(q query, what, remedy string) (route, Verdict, *Finding) {
	back := t.host.route(q)
	v, f := Dropped, &Finding{SeverityError, fmt.Sprintf("no way to %s: %s", back.to, back.failure()), back.command(), cmp.Or(remedy, t.routeRemedy(back.to))}
	if back.passes() {
		if f = t.noHop(&back); f == nil {
			v, f = t.elsewhere(&back)
		}
		if f == nil {
			v, f = Undetermined, t.askedInVain(&back)
		}
	}
	if f != nil {
		f.What = what + ": " + f.What
	}
	return back, v, f
}

// aside says that answers leave by another link than the client's packets come in on, so that only those who know the network
// behind can tell whether they arrive, such as by a VPN's default route; nil if they don't. Of a pod, its link tells.
func (t *tracer) aside(back *route, what string) *Finding {
	if t.departs || t.arrives || back.link == t.client.Interface || back.local() || t.guest(t.client.Address) != nil {
		return nil
	}
	return &Finding{SeverityError, fmt.Sprintf("%s leave by %s, and not by %s, on which packets of %s come in: whether they get there isn't known here", what, back.link, t.client.Interface, back.to),
		back.command(), fmt.Sprintf("look at ip rule and ip route show table %d: have what comes in on %s be answered there, as a rule for its addresses does (ip rule add from ADDRESS lookup main)", back.table, t.client.Interface)}
}

// answerPasses takes an answer through a hook: what is left of w with the packet as it goes on, and what is stopped.
func (t *tracer) answerPasses(w way, p netfilter.Packet, h netfilter.Hook) (way, netfilter.Packet, []end) {
	src, dst := p.Src, p.Dst
	switch {
	case h == netfilter.Prerouting || h == netfilter.Output:
		dst = p.OrigSrc
	case h == netfilter.Postrouting || h == netfilter.Input, h == netfilter.Forward && w.balanced: // IPVS is before (ip_vs_ops4 in net/netfilter/ipvs/ip_vs_core.c)
		src = p.OrigDst
	}
	var out []end
	pass := func(at passage, src, dst netip.AddrPort) {
		var stopped []end
		if w.share >= 1e-9 {
			w, p, stopped = t.laterPasses(w, p, at, src, dst, fmt.Sprintf("the answer of %s", w.endpoint))
			out = append(out, stopped...)
		}
	}
	cross := func(all []crossing) {
		for i := range all {
			was := p
			p = all[i].enter(p)
			pass(passage{hook: all[i].hook, span: all[i].span}, p.Src, p.Dst)
			p = all[i].leave(p, &was)
		}
	}
	was := p
	cross(t.crossings(&p, nil, h))
	pass(passage{hook: h, span: netfilter.Whole}, src, dst)
	cross(t.crossings(&p, &was, h))
	return w, p, out
}

// goesOn follows what the client sends when it has the answer: what is left of w, and what is stopped. A datagram has been
// answered by then, so what stops a client's next ones is a warning.
func (t *tracer) goesOn(w way, connMark uint32) (way, []end) {
	later := map[bool]string{true: "packet to %s that completes the handshake", false: "next datagram to %s"}[t.req.Protocol == service.TCP]
	who := fmt.Sprintf("the client's "+later, t.req.Address)
	if w.userspace && !w.packet.Redirected {
		who = fmt.Sprintf("kproxy's "+later, w.endpoint)
	}
	left, stopped := t.passesAgain(w, connMark, false, who)
	if t.req.Protocol == service.TCP {
		if len(stopped) == 0 {
			return left, nil
		}
		if data, _ := t.passesAgain(w, connMark, true, who); data.share > left.share {
			for i := range stopped {
				if e := &stopped[i]; e.verdict == Dropped {
					e.verdict = Undetermined
					e.stop.What += "; data that the client sends pass, or may, and complete it as well"
				}
			}
		}
		return left, stopped
	}
	for _, e := range stopped {
		if e.verdict == Dropped || e.verdict == Refused {
			t.warn(SeverityWarning, e.stop.What, e.stop.Where, e.stop.Remedy)
		}
	}
	return w, nil
}

// passesAgain follows a later packet of w's connection through the hooks that its first one passed: what is left of w, and what
// is stopped. who says whose it is; it may carry data.
func (t *tracer) passesAgain(w way, connMark uint32, data bool, who string) (way, []end) {
	var out []end
	var p netfilter.Packet
	for i, at := range w.passed {
		first := at.before
		first.State, first.Zone, first.ConnMark = netfilter.Established, netfilter.Zone{}, connMark
		if i > 0 {
			first.State, first.Zone, first.Mark, first.ConnMark = p.State, p.Zone, p.Mark, p.ConnMark
		}
		p = first
		p.Later, p.Data, p.DNAT, p.SNAT, p.DstDone, p.SrcDone = true, data, w.packet.DNAT, w.packet.SNAT, true, true
		if p.Mark != at.before.Mark {
			if stop := t.turnsOff(w, p, at, who); stop != nil {
				out = append(out, end{w, Dropped, stop})
				w.share = 0
				return w, out
			}
		}
		var stopped []end
		w, p, stopped = t.laterPasses(w, p, at, at.behind.Src, at.behind.Dst, who)
		if out = append(out, stopped...); w.share < 1e-9 {
			break
		}
	}
	return w, out
}

// turnsOff says that a later packet, which bears another mark than the first one did before a hook, is routed another way
// to it; nil if it isn't.
func (t *tracer) turnsOff(w way, p netfilter.Packet, at passage, who string) *Finding {
	routed := at.hook == netfilter.Forward || (at.hook == netfilter.Input || at.hook == netfilter.Postrouting && p.In == "") && p.In != loopback
	if !routed || p.Frame.Bridge != "" {
		return nil
	}
	q := t.host.query(&p)
	if w.balanced && p.In == "" {
		q.from = netip.Addr{} // as in emit
	}
	r := t.host.route(q)
	if r.local() == (at.hook == netfilter.Input) && r.passes() && (r.local() || r.link == p.Out) {
		return nil
	}
	return &Finding{SeverityError, fmt.Sprintf("%s goes another way than the first packet, because a rule gave it the mark %#x: %s", who, p.Mark, r.String()), r.command(),
		"look at the rules that set marks and at ip rule"}
}

// laterPasses takes a later packet of w's connection through a hook, in which conntrack translates its addresses to src and
// dst: what is left of w with the packet as it goes on, and what is stopped. who says whose it is.
func (t *tracer) laterPasses(w way, p netfilter.Packet, at passage, src, dst netip.AddrPort, who string) (way, netfilter.Packet, []end) {
	var out []end
	stages := at.span.Stages(at.hook)
	parts := stages[:]
	if p.Frame.Bridge != "" { // where no addresses are translated
		parts = []netfilter.Span{at.span}
	}
	for i, part := range parts {
		if i == 1 && p.State == netfilter.Established && !p.Zone.Finds(w.packet.Zone, p.Reply) {
			p.State = netfilter.Invalid
		}
		if i == 2 && p.State == netfilter.Established {
			p.Src, p.Dst = src, dst
		} else if i == 2 && (p.Src != src || p.Dst != dst) {
			out = append(out, end{w, Dropped, t.untranslated(p, w.astray, src, dst, who)})
			w.share = 0
			return w, p, out
		}
		if part.From == part.Before {
			continue
		}
		walk := t.host.walk(p, at.hook, part)
		t.noteAssumed(walk)
		t.metBack = append(t.metBack, walk.Steps...)
		w.astray = cmp.Or(astray(walk.Steps), w.astray)
		left, on := w, 0
		for i := range walk.Outcomes {
			o := &walk.Outcomes[i]
			if o.Verdict == netfilter.Accept {
				if on++; on == 1 {
					p = o.Packet
				}
				continue
			}
			stopped := w.next(walk, &netfilter.Outcome{Packet: w.packet, Probability: o.Probability, Certain: o.Certain, Rewrote: -1, Masked: -1, Doubts: o.Doubts})
			if o.Certain {
				left.share -= stopped.share
			} else {
				left.certain, left.doubt = false, stopped.doubt
			}
			out = append(out, end{stopped, t.laterVerdict(walk, o, p), t.laterStop(walk, o, w.astray, p, who)})
		}
		if w = left; on == 0 {
			w.share = 0
			return w, p, out
		}
	}
	return w, p, out
}

// laterVerdict returns what becomes of a connection by what netfilter makes of a later packet. Of what is rejected, its
// sender is told: the endpoint of its answer, and the client, whose connection only a reset ends (tcp_v4_err in net/ipv4/tcp_ipv4.c).
func (t *tracer) laterVerdict(walk *netfilter.Walk, o *netfilter.Outcome, p netfilter.Packet) Verdict {
	switch {
	case o.Verdict == netfilter.Unknown:
		return Undetermined
	case o.Verdict == netfilter.Reject && !p.Reply && o.By >= 0 && strings.Contains(strings.ReplaceAll(walk.Steps[o.By].Text, " ", "-"), "tcp-reset"):
		return Refused
	}
	return Dropped
}

// laterStop says what stopped a later packet. Of one whose connection conntrack doesn't find, that comes first.
func (t *tracer) laterStop(walk *netfilter.Walk, o *netfilter.Outcome, s *netfilter.Step, p netfilter.Packet, who string) *Finding {
	f := t.stoppedBy(walk, o)
	if s != nil && p.State == netfilter.Invalid {
		return &Finding{SeverityError, fmt.Sprintf("conntrack doesn't find the connection of %s, because a rule looks for it in another zone or not at all: %s; so %s", who, s.Text, f.What), place(s), t.ruleRemedy(s)}
	}
	f.What += fmt.Sprintf(" (%s)", who)
	return f
}

// untranslated is a later packet whose connection conntrack doesn't find, so that it goes on as it is.
func (t *tracer) untranslated(p netfilter.Packet, s *netfilter.Step, src, dst netip.AddrPort, who string) *Finding {
	from, to := p.Src, src
	if p.Dst != dst {
		from, to = p.Dst, dst
	}
	f := &Finding{SeverityError, fmt.Sprintf("conntrack doesn't find the connection of %s, so that %s isn't translated to %s", who, from, to), "conntrack", "look for rules with NOTRACK or zones (nft list ruleset)"}
	if s != nil {
		f.What, f.Where, f.Remedy = f.What+": "+s.Text, place(s), t.ruleRemedy(s)
	}
	return f
}

// astray is the last rule met that keeps conntrack from a packet's connection; nil if none is.
func astray(steps []netfilter.Step) *netfilter.Step {
	for i := len(steps) - 1; i >= 0; i-- {
		text := strings.ToLower(steps[i].Text)
		if steps[i].Matched == netfilter.Yes && (strings.Contains(text, "notrack") || strings.Contains(text, "zone")) {
			return &steps[i]
		}
	}
	return nil
}
