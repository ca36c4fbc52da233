package trace

import (
	"fmt"
	"net/netip"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace/netfilter"
)

// answer looks whether the endpoint's answer finds its way back: what stops it
// stops the connection. Only what is certain counts, for an answer meets rules
// that look at what conntrack remembers.
func (t *tracer) answer(w way, r *route) *Finding {
	in, home := r.link, t.client.Node || w.plane == plan.Userspace
	endpoint := w.packet.Dst
	if rp := t.sight.reversePath(endpoint.Addr(), in, 0); rp.refused {
		return &Finding{SeverityError, fmt.Sprintf("the reverse path filter drops the answers of %s: they come in on %s, but the way there is %s", endpoint.Addr(), in, rp.back.String()),
			rp.String(), fmt.Sprintf("mend the routes, or make the filter loose: sysctl -w %s=2", rp.setting)}
	}
	if off := t.sight.forwarding(service.FamilyOf(endpoint.Addr()), in); off != "" && !home {
		f := t.notForwarding(off, in)
		f.What += ", so that answers don't come back"
		return f
	}
	v := w
	v.reply = true
	v.packet = netfilter.Packet{
		Protocol: t.req.Protocol, Src: endpoint, Dst: t.answerTo(w, home), In: in, State: netfilter.Established, Reply: true,
		OrigSrc: w.packet.OrigSrc, OrigDst: w.packet.OrigDst, ConnMark: w.packet.ConnMark,
		DNAT: w.packet.DNAT, SNAT: w.packet.SNAT, DstDone: true, SrcDone: true, Reversed: netfilter.Yes,
	}
	if stop := t.stops(v, netfilter.Prerouting); stop != nil {
		return stop
	}
	if home {
		return t.stops(v, netfilter.Input)
	}
	v.packet.Out = t.client.Interface
	if stop := t.stops(v, netfilter.Forward); stop != nil {
		return stop
	}
	return t.stops(v, netfilter.Postrouting)
}

// answerTo is where an answer goes, as rules see it behind PREROUTING's
// translation back: to the client, or to whoever of this node connected.
func (t *tracer) answerTo(w way, home bool) netip.AddrPort {
	if home {
		return w.packet.OrigSrc
	}
	return netip.AddrPortFrom(t.client.Address, clientPort)
}

// stops returns what certainly stops a packet in a hook.
func (t *tracer) stops(w way, h netfilter.Hook) *Finding {
	walk := t.sight.walk(w.packet, h, netfilter.Whole)
	for i := range walk.Outcomes {
		o := &walk.Outcomes[i]
		if !o.Certain || o.Verdict != netfilter.Drop && o.Verdict != netfilter.Reject {
			continue
		}
		f := t.stoppedBy(walk, o, "drops")
		f.What += fmt.Sprintf(" (the answer of %s)", w.endpoint)
		return f
	}
	return nil
}
