package netfilter

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"kproxy.dev/kproxy/service"
)

// kind says what a value is.
type kind int

const (
	isUnknown kind = iota // the caller doesn't know what the packet has
	isAbsent              // the packet has no such field: no rule that looks at it matches (NFT_BREAK)
	isAddress
	isNumber
	isWord   // "tcp", "local", an interface
	isTruth  // "true" or "false", whatever else may be asked
	isFlags  // words, any of which may hold at a time
	isTuple  // of parts
	isEither // of parts, of which one is enough
)

// value is what a packet has in a field.
type value struct {
	kind    kind
	address netip.Addr
	number  uint64
	words   []string
	parts   []value
	more    bool // there may be other flags than words
}

func addressed(a netip.Addr) value {
	if !a.IsValid() {
		return value{}
	}
	return value{kind: isAddress, address: a}
}

func numeric(n uint64) value       { return value{kind: isNumber, number: n} }
func named(name string) value      { return value{kind: isWord, words: []string{name}} }
func flagged(names []string) value { return value{kind: isFlags, words: names} }

// sourcePort is one that the caller may not know.
func sourcePort(n uint16) value {
	if n == 0 {
		return value{}
	}
	return numeric(uint64(n))
}

// device is an interface; of a packet that has none, the empty name (nft_meta_store_ifname).
func device(name string) value {
	if name == AnyInterface {
		return value{}
	}
	return named(name)
}

// String prints a value for people.
func (v value) String() string {
	switch v.kind {
	case isAddress:
		return v.address.String()
	case isNumber:
		return strconv.FormatUint(v.number, 10)
	case isTuple, isEither:
		var parts []string
		for _, p := range v.parts {
			parts = append(parts, p.String())
		}
		return strings.Join(parts, " . ")
	}
	return strings.Join(v.words, ",")
}

// fields are what rules look at, by the names that nft has for them, without that of the header.
var fields = map[string]func(w *walker, p *Packet) value{
	"saddr":    func(_ *walker, p *Packet) value { return addressed(p.Src.Addr()) },
	"daddr":    func(_ *walker, p *Packet) value { return addressed(p.Dst.Addr()) },
	"sport":    func(_ *walker, p *Packet) value { return sourcePort(p.Src.Port()) },
	"dport":    func(_ *walker, p *Packet) value { return numeric(uint64(p.Dst.Port())) },
	"ports":    eitherPort,
	"protocol": layer4, "nexthdr": layer4, "meta l4proto": layer4,
	"fragment":     func(*walker, *Packet) value { return named("no") },
	"flags":        tcpFlags,
	"meta iifname": incoming, "meta iif": incoming,
	"meta oifname": outgoing, "meta oif": outgoing,
	"meta mark":     func(_ *walker, p *Packet) value { return numeric(uint64(p.Mark)) },
	"meta nfproto":  func(_ *walker, p *Packet) value { return named(strings.ToLower(p.Family().String())) },
	"meta protocol": func(_ *walker, p *Packet) value { return named(nftFamily[p.Family()]) },
	"pkttype":       packetType,
	"ct state":      func(w *walker, p *Packet) value { return named(strings.ToLower(w.states(p)[0])) },
	"ct states":     func(w *walker, p *Packet) value { return flagged(w.states(p)) },
	"ct status":     conntrackStatus,
	"ct mark":       func(_ *walker, p *Packet) value { return numeric(uint64(p.ConnMark)) },
	"ct direction":  func(_ *walker, p *Packet) value { return named(p.direction()) },

	"ct original saddr":     func(_ *walker, p *Packet) value { return addressed(p.OrigSrc.Addr()) },
	"ct original daddr":     func(_ *walker, p *Packet) value { return addressed(p.OrigDst.Addr()) },
	"ct original proto-src": func(_ *walker, p *Packet) value { return sourcePort(p.OrigSrc.Port()) },
	"ct original proto-dst": func(_ *walker, p *Packet) value { return sourcePort(p.OrigDst.Port()) },
	"ct reply saddr":        func(_ *walker, p *Packet) value { return addressed(replySource(p).Addr()) },
	"ct reply proto-src":    func(_ *walker, p *Packet) value { return sourcePort(replySource(p).Port()) },

	"fib saddr type":    func(w *walker, p *Packet) value { return w.addressType(p.Src.Addr()) },
	"fib daddr type":    func(w *walker, p *Packet) value { return w.addressType(p.Dst.Addr()) },
	"fib saddr iif oif": reversePath, "fib saddr iif oifname": reversePath,
	"fib saddr mark iif oif": markedPath, "fib saddr mark iif oifname": markedPath,
}

// sameField are other names of fields.
var sameField = strings.NewReplacer(" ip ", " ", " ip6 ", " ")

// inWords is how messages name a field, if not by nft's name.
var inWords = map[string]string{
	"saddr": "source", "daddr": "destination", "sport": "source port", "dport": "destination port", "meta l4proto": "protocol",
	"meta iifname": "incoming interface", "meta oifname": "outgoing interface", "meta mark": "mark", "ct mark": "connection's mark",
	"ct states": "state", "fib saddr type": "source's type", "fib daddr type": "destination's type",
}

// otherHeaders are those that no traced packet has, by the names of nft and of iptables' matches.
var otherHeaders = words("icmp icmpv6 icmp6 igmp esp ah dccp udplite arp comp ipcomp frag hbh mh l2tp")

// words makes a set of words.
func words(text string) map[string]bool {
	out := map[string]bool{}
	for w := range strings.FieldsSeq(text) {
		out[w] = true
	}
	return out
}

// evaluate gives an expression's value for a packet. It is a field's name, or one of nftables'
// (libnftables-json(5)).
func (w *walker) evaluate(p *Packet, expr any) value {
	switch e := expr.(type) {
	case string:
		if fields[e] != nil {
			return w.field(p, e)
		}
	case json.Number:
		if n, err := strconv.ParseUint(e.String(), 10, 64); err == nil {
			return numeric(n)
		}
		return value{}
	case map[string]any:
		for op, detail := range e {
			list, _ := detail.([]any)
			switch op {
			case "concat":
				return w.tuple(p, list)
			case "&", "|", "^":
				return w.bitwise(p, op, list)
			}
		}
	}
	name := fieldName(expr)
	switch header, rest, _ := strings.Cut(name, " "); {
	case header == nftFamily[p.Family()], header == "th", header == p.Protocol.String():
		name = rest
	case otherHeaders[header], header == "ip", header == "ip6", header == "tcp", header == "udp", header == "sctp":
		return value{kind: isAbsent}
	}
	return w.field(p, sameField.Replace(name))
}

// field gives a field's value. A packet without an entry of conntrack has a state and
// nothing else of one (nft_ct_get_eval in net/netfilter/nft_ct.c, connmark_mt in xt_connmark.c).
func (w *walker) field(p *Packet, name string) value {
	f := fields[name]
	switch {
	case f == nil:
		return value{}
	case strings.HasPrefix(name, "ct ") && name != "ct state" && name != "ct states" && !w.hasEntry(p):
		return value{kind: isAbsent}
	}
	return f(w, p)
}

// fieldName names an expression as nft writes it.
func fieldName(expr any) string {
	if name, ok := expr.(string); ok {
		return name
	}
	m, _ := expr.(map[string]any)
	for kind, detail := range m {
		var out []string
		switch d := detail.(type) {
		case map[string]any:
			if kind != "payload" {
				out = append(out, kind)
			}
			for _, k := range []string{"dir", "protocol", "flags", "field", "key", "result"} {
				if v, ok := d[k]; ok {
					out = append(out, texts(v)...)
				}
			}
			return strings.Join(out, " ")
		case []any:
			for _, e := range d {
				out = append(out, fieldName(e))
			}
			return strings.Join(out, map[bool]string{true: " . ", false: " " + kind + " "}[kind == "concat"])
		}
	}
	return fmt.Sprint(expr)
}

func (w *walker) tuple(p *Packet, list []any) value {
	out := value{kind: isTuple}
	for _, e := range list {
		v := w.evaluate(p, e)
		if v.kind == isUnknown {
			return v
		} else if v.kind == isAbsent {
			out.kind = isAbsent
		}
		out.parts = append(out.parts, v)
	}
	return out
}

func (w *walker) bitwise(p *Packet, op string, list []any) value {
	if len(list) != 2 {
		return value{}
	}
	a := w.evaluate(p, list[0])
	switch {
	case a.kind == isAbsent:
		return a
	case a.kind == isFlags && op == "&":
		return flagged(a.only(texts(list[1])))
	}
	b := w.evaluate(p, list[1])
	if a.kind != isNumber || b.kind != isNumber {
		return value{}
	}
	return numeric(map[string]uint64{"&": a.number & b.number, "|": a.number | b.number, "^": a.number ^ b.number}[op])
}

// only is a value's words that are also in a mask.
func (v value) only(mask []string) []string {
	return slices.DeleteFunc(slices.Clone(v.words), func(s string) bool { return !slices.Contains(mask, s) })
}

// flat is a list, or the operands of "|", or one value alone.
func flat(v any) []any {
	if list, ok := v.([]any); ok {
		return list
	}
	if m, ok := v.(map[string]any); ok {
		if list, ok := m["|"].([]any); ok {
			var out []any
			for _, e := range list {
				out = append(out, flat(e)...)
			}
			return out
		}
	}
	return []any{v}
}

func texts(v any) []string {
	var out []string
	for _, e := range flat(v) {
		out = append(out, fmt.Sprint(e))
	}
	return out
}

func incoming(_ *walker, p *Packet) value { return device(p.In) }
func outgoing(_ *walker, p *Packet) value { return device(p.Out) }

func layer4(_ *walker, p *Packet) value { return named(p.Protocol.String()) }

func eitherPort(_ *walker, p *Packet) value {
	return value{kind: isEither, parts: []value{sourcePort(p.Src.Port()), numeric(uint64(p.Dst.Port()))}}
}

// tcpFlags are those of the first packet of a connection and of the answer to it; others' aren't
// known.
func tcpFlags(_ *walker, p *Packet) value {
	switch {
	case p.Reply:
		return flagged([]string{"syn", "ack"})
	case p.State == New || p.State == Untracked || p.State == Invalid:
		return flagged([]string{"syn"})
	}
	return value{}
}

// replySource is where answers come from: the destination as it is now.
func replySource(p *Packet) netip.AddrPort {
	if p.Reply {
		return p.Src
	}
	return p.Dst
}

// packetType: what is sent to this node, or through it, is unicast.
func packetType(_ *walker, p *Packet) value {
	if !p.Dst.Addr().IsValid() || p.Dst.Addr().IsMulticast() || p.In == "lo" || p.In == "" {
		return value{}
	}
	return named("unicast")
}

// conntrackStatus is that of a new connection: nothing has answered it.
func conntrackStatus(w *walker, p *Packet) value {
	if p.State != New {
		return value{}
	}
	out := value{kind: isFlags, more: true}
	for _, s := range w.states(p)[1:] {
		out.words = append(out.words, strings.ToLower(s))
	}
	return out
}

// hasEntry reports whether conntrack has seen a packet, and keeps an entry.
func (w *walker) hasEntry(p *Packet) bool {
	first := w.hook == Prerouting && p.In != "lo" || w.hook == Output
	return p.State != Untracked && p.State != Invalid && w.base.Hook != Ingress && (!first || w.base.order() >= priorityConntrack)
}

// states are the words of --ctstate that fit. Before conntrack has seen a packet
// it is invalid (conntrack_mt in net/netfilter/xt_conntrack.c).
func (w *walker) states(p *Packet) []string {
	switch {
	case p.State == Untracked:
		return []string{string(Untracked)}
	case !w.hasEntry(p):
		return []string{string(Invalid)}
	}
	out := []string{string(p.State)}
	if p.DNAT {
		out = append(out, "DNAT")
	}
	if p.SNAT {
		out = append(out, "SNAT")
	}
	return out
}

// addressType asks the host for the type of the route to an address.
func (w *walker) addressType(a netip.Addr) value {
	if w.tables.host == nil || !a.IsValid() {
		return value{}
	}
	typ, err := w.tables.host.AddressType(a)
	if err != nil {
		return value{}
	}
	return named(strings.ToLower(typ))
}

// reversePath is whether a packet back would leave by the interface that this one came in on,
// which the caller knows.
func reversePath(_ *walker, p *Packet) value {
	switch {
	case p.In == "lo" || p.Reversed == Yes:
		return value{kind: isTruth, words: []string{"true"}}
	case p.Reversed == No:
		return value{kind: isTruth, words: []string{"false"}}
	}
	return value{}
}

// markedPath is that for a packet back with the same mark, which routing rules may lead elsewhere.
func markedPath(w *walker, p *Packet) value {
	if p.Mark != 0 {
		return value{}
	}
	return reversePath(w, p)
}

// protocolNumbers are those of the protocols that service ports have.
var protocolNumbers = map[string]service.Protocol{"tcp": service.TCP, "udp": service.UDP, "sctp": service.SCTP}

// compare asks whether the value of an expression is one of constants: exactly (==, !=), among
// others (in, not in), or in order (<, >, <=, >=).
func compare(left any, op string, right any, set *ruleset) condition {
	return func(w *walker, p *Packet) matched {
		have, name := w.evaluate(p, left), fieldName(left)
		if in, ok := inWords[name]; ok {
			name = in
		}
		answer, not := Maybe, op == "!=" || op == "not in"
		switch {
		case have.kind == isUnknown:
			return maybe("its %s isn't known", name)
		case have.kind == isAbsent:
			return matched{answer: No, why: "it has no " + name}
		case (op == "==" || op == "!=") && have.kind == isFlags:
			answer = have.exactly(right)
		case op == "==" || op == "in" || not:
			answer = have.in(right, set)
		default:
			n, err := strconv.ParseUint(fmt.Sprint(right), 10, 64)
			yes, known := map[string]bool{"<": have.number < n, ">": have.number > n, "<=": have.number <= n, ">=": have.number >= n}[op]
			if err == nil && known && have.kind == isNumber {
				answer = answerTo(yes)
			}
		}
		if answer == Maybe {
			return maybe("its %s can't be compared", name)
		}
		return is(answer == Yes, not, "its %s is %s", name, have)
	}
}

func answerTo(yes bool) Answer {
	if yes {
		return Yes
	}
	return No
}

// elementsOf are the elements of a set or map, given by name or in place.
func elementsOf(data any, set *ruleset) ([]any, bool) {
	if name, ok := data.(string); ok && strings.HasPrefix(name, "@") {
		elements, ok := set.sets[name[1:]]
		return elements, ok
	}
	m, _ := data.(map[string]any)
	list, ok := m["set"]
	return flat(list), ok
}

// in reports whether a value is what an expression of constants says: one, a
// network, a range, or one of several.
func (v value) in(want any, set *ruleset) Answer {
	if v.kind == isEither {
		return anyOf(v.parts, func(part value) Answer { return part.in(want, set) })
	}
	if set != nil {
		if elements, ok := elementsOf(want, set); ok {
			want = elements
		}
	}
	switch x := want.(type) {
	case string:
		switch {
		case x == "*":
			return Yes // for whatever isn't in the set by itself
		case set != nil && strings.HasPrefix(x, "@"):
			return Maybe // a set that isn't there
		}
		return v.equals(x)
	case json.Number, bool:
		return v.equals(fmt.Sprint(x))
	case []any: // flags, of which one is enough
		return anyOf(x, func(e any) Answer { return v.in(e, set) })
	case map[string]any:
		for kind, detail := range x {
			return v.inObject(kind, detail, set)
		}
	}
	return Maybe
}

func anyOf[T any](all []T, is func(T) Answer) Answer {
	out := No
	for _, e := range all {
		switch is(e) {
		case Yes:
			return Yes
		case Maybe:
			out = Maybe
		}
	}
	return out
}

// exactly reports whether flags are those that are wanted, and no others.
func (v value) exactly(want any) Answer {
	names := slices.DeleteFunc(texts(want), func(s string) bool { return s == "0" })
	if v.more || slices.ContainsFunc(names, func(s string) bool { return strings.HasPrefix(s, "@") || strings.HasPrefix(s, "map[") }) {
		return Maybe
	}
	slices.Sort(names)
	return answerTo(slices.Equal(slices.Compact(names), slices.Sorted(slices.Values(v.words))))
}

func (v value) inObject(kind string, detail any, set *ruleset) Answer {
	d, _ := detail.(map[string]any)
	list, _ := detail.([]any)
	switch {
	case kind == "elem":
		return v.in(d["val"], set)
	case kind == "prefix" && v.kind == isAddress:
		return contains(fmt.Sprint(d["addr"], "/", d["len"]), v.address)
	case kind == "range" && len(list) == 2:
		return v.between(fmt.Sprint(list[0]), fmt.Sprint(list[1]))
	case kind == "concat" && v.kind == isTuple && len(list) == len(v.parts):
		at := -1
		not := func(a Answer) Answer { return map[Answer]Answer{Yes: No, No: Yes, Maybe: Maybe}[a] }
		return not(anyOf(list, func(e any) Answer { at++; return not(v.parts[at].in(e, set)) }))
	case kind == "|":
		return v.in(list, set)
	case kind == "masked" && v.kind == isNumber: // of iptables, as the next
		n, mask, ok := masked(fmt.Sprint(detail))
		if ok {
			return answerTo(uint32(v.number)&mask == n)
		}
	case kind == "masked" && v.kind == isFlags && len(list) == 2:
		return flagged(v.only(texts(list[0]))).exactly(list[1])
	}
	return Maybe
}

func (v value) between(first, last string) Answer {
	switch v.kind {
	case isNumber:
		lo, err := strconv.ParseUint(first, 10, 64)
		hi, err2 := strconv.ParseUint(last, 10, 64)
		if err == nil && err2 == nil {
			return answerTo(lo <= v.number && v.number <= hi)
		}
	case isAddress:
		lo, err := netip.ParseAddr(first)
		hi, err2 := netip.ParseAddr(last)
		if err == nil && err2 == nil {
			return answerTo(lo.BitLen() == v.address.BitLen() && lo.Compare(v.address) <= 0 && v.address.Compare(hi) <= 0)
		}
	}
	return Maybe
}

// equals compares with a constant as nft prints it: a protocol by name, an
// interface with a final "*" for the rest.
func (v value) equals(want string) Answer {
	switch v.kind {
	case isNumber:
		if n, err := strconv.ParseUint(want, 0, 64); err == nil {
			return answerTo(n == v.number)
		}
	case isAddress:
		return contains(want, v.address)
	case isFlags:
		return answerTo(slices.Contains(v.words, want))
	case isTruth:
		if want == "true" || want == "false" {
			return answerTo(v.words[0] == want)
		}
	case isWord:
		if prefix, wild := strings.CutSuffix(want, "*"); wild {
			return answerTo(strings.HasPrefix(v.words[0], prefix))
		}
		n, known := protocolNumbers[v.words[0]]
		return answerTo(v.words[0] == want || known && want == strconv.Itoa(int(n)))
	}
	return Maybe
}

// contains reads a network as iptables prints it: an address, with a length, or with a mask
// where that is no length.
func contains(network string, a netip.Addr) Answer {
	base, mask, isNetwork := strings.Cut(network, "/")
	b, err := netip.ParseAddr(base)
	switch {
	case err != nil:
		return Maybe
	case b.BitLen() != a.BitLen():
		return No
	case !isNetwork:
		return answerTo(a == b)
	}
	if n, err := strconv.Atoi(mask); err == nil {
		p, err := b.Prefix(n)
		if err != nil {
			return Maybe
		}
		return answerTo(p.Contains(a))
	}
	m, err := netip.ParseAddr(mask)
	if err != nil || m.BitLen() != a.BitLen() {
		return Maybe
	}
	x, y := a.AsSlice(), b.AsSlice()
	for i, bits := range m.AsSlice() {
		if (x[i]^y[i])&bits != 0 {
			return No
		}
	}
	return Yes
}

// masked reads "0x4000/0x4000".
func masked(s string) (value, mask uint32, ok bool) {
	v, m, has := strings.Cut(s, "/")
	a, err := strconv.ParseUint(v, 0, 32)
	b, err2 := uint64(0xffffffff), error(nil)
	if has {
		b, err2 = strconv.ParseUint(m, 0, 32)
	}
	return uint32(a), uint32(b), err == nil && err2 == nil
}
