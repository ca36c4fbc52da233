package nftables

import (
	"net/netip"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/steering"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Options holds what rules depend on besides the plan.
type Options struct {
	steering.Options
	// Flowtable has established connections to endpoints pass by a flowtable.
	Flowtable bool
}

// DefaultOptions returns options for a host that has everything. The listener's ports are
// the caller's to fill in.
func DefaultOptions() Options { return Options{Options: steering.DefaultOptions()} }

// Names of sets and maps. Where a key has a service's address, that of a node port is
// zero: any address of the node.
const (
	setAlive     = "alive"
	setStarting  = "starting"
	setUserspace = "userspace"
	setLoopback  = "loopback-ports"
	setRefused   = "refused"
	setLimited   = "limited"
	setAllowed   = "allowed"
	setLeaving   = "leaving"
	setTold      = "told-refusals"
	setKept      = "kept"
	setServices  = "services"
	setBackends  = "backends"
	setChoices   = "choices"
	setAffinity  = "affinity"
	setEndpoints = "endpoints"
	setClusterIP = "cluster-ips"
	setLeft      = "left-to-others"
)

// The sets that follow plans: those of steering, and those of services.
var (
	steeringSets = []string{setUserspace, setLoopback, setRefused, setLimited, setAllowed, setLeaving, setClusterIP, setLeft}
	serviceSets  = []string{setServices, setBackends, setChoices, setEndpoints}
)

// sets returns all sets of a family, those that steering changes first.
func sets(f service.Family) []Set {
	addr := typeAddr[f]
	to := []Type{addr, typeProto, typePort}
	with := func(t Type) []Type { return append(to[:3:3], t) }
	return []Set{
		{Name: setAlive, Key: []Type{typeProto}, Timeouts: true, Comment: "protocols of which a live kproxy serves connections in userspace"},
		{Name: setStarting, Key: []Type{typeProto}, Timeouts: true, Comment: "protocols that a kproxy which starts will serve"},
		{Name: setUserspace, Key: to, Comment: "services that are served in userspace"},
		{Name: setLoopback, Key: []Type{typeProto, typePort}, Comment: "node ports that are served on loopback addresses"},
		{Name: setRefused, Key: to, Verdicts: true, Comment: "services without a usable endpoint"},
		{Name: setLimited, Key: to, Comment: "addresses that only some clients may use"},
		{Name: setAllowed, Key: with(addr), Intervals: true, Comment: "which clients may use which of them"},
		{Name: setLeaving, Key: to, Comment: "endpoints that get no new connections"},
		{Name: setClusterIP, Key: []Type{addr}, Comment: "cluster IPs that services have"},
		{Name: setLeft, Key: to, Comment: "addresses that another proxy serves"},
		{Name: setTold, Key: to, Timeouts: true, Comment: "endpoints whose refusals clients are told of"},
		{Name: setKept, Key: []Type{addr, typePort, addr}, Timeouts: true, Comment: "connections in userspace, of services that the kernel has"},
		{Name: setServices, Key: to, Verdicts: true, Comment: "how an endpoint is chosen"},
		{Name: setBackends, Key: with(typeMark), Data: []Type{addr, typePort}, Comment: "the endpoints of a service, by number"},
		{Name: setChoices, Key: with(typeMark), Data: []Type{typeMark}, Comment: "with affinity: the endpoint that a random number stands for"},
		{Name: setAffinity, Key: append([]Type{addr}, to...), Data: []Type{typeMark}, Timeouts: true, Dynamic: true, Comment: "the endpoint that a client stays with"},
		{Name: setEndpoints, Key: with(addr), Comment: "endpoints, with their address once more"},
	}
}

// Counters of the table.
const (
	countInvalid = "invalid"
	countRefused = "refused"
	countSteered = "steered"
)

var counters = []string{countInvalid, countRefused, countSteered}

// Chains that others lead to.
const (
	chainServices   = "services"
	chainRedirect   = "redirect"
	chainReject     = "reject"
	chainElsewhere  = "elsewhere"
	chainOutside    = "outside"
	chainNode       = "node-ports"
	chainRefuse     = "refuse"
	chainRefuseHere = "refuse-here"
	chainUnserved   = "unserved"
	chainOutsiders  = "masquerade-unless-pod"
	chainOwn        = "masquerade-node-clients"
	chainNew        = "prerouting-new"
	chainSent       = "output-own"
	chainClosed     = "closed"
	chainNoPort     = "no-port"
	chainNoService  = "no-service"
)

// rules makes the rules of one family that all services share.
type rules struct {
	*Options
	family  service.Family
	policy  *plan.Policy
	within  []netip.Prefix // addresses of this node that node ports answer on
	limited bool           // to those
}

func newRules(o *Options, f service.Family, p *plan.Policy) *rules {
	r := &rules{Options: o, family: f, policy: p}
	r.within, r.limited = p.NodePortsWithin(f)
	return r
}

// to is the key of a packet's destination, node that of a node port.
func (r *rules) to() key { return key{daddr[r.family], l4proto, dport} }

func (r *rules) node() key { return key{anyAddress(r.family), l4proto, dport} }

// anyAddress is the zero address in the place of the packet's: an address that nothing is
// left of.
func anyAddress(f service.Family) field {
	d, none := daddr[f], zero[f].AsSlice()
	return field{d.text + " & " + zero[f].String(), d.size, func(r *Rule, at uint32) {
		d.load(r, at)
		r.Mask(at, none, none)
	}}
}

// toNode are rules for what is to those of the node's own addresses that node ports answer
// on: one for each network that these are limited to, or one.
func (r *rules) toNode(what ...part) []Rule {
	var begin []part
	if r.policy.NoLocalhostNodePorts {
		begin = append(begin, r.destination(netip.MustParsePrefix(kernel.Loopback[r.family]), "!="))
	}
	begin = append(begin, daddrFib.is("local", native(unix.RTN_LOCAL)...))
	if !r.limited {
		return []Rule{rule(append(begin, what...)...)}
	}
	var out []Rule
	for _, n := range r.within {
		parts := append(begin[:len(begin):len(begin)], r.destination(n, "=="))
		out = append(out, rule(append(parts, what...)...))
	}
	return out
}

func (r *rules) destination(n netip.Prefix, op string) part { return daddr[r.family].within(n, op) }
func (r *rules) source(n netip.Prefix) part                 { return saddr[r.family].within(n, "==") }

// own matches packets that kproxy's sockets send.
func (r *rules) own(op string) part { return metaMark.bits(r.Marks.Own(), op, r.Marks.Own()) }

// listener redirects to the shared listener of a protocol.
func (r *rules) listener(p service.Protocol) []part {
	port := map[service.Protocol]uint16{service.TCP: r.TCPPort, service.UDP: r.UDPPort}[p]
	return []part{count(countSteered), toAddress(netip.AddrPortFrom(steering.ListenerAddress[r.family], port))}
}

var userProtocols = [2]service.Protocol{service.TCP, service.UDP}

// chains are all that don't depend on which services there are.
func (r *rules) chains() []Chain {
	const mangle, dstnat, filter, srcnat = -150, -100, 0, 100 // linux/netfilter_ipv4.h
	base := func(name, kind string, hook uint32, priority int32, rules ...Rule) Chain {
		return Chain{Name: name, Type: kind, Hook: hook, Priority: priority, Base: true, Rules: rules}
	}
	return append([]Chain{
		base("prerouting", "filter", unix.NF_INET_PRE_ROUTING, mangle, r.prerouting()...),
		base("output", "route", unix.NF_INET_LOCAL_OUT, mangle, r.output()...),
		base("nat-prerouting", "nat", unix.NF_INET_PRE_ROUTING, dstnat, rule(jumpTo(chainServices))),
		base("nat-output", "nat", unix.NF_INET_LOCAL_OUT, dstnat, rule(jumpTo(chainServices))),
		base("nat-postrouting", "nat", unix.NF_INET_POST_ROUTING, srcnat, r.postrouting()...),
		base("filter-input", "filter", unix.NF_INET_LOCAL_IN, filter, r.input()...),
		base("filter-forward", "filter", unix.NF_INET_FORWARD, filter, r.forward()...),
		base("filter-output", "filter", unix.NF_INET_LOCAL_OUT, filter, r.filterOutput()...),
		{Name: chainNew, Rules: r.preroutingNew()},
		{Name: chainSent, Rules: r.outputOwn()},
		{Name: chainServices, Rules: r.services()},
		{Name: chainRedirect, Rules: r.redirects()},
		{Name: chainNode, Rules: r.nodePorts()},
		{Name: chainRefuse, Rules: r.refuse()},
		{Name: chainRefuseHere, Rules: r.refuseHere()},
		{Name: chainUnserved, Rules: r.unserved()},
		{Name: chainReject, Rules: r.rejected(kernel.ReasonNoEndpoint)},
		{Name: chainElsewhere, Rules: r.logged(kernel.ReasonElsewhere, rule(drop))},
		{Name: chainOutside, Rules: r.logged(kernel.ReasonOutside, rule(drop))},
		{Name: chainOutsiders, Rules: append(r.pods(returns), rule(r.mark()))},
		{Name: chainOwn, Rules: []Rule{rule(saddrFib.is("local", native(unix.RTN_LOCAL)...), r.mark())}},
	}, r.closed()...)
}

// logged logs a refusal before what comes next.
func (r *rules) logged(reason string, next Rule) []Rule {
	if !r.LogRefusals {
		return []Rule{next}
	}
	return []Rule{rule(limit(kernel.RefusalRate, kernel.RefusalBurst), log(reason, kernel.RefusalGroup)), next}
}

// rejected logs, counts and refuses.
func (r *rules) rejected(reason string) []Rule {
	return append(r.logged(reason, rule(count(countRefused))), rule(reject(r.family, service.TCP)), rule(reject(r.family, service.UDP)))
}

// mark has the packet leave with the node's address.
func (r *rules) mark() part { return setMark(metaMark, r.Marks.Masquerade, r.Marks.Masquerade) }

// pods are rules for packets that pods send, as the policy tells them: by the interface
// that they come in on, or by their source address.
func (r *rules) pods(target part) []Rule {
	switch {
	case r.policy.PodBridge != "":
		return []Rule{rule(arrives(r.policy.PodBridge), target)}
	case r.policy.PodInterfacePrefix != "":
		return []Rule{rule(arrives(r.policy.PodInterfacePrefix+"*"), target)}
	}
	var out []Rule
	for _, n := range r.policy.PodCIDRs {
		if service.FamilyOf(n.Addr()) == r.family {
			out = append(out, rule(r.source(n), target))
		}
	}
	return out
}

// prerouting marks answers to sockets that bear a client's address, so that the route of
// that mark delivers them here. The connection tells, not the socket: see kernel/steering.
//
// Every packet of the host passes the base chains, and packets of established connections
// are most of them: their rules come first.
func (r *rules) prerouting() []Rule {
	t, own := r.Marks.Transparent, r.Marks.Own()
	return append([]Rule{
		rule(ctMark.bits(own, "==", t), r.own("!="), setMark(metaMark, own, t), accept, comment("answers to kproxy")),
		rule(state("invalid,new,untracked", stateInvalid|stateNew|stateUntracked), jumpTo(chainNew)),
	}, r.catchRefusals()...)
}

func (r *rules) preroutingNew() []Rule {
	mark := []part{socket("transparent", socketTransparent, 1), setMark(metaMark, r.Marks.Own(), r.Marks.Transparent), comment("answers to kproxy, forgotten by conntrack")}
	return []Rule{
		r.ranges(),
		rule(append([]part{protocol(service.TCP), notSYN}, mark...)...),
		rule(append([]part{protocol(service.UDP)}, mark...)...),
	}
}

// ranges drops clients that an address isn't for (loadBalancerSourceRanges).
func (r *rules) ranges() Rule {
	return rule(state("new", stateNew), r.to().in(setLimited), append(r.to(), saddr[r.family]).notIn(setAllowed), goesTo(chainOutside), comment(kernel.ReasonOutside))
}

// output marks answers of endpoints on the node itself.
func (r *rules) output() []Rule {
	own, t := r.Marks.Own(), r.Marks.Transparent
	return append([]Rule{
		rule(r.fromListener(), accept),
		rule(r.own("=="), goesTo(chainSent)),
		r.ranges(),
		rule(ctMark.bits(own, "==", t), setMark(metaMark, own, r.Marks.Returned()), comment("answers to kproxy")),
	}, r.catchRefusals()...)
}

// outputOwn marks kproxy's connections to endpoints.
func (r *rules) outputOwn() []Rule {
	own, t := r.Marks.Own(), r.Marks.Transparent
	return []Rule{
		rule(ctMark.bits(own, "==", t), accept),
		rule(setMark(ctMark, own, t), comment("connections of kproxy to endpoints")),
		r.ranges(),
	}
}

// fromListener matches what the listener answers.
func (r *rules) fromListener() part {
	address := steering.ListenerAddress[r.family]
	return r.source(netip.PrefixFrom(address, address.BitLen()))
}

// established lets packets of established connections pass the rules that follow: these
// are about others.
func established() Rule { return rule(state("established", stateEstablished), accept) }

// catchRefusals drops an endpoint's reset that is its first packet: it refuses the
// connection. The client's next SYN, a second later, is a new connection and goes to
// another endpoint, or to userspace. See kernel/steering.
func (r *rules) catchRefusals() (out []Rule) {
	if !r.CatchRefusals {
		return nil
	}
	for _, from := range r.fromEndpoint() {
		out = append(out, rule(resetOfSYN, rewritten, firstReply, r.live(), from,
			key{saddr[r.family], l4proto, sport}.notIn(setTold), drop, comment("refused: the next SYN of the client finds another endpoint")))
	}
	return out
}

// fromEndpoint matches, one or the other, what endpoints send that get new connections, and those that don't any more.
func (r *rules) fromEndpoint() [2]part {
	return [2]part{
		key{saddr[r.family], l4proto, sport, saddr[r.family]}.in(setEndpoints),
		key{saddr[r.family], l4proto, sport}.in(setLeaving),
	}
}

// services is the way of every new connection. The own mark comes first, or kproxy's
// connection to an endpoint that is a service address of its own would come back to it.
// Then those that aren't new, but forgotten by conntrack: they go on where they were.
//
// Most are to no service at all: they meet two look-ups and whether their destination is this
// node's, once.
func (r *rules) services() []Rule {
	out := []Rule{
		rule(r.own("=="), returns, comment("connections of kproxy to endpoints")),
		rule(append([]part{protocol(service.TCP), notSYN, key{saddr[r.family], sport, daddr[r.family]}.in(setKept)}, r.listener(service.TCP)...)...),
		rule(r.to().in(setUserspace), r.live(), goesTo(chainRedirect), comment("a live kproxy serves these in userspace")),
		rule(r.to().vmap(setServices)),
	}
	return append(out, r.toNode(goesTo(chainNode))...)
}

// nodePorts is the way of those that are to an address of this node. Node ports on
// loopback addresses are always served in userspace, and only for this node's clients: DNAT
// would need route_localnet, which opens the node's own loopback services to its neighbours
// (CVE-2020-8558).
func (r *rules) nodePorts() []Rule {
	var out []Rule
	if !r.policy.NoLocalhostNodePorts {
		loopback := r.destination(netip.MustParsePrefix(kernel.Loopback[r.family]), "==")
		out = []Rule{
			rule(loopback, saddrFib.is("local", native(unix.RTN_LOCAL)...), key{l4proto, dport}.in(setLoopback), r.live(), goesTo(chainRedirect)),
			rule(loopback, returns),
		}
	}
	return append(out,
		rule(r.node().in(setUserspace), r.live(), goesTo(chainRedirect)),
		rule(r.node().vmap(setServices)))
}

// live matches protocols that a live kproxy serves.
func (r *rules) live() part { return key{l4proto}.in(setAlive) }

// redirects leads to the shared listener.
func (r *rules) redirects() []Rule {
	var out []Rule
	for _, p := range userProtocols {
		out = append(out, rule(append([]part{protocol(p)}, r.listener(p)...)...))
	}
	return out
}

// postrouting masquerades what is marked, and hairpin connections: an endpoint that
// reaches itself through a service would see its own address as the client's and answer
// itself.
func (r *rules) postrouting() []Rule {
	m, f := r.Marks.Masquerade, r.family
	var out []Rule
	for _, n := range r.policy.StandIns(f) {
		out = append(out, rule(r.source(n.Network), r.own("=="), netmap(n.For), comment("clients behind a bridge")))
	}
	out = append(out, rule(rewritten, append(r.to(), saddr[f]).in(setEndpoints), r.mark(), comment("hairpin: an endpoint that reaches itself")))
	for _, l := range r.policy.Links {
		if service.FamilyOf(l.Addr()) == f {
			out = append(out, rule(r.source(l), r.destination(l, "=="), rewritten, append(r.to(), daddr[f]).in(setEndpoints), r.mark(),
				comment("the endpoint would answer without passing this node")))
		}
	}
	return append(out, rule(metaMark.bits(m, "==", 0), returns), rule(setMark(metaMark, m, 0), masquerade))
}

// evidence are rules that tell of connections to endpoints which may have no answer, see health/passive: a SYN that
// comes a second time, and some of the UDP flows that begin. A SYN of this node's to userspace is confirmed on its way out,
// and comes in over loopback for the first time.
func (r *rules) evidence() []Rule {
	if !r.LogRefusals || !r.PassiveHealth {
		return nil
	}
	return []Rule{
		rule(arrivesNot("lo"), confirmed, rewritten, syn, limit(kernel.UnansweredRate, kernel.UnansweredBurst), logNow(kernel.ReasonUnansweredSYN, kernel.RefusalGroup)),
		rule(protocol(service.UDP), rewritten, notConfirmed, limit(kernel.SampleRate, kernel.SampleBurst), log(kernel.ReasonUDPSample, kernel.RefusalGroup)),
	}
}

// refuse meets connections whose destination nothing has rewritten.
func (r *rules) refuse() []Rule {
	return append(r.evidence(),
		rule(r.to().vmap(setRefused)),
		rule(r.own("!="), notRewritten, r.to().in(setUserspace), goesTo(chainUnserved)))
}

// refuseHere is the same where the destination may be this node.
func (r *rules) refuseHere() []Rule {
	return append(r.toNode(r.node().vmap(setRefused)), rule(goesTo(chainRefuse)))
}

// unserved refuses what userspace should have taken, or it would leave by the default
// route. While a live kproxy serves, only its rules can be missing, or have been when the
// connection began: they are back in a moment, and the client's next packet passes once
// conntrack has forgotten this one. Likewise while a kproxy starts.
func (r *rules) unserved() []Rule {
	return append([]Rule{
		rule(r.live(), drop, comment("kproxy will take the next packet")),
		rule(key{l4proto}.in(setStarting), drop, comment("kproxy starts")),
	}, r.rejected(kernel.ReasonNoKproxy)...)
}

// toClosed is for connections that leave this node, or are forwarded, once all that serves or refuses services has seen
// them: what nothing has rewritten and kproxy doesn't send is to no service. Connections that had begun are let be, as
// with kube-proxy.
func (r *rules) toClosed() []Rule {
	if !r.policy.CloseClusterIPs {
		return nil
	}
	return []Rule{rule(state("new", stateNew), r.own("!="), notRewritten, jumpTo(chainClosed))}
}

// closed returns the chains that refuse what is to a cluster IP by a port that no service has there, and drop what is to an
// address of the ServiceCIDRs that no service has: it would leave by the default route, for a host that has
// that address outside. What this node has itself, or its pods, is theirs; what the node sends to an
// address of its own is forwarded by nothing. The chains are there whatever the policy, which may change.
func (r *rules) closed() []Chain {
	networks, but := r.policy.Closed(r.family)
	var look []Rule
	if len(r.policy.ExcludeCIDRs) > 0 {
		look = append(look, rule(r.to().in(setLeft), returns))
	}
	look = append(look, rule(key{daddr[r.family]}.in(setClusterIP), goesTo(chainNoPort), comment(kernel.ReasonNoPort)))
	for _, n := range networks {
		look = append(look, rule(r.destination(n, "=="), goesTo(chainNoService), comment(kernel.ReasonNoService)))
	}
	own := []Rule{rule(daddrFib.is("local", native(unix.RTN_LOCAL)...), returns)}
	out := []Chain{
		{Name: chainClosed, Rules: look},
		{Name: chainNoPort, Rules: append(own[:1:1], r.rejected(kernel.ReasonNoPort)...)},
	}
	switch {
	case r.policy.PodBridge != "":
		own = append(own, rule(leaves(r.policy.PodBridge), returns))
	case r.policy.PodInterfacePrefix != "":
		own = append(own, rule(leaves(r.policy.PodInterfacePrefix+"*"), returns))
	}
	for _, n := range but {
		own = append(own, rule(r.destination(n, "=="), returns))
	}
	return append(out, Chain{Name: chainNoService, Rules: append(own, r.logged(kernel.ReasonNoService, rule(drop))...)})
}

func (r *rules) input() []Rule {
	out := []Rule{
		established(),
		rule(arrives("lo"), r.own("=="), accept, comment("connections of kproxy to this node")),
		rule(state("new", stateNew), jumpTo(chainRefuseHere)),
	}
	if r.DropInvalid {
		out = append(out, rule(state("invalid", stateInvalid), protocol(service.TCP), socket("wildcard", socketWildcard, 0), accept, comment("has a local socket: leave it to TCP")))
	}
	return append(out, r.invalid()...)
}

func (r *rules) forward() []Rule {
	out := append([]Rule{established(), rule(state("new", stateNew), jumpTo(chainRefuse))}, r.toClosed()...)
	if r.Flowtable {
		add := rule(state("established", stateEstablished), rewritten, append(r.to(), daddr[r.family]).in(setEndpoints), flowAdd)
		out = slices.Insert(out, 0, add)
	}
	return append(out, r.invalid()...)
}

// invalid drops packets of endpoints that conntrack can't place: they would reach the
// client with an address that it has never connected to, and its reset would break the
// connection that it has (kubernetes/kubernetes#74839, #117924).
func (r *rules) invalid() (out []Rule) {
	if !r.DropInvalid {
		return nil
	}
	for _, from := range r.fromEndpoint() {
		out = append(out, rule(state("invalid", stateInvalid), from, count(countInvalid), drop, comment("invalid packet from an endpoint")))
	}
	return out
}

// filterOutput drops an answer of the listener's that conntrack knows no connection for:
// it would bear the listener's address, and the client would reset the connection, while
// kproxy has the connection tracked again in a moment.
func (r *rules) filterOutput() []Rule {
	from := func(p service.Protocol, port uint16, more ...part) Rule {
		parts := append([]part{state("invalid,new", stateInvalid|stateNew), r.fromListener(), protocol(p)}, more...)
		return rule(append(parts, sport.is(strconv.Itoa(int(port)), byte(port>>8), byte(port)), drop, comment("reply without conntrack entry"))...)
	}
	out := []Rule{
		established(),
		from(service.TCP, r.TCPPort, notSYN),
		from(service.UDP, r.UDPPort),
	}
	if r.LogRefusals && r.PassiveHealth {
		out = append(out, rule(protocol(service.UDP), r.own("=="), notConfirmed, limit(kernel.SampleRate, kernel.SampleBurst), log(kernel.ReasonUDPSample, kernel.RefusalGroup)))
	}
	return append(append(out, rule(state("new", stateNew), jumpTo(chainRefuseHere))), r.toClosed()...)
}
