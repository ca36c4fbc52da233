package netfilter

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strconv"

	"golang.org/x/sys/unix"
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

// class reports whether a field is the DSCP, by its bits of the header.
func (f symbol) class() (name string, is bool) {
	switch {
	case f.text == "ip tos" && slices.Equal(f.mask, []byte{0xfc}):
		return "ip dscp", true
	case f.text == "ip6 tos" && slices.Equal(f.mask, []byte{0x0f, 0xc0}):
		return "ip6 dscp", true
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

// extensionHeaders are those of IPv6, by nft's names.
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
