package netfilter

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math/bits"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/lb"
	"kproxy.dev/kproxy/service"
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

// loaded is a field that goes to a register. It has no value where the packet hasn't the field,
// and known bits are none where the value isn't known.
type loaded struct {
	symbol
	value func(w *walker, p *Packet) (value, known []byte, ok bool)
}

// load loads a field. One that isn't known is called by its name, or by what it is.
func (d *nftDecoder) load(at int, f *loaded, name, what string) instruction {
	if f == nil {
		d.hold(at, symbol{text: cmp.Or(name, "a "+what), size: 4, kind: asHostNumber})
		return func(_ *walker, s *nftState, _ position) effect {
			s.set(at, make([]byte, 16), make([]byte, 16))
			return goOn
		}
	}
	d.hold(at, f.symbol)
	return func(w *walker, s *nftState, _ position) effect {
		v, k, ok := f.value(w, &s.packet)
		if !ok {
			return breaks("it has no %s", inWord(f.text))
		}
		s.set(at, v, k)
		return goOn
	}
}

func inWord(text string) string {
	_, field, _ := strings.Cut(text, " ")
	for _, name := range []string{text, field, "meta " + text} {
		if words, ok := inWords[name]; ok {
			return words
		}
	}
	return text
}

func known(v ...byte) (value, mask []byte, ok bool) { return v, ones(len(v)), true }

func ones(n int) []byte { return bytes.Repeat([]byte{0xff}, n) }

func notKnown(n int) (value, mask []byte, ok bool) { return make([]byte, n), make([]byte, n), true }

func native(n uint32) []byte { return binary.NativeEndian.AppendUint32(nil, n) }

// bridgeName is the name of the bridge that one of a packet's interfaces is a port of; of none, empty.
func bridgeName(p *Packet, port string) (value, mask []byte, ok bool) {
	if port != "" {
		port = p.Frame.Bridge
	}
	return deviceName(port)
}

// deviceName and deviceIndex are of an interface; of none, empty and 0.
func deviceName(name string) (value, mask []byte, ok bool) {
	if name == UnknownPort {
		return notKnown(unix.IFNAMSIZ)
	}
	return known(append([]byte(name), make([]byte, max(0, unix.IFNAMSIZ-len(name)))...)...)
}

func deviceIndex(name string) (value, mask []byte, ok bool) {
	if name == "" {
		return known(0, 0, 0, 0)
	}
	link, err := net.InterfaceByName(name)
	if err != nil {
		return notKnown(4)
	}
	return known(native(uint32(link.Index))...)
}

// metaFields are those of meta that can be known (enum nft_meta_keys).
var metaFields = map[uint64]*loaded{
	unix.NFT_META_PROTOCOL: {symbol{text: "meta protocol", kind: asEther, size: 2}, func(_ *walker, p *Packet) (v, k []byte, ok bool) {
		return known(p.etherType()...)
	}},
	unix.NFT_META_PRIORITY: {symbol{text: "meta priority", kind: asHostNumber, size: 4}, func(_ *walker, p *Packet) (v, k []byte, ok bool) {
		if !p.PrioritySet {
			return notKnown(4)
		}
		return known(native(p.Priority)...)
	}},
	unix.NFT_META_MARK:    {symbol{text: "meta mark", kind: asMark, size: 4}, func(_ *walker, p *Packet) (v, k []byte, ok bool) { return known(native(p.Mark)...) }},
	unix.NFT_META_IIF:     {symbol{text: "iif", kind: asInterface, size: 4}, func(_ *walker, p *Packet) (v, k []byte, ok bool) { return deviceIndex(p.In) }},
	unix.NFT_META_OIF:     {symbol{text: "oif", kind: asInterface, size: 4}, func(_ *walker, p *Packet) (v, k []byte, ok bool) { return deviceIndex(p.Out) }},
	unix.NFT_META_IIFNAME: {symbol{text: "iifname", kind: asName, size: unix.IFNAMSIZ}, func(_ *walker, p *Packet) (v, k []byte, ok bool) { return deviceName(p.In) }},
	unix.NFT_META_OIFNAME: {symbol{text: "oifname", kind: asName, size: unix.IFNAMSIZ}, func(_ *walker, p *Packet) (v, k []byte, ok bool) { return deviceName(p.Out) }},
	unix.NFT_META_NFPROTO: {symbol{text: "meta nfproto", kind: asFamily, size: 1}, func(w *walker, p *Packet) (v, k []byte, ok bool) {
		if w.base.bridges() {
			return known(unix.NFPROTO_BRIDGE)
		}
		return known(map[service.Family]byte{service.IPv4: unix.NFPROTO_IPV4, service.IPv6: unix.NFPROTO_IPV6}[p.Family()])
	}},
	unix.NFT_META_L4PROTO: {symbol{text: "meta l4proto", kind: asProtocol, size: 1}, func(_ *walker, p *Packet) (v, k []byte, ok bool) { return known(byte(p.Protocol)) }},
	unix.NFT_META_PKTTYPE: {symbol{text: "meta pkttype", kind: asPacketType, size: 1}, func(w *walker, p *Packet) (v, k []byte, ok bool) {
		if packetType(w, p).kind == isUnknown || p.Frame.Bridge != "" && p.Frame.Dst == "" { // which may be another host's
			return notKnown(1)
		}
		return known(unix.PACKET_HOST)
	}},
	unix.NFT_META_LEN: {symbol{text: "meta length", kind: asHostNumber, size: 4}, func(w *walker, p *Packet) (v, k []byte, ok bool) {
		if n := p.length(); n > 0 && w.base.Hook != Egress { // where the link's header is there
			return known(native(uint32(n))...)
		}
		return notKnown(4)
	}},
	unix.NFT_META_BRI_IIFNAME: {symbol{text: "meta ibrname", kind: asName, size: unix.IFNAMSIZ}, func(_ *walker, p *Packet) (v, k []byte, ok bool) {
		return bridgeName(p, p.In)
	}},
	unix.NFT_META_BRI_OIFNAME: {symbol{text: "meta obrname", kind: asName, size: unix.IFNAMSIZ}, func(_ *walker, p *Packet) (v, k []byte, ok bool) {
		return bridgeName(p, p.Out)
	}},
	unix.NFT_META_SKUID: {symbol{text: "meta skuid", kind: asHostNumber, size: 4}, ofSender},
	unix.NFT_META_SKGID: {symbol{text: "meta skgid", kind: asHostNumber, size: 4}, ofSender},
}

// ofSender is of who sends a packet, which only packets of this host have.
func ofSender(_ *walker, p *Packet) (v, k []byte, ok bool) {
	if p.Unnamed && p.In == "" {
		return known(255, 255, 255, 255) // no user or group has it (INVALID_UID)
	}
	v, k, _ = notKnown(4)
	return v, k, p.In == ""
}

// Bits of a connection's state and status (linux/netfilter/nf_conntrack_common.h).
var (
	stateBits  = map[string]uint32{"invalid": 1, "established": 2, "related": 4, "new": 8, "untracked": 64}
	statusBits = map[string]uint32{"expected": 1, "seen-reply": 2, "assured": 4, "confirmed": 8, "snat": 16, "dnat": 32, "dying": 512}
)

// conntrackField is a field of ct; nil if it isn't known.
func conntrackField(a attributes, f service.Family) *loaded {
	key := a.number(unix.NFTA_CT_KEY)
	direction, has := "", a.has(unix.NFTA_CT_DIRECTION)
	if has {
		direction = [2]string{"original ", "reply "}[a.number(unix.NFTA_CT_DIRECTION)&1]
	}
	field := func(text string, kind kindOfField, size int, value func(w *walker, p *Packet) (v, k []byte, ok bool)) *loaded {
		return &loaded{symbol{text: "ct " + direction + text, kind: kind, size: size}, func(w *walker, p *Packet) (v, k []byte, ok bool) {
			if key != unix.NFT_CT_STATE && !w.hasEntry(p) {
				return nil, nil, false
			}
			return value(w, p)
		}}
	}
	// The addresses of a direction. The reply's destination is the source as it will be.
	end := func(p *Packet, source bool) netip.AddrPort {
		switch {
		case direction == "original " && source:
			return p.OrigSrc
		case direction == "original ":
			return p.OrigDst
		case source:
			return replySource(p)
		}
		return netip.AddrPort{}
	}
	size := f.Bits() / 8
	word := nftFamily[f]
	switch key {
	case unix.NFT_CT_STATE:
		return field("state", asState, 4, func(w *walker, p *Packet) (v, k []byte, ok bool) {
			return known(native(stateBits[strings.ToLower(w.states(p)[0])])...)
		})
	case unix.NFT_CT_DIRECTION:
		return field("direction", asDirection, 1, func(_ *walker, p *Packet) (v, k []byte, ok bool) {
			return known(map[bool]byte{true: 1}[p.Reply])
		})
	case unix.NFT_CT_STATUS:
		return field("status", asStatus, 4, func(_ *walker, p *Packet) (v, k []byte, ok bool) {
			bits, sure := uint32(0), statusBits["dnat"]|statusBits["snat"]
			if p.DNAT {
				bits |= statusBits["dnat"]
			}
			if p.SNAT {
				bits |= statusBits["snat"]
			}
			if p.looped() {
				bits |= statusBits["confirmed"]
			}
			if p.State == New { // nothing has answered it
				sure |= statusBits["seen-reply"] | statusBits["assured"] | statusBits["confirmed"]
			}
			return native(bits), native(sure), true
		})
	case unix.NFT_CT_MARK:
		return field("mark", asMark, 4, func(_ *walker, p *Packet) (v, k []byte, ok bool) { return known(native(p.ConnMark)...) })
	case unix.NFT_CT_PROTOCOL:
		return field("protocol", asProtocol, 1, func(_ *walker, p *Packet) (v, k []byte, ok bool) { return known(byte(p.Protocol)) })
	case unix.NFT_CT_SRC, unix.NFT_CT_SRC_IP, unix.NFT_CT_SRC_IP6:
		return field(word+" saddr", asAddress, size, func(_ *walker, p *Packet) (v, k []byte, ok bool) { return addressBytes(end(p, true).Addr(), size) })
	case unix.NFT_CT_DST, unix.NFT_CT_DST_IP, unix.NFT_CT_DST_IP6:
		return field(word+" daddr", asAddress, size, func(_ *walker, p *Packet) (v, k []byte, ok bool) { return addressBytes(end(p, false).Addr(), size) })
	case unix.NFT_CT_PROTO_SRC:
		return field("proto-src", asNumber, 2, func(_ *walker, p *Packet) (v, k []byte, ok bool) { return portBytes(end(p, true).Port()) })
	case unix.NFT_CT_PROTO_DST:
		return field("proto-dst", asNumber, 2, func(_ *walker, p *Packet) (v, k []byte, ok bool) { return portBytes(end(p, false).Port()) })
	case unix.NFT_CT_PKTS:
		return field("packets", asHostNumber, 8, func(_ *walker, p *Packet) (v, k []byte, ok bool) { return notKnown(8) })
	}
	return nil
}

func addressBytes(a netip.Addr, size int) (value, mask []byte, ok bool) {
	if v := a.AsSlice(); len(v) == size {
		return known(v...)
	}
	return notKnown(size)
}

// portBytes is a port; 0 is one that the caller doesn't know.
func portBytes(n uint16) (value, mask []byte, ok bool) {
	if n == 0 {
		return notKnown(2)
	}
	return known(byte(n>>8), byte(n))
}

// routeTypes are types of routes (linux/rtnetlink.h).
var routeTypes = map[string]uint32{
	"unicast": unix.RTN_UNICAST, "local": unix.RTN_LOCAL, "broadcast": unix.RTN_BROADCAST, "anycast": unix.RTN_ANYCAST, "multicast": unix.RTN_MULTICAST,
	"blackhole": unix.RTN_BLACKHOLE, "unreachable": unix.RTN_UNREACHABLE, "prohibit": unix.RTN_PROHIBIT,
}

// fibField returns what a look-up of a route loads (net/ipv4/netfilter/nft_fib_ipv4.c); nil if it isn't known.
func fibField(result, flags uint64) *loaded {
	const saddr, mark, iif, present = unix.NFTA_FIB_F_SADDR, 4, 8, 32 // enum nft_fib_flags
	side := "daddr"
	if flags&saddr != 0 {
		side = "saddr"
	}
	if result == unix.NFT_FIB_RESULT_ADDRTYPE && flags&^(saddr|unix.NFTA_FIB_F_DADDR) == 0 {
		return &loaded{symbol{text: "fib " + side + " type", kind: asRouteType, size: 4}, func(w *walker, p *Packet) (v, k []byte, ok bool) {
			typ := fields["fib "+side+" type"](w, p)
			if typ.kind == isUnknown {
				return notKnown(4)
			}
			return known(native(routeTypes[typ.words[0]])...)
		}}
	}
	if result == unix.NFT_FIB_RESULT_ADDRTYPE || flags&saddr == 0 || flags&iif == 0 {
		return nil
	}
	size, kind := 4, asInterface
	if flags&present != 0 {
		size, kind = 1, asTruth
	} else if result == unix.NFT_FIB_RESULT_OIFNAME {
		size, kind = unix.IFNAMSIZ, asName
	}
	return &loaded{symbol{text: "fib saddr . iif oif", kind: kind, size: size}, func(_ *walker, p *Packet) (v, k []byte, ok bool) {
		back := p.reversePath()
		if back == Maybe || flags&mark != 0 && p.Mark != 0 {
			return notKnown(size)
		}
		in := ""
		if back == Yes {
			in = p.In
		}
		switch kind {
		case asTruth:
			return known(map[bool]byte{true: 1}[in != ""])
		case asName:
			return deviceName(in)
		}
		return deviceIndex(in)
	}}
}

// socketFields are of the socket that gets what is new (nft_socket_eval in net/netfilter/nft_socket.c).
var socketFields = map[uint64]*loaded{0: socketField("transparent"), 2: socketField("wildcard")}

func socketField(key string) *loaded {
	return &loaded{symbol{text: "socket " + key, kind: asHostNumber, size: 1}, func(w *walker, p *Packet) (v, k []byte, ok bool) {
		found := p.Holder
		if !p.Reply {
			var err error
			if found, err = w.tables.host.Listens(p.Protocol, p.Dst); err != nil || p.State != New && p.State != Invalid && p.State != Untracked {
				return notKnown(1)
			}
		}
		v, k, _ = known(map[bool]byte{true: 1}[found.Transparent && key == "transparent" || found.Wildcard && key == "wildcard"])
		return v, k, found.Found
	}}
}

// numgen is a number at random, or each in turn, which in the long run is the same.
func (d *nftDecoder) numgen(at int, a attributes) instruction {
	n, from := uint32(a.number(unix.NFTA_NG_MODULUS)), uint32(a.number(unix.NFTA_NG_OFFSET))
	text := fmt.Sprintf("numgen %s mod %d", map[bool]string{true: "random", false: "inc"}[a.number(unix.NFTA_NG_TYPE) == unix.NFT_NG_RANDOM], n)
	if from > 0 {
		text += fmt.Sprintf(" offset %d", from)
	}
	d.hold(at, symbol{text: text, kind: asHostNumber, size: 4})
	return oneOf(at, n, from, "by chance")
}

// hash is a number that a field leads to, or, for what isn't known, any.
func (d *nftDecoder) hash(a attributes) instruction {
	n, seed, from := uint32(a.number(unix.NFTA_HASH_MODULUS)), uint32(a.number(unix.NFTA_HASH_SEED)), uint32(a.number(unix.NFTA_HASH_OFFSET))
	at, to, size := offset(a.number(unix.NFTA_HASH_SREG)), offset(a.number(unix.NFTA_HASH_DREG)), a.length(unix.NFTA_HASH_LEN)
	text, known := "symhash", func(*nftState) bool { return false }
	if a.number(unix.NFTA_HASH_TYPE) == unix.NFT_HASH_JENKINS {
		text, known = "jhash "+d.held(at).text, func(s *nftState) bool {
			return a.has(unix.NFTA_HASH_SEED) && at+size <= registerBytes && allKnown(s.known[at:at+size])
		}
	}
	text += fmt.Sprintf(" mod %d", n)
	if a.has(unix.NFTA_HASH_SEED) {
		text += fmt.Sprintf(" seed 0x%x", seed)
	}
	if from > 0 {
		text += fmt.Sprintf(" offset %d", from)
	}
	d.hold(to, symbol{text: text, kind: asHostNumber, size: 4})
	either := oneOf(to, n, from, "by the hash")
	return func(w *walker, s *nftState, p position) effect {
		if !known(s) {
			return either(w, s, p)
		}
		v, _ := bits.Mul32(lb.JHash(s.value[at:at+size], seed), n)
		s.set(to, native(from+v), ones(4))
		return goOn
	}
}

// oneOf is any of n numbers from one on.
func oneOf(at int, n, from uint32, why string) instruction {
	return func(_ *walker, s *nftState, _ position) effect {
		if n == 0 || n > maxWays {
			s.set(at, make([]byte, 4), make([]byte, 4))
			return goOn
		}
		out := effect{matched: matched{answer: Yes, why: fmt.Sprintf("1 of %d %s", n, why)}}
		if n == 1 {
			out.why = ""
		}
		for i := range n {
			f := *s
			f.lo, f.hi = s.lo/float64(n), s.hi/float64(n)
			v, k, _ := known(native(from + i)...)
			f.set(at, v, k)
			out.forks = append(out.forks, f)
		}
		return out
	}
}

// payloadFields are the fields of headers by where they are.
var payloadFields = map[string]map[[2]int]symbol{
	"ip": {
		{12, 4}: {text: "ip saddr", kind: asAddress}, {16, 4}: {text: "ip daddr", kind: asAddress}, {9, 1}: {text: "ip protocol", kind: asProtocol},
		{1, 1}: {text: "ip tos"}, {8, 1}: {text: "ip ttl", kind: asNumber}, {2, 2}: {text: "ip length", kind: asNumber}, {6, 2}: {text: "ip frag-off", kind: asNumber},
	},
	"ether": {{0, 6}: {text: "ether daddr", kind: asHardware}, {6, 6}: {text: "ether saddr", kind: asHardware}, {12, 2}: {text: "ether type", kind: asEther}},
	"ip6":   {{0, 2}: {text: "ip6 tos"}, {4, 2}: {text: "ip6 length", kind: asNumber}, {8, 16}: {text: "ip6 saddr", kind: asAddress}, {24, 16}: {text: "ip6 daddr", kind: asAddress}, {6, 1}: {text: "ip6 nexthdr", kind: asProtocol}, {7, 1}: {text: "ip6 hoplimit", kind: asNumber}},
	"th":    {{0, 2}: {text: "sport", kind: asNumber}, {2, 2}: {text: "dport", kind: asNumber}, {13, 1}: {text: "flags", kind: asFlags}, {12, 1}: {text: "doff"}},
}

// payload loads a part of the packet, or overwrites it.
func (d *nftDecoder) payload(a attributes) instruction {
	base, from, n := a.number(unix.NFTA_PAYLOAD_BASE), int(min(a.number(unix.NFTA_PAYLOAD_OFFSET), 1<<16)), a.length(unix.NFTA_PAYLOAD_LEN)
	name := fmt.Sprintf("@%s,%d,%d", [...]string{"ll", "nh", "th", "ih"}[base&3], 8*from, 8*n)
	f := symbol{text: name, size: n}
	header, protocol := "th", ""
	if base == unix.NFT_PAYLOAD_NETWORK_HEADER {
		if header = d.family; header == "" {
			header = nftFamily[d.set.family]
		}
		d.dropWord(&d.familyAt)
	} else if base == unix.NFT_PAYLOAD_TRANSPORT_HEADER {
		if protocol = d.protocol; protocol == "" {
			protocol = "th"
		}
		protocol += " "
		d.dropWord(&d.protocolAt)
	} else if base == unix.NFT_PAYLOAD_LL_HEADER {
		header = "ether"
	}
	if base <= unix.NFT_PAYLOAD_TRANSPORT_HEADER {
		for at, field := range payloadFields[header] {
			if at[0] == from && (at[1] == n || field.kind == asAddress && n < at[1]) {
				f = field
				f.size, f.text = n, protocol+field.text
			}
		}
	}
	if a.has(unix.NFTA_PAYLOAD_SREG) {
		sreg := offset(a.number(unix.NFTA_PAYLOAD_SREG))
		d.act("%s", d.setText(header, from, f, d.held(sreg)))
		return func(w *walker, s *nftState, _ position) effect {
			if v, k := s.get(sreg, n); base == unix.NFT_PAYLOAD_NETWORK_HEADER && s.packet.writeNetwork(from, v, k) {
				return goOn
			}
			return unknown(w, s, "changing "+f.text)
		}
	}
	at := offset(a.number(unix.NFTA_PAYLOAD_DREG))
	d.hold(at, f)
	return func(_ *walker, s *nftState, _ position) effect {
		v, k := make([]byte, n), make([]byte, n)
		all, sure := headerOf(&s.packet, base)
		if from < len(all) {
			copy(v, all[from:])
			copy(k, sure[from:])
		}
		s.set(at, v, k)
		return goOn
	}
}

// dropWord leaves out the word that says what a field's name does.
func (d *nftDecoder) dropWord(at *int) {
	if *at >= 0 {
		d.words[*at] = ""
	}
	*at = -1
}

func (d *nftDecoder) bitwise(a attributes) instruction {
	const bitwiseOp, bitwiseData = 6, 7 // NFTA_BITWISE_OP, NFTA_BITWISE_DATA
	from, to, n := offset(a.number(unix.NFTA_BITWISE_SREG)), offset(a.number(unix.NFTA_BITWISE_DREG)), a.length(unix.NFTA_BITWISE_LEN)
	mask, xor := bytes.Clone(a.data(unix.NFTA_BITWISE_MASK)), bytes.Clone(a.data(unix.NFTA_BITWISE_XOR))
	f := d.held(from)
	if by := a.data(bitwiseData); (a.number(bitwiseOp) == 1 || a.number(bitwiseOp) == 2) && len(by) == 4 {
		return d.shift(from, to, n, a.number(bitwiseOp) == 2, uint(hostNumber(by)))
	}
	if a.number(bitwiseOp) != 0 || len(mask) != n || len(xor) != n { // by another register
		d.hold(to, symbol{text: f.text + " by another", size: n})
		return func(_ *walker, s *nftState, _ position) effect {
			s.set(to, make([]byte, n), make([]byte, n))
			return goOn
		}
	}
	f.mask, f.kept, f.xor, f.size = mask, mask, xor, n
	if slices.ContainsFunc(xor, func(b byte) bool { return b != 0 }) {
		f.text, f.mask = fmt.Sprintf("%s & 0x%0*x ^ 0x%0*x", f.text, 2*n, hostNumber(mask), 2*n, hostNumber(xor)), nil
		if f.kind == asMark && n == 4 && ^hostNumber(mask)&hostNumber(xor)&0xffffffff == hostNumber(xor) {
			keep := uint32(hostNumber(mask) | hostNumber(xor))
			f.text = strings.TrimSuffix(fmt.Sprintf("%s & 0x%08x | 0x%08x", d.held(from).text, keep, hostNumber(xor)), " | 0x00000000")
			if keep == 0xffffffff {
				f.text = fmt.Sprintf("%s | 0x%08x", d.held(from).text, hostNumber(xor))
			}
		}
	}
	d.hold(to, f)
	return func(_ *walker, s *nftState, _ position) effect {
		v, k := s.get(from, n)
		v, k = bytes.Clone(v), bytes.Clone(k)
		for i := range v {
			v[i], k[i] = v[i]&mask[i]^xor[i], k[i]|^mask[i]
		}
		s.set(to, v, k)
		return goOn
	}
}

// shift shifts words (nft_bitwise_eval_lshift in net/netfilter/nft_bitwise.c).
func (d *nftDecoder) shift(from, to, n int, right bool, by uint) instruction {
	f := d.held(from)
	if class, ok := f.class(); ok {
		f = symbol{text: class, kind: asClass, size: 1}
	} else {
		f.text, f.mask = f.String()+map[bool]string{true: " >> ", false: " << "}[right]+strconv.Itoa(int(by)), nil
	}
	d.hold(to, f)
	words := (n + 3) / 4
	return func(_ *walker, s *nftState, _ position) effect {
		v, k := s.get(from, 4*words)
		v, k = bytes.Clone(v), bytes.Clone(k)
		if by == 0 || by > 31 || len(v) < 4*words {
			return goOn
		}
		carryV, carryK := uint32(0), uint32(1<<by-1)
		if right {
			carryK = ^uint32(0) << (32 - by)
		}
		for i := range words {
			at := 4 * i
			if !right {
				at = 4 * (words - 1 - i)
			}
			x, y := binary.NativeEndian.Uint32(v[at:]), binary.NativeEndian.Uint32(k[at:])
			if right {
				binary.NativeEndian.PutUint32(v[at:], x>>by|carryV)
				binary.NativeEndian.PutUint32(k[at:], y>>by|carryK)
				carryV, carryK = x<<(32-by), y<<(32-by)
			} else {
				binary.NativeEndian.PutUint32(v[at:], x<<by|carryV)
				binary.NativeEndian.PutUint32(k[at:], y<<by|carryK)
				carryV, carryK = x>>(32-by), y>>(32-by)
			}
		}
		s.set(to, v, k)
		return goOn
	}
}

// compare is cmp: ==, !=, <, <=, >, >= (enum nft_cmp_ops).
func (d *nftDecoder) compare(at, op int, with []byte) instruction {
	f := d.held(at)
	sign := [...]string{"", "!= ", "< ", "<= ", "> ", ">= "}[min(max(op, 0), 5)]
	text := f.constant(with)
	if op == unix.NFT_CMP_EQ {
		if f.kind == asProtocol && f.text == "meta l4proto" {
			d.protocol, d.protocolAt = text, len(d.words)
		} else if f.kind == asFamily || f.kind == asEther {
			d.family, d.familyAt = map[string]string{"ipv4": "ip", "ipv6": "ip6", "ip": "ip", "ip6": "ip6"}[text], len(d.words)
		}
	}
	switch zero := !slices.ContainsFunc(with, func(b byte) bool { return b != 0 }); {
	case d.join(f, op, text):
	case f.kind == asFlags && f.mask != nil && zero: // any of them is set, or none
		d.say("%s %s%s", f.text, map[bool]string{true: "! "}[op == unix.NFT_CMP_EQ], f.print(f.mask))
	default:
		d.say("%s", f.comparison(sign, text))
	}
	name := inWord(f.text)
	return func(_ *walker, s *nftState, _ position) effect {
		v, k := s.get(at, len(with))
		answer := Maybe
		switch {
		case op == unix.NFT_CMP_EQ || op == unix.NFT_CMP_NEQ:
			if answer = equal(v, k, with); op == unix.NFT_CMP_NEQ {
				answer = map[Answer]Answer{Yes: No, No: Yes, Maybe: Maybe}[answer]
			}
		case allKnown(k):
			c := bytes.Compare(v, with)
			answer = answerTo(map[int]bool{unix.NFT_CMP_LT: c < 0, unix.NFT_CMP_LTE: c <= 0, unix.NFT_CMP_GT: c > 0, unix.NFT_CMP_GTE: c >= 0}[op])
		}
		switch answer {
		case Maybe:
			return may("its %s isn't known", name)
		case No:
			return breaks("its %s is %s", name, f.printLoaded(v))
		}
		return goOn
	}
}

// comparison writes a field compared with a constant.
func (f symbol) comparison(sign, text string) string {
	if class, ok := f.class(); ok {
		return class + " " + sign + text
	}
	if f.mask != nil && f.kind != asAddress && f.kind != asState && f.kind != asStatus && f.kind != asFlags {
		if sign == "" {
			sign = "== "
		}
		return f.String() + " " + sign + text
	}
	if f.mask != nil && (f.kind == asState || f.kind == asStatus) { // any of them is set, or none
		if sign == "!= " {
			return f.text + " " + f.print(f.mask)
		}
		return f.text + " ! " + f.print(f.mask)
	}
	return f.text + " " + sign + text
}

// constant writes what a field is compared with.
func (f symbol) constant(v []byte) string {
	switch _, isClass := f.class(); {
	case f.text == "tcp doff" && len(v) == 1:
		return strconv.Itoa(int(v[0] >> 4))
	case isClass && len(v) == 1:
		return className(v[0] >> 2)
	case isClass && len(v) == 2:
		return className(byte(attributes{0: v}.number(0) >> 6))
	case f.kind == asAddress && f.mask != nil && len(f.mask) == len(v):
		bits := 0
		for _, b := range f.mask {
			for ; b&0x80 != 0; b <<= 1 {
				bits++
			}
		}
		return fmt.Sprintf("%s/%d", f.print(v), bits)
	case f.kind == asAddress && len(v) != 4 && len(v) != 16: // its first bytes
		full := 4
		if strings.Contains(f.text, "ip6") {
			full = 16
		}
		return fmt.Sprintf("%s/%d", f.print(append(bytes.Clone(v), make([]byte, max(0, full-len(v)))...)), 8*len(v))
	case f.kind == asFlags && f.mask != nil:
		return f.print(v) + " / " + f.print(f.mask)
	case f.kind == asName && len(v) < unix.IFNAMSIZ && !bytes.Contains(v, []byte{0}):
		return strconv.Quote(string(v) + "*")
	}
	return f.print(v)
}

// printLoaded writes what a register held.
func (f symbol) printLoaded(v []byte) string {
	if f.kind == asAddress { // or a network, if that is all that was looked at
		return f.constant(v)
	}
	return strings.Trim(f.print(v), `"`)
}

// print writes a value as nft does.
func (f symbol) print(v []byte) string {
	bits := func(names map[string]uint32) string {
		var out []string
		for name, bit := range names {
			if uint32(hostNumber(v))&bit != 0 {
				out = append(out, name)
			}
		}
		slices.SortFunc(out, func(a, b string) int { return int(names[a]) - int(names[b]) })
		return strings.Join(out, ",")
	}
	switch n := hostNumber(v); f.kind {
	case asAddress:
		if a, ok := netip.AddrFromSlice(v); ok {
			return a.String()
		}
	case asNumber:
		return strconv.FormatUint(attributes{0: v}.number(0), 10)
	case asHostNumber:
		if len(v) == 2 {
			n = uint64(binary.NativeEndian.Uint16(v))
		}
		return strconv.FormatUint(n, 10)
	case asMark:
		return fmt.Sprintf("0x%08x", n)
	case asName:
		return strconv.Quote(netlink.Text(v))
	case asProtocol:
		if p := service.Protocol(n); p == service.TCP || p == service.UDP || p == service.SCTP {
			return p.String()
		}
		return strconv.FormatUint(n, 10)
	case asFamily:
		return map[uint64]string{unix.NFPROTO_IPV4: "ipv4", unix.NFPROTO_IPV6: "ipv6"}[n]
	case asEther:
		if name := map[uint64]string{unix.ETH_P_IP: "ip", unix.ETH_P_IPV6: "ip6", unix.ETH_P_ARP: "arp", unix.ETH_P_8021Q: "8021q"}[n]; name != "" {
			return name
		}
	case asHardware:
		return net.HardwareAddr(v).String()
	case asState:
		return bits(stateBits)
	case asStatus:
		return bits(statusBits)
	case asFlags:
		return bits(map[string]uint32{"fin": 1, "syn": 2, "rst": 4, "psh": 8, "ack": 16, "urg": 32})
	case asRouteType:
		for name, typ := range routeTypes {
			if uint64(typ) == n {
				return name
			}
		}
	case asTruth:
		return map[uint64]string{0: "missing", 1: "exists"}[n]
	case asDirection:
		return map[uint64]string{0: "original", 1: "reply"}[n]
	case asPacketType:
		return map[uint64]string{unix.PACKET_HOST: "host", unix.PACKET_BROADCAST: "broadcast", unix.PACKET_MULTICAST: "multicast"}[n]
	case asClass:
		return className(byte(n))
	case asInterface:
		if link, err := net.InterfaceByIndex(int(n)); err == nil {
			return strconv.Quote(link.Name)
		}
		return strconv.FormatUint(n, 10)
	}
	return "0x" + hex.EncodeToString(v)
}

func (d *nftDecoder) between(at int, a attributes) instruction {
	f, not := d.held(at), a.number(unix.NFTA_RANGE_OP) == unix.NFT_RANGE_NEQ
	first, last := bytes.Clone(a.data(unix.NFTA_RANGE_FROM_DATA)), bytes.Clone(a.data(unix.NFTA_RANGE_TO_DATA))
	d.say("%s", f.comparison(map[bool]string{true: "!= "}[not], f.print(first)+"-"+f.print(last)))
	return func(_ *walker, s *nftState, _ position) effect {
		v, k := s.get(at, len(first))
		if !allKnown(k) {
			return may("its %s isn't known", inWord(f.text))
		}
		if within := bytes.Compare(first, v) <= 0 && bytes.Compare(v, last) <= 0; within == not {
			return breaks("its %s is %s", inWord(f.text), f.printLoaded(v))
		}
		return goOn
	}
}

// lookup finds the packet in a set or a map.
func (d *nftDecoder) lookup(a attributes) instruction {
	name, at := netlink.Text(a[unix.NFTA_LOOKUP_SET]), offset(a.number(unix.NFTA_LOOKUP_SREG))
	set := d.set.nft.sets[name]
	if set == nil {
		d.say("@%s", name)
		return func(*walker, *nftState, position) effect { return may("the set %s isn't there", name) }
	}
	not := a.number(unix.NFTA_LOOKUP_FLAGS)&unix.NFT_LOOKUP_F_INV != 0
	key, parts := d.key(at, set.keyLen)
	maps, data := a.has(unix.NFTA_LOOKUP_DREG), offset(a.number(unix.NFTA_LOOKUP_DREG))
	shown := "@" + name
	if set.flags&unix.NFT_SET_ANONYMOUS != 0 {
		shown = d.set.nft.contents(set, parts)
	}
	switch {
	case set.verdicts && maps:
		d.ends, d.stops = true, true
		d.act("%s vmap %s", key, shown)
	case maps:
		d.hold(data, symbol{text: key + " map " + shown, size: 4, kind: map[uint32]kindOfField{typeMark: asMark}[set.dataType]})
	default:
		d.say("%s", strings.Join(strings.Fields(key+map[bool]string{true: " != "}[not]+" "+shown), " "))
	}
	return func(w *walker, s *nftState, where position) effect {
		v, k := s.get(at, set.keyLen)
		e, found, err := s.packet.stored(d.set.nft, set, v, k)
		looked := looked(parts, v)
		switch {
		case err != nil:
			return may("%v", err)
		case found == Maybe && set.verdicts && maps:
			return unknown(w, s, "its map, of which isn't known which element is for the packet,")
		case found == Maybe:
			return may("whether it is in set %s isn't known", name)
		case (found == Yes) == not:
			return breaks("%s set %s: %s", map[bool]string{true: "in", false: "not in"}[not], name, looked)
		case set.verdicts && maps:
			return e.verdict.apply(w, s, where)
		case maps:
			value, mask, _ := known(e.data...)
			s.set(data, value, mask)
		}
		if !not && set.flags&unix.NFT_SET_ANONYMOUS == 0 {
			return effect{matched: matched{answer: Yes, why: fmt.Sprintf("in set %s: %s", name, looked)}}
		}
		return goOn
	}
}

// looked writes what was looked up.
func looked(parts []symbol, v []byte) string {
	var out []string
	for _, f := range parts {
		n := min(len(v), max(f.size, 1))
		out = append(out, f.printLoaded(v[:n]))
		v = v[min(len(v), (n+3)&^3):]
	}
	return strings.Join(out, " . ")
}

// typeMark is nft's number of the type mark (enum datatypes in its include/datatype.h).
const typeMark = 19

// fieldTypes are the types of fields, by nft's numbers of them.
var fieldTypes = map[uint32]symbol{
	7: {size: 4, kind: asAddress}, 8: {size: 16, kind: asAddress}, 9: {size: 6, kind: asHardware},
	12: {size: 1, kind: asProtocol}, 13: {size: 2, kind: asNumber}, typeMark: {size: 4, kind: asMark}, 41: {size: unix.IFNAMSIZ, kind: asName},
}

// typed writes a key, or a map's data, by the number of its type: that of a concatenation has six bits for each field.
func typed(types uint32, v []byte) string {
	var parts []symbol
	for ; types != 0 || parts == nil; types >>= 6 {
		f, known := fieldTypes[types&0x3f]
		if !known {
			return "0x" + hex.EncodeToString(v)
		}
		parts = slices.Insert(parts, 0, f)
	}
	return looked(parts, v)
}

// contents writes the elements of a set without a name.
func (t *nftTable) contents(s *nftSet, parts []symbol) string {
	const shown = 16
	t.readElements(s)
	var out []string
	for i := range s.elements {
		if len(out) == shown {
			out = append(out, "...")
			break
		}
		out = append(out, s.text(&s.elements[i], func(key []byte) string { return looked(parts, key) }))
	}
	return "{ " + strings.Join(out, ", ") + " }"
}

// text writes an element, whose keys are written by key.
func (s *nftSet) text(e *nftElement, key func([]byte) string) string {
	text := key(e.key)
	switch {
	case e.all:
		text = "*"
	case !bytes.Equal(e.key, e.end):
		text += "-" + key(e.end)
	}
	if s.verdicts {
		text += " : " + e.verdict.String()
	} else if len(e.data) > 0 {
		text += " : " + typed(s.dataType, e.data)
	}
	return text
}

// storing is an element that a rule has added to a set, or deleted.
type storing struct {
	set, key, data string
	deleted        bool
}

// stored finds a key in a set, as it is when rules have changed it for this packet.
func (p *Packet) stored(t *nftTable, s *nftSet, key, known []byte) (nftElement, Answer, error) {
	if p.added.set == t.name+" "+s.name && p.added.key == string(key) && allKnown(known) {
		return nftElement{data: []byte(p.added.data)}, answerTo(!p.added.deleted), nil
	}
	return t.find(s, key, known)
}

// dynset adds to a set or a map, or renews what is there. What is added changes what this packet
// meets next.
func (d *nftDecoder) dynset(a attributes) instruction {
	const ops, opDelete, timeout, expressions = 3, 2, 6, 10 // NFTA_DYNSET_OP, NFT_DYNSET_OP_DELETE, NFTA_DYNSET_TIMEOUT, NFTA_DYNSET_EXPRESSIONS
	name, at := netlink.Text(a[unix.NFTA_DYNSET_SET_NAME]), offset(a.number(unix.NFTA_DYNSET_SREG_KEY))
	set := d.set.nft.sets[name]
	op := a.number(ops)
	word := [...]string{"add", "update", "delete"}[min(op, 2)]
	if set == nil {
		d.act("%s @%s", word, name)
		return nil
	}
	key, _ := d.key(at, set.keyLen)
	if ms := a.number(timeout); ms > 0 {
		key += " timeout " + lifetime(ms/1000)
	}
	value := ""
	if a.has(unix.NFTA_DYNSET_SREG_DATA) {
		value = " : " + d.held(offset(a.number(unix.NFTA_DYNSET_SREG_DATA))).String()
	}
	var nested [][]byte
	if a.has(unix.NFTA_DYNSET_EXPR) {
		nested = append(nested, a[unix.NFTA_DYNSET_EXPR])
	}
	for _, e := range netlink.Attributes(a[expressions]) {
		nested = append(nested, e)
	}
	var counts []func(*Packet) matched // of the element
	for _, e := range nested {
		x := attributesOf(e)
		text, holds := limited(netlink.Text(x[unix.NFTA_EXPR_NAME]), attributesOf(x[unix.NFTA_EXPR_DATA]))
		if holds != nil {
			key, counts = key+" "+text, append(counts, holds)
		}
	}
	d.act("%s @%s { %s%s }", word, name, key, value)
	return func(_ *walker, s *nftState, _ position) effect {
		v, k := s.get(at, set.keyLen)
		_, found, err := s.packet.stored(d.set.nft, set, v, k)
		for _, holds := range counts {
			if m := assumed(holds(&s.packet), !d.stops); m.answer != Yes || m.assumes != "" {
				return effect{matched: m}
			}
		}
		if err != nil || found == Maybe {
			return goOn
		}
		from := offset(a.number(unix.NFTA_DYNSET_SREG_DATA))
		data := s.value[from:min(from+4, len(s.value))]
		switch {
		case op == opDelete:
			s.packet.added = storing{set: d.set.nft.name + " " + name, key: string(v), deleted: true}
		case found == No:
			s.packet.added = storing{set: d.set.nft.name + " " + name, key: string(v), data: string(data)}
		}
		return goOn
	}
}

// counts is an expression about numbers of packets or connections.
func (d *nftDecoder) counts(holds func(*Packet) matched) instruction {
	return func(_ *walker, s *nftState, _ position) effect {
		return effect{matched: assumed(holds(&s.packet), !d.stops)}
	}
}

// object is about an object that has a name.
func (d *nftDecoder) object(a attributes) instruction {
	kind, name := a.number(unix.NFTA_OBJREF_IMM_TYPE), netlink.Text(a[unix.NFTA_OBJREF_IMM_NAME])
	expression := map[uint64]string{unix.NFT_OBJECT_QUOTA: "quota", unix.NFT_OBJECT_LIMIT: "limit", unix.NFT_OBJECT_CONNLIMIT: "connlimit"}[kind]
	words := map[uint64]string{
		unix.NFT_OBJECT_COUNTER: "counter name", unix.NFT_OBJECT_QUOTA: "quota name", unix.NFT_OBJECT_LIMIT: "limit name", unix.NFT_OBJECT_CT_HELPER: "ct helper set",
		unix.NFT_OBJECT_CT_TIMEOUT: "ct timeout set", unix.NFT_OBJECT_CT_EXPECT: "ct expectation set", unix.NFT_OBJECT_SYNPROXY: "synproxy name", unix.NFT_OBJECT_CONNLIMIT: "ct count name",
	}[kind]
	d.say("%s", strings.TrimSpace(words+fmt.Sprintf(" %q", name)))
	switch {
	case expression != "":
		var holds func(*Packet) matched
		err := d.set.nft.dump(unix.NFT_MSG_GETOBJ, unix.NFTA_OBJ_TABLE, func(o attributes) {
			if netlink.Text(o[unix.NFTA_OBJ_NAME]) == name && o.number(unix.NFTA_OBJ_TYPE) == kind {
				_, holds = limited(expression, attributesOf(o[unix.NFTA_OBJ_DATA]))
			}
		})
		if err == nil && holds != nil {
			return d.counts(holds)
		}
		return func(*walker, *nftState, position) effect { return may("%s %q can't be read", words, name) }
	case kind == unix.NFT_OBJECT_SYNPROXY:
		return func(w *walker, s *nftState, _ position) effect { return unknown(w, s, "the statement synproxy") }
	case kind == 0: // by a map
		return func(*walker, *nftState, position) effect { return may("it depends on an object that a map leads to") }
	}
	return nil
}

// setMeta changes what isn't in the packet's headers.
func (d *nftDecoder) setMeta(a attributes) instruction {
	key, from := a.number(unix.NFTA_META_KEY), offset(a.number(unix.NFTA_META_SREG))
	name := cmp.Or(metaName(key), "a field of meta")
	value := d.held(from)
	if key == unix.NFT_META_MARK {
		value.kind = asMark
	}
	text := value.String()
	if n := hostNumber(value.fixed); key == unix.NFT_META_PRIORITY && value.fixed != nil {
		text = fmt.Sprintf("%x:%x", n>>16, n&0xffff)
	}
	d.act("%s set %s", name, text)
	return func(w *walker, s *nftState, _ position) effect {
		v, k := s.get(from, 4)
		switch {
		case key == unix.NFT_META_NFTRACE:
		case key == unix.NFT_META_PRIORITY:
			s.packet.Priority, s.packet.PrioritySet = uint32(hostNumber(v)), allKnown(k)
		case key == unix.NFT_META_MARK && allKnown(k):
			s.packet.Mark = uint32(hostNumber(v))
		default:
			return unknown(w, s, "setting "+name)
		}
		return goOn
	}
}

// setConntrack changes a connection. Without an entry there is nothing to change.
func (d *nftDecoder) setConntrack(a attributes) instruction {
	key, from := a.number(unix.NFTA_CT_KEY), offset(a.number(unix.NFTA_CT_SREG))
	value := d.held(from)
	if key == unix.NFT_CT_MARK {
		value.kind = asMark
	}
	way := ""
	if a.has(unix.NFTA_CT_DIRECTION) {
		way = [2]string{"original", "reply"}[a.number(unix.NFTA_CT_DIRECTION)&1]
	}
	d.act("%s set %s", strings.Replace(conntrackName(key), "ct ", strings.TrimRight("ct "+way, " ")+" ", 1), value)
	return func(w *walker, s *nftState, _ position) effect {
		v, k := s.get(from, 4)
		switch {
		case key == unix.NFT_CT_ZONE && w.hasEntry(&s.packet): // it is too late
		case key == unix.NFT_CT_ZONE && !allKnown(k[:2]):
			return unknown(w, s, "setting the zone")
		case key == unix.NFT_CT_ZONE:
			s.packet.Zone = Zone{ID: binary.NativeEndian.Uint16(v), Way: way}
		case key != unix.NFT_CT_MARK || !w.hasEntry(&s.packet):
		case !allKnown(k):
			return unknown(w, s, "setting the connection's mark")
		default:
			s.packet.ConnMark = uint32(hostNumber(v))
		}
		return goOn
	}
}

// nat rewrites addresses.
func (d *nftDecoder) nat(name string, a attributes) instruction {
	kind := map[string]string{"masq": "masquerade", "redir": "redirect"}[name]
	if kind == "" {
		kind = map[bool]string{true: "snat", false: "dnat"}[a.number(unix.NFTA_NAT_TYPE) == unix.NFT_NAT_SNAT]
	}
	// Registers are numbers in attributes; 0 is none.
	register := func(attribute uint16) (at int, there bool) {
		return offset(a.number(attribute)), a.has(attribute)
	}
	addressAttribute, lastAttribute, portAttribute, lastPort := uint16(unix.NFTA_NAT_REG_ADDR_MIN), uint16(unix.NFTA_NAT_REG_ADDR_MAX), uint16(unix.NFTA_NAT_REG_PROTO_MIN), uint16(unix.NFTA_NAT_REG_PROTO_MAX)
	if name != "nat" {
		addressAttribute, lastAttribute = 0, 0
		portAttribute, lastPort = unix.NFTA_REDIR_REG_PROTO_MIN, unix.NFTA_REDIR_REG_PROTO_MAX
		if name == "masq" {
			portAttribute, lastPort = 0, 0
		}
	}
	size := d.set.family.Bits() / 8
	const flagNetmap = 1 << 6 // NF_NAT_RANGE_NETMAP
	maps := name == "nat" && a.number(unix.NFTA_NAT_FLAGS)&flagNetmap != 0
	to := ""
	if at, ok := register(addressAttribute); ok {
		f := d.held(at)
		end, _ := register(lastAttribute)
		if f.kind = asAddress; maps && f.fixed != nil && d.held(end).fixed != nil {
			to = fmt.Sprintf(" %s prefix to %s", nftFamily[d.set.family], networkOf(f.fixed, d.held(end).fixed))
		} else if f.fixed == nil {
			to = " " + nftFamily[d.set.family] + " to " + f.text
		} else {
			to = " to " + f.String()
			if port, ok := register(portAttribute); ok {
				p := d.held(port)
				p.kind = asNumber
				to = " to " + strings.TrimSuffix(net.JoinHostPort(f.String(), p.String()), ":")
			}
		}
	} else if port, ok := register(portAttribute); ok {
		p := d.held(port)
		p.kind = asNumber
		to = " to :" + p.String()
	}
	flags := a.number(map[string]uint16{"nat": unix.NFTA_NAT_FLAGS, "masq": unix.NFTA_MASQ_FLAGS, "redir": unix.NFTA_REDIR_FLAGS}[name])
	how := ""
	for bit, word := range map[uint64]string{1 << 2: " random", 1 << 3: " persistent", 1 << 4: " fully-random"} { // NF_NAT_RANGE_*
		if flags&bit != 0 {
			how = word
		}
	}
	d.act("%s%s%s", kind, to, how)
	return func(w *walker, s *nftState, at position) effect {
		read := func(attribute uint16, n int) ([]byte, bool) {
			from, there := register(attribute)
			v, k := s.get(from, n)
			return v, there && len(v) == n && allKnown(k)
		}
		var r addressRange
		if _, there := register(addressAttribute); there {
			first, ok := read(addressAttribute, size)
			last, isRange := read(lastAttribute, size)
			if !isRange {
				last = first
			}
			switch {
			case ok && maps && isRange:
				r.netmap = networkOf(first, last)
			case ok:
				r.addresses = addressesBetween(first, last)
			}
			if r.addresses == nil && !r.netmap.IsValid() {
				return unknown(w, s, "the statement "+kind)
			}
		}
		if v, ok := read(portAttribute, 2); ok {
			r.first = binary.BigEndian.Uint16(v)
			r.last = r.first
			if v, ok := read(lastPort, 2); ok {
				r.last = binary.BigEndian.Uint16(v)
			}
		}
		out := w.translate(kind, s.way, r, at)
		return effect{matched: goOn.matched, ends: &out}
	}
}

// networkOf is the network from its first address to its last.
func networkOf(first, last []byte) netip.Prefix {
	a, _ := netip.AddrFromSlice(first)
	n := 0
	for i := range first {
		same := bits.LeadingZeros8(first[i] ^ last[i])
		if n += same; same < 8 {
			break
		}
	}
	return netip.PrefixFrom(a, n)
}

func addressesBetween(first, last []byte) []netip.Addr {
	a, ok := netip.AddrFromSlice(first)
	end, ok2 := netip.AddrFromSlice(last)
	if !ok || !ok2 {
		return nil
	}
	return addressesOf(a, end)
}

// tproxy gives the packet to a socket of this host that is transparent; without one the rule doesn't
// match (nft_tproxy_eval_v4 in net/netfilter/nft_tproxy.c).
func (d *nftDecoder) tproxy(a attributes) instruction {
	const address, port = 2, 3 // enum nft_tproxy_attributes
	size := d.set.family.Bits() / 8
	f, p := d.held(offset(a.number(address))), d.held(offset(a.number(port)))
	f.kind, p.kind = asAddress, asNumber
	text := ""
	if a.has(address) {
		text = f.String()
	}
	if a.has(port) {
		text += ":" + p.String()
	}
	d.act("tproxy to %s", text)
	return func(w *walker, s *nftState, at position) effect {
		to := s.packet.Dst
		if v, k := s.get(offset(a.number(address)), size); a.has(address) && allKnown(k) {
			if given, ok := netip.AddrFromSlice(v); ok {
				to = netip.AddrPortFrom(given, to.Port())
			}
		}
		if v, k := s.get(offset(a.number(port)), 2); a.has(port) && allKnown(k) && len(v) == 2 {
			to = netip.AddrPortFrom(to.Addr(), binary.BigEndian.Uint16(v))
		}
		found, err := w.tables.host.Listens(s.packet.Protocol, to)
		switch {
		case err != nil:
			return may("%v", err)
		case !found.Found || !found.Transparent:
			return breaks("no transparent socket listens at %s", to)
		}
		s.packet.Socket, s.rewrote = to, at.step
		return goOn
	}
}
