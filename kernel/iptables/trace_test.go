package iptables_test

import (
	"fmt"
	"maps"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/kernel/iptables"
	"kproxy.dev/kproxy/kernel/kerneltest"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// tracer follows the first packet of a connection through rendered rules.
type tracer struct {
	t      *testing.T
	chains map[string][]string // "table name"
	sets   map[string][]string
	family service.Family
}

// packet is what rules look at.
type packet struct {
	src, dst           netip.Addr
	srcLocal, dstLocal bool
	proto              service.Protocol
	port               uint16
	mark               uint32
	rewritten          bool
}

// fate is one thing that may become of a packet.
type fate struct {
	To     string // endpoint, "userspace", or a target that ends the matter
	Masked bool   // its source is replaced
}

func newTracer(t *testing.T, r kernel.Ruleset, portal []kernel.Set, f service.Family) *tracer {
	tr := &tracer{t: t, chains: map[string][]string{}, sets: map[string][]string{}, family: f}
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
	return tr
}

// connect returns everything that may become of a new connection.
func (tr *tracer) connect(p packet) []fate {
	first := "PREROUTING"
	if p.srcLocal {
		first = "OUTPUT"
	}
	out := map[fate]bool{}
	for _, end := range tr.walk("mangle", first, p) {
		if end.verdict == "DROP" {
			return []fate{{To: "DROP"}}
		}
	}
	for _, end := range tr.walk("nat", first, p) {
		for _, f := range tr.finish(first, end) {
			out[f] = true
		}
	}
	return slices.SortedFunc(maps.Keys(out), func(a, b fate) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
}

// finish follows a packet that has left the nat table's first hook.
func (tr *tracer) finish(first string, e end) []fate {
	if strings.HasPrefix(e.verdict, "REDIRECT") {
		return []fate{{To: "userspace"}}
	}
	hook := "FORWARD"
	if first == "OUTPUT" {
		hook = "OUTPUT"
	}
	for _, f := range tr.walk("filter", hook, e.packet) {
		if f.verdict == "DROP" || f.verdict == "REJECT" {
			return []fate{{To: f.verdict}}
		}
	}
	if !e.packet.rewritten {
		return []fate{{To: "none"}}
	}
	masked := false
	for _, f := range tr.walk("nat", "POSTROUTING", e.packet) {
		masked = masked || f.verdict == "MASQUERADE"
	}
	return []fate{{To: netip.AddrPortFrom(e.packet.dst, e.packet.port).String(), Masked: masked}}
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
	case "ACCEPT", "DROP", "REJECT", "REDIRECT", "MASQUERADE":
		return nil, []end{{p, target}}
	case "DNAT":
		to := netip.MustParseAddrPort(arg)
		p.dst, p.port, p.rewritten = to.Addr(), to.Port(), true
		return nil, []end{{p, target}}
	case "MARK":
		value, mask, _ := strings.Cut(arg, "/")
		p.mark = p.mark&^number(tr.t, mask) ^ number(tr.t, value)
		return []packet{p}, nil
	case "SET", "CONNMARK":
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
			holds = p.mark&number(tr.t, mask) == number(tr.t, value)
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
		case "--transparent", "--connbytes":
			holds = false
		case "-m":
			if next() == "connmark" { // its --mark isn't the packet's
				return false, false, "", ""
			}
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
	if strings.HasPrefix(name, kernel.SetAlive) {
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

// TestRulesDoWhatThePlanSays follows connections of every kind of client to
// every frontend of random plans, and compares with what the plan says itself.
func TestRulesDoWhatThePlanSays(t *testing.T) {
	for seed := range uint64(40) {
		w := kerneltest.NewWalk(seed, plan.ModeIPTables, plan.IPTables, 12)
		w.Next()
		p := w.Next()
		rules, portal := iptables.Render(p, options()), kernel.Portal(p)
		for _, f := range service.Families {
			tr := newTracer(t, rules, portal, f)
			for _, s := range p.Services {
				for i := range s.Frontends {
					if s.Frontends[i].Family == f {
						compareFrontend(t, tr, p, s, &s.Frontends[i])
					}
				}
			}
		}
	}
}

func compareFrontend(t *testing.T, tr *tracer, p *plan.Plan, s *plan.Service, f *plan.Frontend) {
	t.Helper()
	six := f.Family == service.IPv6
	pick := func(v4, v6 string) netip.Addr {
		if six {
			v4 = v6
		}
		return netip.MustParseAddr(v4)
	}
	node := pick("10.0.0.1", "fd00::1")
	clients := map[string]plan.Client{
		"outsider": {Address: pick("203.0.113.9", "2001:db8:9::9")},
		"in range": {Address: pick("198.51.100.7", "2001:db8:1::7")},
		"pod":      {Address: pick("10.244.200.200", "fd00:244::ffff:1")},
		"node":     {Address: node, Node: true},
	}
	if g := s.Groups[f.Family].Cluster; len(g) > 0 {
		clients["endpoint"] = plan.Client{Address: g[0].Address.Addr()}
	}
	for who, c := range clients {
		pkt := packet{src: c.Address, srcLocal: c.Node, dst: f.Address.Addr(), proto: f.Protocol, port: f.Address.Port()}
		if f.Kind == plan.NodePort {
			pkt.dst, pkt.dstLocal = node, true
		}
		if diff := cmp.Diff(wanted(p, s, f, c), tr.connect(pkt)); diff != "" {
			t.Errorf("%s to %s %s %v of %s, %s, %+v (-plan +rules):\n%s", who, f.Kind, f.Protocol, f.Address, s.Port.Key, s.DataPlane, f, diff)
		}
	}
}

// wanted is what the plan says about a connection.
func wanted(p *plan.Plan, s *plan.Service, f *plan.Frontend, c plan.Client) []fate {
	verdict := s.VerdictFor(f, c, p.Policy.PodCIDRs)
	if f.Kind == plan.NodePort && f.Protocol != service.SCTP {
		// Node ports' sets have no family: what one family does, both do.
		for i := range s.Frontends {
			o := &s.Frontends[i]
			switch {
			case o.Kind != plan.NodePort:
			case s.DataPlane == plan.Userspace && o.Verdict == plan.Forward:
				return []fate{{To: "userspace"}}
			case o.Verdict == plan.Drop && verdict == plan.Reject:
				verdict = plan.Drop
			}
		}
	}
	switch {
	case f.Kind == plan.NodePort && f.Protocol == service.SCTP && verdict != plan.Forward:
		return []fate{{To: "none"}} // no bitmap for SCTP; nobody listens
	case verdict == plan.Drop:
		return []fate{{To: "DROP"}}
	case verdict == plan.Reject:
		return []fate{{To: "REJECT"}}
	case s.DataPlane == plan.Userspace && f.Verdict == plan.Forward && f.Protocol != service.SCTP:
		return []fate{{To: "userspace"}}
	}
	seen := map[fate]bool{}
	for _, b := range s.Backends(f, c, p.Policy.PodCIDRs) {
		if b.Weight > 0 {
			seen[fate{b.Address.String(), f.Masquerades(c, b.Address.Addr(), &p.Policy)}] = true
		}
	}
	return slices.SortedFunc(maps.Keys(seen), func(a, b fate) int { return strings.Compare(fmt.Sprint(a), fmt.Sprint(b)) })
}
