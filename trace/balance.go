package trace

import (
	"fmt"
	"net/netip"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace/netfilter"
	"kproxy.dev/kproxy/userspace"
)

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
	t.show(w, Step{Hook: b.Name, Kind: KindVirtualServer, Text: b.Text, Packets: &b.Packets, Bytes: &b.Bytes, Outcome: "takes it"})
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
		t.show(v, Step{Hook: b.Name, Kind: KindRealServer, Text: r.Text, Packets: &r.Packets, Bytes: &r.Bytes, Outcome: outcome, Why: r.Why})
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
	if w = t.accepts(w); w.share < 1e-9 {
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
		t.finish(w, Refused, &Finding{SeverityError, t.nobodyTakes(), "userspace",
			remedyPods})
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
		return string(f.Algorithm) + ": it is next, unless somebody else comes first"
	}
	return string(f.Algorithm)
}

// checkTransparent looks for what brings endpoints' answers to sockets that bear
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
