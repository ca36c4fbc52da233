package netfilter

import (
	"encoding/binary"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// linuxHops is the TTL, or hop limit, that Linux gives packets (IPDEFTTL in include/net/ip.h, IPV6_DEFAULT_HOPLIMIT in
// include/uapi/linux/ipv6.h).
const linuxHops = 64

// Near fills in what is known of the packet of a Linux host on the same link, which has that MTU; 0 if that isn't known.
func (p *Packet) Near(mtu int) {
	p.TTL = linuxHops
	headers := map[service.Family]int{service.IPv4: 40, service.IPv6: 60}[p.Family()]
	if p.Protocol == service.TCP && mtu > headers {
		p.MSS = uint16(min(mtu-headers, 65495)) // tcp_mss_clamp's 65535 less the headers
	}
}

// Hop takes one from the TTL, as a router does between the hooks PREROUTING and FORWARD (ip_forward in
// net/ipv4/ip_forward.c, ip6_forward in net/ipv6/ip6_output.c); false if the packet ends there.
func (p *Packet) Hop() bool {
	switch p.TTL {
	case 0:
	case 1:
		return false
	default:
		p.TTL--
	}
	return true
}

// shakes reports whether a packet is one of TCP's first two, which have the flag SYN.
func (p *Packet) shakes() bool {
	return p.Protocol == service.TCP && (p.Reply || !p.Later && (p.State == New || p.State == Untracked || p.State == Invalid))
}

// tcpOption is one as Linux writes it.
type tcpOption struct{ kind, size byte }

// options lists TCP's options in the order in which Linux writes them: of a SYN and of its answer, and of what comes after
// them (tcp_options_write in net/ipv4/tcp_output.c, with sysctl's defaults). Those that rules have stripped are padding.
func (p *Packet) options() []tcpOption {
	const padding = 1
	out := []tcpOption{{padding, 1}, {padding, 1}, {unix.TCPOPT_TIMESTAMP, 10}}
	switch {
	case p.Protocol != service.TCP:
		return nil
	case p.shakes():
		out = []tcpOption{{unix.TCPOPT_MAXSEG, 4}, {unix.TCPOPT_SACK_PERMITTED, 2}, {unix.TCPOPT_TIMESTAMP, 10}, {padding, 1}, {unix.TCPOPT_WINDOW, 3}}
	}
	for i, o := range out {
		if p.stripped&(1<<o.kind) != 0 {
			out[i] = tcpOption{padding, o.size}
		}
	}
	return out
}

// has reports whether a packet has an option of TCP.
func (p *Packet) has(kind byte) bool { return p.optionAt(kind) >= 0 }

// optionAt finds an option in TCP's header; -1 if it isn't there.
func (p *Packet) optionAt(kind byte) int {
	at := 20
	for _, o := range p.options() {
		if o.kind == kind {
			return at
		}
		at += int(o.size)
	}
	return -1
}

// strip makes an option of TCP padding.
func (p *Packet) strip(kind byte) {
	if kind < 32 {
		p.stripped |= 1 << kind
	}
}

// clampMSS lowers the MSS that a packet offers, and never raises it (tcpmss_mangle_packet in
// net/netfilter/xt_TCPMSS.c, nft_exthdr_tcp_set_eval in nft_exthdr.c). 0 is one that isn't known.
func (p *Packet) clampMSS(to uint16) {
	if p.MSS == 0 || to == 0 || to < p.MSS {
		p.MSS = to
	}
}

// length is that of the packet from its network header on; 0 if it isn't known.
func (p *Packet) length() int {
	if p.Protocol != service.TCP || p.State == Related || p.Data {
		return 0
	}
	n := 20
	for _, o := range p.options() {
		n += int(o.size)
	}
	return n + map[service.Family]int{service.IPv4: 20, service.IPv6: 40}[p.Family()]
}

// etherType is the protocol that its frame names.
func (p *Packet) etherType() []byte {
	return map[service.Family][]byte{service.IPv4: {8, 0}, service.IPv6: {0x86, 0xdd}}[p.Family()]
}

// headerOf is a packet's header, and which bits of it are known.
func headerOf(p *Packet, base uint64) (v, k []byte) {
	put := func(at int, value, sure []byte) { copy(v[at:], value); copy(k[at:], sure) }
	sure := func(at int, value ...byte) { put(at, value, ones(len(value))) }
	size := p.length()
	switch {
	case base == unix.NFT_PAYLOAD_LL_HEADER && p.Frame.Bridge != "":
		v, k = make([]byte, 14), make([]byte, 14)
		for i, mac := range []string{p.Frame.Dst, p.Frame.Src} {
			put(6*i, []byte(mac), ones(len(mac)))
			k[6*i] |= 1 // it isn't a group's
		}
		if !p.Frame.Tagged {
			sure(12, p.etherType()...)
		}
	case base == unix.NFT_PAYLOAD_NETWORK_HEADER && p.Family() == service.IPv4:
		v, k = make([]byte, 20), make([]byte, 20)
		sure(0, 0x45, p.TOS)
		if size > 0 {
			sure(2, byte(size>>8), byte(size))
		}
		put(6, []byte{0, 0}, []byte{0xbf, 0xff}) // no fragment
		if p.TTL > 0 {
			sure(8, p.TTL)
		}
		sure(9, byte(p.Protocol))
		for at, a := range map[int][]byte{12: p.Src.Addr().AsSlice(), 16: p.Dst.Addr().AsSlice()} {
			if len(a) == 4 {
				sure(at, a...)
			}
		}
	case base == unix.NFT_PAYLOAD_NETWORK_HEADER:
		v, k = make([]byte, 40), make([]byte, 40)
		put(0, []byte{0x60 | p.TOS>>4, p.TOS << 4}, []byte{0xff, 0xf0})
		if size > 0 {
			sure(4, byte((size-40)>>8), byte(size-40))
		}
		sure(6, byte(p.Protocol))
		if p.TTL > 0 {
			sure(7, p.TTL)
		}
		for at, a := range map[int][]byte{8: p.Src.Addr().AsSlice(), 24: p.Dst.Addr().AsSlice()} {
			if len(a) == 16 {
				sure(at, a...)
			}
		}
	case base == unix.NFT_PAYLOAD_TRANSPORT_HEADER:
		v, k = make([]byte, 20), make([]byte, 20)
		value, mask, _ := portBytes(p.Src.Port())
		put(0, value, mask)
		value, mask, _ = portBytes(p.Dst.Port())
		put(2, value, mask)
		switch {
		case p.Protocol != service.TCP:
			return v[:8], k[:8]
		case p.Reply:
			sure(13, 0x12)
		case p.Later && p.Data:
			sure(13, 0x18)
		case p.Later:
			sure(13, 0x10)
		case p.shakes():
			sure(13, 2)
		}
		for _, o := range p.options() {
			value, mask := make([]byte, o.size), make([]byte, o.size)
			value[0], mask[0] = o.kind, 0xff
			switch {
			case o.kind == 1: // padding has no length
				value, mask = []byte(strings.Repeat("\x01", int(o.size))), ones(int(o.size))
			default:
				value[1], mask[1] = o.size, 0xff
			}
			if o.kind == unix.TCPOPT_MAXSEG && p.MSS > 0 {
				binary.BigEndian.PutUint16(value[2:], p.MSS)
				mask = ones(4)
			}
			v, k = append(v, value...), append(k, mask...)
		}
		sure(12, byte(len(v)<<2))
	}
	return v, k
}

// writeNetwork changes the network header; false if it can't be told what it says then, or what that does.
func (p *Packet) writeNetwork(from int, value, known []byte) bool {
	for i, b := range value {
		at := from + i
		switch v4 := p.Family() == service.IPv4; {
		case v4 && at == 1 && known[i] == 0xff:
			p.TOS = b
		case !v4 && at == 0 && known[i] == 0xff:
			p.TOS = p.TOS&0x0f | b<<4
		case !v4 && at == 1 && known[i]&0xf0 == 0xf0:
			p.TOS = p.TOS&0xf0 | b>>4
		case v4 && at == 8 || !v4 && at == 7:
			p.TTL = 0
			if known[i] == 0xff {
				p.TTL = max(1, b)
			}
		case v4 && (at == 0 || at == 9 && known[i] == 0xff && b == byte(p.Protocol)): // beside them, for the checksum
		case at >= 2 && at < 4 && !v4: // the flow label
		default:
			return false
		}
	}
	return true
}

// setTTL is TTL and HL (ttl_tg in net/ipv4/netfilter/xt_HL.c). One of 0 goes no further than one of 1.
func (e *extension) setTTL(p *Packet) bool {
	for _, o := range e.options {
		n, err := strconv.ParseUint(o.arg(0), 10, 8)
		_, how, _ := strings.Cut(strings.TrimPrefix(o.name, "--"), "-")
		switch to := map[string]int{"set": int(n), "inc": int(p.TTL) + int(n), "dec": int(p.TTL) - int(n)}[how]; {
		case err != nil:
			return false
		case how == "set" || p.TTL > 0:
			p.TTL = byte(min(max(to, 1), 255))
		}
	}
	return true
}

// setTOS is DSCP and TOS (net/netfilter/xt_DSCP.c).
func (e *extension) setTOS(p *Packet) bool {
	value, mask, ok := masked(e.arg("--set-tos"))
	if e.name == "DSCP" {
		value, _, ok = masked(e.arg("--set-dscp"))
		value, mask = value<<2, 0xfc
	}
	p.TOS = p.TOS&^byte(mask) ^ byte(value)
	return ok
}

// setMSS is TCPMSS.
func (e *extension) setMSS(p *Packet) bool {
	n, err := strconv.ParseUint(e.arg("--set-mss"), 10, 16)
	if e.has("--clamp-mss-to-pmtu") { // to that of the route, which isn't known here
		n, err = 0, nil
	}
	if err == nil && p.has(unix.TCPOPT_MAXSEG) {
		p.clampMSS(uint16(n))
	}
	return err == nil
}

// optionNumbers are options of TCP by the names that TCPOPTSTRIP has for them.
var optionNumbers = map[string]byte{"mss": unix.TCPOPT_MAXSEG, "wscale": unix.TCPOPT_WINDOW, "sack-permitted": unix.TCPOPT_SACK_PERMITTED, "sack": 5, "timestamp": unix.TCPOPT_TIMESTAMP, "md5": 19}

// stripOptions is TCPOPTSTRIP.
func (e *extension) stripOptions(p *Packet) bool {
	for name := range strings.SplitSeq(e.arg("--strip-options"), ",") {
		kind, ok := optionNumbers[name]
		if n, err := strconv.ParseUint(name, 10, 8); err == nil {
			kind, ok = byte(n), true
		}
		if !ok {
			return false
		}
		p.strip(kind)
	}
	return true
}

// mss is the match tcpmss: a packet without the option matches what "!" says (net/netfilter/xt_tcpmss.c).
func mss(_ *walker, p *Packet, e *extension) matched {
	o, ok := e.find("--mss")
	switch {
	case !ok:
		return maybe("the match tcpmss can't be read")
	case !p.has(unix.TCPOPT_MAXSEG):
		return is(false, o.not, "it has no option MSS")
	case p.MSS == 0:
		return maybe("its MSS isn't known (-m tcpmss)")
	}
	within := ports(o)(numeric(uint64(p.MSS)))
	if within == Maybe {
		return maybe("the match tcpmss can't be read")
	}
	return is(within == Yes, o.not, "its MSS is %d", p.MSS)
}

// number compares with one, as the end of an option's name says: -eq, -gt, -lt.
func number(o option) constant {
	n, err := strconv.ParseUint(o.arg(0), 0, 32)
	return func(v value) Answer {
		switch {
		case err != nil:
			return Maybe
		case strings.HasSuffix(o.name, "-gt"):
			return answerTo(v.number > n)
		case strings.HasSuffix(o.name, "-lt"):
			return answerTo(v.number < n)
		}
		return answerTo(v.number == n)
	}
}

// zeroUnknown is a number of which 0 says that it isn't known.
func zeroUnknown(n int) value {
	if n == 0 {
		return value{}
	}
	return numeric(uint64(n))
}

// optionWords are the numbers of TCP's options.
func optionWords(_ *walker, p *Packet) value {
	if p.Protocol != service.TCP {
		return value{kind: isAbsent}
	}
	out := []string{}
	for _, o := range p.options() {
		out = append(out, strconv.Itoa(int(o.kind)))
	}
	return named(out...)
}
