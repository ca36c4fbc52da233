package trace

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/trace/netfilter"
)

// judgePlan adds what the plan knows to be wrong.
func (t *tracer) judgePlan(r *Result) {
	if t.proxy == nil {
		if t.silent != "" {
			t.warn(SeverityError, "kproxy hangs: it runs, and doesn't answer ("+t.silent+"). This is what the kernel does by itself", "kproxy run", "look at its log, and restart it")
			return
		}
		t.warn(SeverityNote, "kproxy isn't running or wasn't asked: this is what the kernel says alone, without the plan and what userspace would choose", "", "")
		return
	}
	if !t.proxy.Alive {
		t.warn(SeverityWarning, "kproxy's heartbeat has stopped: new connections go by the kernel's own rules, and a service that has none isn't served", "set KPROXY-ALIVE",
			"look at kproxy's log and at kproxy status; restart it")
	}
	if t.service == nil {
		return
	}
	for _, p := range t.service.Problems {
		t.warn(SeverityWarning, p, t.service.Port.Source, "")
	}
	for _, c := range r.Candidates {
		if c.Probability > 0 && c.Health == "down" && !t.stops(c.Endpoint) {
			t.warn(SeverityError, fmt.Sprintf("%s gets %s of new connections, but is down: %s", c.Endpoint, percent(c.Probability), c.Why), "endpoint "+c.Endpoint.String(),
				"look at the pod: it doesn't answer")
		}
	}
	t.judgeVerdict(r)
}

// stops reports whether what ends the way to an endpoint is told already.
func (t *tracer) stops(endpoint netip.AddrPort) bool {
	return slices.ContainsFunc(t.ends, func(e end) bool { return e.endpoint == endpoint && e.stop != nil })
}

// judgeVerdict compares what becomes of the packet with what is planned.
func (t *tracer) judgeVerdict(r *Result) {
	p := &t.proxy.Plan.Policy
	want := t.service.VerdictFor(t.frontend, t.client, p)
	switch {
	case want == plan.Forward && r.Verdict == NotAService && t.untracked():
		where, remedy := "raw", "iptables-save -t raw, or nft list ruleset, shows it"
		if s := t.metRule("raw", "NOTRACK"); s != nil {
			where, remedy = place(s), t.ruleRemedy(s)
		}
		t.warn(SeverityError, "a rule that isn't kproxy's keeps conntrack from the packet (NOTRACK), so that its destination can't be translated", where, remedy)
	case want == plan.Forward && r.Verdict == NotAService:
		t.warn(SeverityError, fmt.Sprintf("nothing in the kernel leads packets for %s to %s's endpoints", t.req.Address, t.serviceName()), "netfilter", t.repairs())
	case want != plan.Forward && r.Verdict == NotAService && r.Service != "":
		t.warn(SeverityError, t.notForwarded(want), "plan", "")
	case want != plan.Forward && r.Verdict == Forwarded:
		t.mismatch("verdict for "+t.req.Address.String(), string(want), "forwarded")
	}
}

// untracked reports whether the packet went on without an entry of conntrack's.
func (t *tracer) untracked() bool {
	return slices.ContainsFunc(t.ends, func(e end) bool { return e.packet.State == netfilter.Untracked })
}

func (t *tracer) notForwarded(v plan.Verdict) string {
	if !t.frontend.Allows(t.client) {
		return t.notAdmitted()
	}
	if v == plan.Drop {
		return t.nobodyHere()
	}
	return t.nobodyTakes()
}

func (t *tracer) notAdmitted() string {
	return fmt.Sprintf("%s isn't in the source ranges that %s admits", t.client.Address, t.serviceName())
}

func (t *tracer) nobodyHere() string {
	return t.serviceName() + " has no endpoint on this node, and its traffic policy is Local"
}

func (t *tracer) nobodyTakes() string {
	return t.serviceName() + " has no endpoint that takes connections" + t.noEndpoints()
}

func (t *tracer) repairs() string {
	return "kproxy repairs its own objects within seconds; if this lasts, look at its log, or restart it"
}

// culprit is one sentence: what stops the packet, where, and the remedy; empty if
// nothing does. A way that only some connections take counts too.
func culprit(r *Result) string {
	stopped := r.Verdict != Forwarded
	pick := slices.IndexFunc(r.Findings, func(f Finding) bool { return f.Severity == SeverityError })
	if pick < 0 && len(r.Mismatches) > 0 && stopped {
		m := r.Mismatches[0]
		return fmt.Sprintf("%s isn't as planned: planned is %s, in the kernel is %s; kproxy repairs it within seconds, or restart it.", m.Object, m.Planned, m.Kernel)
	}
	if pick < 0 {
		return ""
	}
	f := r.Findings[pick]
	text := f.What
	if f.Where != "" {
		text += " (" + f.Where + ")"
	}
	if f.Remedy != "" {
		text += "; remedy: " + f.Remedy
	}
	if len(r.Mismatches) > 0 && r.Verdict == NotAService {
		m := r.Mismatches[0]
		text = fmt.Sprintf("%s isn't as planned: planned is %s, in the kernel is %s; %s", m.Object, m.Planned, m.Kernel, text)
	}
	return strings.TrimSuffix(text, ".") + "."
}
