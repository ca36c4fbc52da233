package trace

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace/netfilter"
)

// way is one of the ways that the packet may take, as far as it has been
// followed.
type way struct {
	packet              netfilter.Packet
	leg                 string  // names the endpoint from where the ways to endpoints part
	share               float64 // probability
	certain             bool    // share is exact
	doubt               string  // what makes it uncertain
	userspace, balanced bool    // it is a connection of userspace, or a packet that a kernel.Balancer sends on
	// endpoint is where the packet is sent; invalid until one is chosen.
	endpoint       netip.AddrPort
	why            string // why it is this endpoint
	packets, bytes *uint64
	rewrote        *netfilter.Step // the rule that gave the packet another destination
	masked         string          // the rule that gave the packet another source
	transparent    bool            // userspace connects from the client's address
	passed         []passage
	astray         *netfilter.Step // the rule that gave a packet another zone of conntrack, or kept it from that
	answer         header          // of the endpoint's answer, as it leaves the endpoint
}

// header holds what a packet's sender may set, and those that forward it see; a TTL of 0 isn't known.
type header struct{ ttl, tos byte }

// set has a packet come with a header.
func (h header) set(p *netfilter.Packet) {
	if h.ttl != 0 {
		p.TTL, p.TOS = h.ttl, h.tos
	}
}

// end says how a way ends.
type end struct {
	way
	verdict Verdict // Forwarded, Refused, Dropped, NotAService or Undetermined
	stop    *Finding
}

// maxHops bounds rules that send a packet around for ever.
const maxHops = 24

// maxLegs is how many endpoints' ways are followed, and shownLegs of how many
// every step is shown: a service may have thousands.
const (
	maxLegs   = 256
	shownLegs = 3
)

// next continues w behind an outcome of a hook.
func (w way) next(walk *netfilter.Walk, o *netfilter.Outcome) way {
	if o.Packet.Zone != w.packet.Zone {
		w.astray = astray(walk.Steps)
	}
	w.packet = o.Packet
	w.share *= o.Probability
	if !o.Certain {
		w.certain = false
		if len(o.Doubts) > 0 && w.doubt == "" {
			s := &walk.Steps[o.Doubts[0]]
			w.doubt = place(s) + ": " + s.Why
		}
	}
	if o.Masked >= 0 {
		w.masked = place(&walk.Steps[o.Masked])
	}
	if o.Rewrote >= 0 {
		s := &walk.Steps[o.Rewrote]
		w.packets, w.bytes, w.rewrote = s.Packets, s.Bytes, s
		if !o.Packet.Redirected {
			w.endpoint = o.Packet.Dst
			w.leg = w.endpoint.String()
		}
	}
	return w
}

// merge joins ways that differ in nothing but the rule that led there: weights
// give an endpoint several.
func merge(ways []way) []way {
	type key struct {
		packet netfilter.Packet
		masked string
	}
	var out []way
	at := map[key]int{}
	for _, w := range ways {
		k := key{w.packet, w.masked}
		i, ok := at[k]
		if !ok {
			at[k] = len(out)
			out = append(out, w)
			continue
		}
		o := &out[i]
		o.share = min(1, o.share+w.share)
		o.certain = o.certain && w.certain
		o.packets, o.bytes = add(o.packets, w.packets), add(o.bytes, w.bytes)
	}
	return out
}

func add(a, b *uint64) *uint64 {
	switch {
	case a == nil:
		return b
	case b == nil:
		return a
	}
	n := *a + *b
	return &n
}

// stops are what netfilter's verdicts make of a packet, and how they are said.
var stops = map[netfilter.Verdict]struct {
	verdict Verdict
	does    string
}{
	netfilter.Drop: {Dropped, "drops"}, netfilter.Reject: {Refused, "refuses"}, netfilter.Unknown: {Undetermined, "decides by itself about"},
}

// pass takes a way through the base chains of a hook, and of the hooks of bridges that go with it. What is stopped there ends;
// go on is called with each way on.
func (t *tracer) pass(w way, h netfilter.Hook, span netfilter.Span, goOn func(way)) {
	was := w.packet
	t.cross(w, t.crossings(&was, nil, h), func(w way) {
		t.passHook(w, h, span, func(w way) { t.cross(w, t.crossings(&w.packet, &was, h), goOn) })
	})
}

// passHook takes a way through the base chains of one hook.
func (t *tracer) passHook(w way, h netfilter.Hook, span netfilter.Span, goOn func(way)) {
	if len(w.passed) >= maxHops {
		t.finish(w, Undetermined, &Finding{SeverityError, "the rules send the packet around in circles", string(h), ""})
		return
	}
	walk := t.host.walk(w.packet, h, span)
	t.note(walk)
	t.showWalk(w, walk)
	var on []way
	for i := range walk.Outcomes {
		o := &walk.Outcomes[i]
		v := w.next(walk, o)
		if stop, stopped := stops[o.Verdict]; stopped {
			t.finish(v, stop.verdict, t.stoppedBy(walk, o))
		} else {
			v.passed = append(slices.Clip(w.passed), passage{h, span, w.packet, v.packet})
			on = append(on, v)
		}
	}
	for i, v := range merge(on) {
		if i == maxLegs {
			t.warn(SeverityWarning, fmt.Sprintf("only the ways to the first %d endpoints were followed", maxLegs), string(h), "")
			break
		}
		goOn(v)
	}
}

// clientPort is the port that the traced client connects from.
const clientPort = 40001

// loopback is the link that a node talks to itself by.
const loopback = "lo"

// arrive follows the packet of another host or a pod.
func (t *tracer) arrive(in string) {
	src := netip.AddrPortFrom(t.client.Address, clientPort)
	w := way{packet: netfilter.NewPacket(t.req.Protocol, src, t.req.Address, in), share: 1, certain: true}
	if t.arrives {
		w.endpoint = t.req.Address
	}
	if stop := t.notePrograms(in); stop != nil {
		t.finish(w, Dropped, stop)
		return
	}
	w.packet.Reversed = netfilter.Maybe
	if back := t.host.route(query{to: t.client.Address}); back.err == nil {
		t.near(&w.packet, &back)
		w.packet.Reversed = netfilter.No
		if back.link == in {
			w.packet.Reversed = netfilter.Yes
		}
	}
	t.sent.set(&w.packet)
	t.pass(w, netfilter.Prerouting, netfilter.Whole, t.received)
}

// received is the routing decision about what came in.
func (t *tracer) received(w way) {
	from, to := w.packet.Src.Addr(), w.packet.Dst.Addr()
	if why := martian(from); why != "" {
		t.finish(w, Dropped, &Finding{SeverityError, fmt.Sprintf("the kernel drops packets from %s (martian source): %s", from, why), "routing", "use another source address"})
		return
	}
	if stop := t.ownSource(from, w.packet.In); stop != nil {
		t.finish(w, Dropped, stop)
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
	r := t.host.route(t.host.query(&w.packet))
	own := t.host.route(query{to: to, mark: w.packet.Mark}) // of this node itself
	off := t.host.forwarding(service.FamilyOf(to), w.packet.In)
	switch {
	case r.local():
		t.showRoute(w, &r, "delivered to this node")
		t.deliver(w)
	case off != "" && (r.passes() || own.passes()):
		t.showSetting(w, off+" = 0", "drops it: this node doesn't forward what comes in on "+w.packet.In)
		t.finish(w, Dropped, t.notForwarding(off, w.packet.In))
	case !r.passes():
		v := r.refusal()
		t.showRoute(w, &r, string(v))
		t.finish(w, v, t.noRoute(&r))
	case from.Is6() && from.IsLinkLocalUnicast(): // ip6_forward in net/ipv6/ip6_output.c
		t.showRoute(w, &r, "refused: it comes from a link-local address")
		t.finish(w, Refused, &Finding{SeverityError, fmt.Sprintf("the kernel doesn't forward packets from %s: link-local addresses mean nothing behind their link", from), "routing", "use another source address"})
	case !w.packet.Hop():
		t.showRoute(w, &r, "refused: its hop limit is used up")
		t.finish(w, Refused, t.usedUp("the packet"))
	default:
		t.showRoute(w, &r, "forwarded by "+r.link)
		w.packet.Out = r.link
		t.pass(w, netfilter.Forward, netfilter.Whole, func(w way) { t.leave(w, &r) })
	}
}

// ownSource says why the kernel drops a packet from another host that bears an address of this one (fib_validate_source in
// net/ipv4/fib_frontend.c); nil if it doesn't. IPv6 takes it.
func (t *tracer) ownSource(from netip.Addr, in string) *Finding {
	link, own := t.host.addresses.links[from]
	if !own || from.Is6() || in == loopback {
		return nil
	}
	if n, _ := kernel.ReadSysctl("net", "ipv4", "conf", in, "accept_local"); n != 0 {
		return nil
	}
	return &Finding{SeverityError, fmt.Sprintf("the kernel drops packets from %s (martian source): that is also an address of its own, on link %s", from, link), "link " + link,
		fmt.Sprintf("ip addr del %s/%d dev %s, or give the client another address", from, from.BitLen(), link)}
}

// diverted is a packet that a rule gives to a socket of this node's (TPROXY); the
// kernel drops it where there is none (tproxy_tg4 in net/netfilter/xt_TPROXY.c).
func (t *tracer) diverted(w way) {
	to := w.packet.Socket
	f := &Finding{SeverityError, fmt.Sprintf("a rule that isn't kproxy's gives the packet to the socket at %s of this node (TPROXY)", to), "table mangle", "find out who made it: iptables-save -t mangle, or nft list ruleset, shows it"}
	if s := t.metRule("TPROXY"); s != nil {
		f.What, f.Where, f.Remedy = f.What+": "+s.Text, place(s), t.ruleRemedy(s)
	}
	l, ok, err := t.host.listener(t.req.Protocol, to)
	if err == nil && !ok {
		f.What += ", where nothing listens"
		t.finish(w, Dropped, f)
		return
	}
	if t.arrives { // such as a service mesh, whose program it is
		t.takes(w, &l)
		return
	}
	t.finish(w, Undetermined, f)
}

func (t *tracer) notForwarding(setting, in string) *Finding {
	return &Finding{SeverityError, fmt.Sprintf("this node doesn't forward packets that come in on %s", in), setting + " = 0", "sysctl -w " + setting + "=1"}
}

// noRoute says what the kernel answered, and asks it as this node itself where the
// answer for packets of others says less.
func (t *tracer) noRoute(r *route) *Finding {
	asked := *r
	if r.in != "" {
		q := r.query
		q.from, q.in = netip.Addr{}, ""
		if plain := t.host.route(q); !plain.passes() {
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
	t.nameOff(f, r.to)
	return f
}

// nameOff adds to what is found about a missing route that IPv6 is off, where it is.
func (t *tracer) nameOff(f *Finding, to netip.Addr) {
	if off := t.host.disabled(service.FamilyOf(to)); off != "" {
		f.What, f.Remedy = f.What+"; IPv6 is off: "+off+" = 1", "sysctl -w "+off+"=0, then add the addresses and routes again, which that took away"
	}
}

// deliver follows what is delivered to this node: IPVS takes it behind the rules
// that filter, or a socket gets it.
func (t *tracer) deliver(w way) {
	t.pass(w, netfilter.Input, netfilter.InputBeforeBalancing, func(w way) {
		if t.balance(w) {
			return
		}
		t.pass(w, netfilter.Input, netfilter.InputAfterBalancing, t.receive)
	})
}

// originate follows a packet of this node's own.
func (t *tracer) originate(source netip.Addr) {
	w := way{share: 1, certain: true}
	w.packet = netfilter.NewPacket(t.req.Protocol, netip.AddrPortFrom(source, clientPort), t.req.Address, "")
	r := t.host.route(t.host.query(&w.packet))
	if !source.IsValid() {
		source = r.source
		w.packet.Src = netip.AddrPortFrom(source, clientPort)
		w.packet.OrigSrc = w.packet.Src
	}
	w.packet.Unnamed = t.departs
	w.packet.Near(0)
	t.near(&w.packet, &r)
	if !r.passes() {
		t.showRoute(w, &r, "the connection fails at once")
		t.finish(w, Refused, t.noRoute(&r))
		return
	}
	who := "this node"
	if t.departs {
		who = "the client"
	}
	t.showRoute(w, &r, who+" connects from "+source.String())
	w.packet.Out = r.link
	t.pass(w, netfilter.Output, netfilter.OutputBeforeBalancing, func(w way) {
		if t.balance(w) {
			return
		}
		t.pass(w, netfilter.Output, netfilter.OutputAfterBalancing, func(w way) { t.reroute(w, &r) })
	})
}

// reroute is the second routing decision about a packet of this node's own, where
// a rule gave it another destination or mark (ip_route_me_harder).
func (t *tracer) reroute(w way, r *route) {
	if to := w.packet.Dst.Addr(); to != r.to || w.packet.Mark != r.mark {
		q := t.host.query(&w.packet)
		q.from = netip.Addr{}
		again := t.host.route(q)
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
	q := t.host.query(&w.packet)
	q.from = netip.Addr{}
	r := t.host.route(q)
	if (w.transparent || w.balanced) && r.passes() && !r.local() {
		r = t.routeFrom(w, r)
	}
	if !r.passes() {
		t.showRoute(w, &r, "fails")
		v := Dropped
		if w.userspace && t.req.Protocol == service.TCP {
			v = Refused // kproxy accepted the client's connection, and resets it
		}
		// IPVS asks by the address alone, and tells the client by ICMP, whatever the reason (__ip_vs_get_out_rt in
		// net/netfilter/ipvs/ip_vs_xmit.c). Then netfilter asks by the whole packet, and drops it (ip_route_me_harder).
		if w.balanced {
			if alone := t.host.route(query{to: q.to}); !alone.passes() {
				v = Refused
			}
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

// routeFrom returns the route of a connection that kproxy or IPVS makes from the client's address, where rules of routing lead what comes
// from there elsewhere than r, or nowhere; r if they don't. The kernel answers for an address that isn't its own only as for
// what comes in, so by the loopback link, and its other refusals are about that.
func (t *tracer) routeFrom(w way, r route) route {
	q := t.host.query(&w.packet)
	q.in = loopback
	from := t.host.route(q)
	refused := errors.Is(from.err, unix.EACCES) || errors.Is(from.err, unix.ENETUNREACH) || from.err == nil && !from.passes()
	if refused || from.passes() && !from.local() && (from.link != r.link || from.via != r.via) {
		return from
	}
	return r
}

// arrived is the end of a way that leads to another host or pod.
func (t *tracer) arrived(w way, r *route) {
	if t.departs {
		t.leaves(w, r)
		return
	}
	if !w.endpoint.IsValid() || t.arrives {
		t.finish(w, NotAService, nil)
		return
	}
	hops := t.host.hops(r)
	for _, h := range hops {
		v, by := w, *r
		by.link, by.via, v.share = h.link, h.via, w.share*h.share
		t.reach(v, &by)
	}
	if len(hops) == 0 {
		t.reach(w, r)
	}
}

// reach follows a packet from this node to its endpoint by one next hop, and the answer back.
func (t *tracer) reach(w way, r *route) {
	if v, stop := t.unreached(w.packet, r); stop != nil {
		t.finish(w, v, stop)
		return
	}
	if stop := t.noHairpin(w, r); stop != nil {
		t.finish(w, Dropped, stop)
		return
	}
	if stop := t.strangeSource(w); stop != nil {
		t.finish(w, Undetermined, stop)
		return
	}
	t.checkMTU(w, r)
	if w = t.visitEndpoint(w, r); w.share < 1e-9 {
		return
	}
	for _, e := range t.answer(w, r) {
		t.finish(e.way, e.verdict, e.stop)
	}
}

// strangeSource says that a rule gave the packet a source that isn't this node's, so that an endpoint elsewhere may answer to
// somebody else; nil if none did. Pods of this node answer by way of the node, whose conntrack knows the connection.
func (t *tracer) strangeSource(w way) *Finding {
	src := w.packet.Src.Addr()
	if !w.packet.SNAT || !src.IsValid() || src == t.client.Address || t.host.local(src) || t.guest(w.packet.Dst.Addr()) != nil {
		return nil
	}
	return &Finding{SeverityError, fmt.Sprintf("a rule has the packet come from %s, which isn't an address of this node: whether answers to it come back here isn't known", src), w.masked,
		"have it SNAT to an address of the node's, or MASQUERADE, unless the network leads that address here"}
}
