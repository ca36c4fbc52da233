package nftables

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/lb"
	"kproxy.dev/kproxy/service"
)

// Rule is a rule in two forms: as nft prints it, and as the kernel takes it.
type Rule struct {
	Text    string
	Comment string
	netlink.Expressions
}

// String prints r as nft does.
func (r *Rule) String() string {
	if r.Comment == "" {
		return r.Text
	}
	return fmt.Sprintf("%s comment %q", r.Text, r.Comment)
}

// part is a match or a statement: it appends to a rule's two forms.
type part func(*Rule)

// rule is parts one after the other.
func rule(parts ...part) Rule {
	var r Rule
	for _, p := range parts {
		p(&r)
	}
	return r
}

// comment says what the rule is for. In listings it is the last word.
func comment(text string) part { return func(r *Rule) { r.Comment = text } }

func (r *Rule) say(format string, args ...any) {
	if r.Text != "" {
		r.Text += " "
	}
	r.Text += fmt.Sprintf(format, args...)
}

const register = netlink.Register

// next is the register behind n bytes in at.
func next(at uint32, n int) uint32 { return at + uint32(n+3)/4 }

// native is a number in the machine's byte order, which marks, states and types have.
func native(v uint32) []byte { return binary.NativeEndian.AppendUint32(nil, v) }

// Type is the type of a field in keys and data of sets.
type Type struct {
	Name string
	id   uint32 // nft's number (enum datatypes in its include/datatype.h): the kernel hands it through
	size int
}

// width returns how many bytes of registers t takes.
func (t Type) width() int { return (t.size + registerAlign - 1) &^ (registerAlign - 1) }

// The types. Marks stand for any number that is no header's.
var (
	typeAddr  = [2]Type{service.IPv4: {"ipv4_addr", 7, 4}, service.IPv6: {"ipv6_addr", 8, 16}}
	typeProto = Type{"inet_proto", 12, 1}
	typePort  = Type{"inet_service", 13, 2}
	typeMark  = Type{"mark", 19, 4}
)

// field is something of a packet that a register can hold.
type field struct {
	text string
	size int
	load func(r *Rule, at uint32)
}

func payload(text string, base, offset uint32, size int) field {
	return field{text, size, func(r *Rule, at uint32) {
		r.Payload(at, base, offset, uint32(size))
	}}
}

func meta(text string, key uint32, size int) field {
	return field{text, size, func(r *Rule, at uint32) {
		r.Numbers("meta", unix.NFTA_META_DREG, at, unix.NFTA_META_KEY, key)
	}}
}

func ct(text string, key uint32) field {
	return field{text, 4, func(r *Rule, at uint32) {
		r.Numbers("ct", unix.NFTA_CT_DREG, at, unix.NFTA_CT_KEY, key)
	}}
}

func fib(text string, flag uint32) field {
	const dreg, result, flags = 1, 2, 3 // enum nft_fib_attributes; the library's have other names
	return field{text, 4, func(r *Rule, at uint32) {
		r.Numbers("fib", dreg, at, result, unix.NFT_FIB_RESULT_ADDRTYPE, flags, flag)
	}}
}

// The fields. th is any transport header: the ports are at one place in all.
var (
	saddr = [2]field{
		service.IPv4: payload("ip saddr", unix.NFT_PAYLOAD_NETWORK_HEADER, 12, 4),
		service.IPv6: payload("ip6 saddr", unix.NFT_PAYLOAD_NETWORK_HEADER, 8, 16),
	}
	daddr = [2]field{
		service.IPv4: payload("ip daddr", unix.NFT_PAYLOAD_NETWORK_HEADER, 16, 4),
		service.IPv6: payload("ip6 daddr", unix.NFT_PAYLOAD_NETWORK_HEADER, 24, 16),
	}
	sport    = payload("th sport", unix.NFT_PAYLOAD_TRANSPORT_HEADER, 0, 2)
	dport    = payload("th dport", unix.NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2)
	l4proto  = meta("meta l4proto", unix.NFT_META_L4PROTO, 1)
	iifname  = meta("iifname", unix.NFT_META_IIFNAME, unix.IFNAMSIZ)
	oifname  = meta("oifname", unix.NFT_META_OIFNAME, unix.IFNAMSIZ)
	metaMark = meta("meta mark", unix.NFT_META_MARK, 4)
	ctMark   = ct("ct mark", unix.NFT_CT_MARK)
	// scratch keeps a number from one rule to the next. A rule can't do with one map's answer
	// as part of another's key: nft 1.0.6 aborts when it lists that. Forwarding sets the
	// priority anew afterwards (ip_forward in net/ipv4/ip_forward.c).
	scratch  = meta("meta priority", unix.NFT_META_PRIORITY, 4)
	saddrFib = fib("fib saddr type", unix.NFTA_FIB_F_SADDR)
	daddrFib = fib("fib daddr type", unix.NFTA_FIB_F_DADDR)
)

// numgen is a number below n, and from offset on: at random, or each in turn.
func numgen(turns bool, n, offset int) field {
	word, kind := "random", uint32(unix.NFT_NG_RANDOM)
	if turns {
		word, kind = "inc", unix.NFT_NG_INCREMENTAL
	}
	text := fmt.Sprintf("numgen %s mod %d", word, n)
	if offset > 0 {
		text += fmt.Sprintf(" offset %d", offset)
	}
	return field{text, 4, func(r *Rule, at uint32) {
		r.Numbers("numgen", unix.NFTA_NG_DREG, at, unix.NFTA_NG_MODULUS, uint32(n), unix.NFTA_NG_TYPE, kind, unix.NFTA_NG_OFFSET, uint32(offset))
	}}
}

// hashed is a number below n, and from offset on, that f leads to ([lb.SourceSlot]).
func hashed(f field, n, offset int) field {
	text := fmt.Sprintf("jhash %s mod %d seed 0x%x", f.text, n, lb.SourceSeed)
	if offset > 0 {
		text += fmt.Sprintf(" offset %d", offset)
	}
	return field{text, 4, func(r *Rule, at uint32) {
		f.load(r, at)
		r.Numbers("hash", unix.NFTA_HASH_SREG, at, unix.NFTA_HASH_DREG, at, unix.NFTA_HASH_LEN, uint32(f.size),
			unix.NFTA_HASH_MODULUS, uint32(n), unix.NFTA_HASH_SEED, lb.SourceSeed, unix.NFTA_HASH_OFFSET, uint32(offset))
	}}
}

// key is a concatenation.
type key []field

func (k key) text() string {
	words := make([]string, len(k))
	for i, f := range k {
		words[i] = f.text
	}
	return strings.Join(words, " . ")
}

// load loads k and returns the register behind it.
func (k key) load(r *Rule, at uint32) uint32 {
	for _, f := range k {
		f.load(r, at)
		at = next(at, f.size)
	}
	return at
}

// constant is a value in the place of a field, of which nothing is left: a value alone can't be part of a key. nft
// prints bits that are set as bits of the mask, too.
func constant(f field, t Type, v string) field {
	value := text([]Type{t}, padded([]byte(v)))
	set := value
	if t != typePort {
		set = "0x" + strings.TrimLeft(fmt.Sprintf("%x", v), "0")
	}
	return field{fmt.Sprintf("%s & %s | %s", f.text, value, set), f.size, func(r *Rule, at uint32) {
		f.load(r, at)
		r.Mask(at, make([]byte, f.size), []byte(v))
	}}
}

// mapped returns the field that loads what a map has for k.
func (k key) mapped(set string) field {
	return field{k.text() + " map @" + set, 0, func(r *Rule, at uint32) {
		k.load(r, at)
		r.Lookup(set, at, unix.NFTA_LOOKUP_DREG, at)
	}}
}

// in matches members of a set.
func (k key) in(set string) part {
	return func(r *Rule) {
		r.say("%s @%s", k.text(), set)
		k.load(r, register)
		r.Lookup(set, register)
	}
}

func (k key) notIn(set string) part {
	return func(r *Rule) {
		r.say("%s != @%s", k.text(), set)
		k.load(r, register)
		r.Lookup(set, register, unix.NFTA_LOOKUP_FLAGS, unix.NFT_LOOKUP_F_INV)
	}
}

// vmap does what a map has for k, if it has something.
func (k key) vmap(set string) part {
	return func(r *Rule) {
		r.say("%s vmap @%s", k.text(), set)
		k.load(r, register)
		r.Lookup(set, register, unix.NFTA_LOOKUP_DREG, unix.NFT_REG_VERDICT)
	}
}

// is matches one value, whose text is given.
func (f field) is(text string, v ...byte) part {
	return func(r *Rule) {
		r.say("%s %s", f.text, text)
		f.load(r, register)
		r.Compare(unix.NFT_CMP_EQ, v...)
	}
}

// bits matches by some bits of a mark.
func (f field) bits(mask uint32, op string, v uint32) part {
	return func(r *Rule) {
		r.say("%s & 0x%08x %s 0x%08x", f.text, mask, op, v)
		f.load(r, register)
		r.Mask(register, native(mask), native(0))
		r.Compare(operators[op], native(v)...)
	}
}

var operators = map[string]uint32{"==": unix.NFT_CMP_EQ, "!=": unix.NFT_CMP_NEQ}

// within matches addresses of a network, or those outside.
func (f field) within(n netip.Prefix, op string) part {
	return func(r *Rule) {
		text := n.Masked().String()
		if n.IsSingleIP() {
			text = n.Addr().String()
		}
		if op == "==" {
			r.say("%s %s", f.text, text)
		} else {
			r.say("%s %s %s", f.text, op, text)
		}
		f.load(r, register)
		if !n.IsSingleIP() {
			r.Mask(register, net.CIDRMask(n.Bits(), 8*f.size), make([]byte, f.size))
		}
		r.Compare(operators[op], n.Masked().Addr().AsSlice()...)
	}
}

// States of conntrack and bits of a connection's status (linux/netfilter/nf_conntrack_common.h).
const (
	stateInvalid     = 1
	stateEstablished = 2
	stateNew         = 8
	stateUntracked   = 64
	statusConfirmed  = 8
	statusDNAT       = 32
)

// state matches connections in one of some states.
func state(text string, states uint32) part {
	return func(r *Rule) {
		r.say("ct state %s", text)
		ct("", unix.NFT_CT_STATE).load(r, register)
		r.Mask(register, native(states), native(0))
		r.Compare(unix.NFT_CMP_NEQ, native(0)...)
	}
}

// status matches connections by a bit of their status: those that have it, or not.
func status(text string, bit, op uint32) part {
	return func(r *Rule) {
		r.say("ct status %s", text)
		ct("", unix.NFT_CT_STATUS).load(r, register)
		r.Mask(register, native(bit), native(0))
		r.Compare(op, native(0)...)
	}
}

var (
	rewritten    = status("dnat", statusDNAT, unix.NFT_CMP_NEQ) // the destination
	notRewritten = status("! dnat", statusDNAT, unix.NFT_CMP_EQ)
	// A connection's first packet has passed every hook before it is confirmed (nf_confirm), so a packet of one that is new
	// and confirmed is sent again, or after the first.
	confirmed    = status("confirmed", statusConfirmed, unix.NFT_CMP_NEQ)
	notConfirmed = status("! confirmed", statusConfirmed, unix.NFT_CMP_EQ)
)

// firstReply matches the packet that is a connection's first in the direction of the
// reply. Whether there are counters is up to net.netfilter.nf_conntrack_acct.
func firstReply(r *Rule) {
	r.say("ct direction reply ct reply packets 1")
	r.Add("ct", func(b []byte) []byte {
		return netlink.AppendUint32(netlink.AppendUint32(b, unix.NFTA_CT_DREG, register), unix.NFTA_CT_KEY, unix.NFT_CT_DIRECTION)
	})
	r.Compare(unix.NFT_CMP_EQ, 1)
	r.Add("ct", func(b []byte) []byte {
		b = netlink.AppendUint32(netlink.AppendUint32(b, unix.NFTA_CT_DREG, register), unix.NFTA_CT_KEY, unix.NFT_CT_PKTS)
		return netlink.Append(b, unix.NFTA_CT_DIRECTION, 1)
	})
	r.Compare(unix.NFT_CMP_EQ, binary.NativeEndian.AppendUint64(nil, 1)...)
}

// protocol matches a transport protocol.
func protocol(p service.Protocol) part {
	return l4proto.is(p.String(), byte(p))
}

// Flags of TCP (RFC 9293).
const (
	flagFIN, flagSYN, flagRST, flagACK = 1, 2, 4, 16
)

var tcpFlags = payload("tcp flags", unix.NFT_PAYLOAD_TRANSPORT_HEADER, 13, 1)

// flags matches TCP packets by those of their flags that mask has.
func flags(text string, mask byte, op uint32, want byte) part {
	return func(r *Rule) {
		r.say("tcp flags %s", text)
		r.tcp()
		tcpFlags.load(r, register)
		r.Mask(register, []byte{mask}, []byte{0})
		r.Compare(op, want)
	}
}

var (
	// A packet that begins a TCP connection, and all others.
	syn    = flags("syn / fin,syn,rst,ack", flagFIN|flagSYN|flagRST|flagACK, unix.NFT_CMP_EQ, flagSYN)
	notSYN = flags("!= syn / fin,syn,rst,ack", flagFIN|flagSYN|flagRST|flagACK, unix.NFT_CMP_NEQ, flagSYN)
	// A reset in answer to a SYN: in answer to what has an ACK, which is of a connection, a reset has none (RFC 9293, 3.10.7.1).
	resetOfSYN = flags("rst,ack / rst,ack", flagRST|flagACK, unix.NFT_CMP_EQ, flagRST|flagACK)
)

// tcp matches protocol TCP, which a match of a field of TCP depends on; nft doesn't print it.
func (r *Rule) tcp() {
	l4proto.load(r, register)
	r.Compare(unix.NFT_CMP_EQ, unix.IPPROTO_TCP)
}

// socket matches packets for which there is a socket that is transparent, or bound to
// their address.
func socket(text string, key uint32, v byte) part {
	const keyAttribute, dreg = 1, 2 // enum nft_socket_attributes
	return func(r *Rule) {
		r.say("socket %s %d", text, v)
		r.Numbers("socket", keyAttribute, key, dreg, register)
		r.Compare(unix.NFT_CMP_EQ, v)
	}
}

// enum nft_socket_keys
const (
	socketTransparent = 0
	socketWildcard    = 2
)

// arrives matches packets by the interface that they come in on: a name, or what names
// begin with and an asterisk.
func arrives(name string) part { return passes(iifname, "", unix.NFT_CMP_EQ, name) }

// arrivesNot matches packets that come in on another interface, or that this node sends.
func arrivesNot(name string) part { return passes(iifname, "!= ", unix.NFT_CMP_NEQ, name) }

// leaves matches packets by the interface that they go out on.
func leaves(name string) part { return passes(oifname, "", unix.NFT_CMP_EQ, name) }

func passes(interfaces field, operator string, compare uint32, name string) part {
	return func(r *Rule) {
		r.say("%s %s%q", interfaces.text, operator, name)
		interfaces.load(r, register)
		v := append([]byte(strings.TrimSuffix(name, "*")), 0)
		if strings.HasSuffix(name, "*") {
			v = v[:len(v)-1]
		} else {
			v = append(v, make([]byte, max(0, unix.IFNAMSIZ-len(v)))...)
		}
		r.Compare(compare, v...)
	}
}

// setMark replaces the bits of mask of a packet's mark, or a connection's.
func setMark(f field, mask, v uint32) part {
	return func(r *Rule) {
		switch {
		case v == mask:
			r.say("%s set %s | 0x%08x", f.text, f.text, v)
		case v == 0:
			r.say("%s set %s & 0x%08x", f.text, f.text, ^mask)
		default:
			r.say("%s set %s & 0x%08x | 0x%08x", f.text, f.text, ^mask|v, v)
		}
		f.load(r, register)
		r.Mask(register, native(^mask), native(v))
		if f.text == metaMark.text {
			r.Numbers("meta", unix.NFTA_META_KEY, unix.NFT_META_MARK, unix.NFTA_META_SREG, register)
		} else {
			r.Numbers("ct", unix.NFTA_CT_KEY, unix.NFT_CT_MARK, unix.NFTA_CT_SREG, register)
		}
	}
}

// setScratch keeps what a map has for k.
func (k key) setScratch(set string) part {
	return func(r *Rule) {
		v := k.mapped(set)
		r.say("%s set %s", scratch.text, v.text)
		v.load(r, register)
		r.Numbers("meta", unix.NFTA_META_KEY, unix.NFT_META_PRIORITY, unix.NFTA_META_SREG, register)
	}
}

// count counts in a named counter.
func count(name string) part {
	return func(r *Rule) {
		r.say("counter name %q", name)
		r.Add("objref", func(b []byte) []byte {
			return netlink.AppendText(netlink.AppendUint32(b, unix.NFTA_OBJREF_IMM_TYPE, unix.NFT_OBJECT_COUNTER), unix.NFTA_OBJREF_IMM_NAME, name)
		})
	}
}

// limit matches so many packets a second, and a burst of more after a pause.
func limit(rate, burst int) part {
	return func(r *Rule) {
		r.say("limit rate %d/second burst %d packets", rate, burst)
		r.Limit(rate, burst)
	}
}

// log hands the packet to who reads a group of nfnetlink_log, within a second.
func log(prefix string, group uint16) part {
	return func(r *Rule) { r.log(prefix, group, 0) }
}

// logNow does so at once.
func logNow(prefix string, group uint16) part {
	return func(r *Rule) { r.log(prefix, group, 1) }
}

// log hands packets over as soon as there are so many; 0 is the kernel's default.
func (r *Rule) log(prefix string, group, threshold uint16) {
	r.say("log prefix %q group %d", prefix, group)
	if threshold > 0 {
		r.say("queue-threshold %d", threshold)
	}
	r.Add("log", func(b []byte) []byte {
		b = netlink.AppendText(netlink.AppendUint16(b, unix.NFTA_LOG_GROUP, group), unix.NFTA_LOG_PREFIX, prefix)
		if threshold > 0 {
			b = netlink.AppendUint16(b, unix.NFTA_LOG_QTHRESHOLD, threshold)
		}
		return b
	})
}

// verdict appends a verdict, with its chain if it has one.
func verdict(b []byte, typ uint16, code int32, chain string) []byte {
	return netlink.AppendNested(b, typ, func(b []byte) []byte {
		return netlink.AppendNested(b, unix.NFTA_DATA_VERDICT, func(b []byte) []byte {
			b = netlink.AppendUint32(b, unix.NFTA_VERDICT_CODE, uint32(code))
			if chain != "" {
				b = netlink.AppendText(b, unix.NFTA_VERDICT_CHAIN, chain)
			}
			return b
		})
	})
}

// Codes of verdicts (linux/netfilter.h, nf_tables.h).
const (
	codeDrop   = 0
	codeAccept = 1
	codeJump   = unix.NFT_JUMP
	codeGoto   = unix.NFT_GOTO
	codeReturn = unix.NFT_RETURN
)

var verdictWords = map[int32]string{codeDrop: "drop", codeAccept: "accept", codeJump: "jump", codeGoto: "goto", codeReturn: "return"}

func ends(code int32, chain string) part {
	return func(r *Rule) {
		r.say("%s", strings.TrimSpace(verdictWords[code]+" "+chain))
		r.Add("immediate", func(b []byte) []byte {
			return verdict(netlink.AppendUint32(b, unix.NFTA_IMMEDIATE_DREG, unix.NFT_REG_VERDICT), unix.NFTA_IMMEDIATE_DATA, code, chain)
		})
	}
}

var (
	drop    = ends(codeDrop, "")
	accept  = ends(codeAccept, "")
	returns = ends(codeReturn, "")
)

func jumpTo(chain string) part { return ends(codeJump, chain) }
func goesTo(chain string) part { return ends(codeGoto, chain) }

// nfWord returns nft's name for a family's tables and addresses.
func nfWord(f service.Family) string {
	if f == service.IPv6 {
		return "ip6"
	}
	return "ip"
}

func (r *Rule) dnat(f service.Family) {
	r.Numbers("nat", unix.NFTA_NAT_TYPE, unix.NFT_NAT_DNAT, unix.NFTA_NAT_FAMILY, uint32(f.Number()),
		unix.NFTA_NAT_REG_ADDR_MIN, register, unix.NFTA_NAT_REG_PROTO_MIN, next(register, typeAddr[f].size))
}

// to rewrites the destination to what a map has for k.
func (k key) to(f service.Family, set string) part {
	return func(r *Rule) {
		v := k.mapped(set)
		r.say("dnat %s to %s", nfWord(f), v.text)
		v.load(r, register)
		r.dnat(f)
	}
}

// toAddress rewrites the destination to an address.
func toAddress(a netip.AddrPort) part {
	f := service.FamilyOf(a.Addr())
	return func(r *Rule) {
		r.say("dnat to %s", a)
		r.Immediate(register, a.Addr().AsSlice()...)
		r.Immediate(next(register, typeAddr[f].size), byte(a.Port()>>8), byte(a.Port()))
		r.dnat(f)
	}
}

// netmap rewrites the source to that of network n with the same last bits
// (nft_nat_setup_netmap in net/netfilter/nft_nat.c).
func netmap(n netip.Prefix) part {
	const netmap = 1 << 6 // NF_NAT_RANGE_NETMAP
	f := service.FamilyOf(n.Addr())
	first, last := n.Masked().Addr().AsSlice(), lastOf(n).AsSlice()
	return func(r *Rule) {
		end := next(register, len(first))
		r.say("snat %s prefix to %s", nfWord(f), n)
		r.Immediate(register, first...)
		r.Immediate(end, last...)
		r.Numbers("nat", unix.NFTA_NAT_TYPE, unix.NFT_NAT_SNAT, unix.NFTA_NAT_FAMILY, uint32(f.Number()),
			unix.NFTA_NAT_REG_ADDR_MIN, register, unix.NFTA_NAT_REG_ADDR_MAX, end, unix.NFTA_NAT_FLAGS, netmap)
	}
}

// masquerade gives the packet the node's address, and a random port.
func masquerade(r *Rule) {
	const randomFully = 1 << 4 // NF_NAT_RANGE_PROTO_RANDOM_FULLY
	r.say("masquerade fully-random")
	r.Numbers("masq", unix.NFTA_MASQ_FLAGS, randomFully)
}

// reject refuses: TCP by a reset, as ICMP is rate limited per client, and a client that a
// router has just redirected would learn nothing for a second.
func reject(f service.Family, p service.Protocol) part {
	kind, code, text := uint32(unix.NFT_REJECT_TCP_RST), byte(0), "tcp reset"
	if p != service.TCP {
		kind, code, text = unix.NFT_REJECT_ICMP_UNREACH, 3, "icmp port-unreachable" // ICMP_PORT_UNREACH
		if f == service.IPv6 {
			code, text = 4, "icmpv6 port-unreachable" // ICMPV6_PORT_UNREACH
		}
	}
	return func(r *Rule) {
		if p == service.TCP {
			r.say("meta l4proto tcp")
			r.tcp()
		}
		r.say("reject with %s", text)
		r.Add("reject", func(b []byte) []byte {
			return netlink.Append(netlink.AppendUint32(b, unix.NFTA_REJECT_TYPE, kind), unix.NFTA_REJECT_ICMP_CODE, code)
		})
	}
}

// dynset changes a map by the packet: what is there for k stays for so many seconds from
// now on, or is made of scratch if there is nothing; for 0 seconds, it is deleted.
func (k key) dynset(set string, seconds int) part {
	const deletes = 2 // NFT_DYNSET_OP_DELETE
	return func(r *Rule) {
		op, word, timeout := uint32(unix.NFT_DYNSET_OP_UPDATE), "update", " timeout "+secondsText(seconds)
		if seconds == 0 {
			op, word, timeout = deletes, "delete", ""
		}
		r.say("%s @%s { %s%s : %s }", word, set, k.text(), timeout, scratch.text)
		at := k.load(r, register)
		scratch.load(r, at)
		r.Add("dynset", func(b []byte) []byte {
			b = netlink.AppendText(b, unix.NFTA_DYNSET_SET_NAME, set)
			b = netlink.AppendUint32(b, unix.NFTA_DYNSET_OP, op)
			b = netlink.AppendUint32(b, unix.NFTA_DYNSET_SREG_KEY, register)
			b = netlink.AppendUint32(b, unix.NFTA_DYNSET_SREG_DATA, at)
			if seconds > 0 {
				b = netlink.Append(b, unix.NFTA_DYNSET_TIMEOUT, binary.BigEndian.AppendUint64(nil, uint64(seconds)*1000)...)
			}
			return b
		})
	}
}
