package netfilter

import (
	"bytes"
	"fmt"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel/netlink"
)

// registers holds the registers of nftables' machine, and which of their bits are known.
type registers struct{ value, known [registerBytes]byte }

const registerBytes = 64

// set loads a value. The kernel clears the rest of its last register.
func (r *registers) set(at int, value, known []byte) {
	for i := at; i < min(len(r.value), at+(len(value)+3)&^3); i++ {
		r.value[i], r.known[i] = 0, 0xff
	}
	copy(r.value[at:], value)
	copy(r.known[at:], known)
}

func (r *registers) get(at, n int) (value, known []byte) {
	at, n = min(at, len(r.value)), max(n, 0)
	return r.value[at:min(at+n, len(r.value))], r.known[at:min(at+n, len(r.value))]
}

// nftState is a packet in the middle of a rule.
type nftState struct {
	way
	registers
}

// effect describes what an instruction does: where matched says Yes the rule goes on, No ends it,
// and with Maybe it may be either.
type effect struct {
	matched
	forks []nftState // by chance, instead of the state
	ends  *result    // a verdict
}

// instruction is an expression of a rule (enum nft_*_attributes in linux/netfilter/nf_tables.h).
type instruction func(w *walker, s *nftState, at position) effect

var goOn = effect{matched: matched{answer: Yes}}

func breaks(format string, args ...any) effect {
	return effect{matched: matched{answer: No, why: fmt.Sprintf(format, args...)}}
}

func may(format string, args ...any) effect { return effect{matched: maybe(format, args...)} }

// unknown ends a packet's way: what becomes of it can't be told.
func unknown(w *walker, s *nftState, what string) effect {
	return effect{matched: goOn.matched, ends: &result{ended: w.giveUp([]way{s.way}, "what "+what+" does isn't known to this program")}}
}

// nftVerdict is a verdict, of a rule or of an element.
type nftVerdict struct {
	code  int32
	chain string
}

func (v nftVerdict) String() string {
	return strings.TrimSpace(map[int32]string{0: "drop", 1: "accept", unix.NFT_JUMP: "jump", unix.NFT_GOTO: "goto", unix.NFT_RETURN: "return", unix.NFT_CONTINUE: "continue"}[v.code] + " " + v.chain)
}

func (v nftVerdict) stops() bool {
	return v.code != 1 && v.code != unix.NFT_RETURN && v.code != unix.NFT_CONTINUE
}

func (v nftVerdict) apply(w *walker, s *nftState, at position) effect {
	a := action{}
	switch v.code {
	case 0:
		a.verdict = Drop
	case 1:
		a.verdict = Accept
	case unix.NFT_RETURN:
		a.verdict = returns
	case unix.NFT_JUMP, unix.NFT_GOTO:
		a.chain, a.leave = v.chain, v.code == unix.NFT_GOTO
	case unix.NFT_CONTINUE:
		return goOn
	default:
		return unknown(w, s, fmt.Sprintf("the verdict %d", v.code))
	}
	r := a.apply(w, at, []way{s.way})
	return effect{matched: goOn.matched, ends: &r}
}

// runNFT runs a rule of nftables for the packets of ways, and returns those that go on after it.
func (w *walker) runNFT(r *rule, at position, ways []way, out *result) (next []way, seen []matched) {
	for _, x := range ways {
		var res result
		live, missed := []nftState{{way: x}}, []way(nil)
		m, hit, unsure := matched{answer: Yes}, 0.0, false
		for i := 0; i < len(r.program) && len(live) > 0; i++ {
			var on []nftState
			for _, s := range live {
				e := r.program[i](w, &s, at)
				if m.why == "" || e.answer == Maybe && !unsure || e.answer == No && len(live) == 1 && !unsure {
					m.why = e.why
				}
				if e.assumes != "" {
					m.assumes = e.assumes
				}
				if e.answer == Maybe {
					unsure = true
					s.doubt(at.step)
				}
				if e.answer != Yes {
					missed = append(missed, s.way)
				}
				switch {
				case e.answer == No:
				case e.forks != nil:
					on = append(on, e.forks...)
				case e.ends != nil:
					hit += s.hi
					res.add(*e.ends)
					res.stay = append(res.stay, e.ends.stay...)
				default:
					on = append(on, s)
				}
			}
			live = on
		}
		for _, s := range live {
			hit += s.hi
			res.stay = append(res.stay, s.way)
		}
		res.stay = append(res.stay, missed...)
		if !r.ends {
			m.assumes = ""
		}
		switch {
		case unsure:
			m.answer = Maybe
		case hit == 0:
			m.answer = No
		case len(missed) > 0:
			m.answer, m.chance = Chance, hit/x.hi
		}
		seen = append(seen, m)
		if unsure && len(res.leave)+len(res.pass)+len(res.ended) == 0 && sameWays(res.stay, []way{x}) {
			next = append(next, x) // it does nothing either way
			continue
		}
		out.add(res)
		next = append(next, res.stay...)
	}
	return next, seen
}

// nftDecoder reads a rule: what it does, and how it is written.
type nftDecoder struct {
	set   *ruleset
	holds [16]symbol // what registers hold
	words []string
	does  []string
	ends  bool // it has a verdict
	stops bool // it has a verdict that stops packets, or leads to a chain that may
	// The protocol that the rule is limited to, and which word says so: nft writes a field of
	// its header without it.
	protocol, family     string
	protocolAt, familyAt int
}

// symbol is a field in words.
type symbol struct {
	text  string
	kind  kindOfField
	size  int
	mask  []byte // applied to it
	kept  []byte // the mask of bits that are kept where others are set
	xor   []byte // those that are set
	fixed []byte // it is a constant
}

// kindOfField says how values of a field are written.
type kindOfField int

const (
	inBytes kindOfField = iota
	asAddress
	asNumber // in network byte order
	asHostNumber
	asMark
	asName
	asProtocol
	asFamily
	asEther
	asState
	asStatus
	asRouteType
	asFlags
	asTruth
	asDirection
	asInterface
	asPacketType
	asClass // DSCP
	asHardware
)

func decodeRule(set *ruleset, a attributes) *rule {
	d := &nftDecoder{set: set, protocolAt: -1, familyAt: -1}
	r := &rule{}
	var read func([]byte)
	read = func(expressions []byte) {
		for _, e := range netlink.Attributes(expressions) {
			x := attributesOf(e)
			name, data := netlink.Text(x[unix.NFTA_EXPR_NAME]), attributesOf(x[unix.NFTA_EXPR_DATA])
			if name == "counter" {
				packets, size := data.number(unix.NFTA_COUNTER_PACKETS), data.number(unix.NFTA_COUNTER_BYTES)
				r.counter = Counter{&packets, &size}
			} else if plain := ebtables(netlink.Text(data[unix.NFTA_MATCH_NAME]), data[unix.NFTA_MATCH_INFO]); set.bridges() && name == "match" && plain != nil {
				read(plain)
			} else if in := d.decode(name, data); in != nil {
				r.program = append(r.program, in)
			}
		}
	}
	read(a[unix.NFTA_RULE_EXPRESSIONS])
	r.isNFT, r.ends = true, d.ends
	r.text = strings.Join(strings.Fields(strings.Join(slices.DeleteFunc(d.words, func(s string) bool { return s == "" }), " ")), " ")
	if about := a[unix.NFTA_RULE_USERDATA]; len(about) > 2 && about[0] == 0 {
		r.text += fmt.Sprintf(" comment %q", netlink.Text(about[2:]))
	}
	r.action = action{text: strings.Join(d.does, ", ")}
	return r
}

// join joins ">= first" and "<= last" of a field to "first-last", as nft writes them.
func (d *nftDecoder) join(f symbol, op int, text string) bool {
	n := len(d.words) - 1
	first, ok := "", false
	if n >= 0 && op == unix.NFT_CMP_LTE {
		first, ok = strings.CutPrefix(d.words[n], f.String()+" >= ")
	}
	if ok {
		d.words[n] = f.String() + " " + first + "-" + text
	}
	return ok
}

func (d *nftDecoder) say(format string, args ...any) {
	d.words = append(d.words, fmt.Sprintf(format, args...))
}

// act says what the rule does.
func (d *nftDecoder) act(format string, args ...any) {
	d.say(format, args...)
	d.does = append(d.does, fmt.Sprintf(format, args...))
}

// offset returns the byte at which a register begins: 1 to 4 have 16 bytes, those from 8 on have 4.
func offset(register uint64) int {
	if register >= unix.NFT_REG32_00 {
		return int(min(register-unix.NFT_REG32_00, 16)) * 4
	}
	return max(0, int(register)-1) * 16 % registerBytes
}

// length returns how many bytes an expression works on, of those that there are.
func (a attributes) length(typ uint16) int { return int(min(a.number(typ), registerBytes)) }

func (d *nftDecoder) hold(at int, s symbol) {
	if i := at / 4; i < len(d.holds) {
		d.holds[i] = s
	}
}

func (d *nftDecoder) held(at int) symbol {
	if i := at / 4; i < len(d.holds) {
		return d.holds[i]
	}
	return symbol{}
}

// key describes what n bytes of registers hold.
func (d *nftDecoder) key(at, n int) (text string, parts []symbol) {
	var names []string
	for end := at + n; at < end; {
		s := d.held(at)
		parts, names = append(parts, s), append(names, s.String())
		at += max(4, (s.size+3)&^3)
	}
	return strings.Join(names, " . "), parts
}

func (s symbol) String() string {
	switch {
	case s.fixed != nil:
		return s.print(s.fixed)
	case s.mask != nil && s.kind == asAddress:
		return s.text + " & " + s.print(s.mask)
	case s.mask != nil:
		return fmt.Sprintf("%s & 0x%0*x", s.text, 2*len(s.mask), hostNumber(s.mask))
	}
	return s.text
}

// decode reads an expression; nil for one that does nothing to a packet.
func (d *nftDecoder) decode(name string, a attributes) instruction {
	dreg, sreg := offset(a.number(1)), offset(a.number(1)) // of most expressions
	switch name {
	case "payload":
		return d.payload(a)
	case "meta":
		if a.has(unix.NFTA_META_SREG) {
			return d.setMeta(a)
		}
		key := a.number(unix.NFTA_META_KEY)
		return d.load(dreg, metaFields[key], metaName(key), "field of meta")
	case "ct":
		if a.has(unix.NFTA_CT_SREG) {
			return d.setConntrack(a)
		}
		return d.load(dreg, conntrackField(a, d.set.family), conntrackName(a.number(unix.NFTA_CT_KEY)), "field of conntrack")
	case "fib":
		const result, flags = 2, 3 // enum nft_fib_attributes
		return d.load(dreg, fibField(a.number(result), a.number(flags)), "", "field of routing")
	case "socket":
		const key, dreg = 1, 2 // enum nft_socket_attributes
		return d.load(offset(a.number(dreg)), socketFields[a.number(key)], "", "field of sockets")
	case "numgen":
		return d.numgen(dreg, a)
	case "hash":
		return d.hash(a)
	case "immediate":
		if a.number(unix.NFTA_IMMEDIATE_DREG) == unix.NFT_REG_VERDICT {
			v := a.verdict(unix.NFTA_IMMEDIATE_DATA)
			d.ends, d.stops = true, d.stops || v.stops()
			d.act("%s", v)
			return v.apply
		}
		v := bytes.Clone(a.data(unix.NFTA_IMMEDIATE_DATA))
		d.hold(dreg, symbol{size: len(v), fixed: v, kind: asHostNumber})
		return func(_ *walker, s *nftState, _ position) effect {
			s.set(dreg, v, ones(len(v)))
			return goOn
		}
	case "cmp":
		return d.compare(sreg, int(a.number(unix.NFTA_CMP_OP)), bytes.Clone(a.data(unix.NFTA_CMP_DATA)))
	case "range":
		return d.between(sreg, a)
	case "bitwise":
		return d.bitwise(a)
	case "byteorder":
		size := a.length(unix.NFTA_BYTEORDER_SIZE)
		n, from, to := a.length(unix.NFTA_BYTEORDER_LEN), offset(a.number(unix.NFTA_BYTEORDER_SREG)), offset(a.number(unix.NFTA_BYTEORDER_DREG))
		f := d.held(from)
		if f.kind == asHostNumber || f.kind == asMark {
			f.kind = asNumber
		}
		d.hold(to, f)
		return func(_ *walker, s *nftState, _ position) effect {
			v, k := s.get(from, n)
			v, k = bytes.Clone(v), bytes.Clone(k)
			for i := 0; size > 0 && i+size <= len(v); i += size {
				slices.Reverse(v[i : i+size])
				slices.Reverse(k[i : i+size])
			}
			s.set(to, v, k)
			return goOn
		}
	case "lookup":
		return d.lookup(a)
	case "dynset":
		return d.dynset(a)
	case "nat", "masq", "redir":
		return d.nat(name, a)
	case "tproxy":
		return d.tproxy(a)
	case "notrack":
		d.act("notrack")
		return func(w *walker, s *nftState, _ position) effect {
			if w.base.bridges() { // conntrack sees packets there only if a rule there asks for it
				return unknown(w, s, "the statement notrack")
			}
			if !w.hasEntry(&s.packet) {
				s.packet.State = Untracked
			}
			return goOn
		}
	case "reject":
		d.ends, d.stops = true, true
		d.act("reject%s", rejectText(a, d.set.family))
		return func(w *walker, s *nftState, at position) effect {
			r := (&action{verdict: Reject}).apply(w, at, []way{s.way})
			return effect{matched: goOn.matched, ends: &r}
		}
	case "log":
		d.act("%s", logText(a))
		return nil
	case "objref":
		return d.object(a)
	case "dup", "flow_offload", "last":
		d.act("%s", name)
		return nil
	case "limit", "quota", "connlimit":
		text, holds := limited(name, a)
		d.say("%s", text)
		return d.counts(holds)
	case "match":
		m := netlink.Text(a[unix.NFTA_MATCH_NAME])
		if m == "comment" {
			return nil
		}
		d.say("-m %s", m)
		return func(*walker, *nftState, position) effect {
			return may("it has the match %s of iptables, which can't be read", m)
		}
	case "target":
		target := netlink.Text(a[unix.NFTA_TARGET_NAME])
		d.act("-j %s", target)
		if passive[target] {
			return nil
		}
		return func(w *walker, s *nftState, _ position) effect { return unknown(w, s, "the target "+target) }
	case "exthdr":
		return d.option(a)
	case "rt", "osf", "xfrm", "tunnel":
		return d.load(dreg, nil, map[string]string{"rt": "rt mtu"}[name], name)
	}
	text := name
	if name == "queue" {
		text = queueText(a)
	}
	d.ends, d.stops = true, true
	d.act("%s", text)
	return func(w *walker, s *nftState, _ position) effect { return unknown(w, s, "the statement "+text) }
}
