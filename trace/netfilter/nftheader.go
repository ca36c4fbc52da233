package netfilter

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/service"
)

// className is nft's name of a DSCP (RFC 2474 and its successors).
func className(dscp byte) string {
	for name, n := range classes {
		if n == dscp {
			return name
		}
	}
	return fmt.Sprintf("0x%02x", dscp)
}

var classes = map[string]byte{
	"cs0": 0x00, "cs1": 0x08, "cs2": 0x10, "cs3": 0x18, "cs4": 0x20, "cs5": 0x28, "cs6": 0x30, "cs7": 0x38, "lephb": 0x01,
	"af11": 0x0a, "af12": 0x0c, "af13": 0x0e, "af21": 0x12, "af22": 0x14, "af23": 0x16, "af31": 0x1a, "af32": 0x1c, "af33": 0x1e,
	"af41": 0x22, "af42": 0x24, "af43": 0x26, "va": 0x2c, "ef": 0x2e,
}

// class reports whether a field is the DSCP, by its bits of the header, or another whose bits are a part of a byte.
func (f symbol) class() (name string, is bool) {
	switch {
	case f.text == "ip tos" && slices.Equal(f.mask, []byte{0xfc}):
		return "ip dscp", true
	case f.text == "ip6 tos" && slices.Equal(f.mask, []byte{0x0f, 0xc0}):
		return "ip6 dscp", true
	case f.text == "tcp doff" && slices.Equal(f.mask, []byte{0xf0}):
		return "tcp doff", true
	}
	return "", false
}

// optionFields are the fields of TCP's options that nft has names for, by the option and by where they are in it.
var optionFields = map[uint64]struct {
	name   string
	fields map[uint64]string
}{
	2: {"maxseg", map[uint64]string{2: "size"}}, 3: {"window", map[uint64]string{2: "count"}}, 4: {"sack-perm", nil}, 5: {"sack", nil},
	8: {"timestamp", map[uint64]string{2: "tsval", 6: "tsecr"}}, 30: {"mptcp", nil}, 34: {"fastopen", nil}, 1: {"nop", nil}, 0: {"eol", nil}, 19: {"md5sig", nil},
}

// option is an expression about options of TCP and of IP: it loads one, changes it or makes it padding
// (net/netfilter/nft_exthdr.c).
func (d *nftDecoder) option(a attributes) instruction {
	kind, from, n := a.number(unix.NFTA_EXTHDR_TYPE), a.number(unix.NFTA_EXTHDR_OFFSET), a.length(unix.NFTA_EXTHDR_LEN)
	present, ofTCP := a.number(unix.NFTA_EXTHDR_FLAGS)&unix.NFT_EXTHDR_F_PRESENT != 0, a.number(unix.NFTA_EXTHDR_OP) == unix.NFT_EXTHDR_OP_TCPOPT
	at, sreg := offset(a.number(unix.NFTA_EXTHDR_DREG)), offset(a.number(unix.NFTA_EXTHDR_SREG))
	f := symbol{text: fmt.Sprintf("%s %d", map[bool]string{true: "tcp option", false: "option"}[ofTCP], kind), kind: asNumber, size: n}
	if ofTCP {
		d.dropWord(&d.protocolAt)
		o, named := optionFields[kind]
		if named {
			f.text = "tcp option " + o.name
		}
		field := map[uint64]string{0: "kind", 1: "length"}[from]
		if x, ok := o.fields[from]; ok {
			field = x
		}
		if !present && a.has(unix.NFTA_EXTHDR_LEN) && field != "" {
			f.text += " " + field
		}
	} else if name, ok := extensionHeaders[kind]; ok && a.number(unix.NFTA_EXTHDR_OP) == unix.NFT_EXTHDR_OP_IPV6 {
		f.text = "exthdr " + name
	}
	switch {
	case a.has(unix.NFTA_EXTHDR_SREG):
		value := d.held(sreg)
		if value.fixed != nil {
			value.kind = asNumber
		}
		d.act("%s set %s", f.text, value)
		return func(_ *walker, s *nftState, _ position) effect {
			switch v, k := s.get(sreg, 2); {
			case !ofTCP || !s.packet.has(byte(kind)): // of what it doesn't have it changes nothing
			case kind == unix.TCPOPT_MAXSEG && from == 2 && allKnown(k):
				s.packet.clampMSS(binary.BigEndian.Uint16(v))
			case kind == unix.TCPOPT_MAXSEG:
				s.packet.clampMSS(0)
			}
			return goOn
		}
	case !a.has(unix.NFTA_EXTHDR_DREG):
		d.act("reset %s", f.text)
		return func(_ *walker, s *nftState, _ position) effect {
			if ofTCP {
				s.packet.strip(byte(kind))
			}
			return goOn
		}
	case present:
		f.kind, f.size = asTruth, 1
	}
	d.hold(at, f)
	return func(_ *walker, s *nftState, _ position) effect {
		where := -1 // no packet that is followed has an option or extension header of IP
		if ofTCP {
			where = s.packet.optionAt(byte(kind))
		}
		switch {
		case present:
			v, k, _ := known(map[bool]byte{true: 1}[where >= 0])
			s.set(at, v, k)
		case where < 0:
			return breaks("it has no %s", f.text)
		default:
			v, k := make([]byte, n), make([]byte, n)
			all, sure := headerOf(&s.packet, unix.NFT_PAYLOAD_TRANSPORT_HEADER)
			if where += int(from); where < len(all) {
				copy(v, all[where:])
				copy(k, sure[where:])
			}
			s.set(at, v, k)
		}
		return goOn
	}
}

// extensionHeaders lists those of IPv6, by nft's names.
var extensionHeaders = map[uint64]string{0: "hbh", 43: "rt", 44: "frag", 60: "dst", 135: "mh"}

// metaName is nft's name of a field of meta; empty if it has none here.
func metaName(key uint64) string {
	names := [...]string{
		"length", "protocol", "priority", "mark", "iif", "oif", "iifname", "oifname", "iiftype", "oiftype", "skuid", "skgid", "nftrace", "rtclassid",
		"secmark", "nfproto", "l4proto", "ibrname", "obrname", "pkttype", "cpu", "iifgroup", "oifgroup", "cgroup", "random", "ipsec", "iifkind", "oifkind",
		"ibrpvid", "ibrvproto", "time", "day", "hour", "sdif", "sdifname", "broute",
	}
	switch {
	case key >= uint64(len(names)):
		return ""
	case slices.Contains([]string{"iif", "oif", "iifname", "oifname", "iifgroup", "oifgroup"}, names[key]):
		return names[key]
	}
	return "meta " + names[key]
}

// conntrackName is nft's name of a field of ct; empty if it has none here.
func conntrackName(key uint64) string {
	names := [...]string{
		"state", "direction", "status", "mark", "secmark", "expiration", "helper", "l3proto", "saddr", "daddr", "protocol", "proto-src", "proto-dst", "label",
		"packets", "bytes", "avgpkt", "zone", "event", "ip saddr", "ip daddr", "ip6 saddr", "ip6 daddr", "timeout", "id",
	}
	if key >= uint64(len(names)) {
		return "ct field " + strconv.FormatUint(key, 10)
	}
	return "ct " + names[key]
}

// setText writes a change of a header as nft does: what nft reads, keeps part of, and writes back.
func (d *nftDecoder) setText(header string, from int, f, value symbol) string {
	if len(value.kept) == 2 && len(value.xor) == 2 {
		switch x, m := value.xor, value.kept; {
		case header == "ip" && from == 8 && m[0] == 0:
			return fmt.Sprintf("ip ttl set %d", x[0])
		case header == "ip6" && from == 6 && m[1] == 0:
			return fmt.Sprintf("ip6 hoplimit set %d", x[1])
		case header == "ip" && from == 0 && m[1] == 0x03:
			return "ip dscp set " + className(x[1]>>2)
		case header == "ip6" && from == 0 && m[0] == 0xf0 && m[1] == 0x3f:
			return "ip6 dscp set " + className(byte(binary.BigEndian.Uint16(x)>>6))
		}
	}
	if value.fixed != nil {
		value.kind = f.kind
		return fmt.Sprintf("%s set %s", f, value)
	}
	return fmt.Sprintf("%s set", f)
}

// logText writes a statement log as nft does (log_stmt_print in its src/statement.c).
func logText(a attributes) string {
	out := "log"
	if prefix := netlink.Text(a[unix.NFTA_LOG_PREFIX]); prefix != "" {
		out += fmt.Sprintf(" prefix %q", prefix)
	}
	if a.has(unix.NFTA_LOG_GROUP) {
		out += fmt.Sprintf(" group %d", a.number(unix.NFTA_LOG_GROUP))
	}
	if a.has(unix.NFTA_LOG_SNAPLEN) {
		out += fmt.Sprintf(" snaplen %d", a.number(unix.NFTA_LOG_SNAPLEN))
	}
	if n := a.number(unix.NFTA_LOG_QTHRESHOLD); n > 0 {
		out += fmt.Sprintf(" queue-threshold %d", n)
	}
	levels := [...]string{"emerg", "alert", "crit", "err", "warn", "notice", "info", "debug", "audit"}
	if n := a.number(unix.NFTA_LOG_LEVEL); a.has(unix.NFTA_LOG_LEVEL) && n < uint64(len(levels)) && levels[n] != "warn" {
		out += " level " + levels[n]
	}
	const all = 0x2f // of NF_LOG_*
	switch flags := a.number(unix.NFTA_LOG_FLAGS); {
	case flags&all == all:
		out += " flags all"
	default:
		for _, f := range []struct {
			bits uint64
			text string
		}{{1, "tcp sequence"}, {2, "tcp options"}, {4, "ip options"}, {8, "skuid"}, {32, "ether"}} {
			if flags&f.bits != 0 {
				out += " flags " + f.text
			}
		}
	}
	return out
}

// rejectText writes how a packet is rejected; nothing for the usual way.
func rejectText(a attributes, f service.Family) string {
	kind, code := a.number(unix.NFTA_REJECT_TYPE), a.number(unix.NFTA_REJECT_ICMP_CODE)
	protocol, names := "icmpx", map[uint64]string{0: "no-route", 2: "host-unreachable", 3: "admin-prohibited"}
	switch {
	case kind == unix.NFT_REJECT_TCP_RST:
		return " with tcp reset"
	case kind == unix.NFT_REJECT_ICMP_UNREACH && f == service.IPv4:
		protocol, names = "icmp", map[uint64]string{0: "net-unreachable", 1: "host-unreachable", 2: "prot-unreachable", 9: "net-prohibited", 10: "host-prohibited", 13: "admin-prohibited"}
	case kind == unix.NFT_REJECT_ICMP_UNREACH:
		protocol, names = "icmpv6", map[uint64]string{0: "no-route", 1: "admin-prohibited", 3: "addr-unreachable", 5: "policy-fail", 6: "reject-route"}
	}
	if names[code] == "" {
		return ""
	}
	return " with " + protocol + " " + names[code]
}

// queueText writes a statement queue as nft does.
func queueText(a attributes) string {
	out, first, n := "queue", a.number(unix.NFTA_QUEUE_NUM), a.number(unix.NFTA_QUEUE_TOTAL)
	switch a.number(unix.NFTA_QUEUE_FLAGS) & 3 {
	case 1:
		out += " flags bypass"
	case 2:
		out += " flags fanout"
	case 3:
		out += " flags bypass,fanout"
	}
	if out += fmt.Sprintf(" to %d", first); n > 1 {
		out += fmt.Sprintf("-%d", first+n-1)
	}
	return out
}

// lifetime writes seconds as nft does: 1m30s.
func lifetime(seconds uint64) (out string) {
	for _, u := range []struct {
		n    uint64
		unit string
	}{{86400, "d"}, {3600, "h"}, {60, "m"}, {1, "s"}} {
		if seconds >= u.n {
			out += fmt.Sprintf("%d%s", seconds/u.n, u.unit)
		}
		seconds %= u.n
	}
	return out
}

// ebtables writes ebtables' match of a packet's addresses, protocol and ports in expressions of nftables; nil if info asks for more
// (struct ebt_ip_info and ebt_ip_mt in net/bridge/netfilter/ebt_ip.c, and those of IPv6, whose addresses are longer).
func ebtables(match string, info []byte) (out netlink.Expressions) {
	n, addressesAt := 4, uint32(12)
	if match == "ip6" {
		n, addressesAt = 16, 8
	}
	if match != "ip" && match != "ip6" || len(info) < 4*n+12 {
		return nil
	}
	rest := info[4*n:] // the class, the protocol, what is asked for and what of it is inverted; ports
	is := func(bit int, first, last []byte) {
		not := uint32(rest[3] >> bit & 1) // NFT_CMP_NEQ, NFT_RANGE_NEQ
		if bytes.Equal(first, last) {
			out.Compare(not, first...)
			return
		}
		out.Add("range", func(b []byte) []byte {
			b = netlink.AppendUint32(netlink.AppendUint32(b, unix.NFTA_RANGE_SREG, netlink.Register), unix.NFTA_RANGE_OP, not)
			return netlink.AppendData(netlink.AppendData(b, unix.NFTA_RANGE_FROM_DATA, first...), unix.NFTA_RANGE_TO_DATA, last...)
		})
	}
	for bit := range 8 {
		if rest[2]>>bit&1 == 0 {
			continue
		}
		switch i := bit & 1; bit {
		case 0, 1:
			out.Payload(netlink.Register, unix.NFT_PAYLOAD_NETWORK_HEADER, addressesAt+uint32(i*n), uint32(n))
			if mask := info[(2+i)*n:][:n]; !allKnown(mask) {
				out.Mask(netlink.Register, mask, make([]byte, n))
			}
			is(bit, info[i*n:][:n], info[i*n:][:n])
		case 3:
			out.Numbers("meta", unix.NFTA_META_DREG, netlink.Register, unix.NFTA_META_KEY, unix.NFT_META_L4PROTO)
			is(bit, rest[1:2], rest[1:2])
		case 4, 5:
			number := func(at int) []byte { return binary.BigEndian.AppendUint16(nil, binary.NativeEndian.Uint16(rest[at:])) }
			out.Payload(netlink.Register, unix.NFT_PAYLOAD_TRANSPORT_HEADER, uint32(2*i), 2)
			is(bit, number(4+4*i), number(6+4*i))
		default:
			return nil
		}
	}
	return out
}
