package netfilter

import (
	"cmp"
	"encoding/binary"
	"fmt"
	"math/bits"
	"net"
	"net/netip"
	"strings"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel/netlink"
)

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
