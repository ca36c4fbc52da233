package kerneltest

import (
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// tracer follows the first packet of a connection through a ruleset: rules, sets
// and virtual servers. Everything that is wanted is in the kernel, and kproxy
// is alive.
type tracer struct {
	t      *testing.T
	rules  *kernel.Ruleset
	chains map[string][]string // "table name"
	sets   map[string][]string
}

// packet is what rules look at.
type packet struct {
	in                 string // the interface it comes in on, if not loopback
	src, dst           netip.Addr
	srcLocal, dstLocal bool
	proto              service.Protocol
	port               uint16
	mark, connmark     uint32
	rewritten          bool // by iptables, which conntrack calls DNAT
}

// Fate is one thing that may become of a packet.
type Fate struct {
	To     string // endpoint, "userspace", or a target that ends the matter
	Masked bool   // its source is replaced
}

func newTracer(t *testing.T, r kernel.Ruleset, portal []kernel.Set, f service.Family) *tracer {
	tr := &tracer{t: t, rules: &r, chains: map[string][]string{}, sets: map[string][]string{}}
	for _, c := range r.Chains[f] {
		tr.chains[c.Table+" "+c.Name] = c.Rules
	}
	for _, j := range r.Jumps[f] {
		tr.chains[j.Table+" "+j.From] = append(tr.chains[j.Table+" "+j.From], j.Rule)
	}
	for _, sets := range [][]kernel.Set{r.Sets, portal} {
		for _, s := range sets {
			tr.sets[s.Name] = append(tr.sets[s.Name], s.Entries...)
		}
	}
	for _, v := range r.Virtuals { // the backend records what it makes
		name := kernel.FamilySet(kernel.SetVirtual, service.FamilyOf(v.Address.Addr()))
		tr.sets[name] = append(tr.sets[name], kernel.AddressEntry(v.Protocol, v.Address))
	}
	for _, a := range r.Addresses {
		name := kernel.FamilySet(kernel.SetVIP, service.FamilyOf(a))
		tr.sets[name] = append(tr.sets[name], a.String())
	}
	return tr
}

// connect returns everything that may become of a new connection.
func (tr *tracer) connect(p packet) []Fate {
	if _, onLink := slices.BinarySearchFunc(tr.rules.Addresses, p.dst, netip.Addr.Compare); onLink {
		p.dstLocal = true
	}
	first := "PREROUTING"
	if p.srcLocal {
		first = "OUTPUT"
	}
	out := map[Fate]bool{}
	for _, end := range tr.walk("mangle", first, p) {
		if end.verdict == "DROP" {
			return []Fate{{To: "DROP"}}
		}
	}
	for _, end := range tr.walk("nat", first, p) {
		for _, f := range tr.finish(end) {
			out[f] = true
		}
	}
	return sortedFates(out)
}

// finish follows a packet that has left the nat table's first hook.
func (tr *tracer) finish(e end) []Fate {
	p := e.packet
	switch {
	case slices.Contains(kernel.ListenerAddress[:], p.dst):
		return []Fate{{To: "userspace"}}
	case p.rewritten && p.srcLocal:
		return tr.leave(p, "OUTPUT")
	case p.rewritten:
		return tr.leave(p, "FORWARD")
	case p.srcLocal:
		if fates := tr.schedule(p); fates != nil {
			return fates
		}
		if f := tr.refused(p, "OUTPUT"); f != nil || !p.dstLocal {
			return append(f, none[len(f):]...)
		}
		f := tr.refused(p, "INPUT")
		return append(f, none[len(f):]...)
	case p.dstLocal:
		if f := tr.refused(p, "INPUT"); f != nil {
			return f
		}
		if fates := tr.schedule(p); fates != nil {
			return fates
		}
	default:
		if f := tr.refused(p, "FORWARD"); f != nil {
			return f
		}
	}
	return none
}

// none: nobody of kproxy's takes it.
var none = []Fate{{To: "none"}}

// schedule is IPVS: what its virtual server at the packet's destination does with
// it; nil where there is none.
func (tr *tracer) schedule(p packet) []Fate {
	v, ok := tr.rules.Virtual(p.proto, netip.AddrPortFrom(p.dst, p.port))
	if !ok {
		return nil
	}
	out := map[Fate]bool{}
	for _, r := range v.Reals {
		if r.Weight == 0 {
			continue
		}
		to := p
		to.dst, to.port, to.dstLocal = r.Address.Addr(), r.Address.Port(), false
		for _, f := range tr.leave(to, "OUTPUT") {
			out[f] = true
		}
	}
	if len(out) == 0 {
		return []Fate{{To: "REJECT"}} // ip_vs_leave
	}
	return sortedFates(out)
}

// refused is what the filter table's hook does with a packet that it doesn't let
// through.
func (tr *tracer) refused(p packet, hook string) []Fate {
	for _, f := range tr.walk("filter", hook, p) {
		if f.verdict == "DROP" || f.verdict == "REJECT" {
			return []Fate{{To: f.verdict}}
		}
	}
	return nil
}

// leave follows a packet to an endpoint out of the node.
func (tr *tracer) leave(p packet, hook string) []Fate {
	if f := tr.refused(p, hook); f != nil {
		return f
	}
	masked := false
	for _, f := range tr.walk("nat", "POSTROUTING", p) {
		masked = masked || f.verdict == "MASQUERADE"
	}
	return []Fate{{To: netip.AddrPortFrom(p.dst, p.port).String(), Masked: masked}}
}

// end is where a packet left a chain: with a verdict, or at the end.
type end struct {
	packet  packet
	verdict string // empty: end of the chain, or RETURN
}

// walk returns every way through a chain; rules of chance may match or not.
func (tr *tracer) walk(table, chain string, p packet) []end {
	rules, ok := tr.chains[table+" "+chain]
	if !ok && strings.HasPrefix(chain, kernel.Prefix) {
		tr.t.Fatalf("jump to chain %s %s, which isn't there", table, chain)
	}
	ways := []packet{p}
	var out []end
	for _, rule := range rules {
		var next []packet
		for _, p := range ways {
			match, chance, target, arg := tr.match(rule, p)
			if !match || chance {
				next = append(next, p)
			}
			if !match {
				continue
			}
			stay, left := tr.target(table, rule, target, arg, p)
			next, out = append(next, stay...), append(out, left...)
		}
		ways = next
	}
	for _, p := range ways {
		out = append(out, end{packet: p})
	}
	return out
}

// target says who goes on in the chain, and who leaves it.
func (tr *tracer) target(table, rule, target, arg string, p packet) (stay []packet, left []end) {
	switch target {
	case "RETURN":
		return nil, []end{{packet: p}}
	case "ACCEPT", "DROP", "REJECT", "MASQUERADE":
		return nil, []end{{p, target}}
	case "DNAT":
		to := netip.MustParseAddrPort(arg)
		p.dst, p.port, p.rewritten = to.Addr(), to.Port(), true
		return nil, []end{{p, target}}
	case "MARK", "CONNMARK":
		value, mask, _ := strings.Cut(arg, "/")
		of := &p.mark
		if target == "CONNMARK" {
			of = &p.connmark
		}
		*of = *of&^number(tr.t, mask) ^ number(tr.t, value)
		return []packet{p}, nil
	case "SET":
		return []packet{p}, nil
	}
	for _, e := range tr.walk(table, target, p) {
		switch {
		case e.verdict != "" || strings.Contains(" "+rule, " -g "):
			left = append(left, e)
		default:
			stay = append(stay, e.packet)
		}
	}
	return stay, left
}

func number(t *testing.T, s string) uint32 {
	n, err := strconv.ParseUint(s, 0, 32)
	if err != nil {
		t.Fatal(err)
	}
	return uint32(n)
}

var comments = regexp.MustCompile(`-m comment --comment ("([^"\\]|\\.)*"|\S+)`)

// match reports whether a rule matches, whether that is a matter of chance, and
// its target with the target's argument.
func (tr *tracer) match(rule string, p packet) (match, chance bool, target, arg string) {
	match = true
	words := strings.Fields(comments.ReplaceAllString(rule, ""))
	of := "" // the match that an option belongs to
	for i := 0; i < len(words); i++ {
		not := words[i] == "!"
		if not {
			i++
		}
		next := func() string { i++; return words[i] }
		holds := true
		switch w := words[i]; w {
		case "-d":
			holds = netip.MustParsePrefix(next()).Contains(p.dst)
		case "-s":
			holds = netip.MustParsePrefix(next()).Contains(p.src)
		case "-i":
			name, anyOf := strings.CutSuffix(next(), "+")
			in := p.in
			if p.srcLocal {
				in = "lo"
			}
			holds = in == name || anyOf && strings.HasPrefix(in, name)
		case "-p":
			holds = next() == p.proto.String()
		case "--dport":
			lo, hi, isRange := strings.Cut(next(), ":")
			if !isRange {
				hi = lo
			}
			holds = number(tr.t, lo) <= uint32(p.port) && uint32(p.port) <= number(tr.t, hi)
		case "--match-set":
			set, directions := next(), next()
			if strings.HasPrefix(set, kernel.Prefix+"AFF-") {
				chance = true
			} else {
				holds = tr.inSet(set, directions, p)
			}
		case "--mark":
			value, mask, _ := strings.Cut(next(), "/")
			has := p.mark
			if of == "connmark" {
				has = p.connmark
			}
			holds = has&number(tr.t, mask) == number(tr.t, value)
		case "--dst-type":
			holds = p.dstLocal && !p.rewritten && next() == "LOCAL"
		case "--src-type":
			holds = p.srcLocal && next() == "LOCAL"
		case "--ctstate":
			states := strings.Split(next(), ",")
			holds = slices.Contains(states, "NEW") || slices.Contains(states, "DNAT") && p.rewritten
		case "--ctdir":
			holds = next() == "ORIGINAL"
		case "--mode":
			chance = true
		case "--tcp-flags": // it is a SYN
			next()
			holds = next() == "SYN"
		case "--sport": // not one that kproxy listens on
			next()
			holds = false
		case "--transparent", "--connbytes":
			holds = false
		case "-m":
			of = next()
		case "-j", "-g":
			target = next()
		case "--to-destination", "--set-xmark":
			arg = next()
		}
		match = match && holds != not
	}
	return match, chance, target, arg
}

// inSet looks a packet up as ipset does.
func (tr *tracer) inSet(name, directions string, p packet) bool {
	if strings.HasPrefix(name, kernel.SetAlive) { // and the start is over
		return true
	}
	for _, e := range tr.sets[name] {
		if tr.entryMatches(e, strings.Split(directions, ","), p) {
			return true
		}
	}
	return false
}

func (tr *tracer) entryMatches(entry string, directions []string, p packet) bool {
	for i, part := range strings.Split(entry, ",") {
		a := p.dst
		if directions[i] == "src" {
			a = p.src
		}
		proto, port, named := strings.Cut(part, ":")
		_, isNumber := strconv.Atoi(part)
		switch {
		case isNumber == nil:
			if part != strconv.Itoa(int(p.port)) {
				return false
			}
		case named && !strings.Contains(port, ":") && proto == p.proto.String():
			if port != strconv.Itoa(int(p.port)) {
				return false
			}
		case strings.Contains(part, "/"):
			if !netip.MustParsePrefix(part).Contains(a) {
				return false
			}
		default:
			if part != a.String() {
				return false
			}
		}
	}
	return true
}
