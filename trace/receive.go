package trace

import (
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace/netfilter"
	"kproxy.dev/kproxy/userspace"
)

// receive is a socket of this node's.
func (t *tracer) receive(w way) {
	l, ok, err := t.host.listener(t.req.Protocol, w.packet.Dst)
	if err != nil {
		t.warn(SeverityWarning, err.Error(), "sockets", "")
	}
	text := fmt.Sprintf("%s %s", t.req.Protocol, w.packet.Dst)
	show := func(hook, outcome string) {
		if ok && !t.strayed(w) {
			text = fmt.Sprintf("%s %s", t.req.Protocol, l.address)
		}
		t.show(w, Step{Hook: hook, Kind: KindListener, Text: text, Outcome: outcome})
	}
	switch input := string(netfilter.Input); {
	case t.departs:
		show(input, map[bool]string{true: "a program of the client's own takes it", false: "nothing listens"}[ok])
		t.taken(w, ok)
	case t.arrives && ok:
		show(input, "the endpoint takes it")
		t.takes(w, &l)
	case t.arrives:
		show(input, "nothing listens")
		t.finish(w, Refused, &Finding{SeverityError, fmt.Sprintf("nothing listens at %s", text), "endpoint " + t.req.Address.String(),
			"look whether the program there runs, and whether targetPort is the port that it listens on (ss -lntup)"})
	case w.packet.Redirected && t.strayed(w):
		show(input, "not kproxy's")
		if ok {
			t.finish(w, NotAService, nil)
			return
		}
		t.finish(w, Refused, &Finding{SeverityError, "nothing listens there", text, ""})
	case ok && w.packet.Redirected:
		show("userspace", "kproxy's listener takes it")
		t.userspace(w)
	case w.packet.Redirected:
		show("userspace", "nothing listens")
		t.finish(w, Refused, &Finding{SeverityError, "the packet is redirected to kproxy's listener, but nothing listens there", text,
			"kproxy has died a moment ago: start it again; in a few seconds the kernel's own rules take new connections, where there are any"})
	case ok && w.endpoint.IsValid():
		show(input, "a process of this node takes it")
		t.takes(w, &l)
	case ok:
		show(input, "a process of this node takes it")
		t.finish(w, NotAService, nil)
	default:
		show(input, "nothing listens")
		f := &Finding{SeverityError, fmt.Sprintf("nothing listens on %s of this node", text), "sockets of this node",
			"start what is to listen there (ss -lntup shows who does)"}
		to, v := w.packet.Dst.Addr(), Refused
		link, own := t.host.addresses.links[to]
		switch e := t.planned(w.packet.Dst); {
		case own && (t.guest(to) != nil || e != nil && !e.Local):
			f.What = fmt.Sprintf("the endpoint's address %s is also this node's, on link %s, so that packets don't leave it; nothing listens on %s there", to, link, text)
			f.Where, f.Remedy = "link "+link, fmt.Sprintf("ip addr del %s/%d dev %s, or give the endpoint another address", to, to.BitLen(), link)
		case !t.host.local(to) && !w.userspace && w.packet.In != "" && w.packet.In != loopback:
			r := t.host.route(t.host.query(&w.packet))
			if r.table == unix.RT_TABLE_LOCAL {
				break
			}
			// A reset would bear an address that isn't this node's, and isn't sent (ip_route_output_key_hash_rcu in net/ipv4/route.c).
			v, f.What, f.Where = Dropped, fmt.Sprintf("a route delivers packets for %s to this node, whose address that isn't, and nothing listens on %s", to, text), r.command()
			f.Remedy = fmt.Sprintf("find out who made the route in table %d and the rule that leads there, such as a program's that has used TPROXY, or delete them: ip rule, ip route show table %d", r.table, r.table)
		}
		t.finish(w, v, f)
	}
}

// takes ends a way at the socket of an endpoint, which answers.
func (t *tracer) takes(w way, l *listener) {
	if t.req.Protocol == service.TCP && l.waiting > l.queue { // sk_acceptq_is_full in include/net/sock.h
		t.finish(w, Dropped, &Finding{SeverityError, fmt.Sprintf("the program that listens at %s doesn't accept connections: %d of %d wait already, and the kernel drops more", l.address, l.waiting, l.queue),
			"listener " + l.address.String(), "look at the program: it hangs, or has more to do than it can (ss -lnt shows the queue)"})
		return
	}
	if pid, name := t.host.stopped(l.inode); pid != 0 {
		t.finish(w, Dropped, &Finding{SeverityError, fmt.Sprintf("the program that listens at %s takes connections, but is stopped and answers nothing: %s, process %d", l.address, name, pid),
			"listener " + l.address.String(), fmt.Sprintf("kill -CONT %d, or find out who stopped it", pid)})
		return
	}
	if !w.userspace { // whose own answers don't leave the node
		w = t.accepts(w, w.endpoint.String()+"'s")
	}
	if w.share >= 1e-9 {
		t.finish(w, Forwarded, nil)
	}
}

// balance gives the packet to what distributes connections to its destination in the kernel;
// false if nothing does.
func (t *tracer) balance(w way) bool {
	if w.balanced {
		return false // IPVS doesn't take its own packets (ipvs_property)
	}
	var b *kernel.Balancer
	for _, x := range t.explainers {
		found, err := x.Explain(t.req.Protocol, w.packet.Dst, t.client.Address)
		if err != nil {
			t.warn(SeverityWarning, err.Error(), "data plane", "")
		} else if found != nil {
			b = found
		}
	}
	if b == nil {
		return false
	}
	if b.Note != "" {
		t.warn(SeverityWarning, b.Note, b.Name, "")
	}
	t.show(w, Step{Hook: b.Name, Kind: KindVirtualServer, Silent: true, Text: b.Text, Packets: &b.Packets, Bytes: &b.Bytes, Outcome: "takes it"})
	taken := false
	for i := range b.Targets {
		r := &b.Targets[i]
		v := w
		v.balanced, v.endpoint, v.why = true, r.Address, r.Why
		v.leg, v.share = r.Address.String(), w.share*r.Share
		v.packets, v.bytes = &r.Packets, &r.Bytes
		outcome := "may be chosen"
		switch {
		case r.Weight == 0:
			outcome = "weight 0: takes no new connection"
		case r.Share == 0:
			outcome = "not chosen now"
		}
		t.show(v, Step{Hook: b.Name, Kind: KindRealServer, Silent: true, Text: r.Text, Packets: &r.Packets, Bytes: &r.Bytes, Outcome: outcome, Why: r.Why})
		if r.Weight == 0 {
			continue
		}
		if taken = true; len(t.legs) < maxLegs {
			v.packet.Dst, v.packet.DstDone = r.Address, true
			v.packet.In = "" // LOCAL_OUT has no interface that the packet came in on
			t.emit(v)
		}
	}
	if !taken {
		t.finish(w, Refused, &Finding{SeverityError, "the virtual server has no real server that takes connections", b.Text, remedyPods})
	}
	return true
}

// userspace follows the connections that kproxy may make.
func (t *tracer) userspace(w way) {
	w.userspace = true
	if w = t.accepts(w, "kproxy's"); w.share < 1e-9 {
		return
	}
	if onward := w.packet; !onward.Hop() { // the endpoint's packets have the client's TTL less one
		t.finish(w, Refused, t.usedUp("the packet"))
		return
	}
	if t.proxy == nil || t.proxy.Forecast == nil {
		t.warn(SeverityNote, "which endpoint kproxy would take, only a running one that can be asked tells", "userspace", "")
		w.doubt, w.certain = "kproxy's listener takes it, and what it does then only a kproxy that can be asked tells", false
		t.finish(w, Undetermined, nil)
		return
	}
	f, ok := t.proxy.Forecast(t.req.Protocol, t.req.Address, t.client)
	if !ok {
		t.finish(w, Refused, &Finding{SeverityError, "kproxy's listener gets the packet, but kproxy knows no service at " + t.req.Address.String(), "userspace",
			"if this lasts, restart kproxy: kernel and plan don't fit"})
		return
	}
	t.forecast = &f
	followed := false
	for i := range f.Endpoints {
		if e := &f.Endpoints[i]; e.Share > 0 {
			followed = true
			t.connect(w, &f, e)
		}
	}
	if !followed {
		t.finish(w, Refused, &Finding{SeverityError, t.noUsableEndpoint(), "userspace", remedyPods})
	}
}

// connect follows kproxy's own connection to one endpoint.
func (t *tracer) connect(w way, f *userspace.Forecast, e *userspace.Prospect) {
	v := way{
		userspace: true, endpoint: e.Address, leg: e.Address.String(), share: w.share * e.Share, certain: w.certain, doubt: w.doubt,
		transparent: e.Transparent, why: prospectWhy(f, e),
	}
	src := netip.AddrPortFrom(e.Source, clientPort)
	v.packet = netfilter.NewPacket(t.req.Protocol, src, e.Address, "")
	v.packet.Mark = t.proxy.Marks.Own()
	from := "the node's address"
	if e.Source.IsValid() {
		from = "the client's address " + e.Source.String()
	}
	t.show(v, Step{Hook: "userspace", Kind: KindListener, Text: "connect to " + e.Address.String(), Outcome: "from " + from, Why: v.why})
	if e.Transparent {
		t.checkTransparent()
	}
	t.emit(v)
}

// whyAffinity is why an endpoint gets all connections of a client.
const whyAffinity = "the client stays with it (affinity)"

// prospectWhy says why userspace may take an endpoint.
func prospectWhy(f *userspace.Forecast, e *userspace.Prospect) string {
	switch {
	case f.Affine == e.Address:
		return whyAffinity
	case f.Algorithm == service.LeastConnections:
		return fmt.Sprintf("it has the fewest connections for its weight now (%d)", e.Active)
	case f.Algorithm == service.SourceHash || f.Algorithm == service.Maglev:
		return "the client's address decides (" + string(f.Algorithm) + ")"
	case e.Next:
		return string(f.Algorithm) + ": it is next, unless another connection comes first"
	}
	return string(f.Algorithm)
}

// checkTransparent checks what brings endpoints' answers to sockets that bear
// a client's address.
func (t *tracer) checkTransparent() {
	if t.proxy.Missing == nil {
		return
	}
	missing, err := t.proxy.Missing()
	if err != nil {
		t.warn(SeverityWarning, err.Error(), "routing", "")
	}
	for _, what := range missing {
		t.warn(SeverityError, "answers to connections that kproxy makes from the client's address don't come back: there is no "+what, "routing",
			"kproxy repairs it within seconds; if not, restart it")
	}
}
