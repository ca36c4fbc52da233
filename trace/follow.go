package trace

import (
	"errors"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace/netfilter"
)

// clientPort is the port that the traced client connects from.
const clientPort = 40001

// loopback is the link that a node talks to itself by.
const loopback = "lo"

// arrive follows the packet of another host or a pod.
func (t *tracer) arrive(in string) {
	src := netip.AddrPortFrom(t.client.Address, clientPort)
	w := way{packet: netfilter.NewPacket(t.req.Protocol, src, t.req.Address, in), share: 1, certain: true}
	w.packet.Reversed = netfilter.Maybe
	if back := t.host.route(query{to: t.client.Address}); back.err == nil {
		w.packet.Reversed = netfilter.No
		if back.link == in {
			w.packet.Reversed = netfilter.Yes
		}
	}
	t.pass(w, netfilter.Prerouting, netfilter.Whole, t.received)
}

// received is the routing decision about what came in.
func (t *tracer) received(w way) {
	from, to := w.packet.Src.Addr(), w.packet.Dst.Addr()
	if why := martian(from); why != "" {
		t.finish(w, Dropped, &Finding{SeverityError, fmt.Sprintf("the kernel drops packets from %s (martian source): %s", from, why), "routing", "use another source address"})
		return
	}
	if w.packet.Socket.IsValid() {
		t.diverted(w)
		return
	}
	rp := t.host.reversePath(from, w.packet.In, w.packet.Mark)
	if rp.refused {
		t.showSetting(w, rp.String(), "drops it: the way back to "+from.String()+" is "+rp.back.String())
		t.finish(w, Dropped, &Finding{SeverityError,
			fmt.Sprintf("the reverse path filter drops the packet: it comes in on %s, but the way back to %s is %s", w.packet.In, from, rp.back.String()),
			rp.String(), rp.remedy()})
		return
	}
	r := t.host.route(query{to: to, from: from, in: w.packet.In, mark: w.packet.Mark})
	off := t.host.forwarding(service.FamilyOf(to), w.packet.In)
	switch {
	case r.local():
		t.showRoute(w, &r, "delivered to this node")
		t.deliver(w)
	case off != "" && (r.passes() || t.reachable(to, w.packet.Mark)):
		t.showSetting(w, off+" = 0", "drops it: this node doesn't forward what comes in on "+w.packet.In)
		t.finish(w, Dropped, t.notForwarding(off, w.packet.In))
	case !r.passes():
		v := r.refusal()
		t.showRoute(w, &r, string(v))
		t.finish(w, v, t.noRoute(&r))
	case from.Is6() && from.IsLinkLocalUnicast(): // ip6_forward in net/ipv6/ip6_output.c
		t.showRoute(w, &r, "refused: it comes from a link-local address")
		t.finish(w, Refused, &Finding{SeverityError, fmt.Sprintf("the kernel doesn't forward packets from %s: link-local addresses mean nothing behind their link", from), "routing", "use another source address"})
	default:
		t.showRoute(w, &r, "forwarded by "+r.link)
		w.packet.Out = r.link
		t.pass(w, netfilter.Forward, netfilter.Whole, func(w way) { t.leave(w, &r) })
	}
}

// diverted is a packet that a rule gives to a socket of this node's (TPROXY); the
// kernel drops it where there is none (tproxy_tg4 in net/netfilter/xt_TPROXY.c).
func (t *tracer) diverted(w way) {
	to := w.packet.Socket
	f := &Finding{SeverityError, fmt.Sprintf("a rule that isn't kproxy's gives the packet to the socket at %s of this node (TPROXY)", to), "table mangle", "find out who made it: iptables-save -t mangle, or nft list ruleset, shows it"}
	if s := t.metRule("mangle", "TPROXY"); s != nil {
		f.What, f.Where, f.Remedy = f.What+": "+s.Text, place(s), t.ruleRemedy(s)
	}
	if _, ok, err := t.host.listener(t.req.Protocol, to); err == nil && !ok {
		f.What += ", where nobody listens"
		t.finish(w, Dropped, f)
		return
	}
	t.finish(w, Undetermined, f)
}

// reachable reports whether this node itself has a way to an address.
func (t *tracer) reachable(to netip.Addr, mark uint32) bool {
	r := t.host.route(query{to: to, mark: mark})
	return r.passes()
}

func (t *tracer) notForwarding(setting, in string) *Finding {
	return &Finding{SeverityError, fmt.Sprintf("this node doesn't forward packets that come in on %s", in), setting + " = 0", "sysctl -w " + setting + "=1"}
}

// noRoute says what the kernel answered, and asks it as this node itself where the
// answer for packets of others says less.
func (t *tracer) noRoute(r *route) *Finding {
	asked := *r
	if r.in != "" {
		if plain := t.host.route(query{to: r.to, mark: r.mark}); !plain.passes() {
			asked = plain
		}
	}
	f := &Finding{SeverityError, fmt.Sprintf("no way to %s: %s", r.to, asked.failure()), asked.command(), ""}
	kind := routeKinds[asked.kind]
	for errno, name := range map[error]string{unix.EINVAL: "blackhole", unix.EHOSTUNREACH: "unreachable", unix.EACCES: "prohibit"} {
		if errors.Is(asked.err, errno) {
			kind = name
		}
	}
	if kind != "" && kind != "local" {
		f.Remedy = fmt.Sprintf("find out who made it, or delete it: ip route show table all type %s and ip rule show it", kind)
		return f
	}
	f.Remedy = t.routeRemedy(r.to)
	if down := t.downLinks(); down != "" {
		f.What += "; " + down
	}
	return f
}

// deliver follows what is delivered to this node: IPVS takes it behind the rules
// that filter, or a socket gets it.
func (t *tracer) deliver(w way) {
	t.pass(w, netfilter.Input, netfilter.InputBeforeIPVS, func(w way) {
		if t.balance(w) {
			return
		}
		t.pass(w, netfilter.Input, netfilter.InputAfterIPVS, t.receive)
	})
}

// originate follows a packet of this node's own.
func (t *tracer) originate(source netip.Addr) {
	r := t.host.route(query{to: t.req.Address.Addr(), from: source})
	w := way{share: 1, certain: true}
	if !source.IsValid() {
		source = r.source
	}
	w.packet = netfilter.NewPacket(t.req.Protocol, netip.AddrPortFrom(source, clientPort), t.req.Address, "")
	if !r.passes() {
		t.showRoute(w, &r, "the connection fails at once")
		t.finish(w, Refused, t.noRoute(&r))
		return
	}
	t.showRoute(w, &r, "this node connects from "+source.String())
	w.packet.Out = r.link
	t.pass(w, netfilter.Output, netfilter.OutputBeforeIPVS, func(w way) {
		if t.balance(w) {
			return
		}
		t.pass(w, netfilter.Output, netfilter.OutputAfterIPVS, func(w way) { t.reroute(w, &r) })
	})
}

// reroute is the second routing decision about a packet of this node's own, where
// a rule gave it another destination or mark (ip_route_me_harder).
func (t *tracer) reroute(w way, r *route) {
	if to := w.packet.Dst.Addr(); to != r.to || w.packet.Mark != r.mark {
		again := t.host.route(query{to: to, mark: w.packet.Mark})
		r = &again
		if !r.passes() {
			t.showRoute(w, r, "dropped")
			t.finish(w, Dropped, t.noRoute(r))
			return
		}
		t.showRoute(w, r, "")
		w.packet.Out = r.link
	}
	t.leave(w, r)
}

// leave is the last hook; what this node sends to itself comes in again.
func (t *tracer) leave(w way, r *route) {
	w.packet.Out = r.link
	if r.local() {
		w.packet.Out = loopback
	}
	t.pass(w, netfilter.Postrouting, netfilter.Whole, func(w way) {
		if !r.local() {
			t.arrived(w, r)
			return
		}
		w.packet.In, w.packet.Out = loopback, ""
		w.packet.DstDone, w.packet.SrcDone = true, true
		t.pass(w, netfilter.Prerouting, netfilter.Whole, func(w way) {
			t.pass(w, netfilter.Input, netfilter.Whole, t.receive)
		})
	})
}

// emit follows a connection that userspace or IPVS makes to w's endpoint.
func (t *tracer) emit(w way) {
	q := query{to: w.packet.Dst.Addr(), mark: w.packet.Mark}
	r := t.host.route(q)
	if !r.passes() {
		t.showRoute(w, &r, "fails")
		v := Dropped
		if w.userspace && t.req.Protocol == service.TCP {
			v = Refused // kproxy accepted the client's connection, and resets it
		}
		if w.balanced { // IPVS tells the client by ICMP, whatever the reason (__ip_vs_get_out_rt in net/netfilter/ipvs/ip_vs_xmit.c)
			v = Refused
		}
		t.finish(w, v, t.noRoute(&r))
		return
	}
	t.showRoute(w, &r, "")
	w.packet.Out = r.link
	if w.userspace && !w.packet.Src.Addr().IsValid() {
		w.packet.Src = netip.AddrPortFrom(r.source, clientPort)
		w.packet.OrigSrc = w.packet.Src
	}
	t.pass(w, netfilter.Output, netfilter.Whole, func(w way) { t.reroute(w, &r) })
}

// arrived is the end of a way that leads to another host or pod.
func (t *tracer) arrived(w way, r *route) {
	if !w.endpoint.IsValid() {
		t.finish(w, NotAService, nil)
		return
	}
	if v, stop := t.unreached(w.packet, r); stop != nil {
		t.finish(w, v, stop)
		return
	}
	t.checkMTU(w, r)
	for _, e := range t.answer(w, r) {
		t.finish(e.way, e.verdict, e.stop)
	}
}

// receive is a socket of this node's.
func (t *tracer) receive(w way) {
	l, ok, err := t.host.listener(t.req.Protocol, w.packet.Dst)
	if err != nil {
		t.warn(SeverityWarning, err.Error(), "sockets", "")
	}
	text := fmt.Sprintf("%s %s", t.req.Protocol, w.packet.Dst)
	switch {
	case w.packet.Redirected && t.strayed(w):
		t.show(w, Step{Hook: string(netfilter.Input), Kind: KindListener, Text: text, Outcome: "not kproxy's"})
		if ok {
			t.finish(w, NotAService, nil)
			return
		}
		t.finish(w, Refused, &Finding{SeverityError, "nobody listens there", text, ""})
	case ok && w.packet.Redirected:
		t.show(w, Step{Hook: "userspace", Kind: KindListener, Text: fmt.Sprintf("%s %s", t.req.Protocol, l.address), Outcome: "kproxy's listener takes it"})
		t.userspace(w)
	case w.packet.Redirected:
		t.show(w, Step{Hook: "userspace", Kind: KindListener, Text: text, Outcome: "nobody listens"})
		t.finish(w, Refused, &Finding{SeverityError, "the packet is redirected to kproxy's listener, but nobody listens there", text,
			"kproxy has died a moment ago: start it again; in a few seconds the kernel's own rules take new connections, where there are any"})
	case ok:
		t.show(w, Step{Hook: string(netfilter.Input), Kind: KindListener, Text: fmt.Sprintf("%s %s", t.req.Protocol, l.address), Outcome: "a process of this node takes it"})
		t.finish(w, t.localEnd(w), nil)
	default:
		t.show(w, Step{Hook: string(netfilter.Input), Kind: KindListener, Text: text, Outcome: "nobody listens"})
		t.finish(w, Refused, &Finding{SeverityError, fmt.Sprintf("nobody listens on %s %s of this node", t.req.Protocol, w.packet.Dst), "sockets of this node",
			"start what is to listen there (ss -lntup shows who does)"})
	}
}

// localEnd is Forwarded for an endpoint on this node itself, and NotAService for
// whoever else listens.
func (t *tracer) localEnd(w way) Verdict {
	if w.endpoint.IsValid() {
		return Forwarded
	}
	return NotAService
}
