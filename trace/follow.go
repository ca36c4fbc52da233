package trace

import (
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/trace/netfilter"
	"kproxy.dev/kproxy/userspace"
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

// show adds a step. Of many endpoints' ways only the first are shown, and what
// stops a packet on any other is a finding.
func (t *tracer) show(w way, s Step) {
	if w.leg != "" {
		if _, ok := t.legs[w.leg]; !ok {
			t.legs[w.leg] = len(t.legs)
		}
		if t.legs[w.leg] >= shownLegs && !t.req.Every {
			return
		}
	}
	s.Leg = w.leg
	t.steps = append(t.steps, s)
}

func (t *tracer) showRoute(w way, r *route, outcome string) {
	if outcome == "" {
		outcome = "leaves by " + r.link
		if r.local() {
			outcome = "stays on this node"
		}
		if r.local() && t.departs {
			outcome = "comes back to the client"
		}
	}
	t.show(w, Step{Hook: "routing", Kind: KindRoute, Text: r.String(), Outcome: outcome, Why: r.command()})
}

func (t *tracer) showSetting(w way, text, outcome string) {
	t.show(w, Step{Hook: "routing", Kind: KindSetting, Text: text, Outcome: outcome})
}

// showWalk adds the steps of a walk that are worth showing: rules that match or
// may match, those that redirect to userspace whether they match or not, and policies that stop.
func (t *tracer) showWalk(w way, walk *netfilter.Walk) {
	for i := range walk.Steps {
		s := &walk.Steps[i]
		if !worthShowing(s) {
			continue
		}
		step := Step{
			Hook: string(s.Hook), Silent: netfilter.Silent(s), Table: s.Table, Chain: s.Chain, Kind: KindRule, Text: s.Text,
			Packets: s.Packets, Bytes: s.Bytes, Outcome: outcomeText(s), Why: s.Why,
		}
		if s.Policy {
			step.Kind = KindPolicy
		}
		t.show(w, step)
	}
}

func worthShowing(s *netfilter.Step) bool {
	switch {
	case s.Policy:
		return !strings.Contains(strings.ToLower(s.Outcome), "accept")
	case s.Matched == netfilter.No:
		return s.Chain == kernel.Prefix+"PORTAL" || netfilter.Own(s) && strings.Contains(s.Text, "@userspace")
	}
	return true
}

func outcomeText(s *netfilter.Step) string {
	if s.Matched == netfilter.No {
		return "no match"
	}
	return map[netfilter.Answer]string{netfilter.Yes: "matches: ", netfilter.Chance: "by chance: ", netfilter.Maybe: "may match: "}[s.Matched] + s.Outcome
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
