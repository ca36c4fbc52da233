package trace

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace/netfilter"
)

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

// dropping are kproxy's chains that do nothing but drop, and say that they do: of iptables and of nftables.
var dropping = map[string]bool{steering.ChainElsewhere: true, steering.ChainOutside: true, "outside": true}

// stoppedBy says what stopped a packet, and the remedy.
func (t *tracer) stoppedBy(walk *netfilter.Walk, o *netfilter.Outcome) *Finding {
	does := stops[o.Verdict].does
	if o.By < 0 {
		return &Finding{SeverityError, "netfilter " + does + " the packet, by something that can't be read", string(walk.Steps[0].Hook), "nft list ruleset shows it"}
	}
	s := &walk.Steps[o.By]
	if isOwn(s) {
		for i := o.By; i >= 0; i-- {
			at := &walk.Steps[i]
			if (at.Chain == steering.ChainUnserved || netfilter.Own(at) && at.Chain == "unserved") && (i == o.By || at.Outcome == "jump to "+s.Chain || at.Outcome == "goto "+s.Chain) {
				return t.unserved(at, o.Verdict)
			}
			if at.Matched != netfilter.Yes || !isOwn(at) {
				continue
			}
			if dropping[s.Chain] && (at.Outcome == "jump to "+s.Chain || at.Outcome == "goto "+s.Chain) || netfilter.Own(at) && strings.Contains(at.Text, "vmap @refused") {
				s = at // the rule that says why
				break
			}
		}
		return t.ownStop(s, o.Verdict)
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

// program names the program of iptables that changes the rules of a step's source.
func (t *tracer) program(s *netfilter.Step) string {
	name := "iptables"
	if t.req.Address.Addr().Is6() {
		name = "ip6tables"
	}
	if s.Source == "iptables-legacy" {
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

// policyRemedy accepts what goes to, or answers from, one address and port, or both ways of the
// service's connections: to change the policy would open the host.
func (t *tracer) policyRemedy(s *netfilter.Step, p *netfilter.Packet) string {
	at, side, nft, port := p.Dst, "-d", "daddr", "dport"
	if p.Reply {
		at, side, nft, port = p.Src, "-s", "saddr", "sport"
	}
	translated := p.DNAT && s.Hook == netfilter.Forward && p.Frame.Bridge == ""
	if translated {
		at = p.OrigDst
	}
	match := fmt.Sprintf("%s %s -p %s --%s %d", side, at.Addr(), t.req.Protocol, port, at.Port())
	family := [2]string{service.IPv4: "ip", service.IPv6: "ip6"}[service.FamilyOf(at.Addr())]
	native := s.Source == "nftables"
	switch {
	case native && translated:
		match = fmt.Sprintf("meta l4proto %s ct original %s daddr %s ct original proto-dst %d", t.req.Protocol, family, at.Addr(), at.Port())
	case native:
		match = fmt.Sprintf("%s %s %s %s %s %d", family, nft, at.Addr(), t.req.Protocol, port, at.Port())
	case translated:
		match = fmt.Sprintf("-m conntrack --ctstate DNAT --ctorigdst %s --ctorigdstport %d", at.Addr(), at.Port())
	case p.Reply:
		match += " -m conntrack --ctstate ESTABLISHED"
	}
	if native {
		return fmt.Sprintf("accept this, and no more: nft add rule %s %s %s accept", s.Table, s.Chain, match)
	}
	return fmt.Sprintf("accept this, and no more: %s -t %s -A %s %s -j ACCEPT", t.program(s), s.Table, s.Chain, match)
}

// unserved is a connection to a service in userspace that nothing took.
func (t *tracer) unserved(s *netfilter.Step, v netfilter.Verdict) *Finding {
	if before := t.takenBefore(); before != nil {
		return before
	}
	if v == netfilter.Drop {
		return &Finding{SeverityError, fmt.Sprintf("kproxy is alive, but no rule leads packets for %s to it", t.req.Address), place(s), t.repairs()}
	}
	return &Finding{SeverityError, fmt.Sprintf("no live kproxy serves %s in userspace, and the kernel has no rules of its own for it", t.req.Address), place(s),
		"start kproxy, or look at its log and restart it; in every mode but userspace the kernel serves while kproxy is dead"}
}

// ownStop explains what kproxy's own rules stop.
func (t *tracer) ownStop(s *netfilter.Step, v netfilter.Verdict) *Finding {
	where, refused := place(s), strings.Contains(s.Text, "@refused")
	to := t.req.Address.Addr()
	switch {
	case (s.Chain == steering.ChainNoPort || s.Chain == "no-port") && t.frontend != nil:
		return &Finding{SeverityError, fmt.Sprintf("no rule leads packets for %s to %s: they count as for a port that no Service has", t.req.Address, t.serviceName()), where, t.repairs()}
	case s.Chain == steering.ChainNoPort || s.Chain == "no-port":
		return &Finding{SeverityError, fmt.Sprintf("%s is a cluster IP, and no Service has port %d there by %s", to, t.req.Address.Port(), t.req.Protocol), where,
			"look which ports the Service has: kproxy status; --close-cluster-ips=false lets such packets pass"}
	case s.Chain == steering.ChainNoService || s.Chain == "no-service":
		return &Finding{SeverityError, fmt.Sprintf("no Service has %s, which is in the cluster's ServiceCIDRs", to), where,
			"if a host outside has the address, the cluster needs other ServiceCIDRs; --close-cluster-ips=false lets such packets pass"}
	case strings.Contains(s.Text, kernel.SetRanged) || strings.Contains(s.Text, kernel.SetAllow) || strings.Contains(s.Text, "@limited"):
		return &Finding{SeverityError, t.notAdmitted(), where,
			"add it to spec.loadBalancerSourceRanges of the Service, if it is to be admitted"}
	case strings.Contains(s.Text, kernel.SetReject) || refused && v == netfilter.Reject:
		return &Finding{SeverityError, t.noUsableEndpoint(), where, remedyPods}
	case strings.Contains(s.Text, kernel.SetDrop) || refused:
		return &Finding{SeverityError, t.noLocalEndpoint(), where,
			"send it to a node that has one, or set the Service's traffic policy to Cluster"}
	case s.Chain == steering.ChainInvalid || strings.Contains(s.Text, "ct state invalid"):
		return &Finding{SeverityError, "conntrack can't place the packet (INVALID)", where, "look whether answers take another way than requests"}
	}
	if before := t.takenBefore(); before != nil { // what was to go to userspace meets IPVS' rules
		return before
	}
	return &Finding{SeverityError, fmt.Sprintf("kproxy's own rule %s the packet: %s", stops[v].does, s.Text), where, ""}
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

// chain names a chain.
type chain struct{ table, name string }

// near fills in what is known of a packet from, or to, the host that a route leads to, if nothing is between.
func (t *tracer) near(p *netfilter.Packet, r *route) {
	if r.err != nil || r.via.IsValid() {
		return
	}
	h, _ := t.host.hop(r) // no MTU where it fails
	if g := t.guest(r.to); g != nil {
		h.mtu = g.mtu
	}
	p.Near(h.mtu)
}

// usedUp is a packet that ends here because a rule has lowered its hop limit.
func (t *tracer) usedUp(what string) *Finding {
	f := &Finding{SeverityError, "this node doesn't forward " + what + ", as its hop limit (TTL) is used up", "routing", "look for what lowers it, in the tables mangle and in those of nft list ruleset"}
	if s := t.metRule("--TTL-", "--HL-", "TTL SET", "HOPLIMIT SET"); s != nil {
		f.What, f.Where, f.Remedy = f.What+": a rule that isn't kproxy's sets it: "+s.Text, place(s), t.ruleRemedy(s)
	}
	return f
}

// note remembers the rules that the packet met.
func (t *tracer) note(w *netfilter.Walk) {
	t.noteAssumed(w)
	for _, s := range w.Steps {
		c := chain{s.Table, s.Chain}
		if !slices.ContainsFunc(t.met[c], func(o netfilter.Step) bool { return o.Index == s.Index }) {
			t.met[c] = append(t.met[c], s)
		}
	}
}

// noteAssumed says what was taken for so of rules that the packet met.
func (t *tracer) noteAssumed(w *netfilter.Walk) {
	for i := range w.Steps {
		if s := &w.Steps[i]; s.Assumes != "" && s.Matched != netfilter.Maybe && !isOwn(s) {
			t.warn(SeverityNote, s.Assumes+": "+s.Text, place(s), "")
		}
	}
}

// metRule is a rule that isn't kproxy's, matches the packet and does one of several things, in capitals; nil if it met none.
func (t *tracer) metRule(does ...string) *netfilter.Step {
	return t.metStep(func(s *netfilter.Step) bool {
		return slices.ContainsFunc(does, func(word string) bool { return strings.Contains(strings.ToUpper(s.Outcome), word) })
	})
}

// metStep is a rule that isn't kproxy's, matches the packet, or else an answer, and is the one that is looked for; nil if they
// met none.
func (t *tracer) metStep(is func(*netfilter.Step) bool) *netfilter.Step {
	for _, steps := range append(slices.Collect(maps.Values(t.met)), t.metBack) {
		for i := range steps {
			if s := &steps[i]; s.Matched == netfilter.Yes && !isOwn(s) && is(s) {
				return s
			}
		}
	}
	return nil
}

// takenBefore says which rule keeps the packet from kproxy's rules of the table nat; nil if none does.
func (t *tracer) takenBefore() *Finding {
	s := t.acceptedBefore(netfilter.Prerouting, netfilter.Output)
	if s == nil {
		return nil
	}
	return &Finding{SeverityError, "a rule that isn't kproxy's accepts the packet before kproxy's do: " + s.Text, place(s), "let it stand behind kproxy's jump; " + t.ruleRemedy(s)}
}

// acceptedBefore is a rule that isn't kproxy's and ends iptables' table nat for the packet before kproxy's rules; nil if it met none.
func (t *tracer) acceptedBefore(hooks ...netfilter.Hook) *netfilter.Step {
	return t.metStep(func(s *netfilter.Step) bool {
		return s.Table == "nat" && s.Outcome == "accept" && slices.Contains(hooks, s.Hook)
	})
}
