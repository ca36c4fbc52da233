package trace

import (
	"context"
	"fmt"
	"net/netip"

	"kproxy.dev/kproxy/service"
)

// Departure is a packet's way in its client's own network namespace: the rules of what it sends, its routes and links.
type Departure struct {
	Where   string  `json:"where"`   // "network namespace PATH, where the client is", "pod NAMESPACE/NAME"
	Verdict Verdict `json:"verdict"` // Leaves, or what becomes of the packet there
	Steps   []Step  `json:"steps"`
}

// Depart follows a packet that the network namespace of the calling thread sends, until it leaves that, and
// what would stop the answer there. Of a sender nothing is known but that no rule names its user or group.
func Depart(ctx context.Context, req Request) (Result, error) {
	if err := req.settle(); err != nil {
		return Result{}, err
	}
	s, err := readHost(ctx, service.FamilyOf(req.Address.Addr()), nil)
	if err != nil {
		return Result{}, err
	}
	defer s.close()
	s.neighbours = func() (neighbourhood, error) { return neighbourhood{}, nil } // they are the node's to see
	r, _ := depart(req, s)
	r.Namespace = spaceName()
	return r, nil
}

// depart returns what becomes of the packet in its client's namespace, and what it leaves that with.
func depart(req Request, s *hostState) (Result, header) {
	t := newTracer(req, nil, s)
	t.departs = true
	t.follow()
	t.req.From = t.client.Address
	sent := header{}
	for _, e := range t.ends {
		if e.verdict == Leaves {
			sent = header{e.packet.TTL, e.packet.TOS}
		}
	}
	return t.result(), sent
}

// departure follows the packet in the client's namespace, where that is seen from here.
func (t *tracer) departure() {
	if t.client.Node || t.req.Every || t.req.AnyClient {
		return
	}
	path := t.req.Netns
	if path == "" {
		g := t.guest(t.req.From)
		if g == nil {
			return
		}
		path = g.path
	}
	t.where = "network namespace " + path + ", where the client is"
	err := t.host.visit(path, func(s *hostState) {
		r, sent := depart(Request{Address: t.req.Address, Protocol: t.req.Protocol, From: t.req.From}, s)
		t.departed, t.sent = &r, sent
	})
	if err != nil {
		t.warn(SeverityNote, fmt.Sprintf("the packet isn't followed in %s: %v", t.where, err), "", "")
	}
}

// After puts first, which is what becomes of the packet in the client's own network namespace, before r, which is what
// becomes of it on the node if it gets there.
func (r *Result) After(where string, first *Result) {
	r.Departure = &Departure{Where: where, Verdict: first.Verdict, Steps: first.Steps}
	switch first.Verdict {
	case Leaves:
	case Undetermined:
		r.Verdict = Undetermined
	default:
		r.Verdict = first.Verdict
		r.Steps, r.Findings, r.Masquerade = []Step{}, nil, Masquerade{Reason: "nothing reaches an endpoint"}
		for i := range r.Candidates {
			if c := &r.Candidates[i]; c.Usable {
				c.Probability, c.Why = 0, ""
			}
		}
	}
	for _, f := range first.Findings {
		r.Findings = append(r.Findings, f.in(where))
	}
	r.sortFindings()
	r.Culprit = culprit(r)
}

// in says of a finding that it is in another network namespace.
func (f Finding) in(where string) Finding {
	f.What = fmt.Sprintf("in %s: %s", where, f.What)
	if f.Remedy != "" { // commands that would hit the node's own rules and routes
		f.Remedy = "in that network namespace, " + f.Remedy
	}
	return f
}

// leaves ends a way where the packet leaves the client's namespace by r, unless something there stops it, or its answer.
func (t *tracer) leaves(w way, r *route) {
	if stop := t.noHop(r); stop != nil {
		t.finish(w, Dropped, stop)
		return
	}
	if stop := t.askedInVain(r); stop != nil {
		t.finish(w, Undetermined, stop)
		return
	}
	if s := w.rewrote; s != nil && w.packet.Dst != t.req.Address {
		to := w.packet.Dst
		t.finish(w, NotAService, &Finding{SeverityError, fmt.Sprintf("a rule sends the packet to %s instead of %s: %s", to, t.req.Address, s.Text), place(s),
			fmt.Sprintf("trace that, or find out who made the rule (kproxy trace %s)", to)})
		return
	}
	if src := w.packet.Src.Addr(); src != t.client.Address {
		t.warn(SeverityWarning, fmt.Sprintf("a rule has the packet come to the node from %s, and it is followed there as if it came from %s", src, t.client.Address), w.masked, "trace it from there")
	}
	w.endpoint = w.packet.Dst // whose answer it is
	for _, e := range t.answer(w, r) {
		if e.endpoint = (netip.AddrPort{}); e.verdict == Forwarded {
			e.verdict = Leaves
		}
		t.ends = append(t.ends, e)
	}
}

// taken ends a way at a socket of the client's own namespace, or where there is none.
func (t *tracer) taken(w way, listens bool) {
	s, to := w.rewrote, w.packet.Dst
	f := &Finding{SeverityError, fmt.Sprintf("%s is an address of the client's own", to.Addr()), "", ""}
	if s != nil {
		f.What, f.Where = fmt.Sprintf("a rule leads the packet to %s, an address of the client's own: %s", to, s.Text), place(s)
	}
	switch {
	case !listens:
		f.What += "; nothing listens there"
		if f.Remedy = "start what is to listen there"; s != nil {
			f.Remedy += ", or " + t.ruleRemedy(s)
		}
		t.finish(w, Refused, f)
	case s != nil:
		f.What += "; the program that listens there, such as a service mesh's, decides where it connects to"
		f.Remedy = "look at its log or configuration"
		t.finish(w, NotAService, f)
	default:
		t.finish(w, NotAService, f)
	}
}
