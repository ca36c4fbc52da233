package netfilter

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// unprintable shows the ends of lines that a comment may have.
var unprintable = strings.NewReplacer("\n", `\n`, "\r", `\r`)

// parseSave reads what iptables-save -c printed. What iptables can't print, because
// nft put it there, it leaves out or, base chains, shows as ones of its own that
// are empty: they are told apart by their names, see Tables.readNFT.
func parseSave(source string, f service.Family, text string) (*ruleset, error) {
	r := &ruleset{source: source, family: f, chains: map[string]*chain{}}
	table := ""
	for line := range kernel.SavedLines(text) {
		switch {
		case line == "" || line[0] == '#':
		case line == "COMMIT":
			table = ""
		case line[0] == '*':
			table = strings.TrimSpace(line[1:])
		case table == "":
			return nil, fmt.Errorf("parse rules: %q is in no table", line)
		case line[0] == ':':
			r.addChain(table, strings.Fields(line[1:]))
		default:
			if err := r.addRule(table, line); err != nil {
				return nil, err
			}
		}
	}
	return r, nil
}

// addChain reads "INPUT ACCEPT [12:720]".
func (r *ruleset) addChain(table string, words []string) {
	if len(words) < 2 {
		return
	}
	c := &chain{table: table, name: words[0], policy: map[string]Verdict{"ACCEPT": Accept, "DROP": Drop}[words[1]]}
	if len(words) > 2 {
		c.counter, _ = parseCounter(words[2])
	}
	r.chains[table+" "+c.name] = c
}

// addRule reads "[12:720] -A INPUT …".
func (r *ruleset) addRule(table, line string) error {
	var counter Counter
	if line[0] == '[' {
		brackets, rest, _ := strings.Cut(line, " ")
		var ok bool
		if counter, ok = parseCounter(brackets); !ok {
			return fmt.Errorf("parse rule %q: no counter", line)
		}
		line = rest
	}
	rest, ok := strings.CutPrefix(line, "-A ")
	if !ok {
		return fmt.Errorf("parse rule %q: it doesn't begin with -A", line)
	}
	name, spec, _ := strings.Cut(rest, " ")
	c := r.chain(table, name)
	if c == nil {
		return fmt.Errorf("parse rule %q: table %s has no such chain", line, table)
	}
	c.rules = append(c.rules, &rule{text: unprintable.Replace(line), counter: counter, spec: spec, action: action{quiet: true}})
	return nil
}

func parseCounter(s string) (Counter, bool) {
	packets, bytes, ok := strings.Cut(strings.Trim(s, "[]"), ":")
	p, err := strconv.ParseUint(packets, 10, 64)
	b, err2 := strconv.ParseUint(bytes, 10, 64)
	if !ok || err != nil || err2 != nil {
		return Counter{}, false
	}
	return Counter{&p, &b}, true
}

// extension is a match or target with its options, or a rule's own options (-s, -d, …), whose
// name is empty.
type extension struct {
	name    string
	options []option
}

// option is one with its arguments: "! --dport 80".
type option struct {
	name string
	not  bool
	args []string
}

func (o option) arg(i int) string {
	if i < len(o.args) {
		return o.args[i]
	}
	return ""
}

func (e *extension) find(name string) (option, bool) {
	for _, o := range e.options {
		if o.name == name {
			return o, true
		}
	}
	return option{}, false
}

func (e *extension) has(name string) bool { _, ok := e.find(name); return ok }
func (e *extension) arg(name string) string {
	o, _ := e.find(name)
	return o.arg(0)
}

// prepare takes a rule apart, once. What doesn't fit is kept where it is, and
// makes its match undecided.
func (r *rule) prepare() {
	if r.spec == "" {
		return
	}
	own := &extension{}
	matches := []*extension{own}
	var to *extension
	leave := false
	options := &own.options // of the match or target that options belong to
	last := options         // where the last option is
	not := false
	words := kernel.Words(r.spec)
	r.spec = ""
	for i := 0; i < len(words); i++ {
		w := words[i]
		argument := func() string {
			if i++; i < len(words) {
				return words[i]
			}
			return ""
		}
		switch {
		case w == "!":
			not = true
			continue
		case w == "-m" && to == nil:
			m := &extension{name: argument()}
			matches = append(matches, m)
			options, last = &m.options, &m.options
		case (w == "-j" || w == "-g") && to == nil:
			leave, to = w == "-g", &extension{name: argument()}
			options, last = &to.options, &to.options
		case strings.HasPrefix(w, "-") && len(w) > 1 && (w[1] < '0' || w[1] > '9'): // else a negative number
			if last = options; to == nil && !strings.HasPrefix(w, "--") {
				last = &own.options
			}
			*last = append(*last, option{name: w, not: not})
		default:
			if n := len(*last); n > 0 {
				(*last)[n-1].args = append((*last)[n-1].args, w)
			}
		}
		not = false
	}
	for _, m := range matches {
		r.conditions = append(r.conditions, m.conditions()...)
	}
	if to != nil {
		r.action = to.action(leave)
	}
}

// comparing are the matches whose options each compare a field; a rule's own options do too.
var comparing = words("tcp udp sctp multiport mark connmark iprange pkttype conntrack state addrtype ttl hl length dscp tos")

// compared says which field an option compares, and how iptables writes constants.
var compared = map[string]struct {
	field    string
	constant func(option) constant
}{
	"-s": {"saddr", network}, "-d": {"daddr", network}, "-p": {"meta l4proto", protocol}, "-f": {"fragment", list},
	"-i": {"meta iifname", iface}, "-o": {"meta oifname", iface},
	"--sport": {"sport", ports}, "--source-port": {"sport", ports}, "--sports": {"sport", ports},
	"--dport": {"dport", ports}, "--destination-port": {"dport", ports}, "--dports": {"dport", ports}, "--ports": {"ports", ports},
	"--tcp-flags": {"flags", tcpMask}, "--src-range": {"saddr", addresses}, "--dst-range": {"daddr", addresses}, "--pkt-type": {"pkttype", list},
	"mark --mark": {"meta mark", markValue}, "connmark --mark": {"ct mark", markValue},
	"--ttl-eq": {"ttl", number}, "--ttl-gt": {"ttl", number}, "--ttl-lt": {"ttl", number}, "--hl-eq": {"ttl", number}, "--hl-gt": {"ttl", number}, "--hl-lt": {"ttl", number},
	"--length": {"length", ports}, "--dscp": {"dscp", number}, "--tos": {"tos", markValue}, "--tcp-option": {"tcp options", list},
	"--src-type": {"fib saddr type", list}, "--dst-type": {"fib daddr type", list},
	"--ctstate": {"ct states", list}, "--state": {"ct states", list}, "--ctstatus": {"ct status", list},
	"--ctdir": {"ct direction", list}, "--ctproto": {"meta l4proto", protocol},
	"--ctorigsrc": {"ct original saddr", network}, "--ctorigdst": {"ct original daddr", network},
	"--ctorigsrcport": {"ct original proto-src", ports}, "--ctorigdstport": {"ct original proto-dst", ports},
	"--ctreplsrc": {"ct reply saddr", network}, "--ctreplsrcport": {"ct reply proto-src", ports},
}

// depends says what matches look at that a walk doesn't know.
var depends = map[string]string{
	"time": "the time of day", "quota": "how much has passed",
	"mac":    "the hardware address",
	"string": "the packet's content", "u32": "the packet's content",
	"bpf": "a program", "policy": "IPsec",
}

// matches are those whose options belong together.
var matches = map[string]func(w *walker, p *Packet, e *extension) matched{
	"set": inSet, "statistic": statistic, "socket": socket, "owner": owner, "rpfilter": rpfilter, "recent": recent, "physdev": physdev, "tcpmss": mss,
}

// conditions returns what a match asks.
func (e *extension) conditions() []condition {
	all := func(m matched) []condition { return []condition{func(*walker, *Packet) matched { return m }} }
	holds := matches[e.name]
	if holds == nil {
		holds = limits[e.name]
	}
	switch {
	case e.name == "comment":
		return nil
	case otherHeaders[e.name] || e.name == "rt" || e.name == "dst":
		return all(matched{answer: No, why: "it has no header of " + e.name})
	case holds != nil:
		return []condition{func(w *walker, p *Packet) matched { return holds(w, p, e) }}
	case depends[e.name] != "":
		return all(maybe("it depends on %s (-m %s)", depends[e.name], e.name))
	case e.name != "" && !comparing[e.name]:
		return all(maybe("the match %s isn't known to this program", e.name))
	}
	var out []condition
	for _, o := range e.options {
		c, ok := compared[o.name]
		if !ok {
			c, ok = compared[e.name+" "+o.name]
		}
		holds := func(*walker, *Packet) matched { return maybe("the option %s isn't known to this program", o.name) }
		if ok {
			holds = compare(c.field, o.not, c.constant(o))
		}
		if e.name == "conntrack" {
			holds = e.ofEntry(o, holds)
		}
		out = append(out, holds)
	}
	return out
}

// ofEntry is a condition about an entry of conntrack. Of a packet without one only
// the state is asked: it decides alone, and without it nothing matches
// (conntrack_mt in net/netfilter/xt_conntrack.c).
func (e *extension) ofEntry(o option, holds condition) condition {
	if o.name == "--ctstate" {
		return holds
	}
	return func(w *walker, p *Packet) matched {
		switch {
		case w.hasEntry(p):
			return holds(w, p)
		case e.has("--ctstate"):
			return matched{answer: Yes}
		}
		return matched{answer: No, why: "conntrack has no entry of it"}
	}
}

// rpfilter asks whether a packet back would leave by the same interface.
func rpfilter(_ *walker, p *Packet, e *extension) matched {
	invert := e.has("--invert")
	back := p.reversePath()
	switch {
	case len(e.options) > 0 && !(invert && len(e.options) == 1):
		return maybe("the option %s of rpfilter can't be decided", e.options[0].name)
	case back == Maybe:
		return maybe("whether a packet back would leave by the same interface isn't known (-m rpfilter)")
	}
	return is(back == Yes, invert, "whether a packet back would leave by %s: %t", p.In, back == Yes)
}

// statistic is a matter of chance: at random, or each n-th packet, which in the
// long run is the same (statistic_mt in net/netfilter/xt_statistic.c).
func statistic(_ *walker, _ *Packet, e *extension) matched {
	switch e.arg("--mode") {
	case "random":
		o, _ := e.find("--probability")
		if p, err := strconv.ParseFloat(o.arg(0), 64); err == nil && p >= 0 && p <= 1 {
			return chance(p, "at random, probability "+o.arg(0)).invert(o.not)
		}
	case "nth":
		o, _ := e.find("--every")
		if n, err := strconv.ParseUint(o.arg(0), 10, 32); err == nil && n > 0 {
			return chance(1/float64(n), fmt.Sprintf("1 of %d in turn", n)).invert(o.not)
		}
	}
	return maybe("the match statistic can't be read")
}

func chance(p float64, why string) matched {
	switch {
	case p >= 1:
		return matched{answer: Yes, why: why}
	case p <= 0:
		return matched{answer: No, why: why}
	}
	return matched{answer: Chance, chance: p, why: why}
}

// socket matches what a socket of this host would receive: one that has the connection. Of a new connection
// that is one which listens at exactly its destination: those that listen on
// every address don't count without --nowildcard (xt_socket.c).
func socket(w *walker, p *Packet, e *extension) matched {
	switch {
	case p.Reply:
		return is(p.Holder.Found && (p.Holder.Transparent || !e.has("--transparent")), false, "no socket that this looks for has the connection")
	case p.State != New && p.State != Invalid && p.State != Untracked:
		return maybe("whether a socket has this connection isn't known")
	case e.has("--nowildcard"):
		return maybe("which sockets this host has isn't known")
	}
	found, err := w.tables.host.Listens(p.Protocol, p.Dst)
	if err != nil {
		return maybe("%v", err)
	}
	bound := found.Found && !found.Wildcard
	if bound && e.has("--transparent") {
		return is(found.Transparent, false, "the socket at %s isn't transparent", p.Dst)
	}
	return is(bound, false, "no socket is bound to %s", p.Dst)
}

// owner is for what sockets of this host send; nothing else has an owner.
func owner(_ *walker, p *Packet, e *extension) matched {
	switch {
	case p.In != "":
		return e.nothing("it isn't sent by this host")
	case p.Unnamed && !e.has("--socket-exists"):
		return e.nothing("it is followed for a sender that no rule names")
	}
	return maybe("who sends it isn't known (-m owner)")
}

// physdev looks at ports of bridges. Where bridged packets don't pass netfilter,
// packets have none (physdev_mt in net/netfilter/xt_physdev.c).
func physdev(w *walker, _ *Packet, e *extension) matched {
	if w.tables.bridged != No {
		return maybe("it depends on the bridge's port (-m physdev)")
	}
	return e.nothing("bridged packets don't pass netfilter")
}

// nothing is a match of which no option holds.
func (e *extension) nothing(why string) matched {
	for _, o := range e.options {
		if !o.not {
			return matched{answer: No, why: why}
		}
	}
	return matched{answer: Yes}
}

// passive are the targets that change nothing a walk looks at; the packet goes on
// with the next rule.
var passive = words("LOG NFLOG ULOG TRACE AUDIT CLASSIFY CHECKSUM SECMARK CONNSECMARK IDLETIMER LED RATEEST TEE ECN log nflog")

// undecided are the targets that may do anything.
var undecided = words("NFQUEUE QUEUE SYNPROXY HMARK")

// changing are the targets that change the packet alone.
var changing = map[string]func(*extension, *Packet) bool{
	"MARK": (*extension).setMark, "CONNMARK": (*extension).setConnMark, "TTL": (*extension).setTTL, "HL": (*extension).setTTL, "DSCP": (*extension).setTOS,
	"TOS": (*extension).setTOS, "TCPMSS": (*extension).setMSS, "TCPOPTSTRIP": (*extension).stripOptions,
}

var verdicts = map[string]Verdict{"ACCEPT": Accept, "DROP": Drop, "REJECT": Reject, "RETURN": returns}

// action returns what a target does, or leads to. Adding to sets changes nothing for this packet,
// whatever later rules ask; mapping may.
func (e *extension) action(leave bool) action {
	out := action{text: e.name, what: "the target " + e.name}
	for _, o := range e.options {
		out.text += " " + strings.Join(append([]string{o.name}, o.args...), " ")
	}
	switch {
	case leave:
		return action{text: "go to " + e.name, chain: e.name, leave: true}
	case verdicts[e.name] != "":
		return action{text: strings.ToLower(e.name), verdict: verdicts[e.name]}
	case e.name == "CT" && e.zone() != (Zone{}):
		out.change = untouched(func(p *Packet) { p.Zone = e.zone() })
	case passive[e.name], e.name == "CT" && !e.has("--notrack"), e.name == "SET" && !e.has("--map-set"):
		out.quiet = true
	case changing[e.name] != nil:
		out.change = modify(func(p *Packet) bool { return changing[e.name](e, p) })
	case e.name == "TPROXY":
		out.change = e.tproxy
	case e.name == "CT", e.name == "NOTRACK":
		out.change = untouched(func(p *Packet) { p.State = Untracked })
	case e.name == "DNAT", e.name == "SNAT", e.name == "REDIRECT", e.name == "MASQUERADE":
		out.change = func(w *walker, x way, at position) (result, bool) {
			to, ok := e.addressRange()
			if !ok {
				return result{}, false
			}
			return w.translate(strings.ToLower(e.name), x, to, at), true
		}
	case e.name == "NETMAP":
		out.change = func(w *walker, x way, at position) (result, bool) {
			network, err := netip.ParsePrefix(e.arg("--to"))
			kind := "dnat"
			if w.hook == Postrouting || w.hook == Input {
				kind = "snat"
			}
			return w.translate(kind, x, addressRange{netmap: network}, at), err == nil
		}
	case !undecided[e.name] && e.name != "SET":
		return action{text: "jump to " + e.name, chain: e.name}
	}
	return out
}

// untouched changes packets that conntrack hasn't seen: it keeps what it knows of those that come in by the loopback (xt_ct_target
// in net/netfilter/xt_CT.c).
func untouched(f func(*Packet)) func(*walker, way, position) (result, bool) {
	return func(w *walker, x way, _ position) (result, bool) {
		if !w.hasEntry(&x.packet) {
			f(&x.packet)
		}
		return stays(x), true
	}
}

// zone is that of a target CT; zero where it names none, or the packet's mark.
func (e *extension) zone() Zone {
	for option, way := range map[string]string{"--zone": "", "--zone-orig": "original", "--zone-reply": "reply"} {
		if n, err := strconv.ParseUint(e.arg(option), 0, 16); err == nil && n > 0 {
			return Zone{uint16(n), way}
		}
	}
	return Zone{}
}

// addressRange returns what a target of the table nat leads to. MASQUERADE may choose ports, which
// nothing looks at.
func (e *extension) addressRange() (addressRange, bool) {
	if ports := e.arg("--to-ports"); ports != "" && e.name == "REDIRECT" {
		return parseRange(":" + ports)
	}
	return parseRange(e.arg("--to-destination") + e.arg("--to-source"))
}

// setMark is MARK (mark_tg in net/netfilter/xt_mark.c).
func (e *extension) setMark(p *Packet) bool {
	value, mask, ok := masked(e.arg("--set-xmark"))
	p.Mark = p.Mark&^mask ^ value
	return ok
}

// setConnMark is CONNMARK (connmark_tg_shift in net/netfilter/xt_connmark.c).
func (e *extension) setConnMark(p *Packet) bool {
	if o, ok := e.find("--set-xmark"); ok {
		value, mask, ok := masked(o.arg(0))
		p.ConnMark = p.ConnMark&^mask ^ value
		return ok
	}
	nf, ct := uint32(0xffffffff), uint32(0xffffffff)
	for _, o := range e.options {
		mask, _, ok := masked(o.arg(0))
		if ok && (o.name == "--nfmask" || o.name == "--mask") {
			nf = mask
		}
		if ok && (o.name == "--ctmask" || o.name == "--mask") {
			ct = mask
		}
	}
	switch {
	case e.has("--save-mark"):
		p.ConnMark = p.ConnMark&^ct ^ p.Mark&nf
	case e.has("--restore-mark"):
		p.Mark = p.Mark&^nf ^ p.ConnMark&ct
	default:
		return false
	}
	return true
}

// tproxy delivers to a socket of this host, and goes no further in the table.
func (e *extension) tproxy(_ *walker, x way, at position) (result, bool) {
	p := &x.packet
	if o, ok := e.find("--tproxy-mark"); ok {
		value, mask, ok := masked(o.arg(0))
		if !ok {
			return result{}, false
		}
		p.Mark = p.Mark&^mask ^ value
	}
	a, port := p.Dst.Addr(), p.Dst.Port()
	if o, ok := e.find("--on-port"); ok {
		n, err := strconv.ParseUint(o.arg(0), 10, 16)
		if err != nil {
			return result{}, false
		}
		port = uint16(n)
	}
	if given, err := netip.ParseAddr(e.arg("--on-ip")); err == nil && !given.IsUnspecified() {
		a = given
	}
	p.Socket = netip.AddrPortFrom(a, port)
	x.by = at.step
	return result{pass: []way{x}}, true
}
