package trace

import (
	"fmt"
	"net/netip"

	"kproxy.dev/kproxy/plan"
)

// maxVisits is how many network namespaces of endpoints are looked into: each takes as long as a node with few rules.
const maxVisits = 32

// visitEndpoint follows a packet that leaves this node by r in its endpoint's own network namespace, and the answer there, and
// ends what is stopped. It returns what is left of w.
func (t *tracer) visitEndpoint(w way, r *route) way {
	g := t.guest(w.packet.Dst.Addr())
	if g == nil {
		t.warn(SeverityNote, "of endpoints whose network namespace isn't seen from here, such as those of other nodes, the trace ends at the door", "", "look from there: kproxy trace on that node; or have connections made: --probe")
		return w
	}
	if t.visits++; t.visits > maxVisits {
		t.warn(SeverityNote, fmt.Sprintf("only the network namespaces of the first %d endpoints were looked into", maxVisits), "", "")
		return w
	}
	src := w.packet.Src
	if !src.Addr().IsValid() {
		src = netip.AddrPortFrom(r.source, clientPort) // a rule chooses it, most likely this one
	}
	where := fmt.Sprintf("network namespace %s, where endpoint %s is", g.path, w.endpoint)
	var there *tracer
	err := t.host.visit(g.path, func(s *hostState) {
		there = newTracer(Request{Address: w.packet.Dst, Protocol: t.req.Protocol, From: src.Addr(), Every: t.req.Every}, nil, s)
		there.arrives, there.client = true, plan.Client{Address: src.Addr(), Interface: g.link}
		there.arrive(g.link)
	})
	if err != nil {
		t.warn(SeverityNote, fmt.Sprintf("the packet isn't followed in %s: %v", where, err), "", "")
		return w
	}
	if !t.req.Every {
		for _, s := range there.steps {
			s.Namespace = where
			t.show(w, s)
		}
	}
	for _, f := range there.findings {
		t.findings = append(t.findings, f.in(where))
	}
	all := w
	w.share = 0
	for _, e := range there.ends {
		share := all.share * e.share
		if e.stop == nil { // also of what goes on to where nothing is seen
			w.share, w.answer = w.share+share, e.answer
			if w.certain = w.certain && e.certain; w.doubt == "" {
				w.doubt = e.doubt
			}
			continue
		}
		v, stop := all, e.stop.in(where)
		v.share, v.certain = share, all.certain && e.certain
		if v.doubt == "" {
			v.doubt = e.doubt
		}
		t.finish(v, e.verdict, &stop)
	}
	w.share = min(w.share, all.share)
	return w
}
