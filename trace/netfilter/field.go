package netfilter

import (
	"cmp"
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
	isWords  // "tcp", "local", an interface; or flags, any of which may hold at a time
	isEither // of parts, of which one is enough
)

// value holds what a packet has in a field.
type value struct {
	kind    kind
	address netip.Addr
	number  uint64
	words   []string
	parts   []value
}

func addressed(a netip.Addr) value {
	if !a.IsValid() {
		return value{}
	}
	return value{kind: isAddress, address: a}
}

func numeric(n uint64) value      { return value{kind: isNumber, number: n} }
func named(words ...string) value { return value{kind: isWords, words: words} }

// sourcePort is one that the caller may not know.
func sourcePort(n uint16) value {
	if n == 0 {
		return value{}
	}
	return numeric(uint64(n))
}

// String prints a value for people.
func (v value) String() string {
	switch v.kind {
	case isAddress:
		return v.address.String()
	case isNumber:
		return strconv.FormatUint(v.number, 10)
	case isEither:
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
	"saddr":        func(_ *walker, p *Packet) value { return addressed(p.Src.Addr()) },
	"daddr":        func(_ *walker, p *Packet) value { return addressed(p.Dst.Addr()) },
	"sport":        func(_ *walker, p *Packet) value { return sourcePort(p.Src.Port()) },
	"dport":        func(_ *walker, p *Packet) value { return numeric(uint64(p.Dst.Port())) },
	"ports":        eitherPort,
	"meta l4proto": layer4,
	"fragment":     func(*walker, *Packet) value { return named("no") },
	"flags":        tcpFlags,
	"meta iifname": func(_ *walker, p *Packet) value { return named(p.In) }, // empty for none, as in nft_meta_store_ifname
	"meta oifname": func(_ *walker, p *Packet) value { return named(p.Out) },
	"meta mark":    func(_ *walker, p *Packet) value { return numeric(uint64(p.Mark)) },
	"pkttype":      packetType,
	"ttl":          func(_ *walker, p *Packet) value { return zeroUnknown(int(p.TTL)) },
	"tos":          func(_ *walker, p *Packet) value { return numeric(uint64(p.TOS)) },
	"dscp":         func(_ *walker, p *Packet) value { return numeric(uint64(p.TOS >> 2)) },
	"length":       func(_ *walker, p *Packet) value { return zeroUnknown(p.length()) },
	"tcp options":  optionWords,
	"ct states":    func(w *walker, p *Packet) value { return named(w.states(p)...) },
	"ct status":    conntrackStatus,
	"ct mark":      func(_ *walker, p *Packet) value { return numeric(uint64(p.ConnMark)) },
	"ct direction": func(_ *walker, p *Packet) value { return named(p.direction()) },

	"ct original saddr":     func(_ *walker, p *Packet) value { return addressed(p.OrigSrc.Addr()) },
	"ct original daddr":     func(_ *walker, p *Packet) value { return addressed(p.OrigDst.Addr()) },
	"ct original proto-src": func(_ *walker, p *Packet) value { return sourcePort(p.OrigSrc.Port()) },
	"ct original proto-dst": func(_ *walker, p *Packet) value { return sourcePort(p.OrigDst.Port()) },
	"ct reply saddr":        func(_ *walker, p *Packet) value { return addressed(replySource(p).Addr()) },
	"ct reply proto-src":    func(_ *walker, p *Packet) value { return sourcePort(replySource(p).Port()) },

	"fib saddr type": func(w *walker, p *Packet) value { return w.addressType(p.Src.Addr()) },
	"fib daddr type": func(w *walker, p *Packet) value { return w.addressType(p.Dst.Addr()) },
}

// inWords is how messages name a field, if not by nft's name.
var inWords = map[string]string{
	"saddr": "source", "daddr": "destination", "sport": "source port", "dport": "destination port", "meta l4proto": "protocol",
	"meta iifname": "incoming interface", "meta oifname": "outgoing interface", "meta mark": "mark", "ct mark": "connection's mark",
	"ttl": "hop limit", "hoplimit": "hop limit", "tos": "service class", "dscp": "service class", "tcp options": "options of TCP",
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

// field gives a field's value. A packet without an entry of conntrack has a state and
// nothing else of one (nft_ct_get_eval in net/netfilter/nft_ct.c, connmark_mt in xt_connmark.c).
func (w *walker) field(p *Packet, name string) value {
	f := fields[name]
	switch {
	case f == nil:
		return value{}
	case strings.HasPrefix(name, "ct ") && name != "ct states" && !w.hasEntry(p):
		return value{kind: isAbsent}
	}
	return f(w, p)
}

func layer4(_ *walker, p *Packet) value { return named(p.Protocol.String()) }

func eitherPort(_ *walker, p *Packet) value {
	return value{kind: isEither, parts: []value{sourcePort(p.Src.Port()), numeric(uint64(p.Dst.Port()))}}
}

// tcpFlags returns the flags of the first three packets of a connection; others' aren't known.
func tcpFlags(_ *walker, p *Packet) value {
	switch {
	case p.Reply:
		return named("syn", "ack")
	case p.Later && p.Data:
		return named("psh", "ack")
	case p.Later:
		return named("ack")
	case p.shakes():
		return named("syn")
	}
	return value{}
}

// replySource returns where answers come from: the destination as it is now.
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
	status := w.states(p)[1:]
	if p.looped() {
		status = append(status, "CONFIRMED")
	}
	return named(status...)
}

// hasEntry reports whether conntrack has seen a packet, and keeps an entry. A rule of the family bridge that asks makes it look
// there as well, with the same priority (nf_ct_bridge_ops in net/bridge/netfilter/nf_conntrack_bridge.c).
func (w *walker) hasEntry(p *Packet) bool {
	first := w.hook == Prerouting && p.In != "lo" || w.hook == Output && !w.base.bridges()
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
	if !a.IsValid() {
		return value{}
	}
	typ, err := w.tables.host.AddressType(a)
	if err != nil {
		return value{}
	}
	return named(strings.ToLower(typ))
}

// reversePath says whether a packet back would leave by the interface that this one came in on,
// which the caller knows.
func (p *Packet) reversePath() Answer {
	if p.In == "lo" {
		return Yes
	}
	return cmp.Or(p.Reversed, Maybe)
}

// compare asks whether the value of a field is as a constant says.
func compare(field string, not bool, want constant) condition {
	name := cmp.Or(inWords[field], field)
	return func(w *walker, p *Packet) matched {
		have := w.field(p, field)
		switch have.kind {
		case isUnknown:
			return maybe("its %s isn't known", name)
		case isAbsent:
			return matched{answer: No, why: "it has no " + name}
		}
		answer := No
		if have.kind == isEither {
			answer = anyOf(have.parts, want)
		} else {
			answer = want(have)
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

// constant says whether a value of a field is one that an option means, by what iptables-save prints
// of the option. Maybe is for text that can't be read.
type constant func(value) Answer

func network(o option) constant {
	return func(v value) Answer { return contains(o.arg(0), v.address) }
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

// iface compares as ifname_compare does: "eth+" is every name that begins so.
func iface(o option) constant {
	prefix, wild := strings.CutSuffix(o.arg(0), "+")
	return func(v value) Answer {
		return answerTo(v.words[0] == o.arg(0) || wild && strings.HasPrefix(v.words[0], prefix))
	}
}

// list is one of several words.
func list(o option) constant {
	want := strings.Split(o.arg(0), ",")
	return func(v value) Answer {
		return answerTo(slices.ContainsFunc(v.words, func(have string) bool {
			return slices.ContainsFunc(want, func(s string) bool { return strings.EqualFold(s, have) })
		}))
	}
}

// protocol is one by name or number.
func protocol(o option) constant {
	return func(v value) Answer {
		p, _ := service.ParseProtocol(v.words[0])
		return answerTo(strings.EqualFold(o.arg(0), v.words[0]) || o.arg(0) == strconv.Itoa(int(p)))
	}
}

// ports are "80", "80:90", or several, by number: iptables-save never prints names of ports.
func ports(o option) constant {
	want := strings.Split(o.arg(0), ",")
	return func(v value) Answer {
		return anyOf(want, func(s string) Answer {
			first, last, isRange := strings.Cut(s, ":")
			if !isRange {
				last = first
			}
			lo, ok := parsePort(first)
			hi, ok2 := parsePort(last)
			if !ok || !ok2 {
				return Maybe
			}
			return answerTo(uint64(lo) <= v.number && v.number <= uint64(hi))
		})
	}
}

func addresses(o option) constant {
	first, last, isRange := strings.Cut(o.arg(0), "-")
	if !isRange {
		last = first
	}
	lo, err := netip.ParseAddr(first)
	hi, err2 := netip.ParseAddr(last)
	return func(v value) Answer {
		if err != nil || err2 != nil {
			return Maybe
		}
		return answerTo(lo.BitLen() == v.address.BitLen() && lo.Compare(v.address) <= 0 && v.address.Compare(hi) <= 0)
	}
}

func markValue(o option) constant {
	n, mask, ok := masked(o.arg(0))
	return func(v value) Answer {
		if !ok {
			return Maybe
		}
		return answerTo(uint32(v.number)&mask == n)
	}
}

// tcpMask reads which flags a rule looks at, and which of them are to be set.
func tcpMask(o option) constant {
	read := func(s string) []string {
		s = strings.NewReplacer("ALL", "FIN,SYN,RST,PSH,ACK,URG", "NONE", "").Replace(s)
		return strings.FieldsFunc(strings.ToLower(s), func(r rune) bool { return r == ',' })
	}
	mask, want := read(o.arg(0)), read(o.arg(1))
	return func(v value) Answer {
		return answerTo(!slices.ContainsFunc(slices.Concat(mask, want), func(flag string) bool {
			return (slices.Contains(mask, flag) && slices.Contains(v.words, flag)) != slices.Contains(want, flag)
		}))
	}
}
