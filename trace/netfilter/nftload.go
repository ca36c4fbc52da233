package netfilter

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"math/bits"
	"net"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/lb"
	"kproxy.dev/kproxy/service"
)

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

// metaFields holds the fields of meta that can be known (enum nft_meta_keys).
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
