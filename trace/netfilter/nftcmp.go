package netfilter

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/service"
)

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
