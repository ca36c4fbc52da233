package trace

import (
	"fmt"
	"slices"
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace/netfilter"
)

// pass takes a way through the base chains of a hook. What is stopped there ends;
// go on is called with each way on.
func (t *tracer) pass(w way, h netfilter.Hook, span netfilter.Span, goOn func(way)) {
	if w.hops >= maxHops {
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
		switch o.Verdict {
		case netfilter.Drop:
			t.finish(v, Dropped, t.stoppedBy(walk, o, "drops"))
		case netfilter.Reject:
			t.finish(v, Refused, t.stoppedBy(walk, o, "refuses"))
		case netfilter.Unknown:
			t.finish(v, Undetermined, t.stoppedBy(walk, o, "decides by itself about"))
		default:
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

// place says where a step is: "rule 3 of chain FORWARD in table filter".
func place(s *netfilter.Step) string {
	table := "table " + s.Table
	if s.Source == "nftables" {
		table = "nftables table " + s.Table
	}
	if s.Policy || s.Index == 0 {
		return fmt.Sprintf("the policy of chain %s in %s", s.Chain, table)
	}
	return fmt.Sprintf("rule %d of chain %s in %s", s.Index, s.Chain, table)
}

// stoppedBy says what stopped a packet, and the remedy.
func (t *tracer) stoppedBy(walk *netfilter.Walk, o *netfilter.Outcome, does string) *Finding {
	if o.By < 0 {
		return &Finding{SeverityError, "netfilter " + does + " the packet, by something that can't be read", string(walk.Steps[0].Hook), "nft list ruleset shows it"}
	}
	s := &walk.Steps[o.By]
	if isOwn(s) {
		for i := o.By; i >= 0; i-- {
			if at := &walk.Steps[i]; at.Chain == kernel.Prefix+"UNSERVED" && (i == o.By || at.Outcome == "jump to "+s.Chain) {
				return t.unserved(at, o.Verdict)
			}
		}
		return t.ownStop(s, does)
	}
	where := place(s)
	if s.Source == "iptables-legacy" {
		where += " (iptables-legacy)"
	}
	f := &Finding{Severity: SeverityError, What: fmt.Sprintf("a rule that isn't kproxy's %s the packet: %s", does, s.Text), Where: where, Remedy: t.ruleRemedy(s)}
	if s.Policy {
		f.What, f.Remedy = fmt.Sprintf("the policy of chain %s %s the packet: no rule in it accepts it", s.Chain, does), t.policyRemedy(s, &o.Packet)
	}
	// kproxy accepts what goes to its services' endpoints, but for what a rule before drops.
	t.acceptable[f] = slices.ContainsFunc(walk.Steps[:o.By], func(own netfilter.Step) bool {
		return own.Table == s.Table && own.Chain == s.Chain && own.Depth == 0 && own.Outcome == "jump to "+kernel.Prefix+"ACCEPT"
	})
	return f
}

// program is what changes the rules of a step's source.
func (t *tracer) program(s *netfilter.Step) string {
	name := "iptables"
	if t.req.Address.Addr().Is6() {
		name = "ip6tables"
	}
	if v, ok := strings.CutPrefix(s.Source, "iptables-"); ok && v == "legacy" {
		return name + "-legacy"
	}
	return name
}

func (t *tracer) ruleRemedy(s *netfilter.Step) string {
	if s.Source == "nftables" {
		return fmt.Sprintf("find out who made it; nft -a list chain %s %s shows its handle, to delete it by", s.Table, s.Chain)
	}
	return fmt.Sprintf("find out who made it, or delete it: %s -t %s -D %s %d", t.program(s), s.Table, s.Chain, s.Index)
}

// policyRemedy accepts what goes to, or answers from, one address and port: to change the policy
// would open the host.
func (t *tracer) policyRemedy(s *netfilter.Step, p *netfilter.Packet) string {
	option, word, port, a := "-d", "daddr", "dport", p.Dst
	if p.Reply {
		option, word, port, a = "-s", "saddr", "sport", p.Src
	}
	if s.Source == "nftables" {
		family := nftWord[service.FamilyOf(a.Addr())]
		if o := p.OrigDst; p.DNAT && s.Hook == netfilter.Forward {
			return fmt.Sprintf("accept this, and no more: nft add rule %s %s meta l4proto %s ct original %s daddr %s ct original proto-dst %d accept", s.Table, s.Chain, t.req.Protocol, family, o.Addr(), o.Port())
		}
		return fmt.Sprintf("accept this, and no more: nft add rule %s %s %s %s %s %s %s %d accept", s.Table, s.Chain, family, word, a.Addr(), t.req.Protocol, port, a.Port())
	}
	if o := p.OrigDst; p.DNAT && s.Chain == string(netfilter.Forward) { // both ways of the service's connections
		return fmt.Sprintf("accept this, and no more: %s -t %s -A %s -m conntrack --ctstate DNAT --ctorigdst %s --ctorigdstport %d -j ACCEPT", t.program(s), s.Table, s.Chain, o.Addr(), o.Port())
	}
	established := ""
	if p.Reply {
		established = " -m conntrack --ctstate ESTABLISHED"
	}
	return fmt.Sprintf("accept this, and no more: %s -t %s -A %s %s %s -p %s --%s %d%s -j ACCEPT", t.program(s), s.Table, s.Chain, option, a.Addr(), t.req.Protocol, port, a.Port(), established)
}

// nftWord is what nft calls a family's header.
var nftWord = [2]string{service.IPv4: "ip", service.IPv6: "ip6"}

// unserved is a connection to a service in userspace that nothing took.
func (t *tracer) unserved(s *netfilter.Step, v netfilter.Verdict) *Finding {
	if v == netfilter.Drop {
		return &Finding{SeverityError, fmt.Sprintf("kproxy is alive, but no rule leads packets for %s to it", t.req.Address), place(s), t.repairs()}
	}
	return &Finding{SeverityError, fmt.Sprintf("no live kproxy serves %s in userspace, and the kernel has no rules of its own for it", t.req.Address), place(s),
		"start kproxy, or look at its log and restart it; with --mode iptables, ipvs or auto the kernel serves while kproxy is dead"}
}

// ownStop explains what kproxy's own rules stop.
func (t *tracer) ownStop(s *netfilter.Step, does string) *Finding {
	where := place(s)
	switch {
	case strings.Contains(s.Text, kernel.SetRanged) || strings.Contains(s.Text, kernel.SetAllow):
		return &Finding{SeverityError, t.notAdmitted(), where,
			"add it to spec.loadBalancerSourceRanges of the Service, if it is to be admitted"}
	case strings.Contains(s.Text, kernel.SetReject):
		return &Finding{SeverityError, t.nobodyTakes(), where,
			remedyPods}
	case strings.Contains(s.Text, kernel.SetDrop):
		return &Finding{SeverityError, t.nobodyHere(), where,
			"send it to a node that has one, or set the Service's traffic policy to Cluster"}
	case s.Chain == kernel.ChainInvalid:
		return &Finding{SeverityError, "conntrack can't place the packet (INVALID)", where, "look whether answers take another way than requests"}
	}
	return &Finding{SeverityError, fmt.Sprintf("kproxy's own rule %s the packet: %s", does, s.Text), where, ""}
}

// noEndpoints says what the endpoints lack.
func (t *tracer) noEndpoints() string {
	switch {
	case t.service == nil:
		return ""
	case len(t.service.Endpoints) == 0:
		return ": it has no endpoints at all"
	}
	var why []string
	for i := range t.service.Endpoints {
		if e := &t.service.Endpoints[i]; len(why) < 3 {
			why = append(why, e.Address.String()+" "+t.unusable(e))
		}
	}
	return ": " + strings.Join(why, ", ")
}
