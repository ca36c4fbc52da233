package kernel

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/vishvananda/netlink/nl"
	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/service"
)

// AnyEntry is an entry of a set of any type. What its set's type doesn't have is zero.
type AnyEntry struct {
	Net, Net2 netip.Prefix // a single address is a network of one
	// Last is the end of a range that begins with Net's address, if that isn't zero.
	Last      netip.Addr
	Protocol  uint8 // of the port; 0 where the set has ports only
	Port      uint16
	Mark      uint32
	Interface string
	Physical  bool   // Interface is a port of a bridge
	Member    string // of a list:set: another set
	NoMatch   bool   // an exception
	MAC       bool   // the entry has a hardware address too, which isn't read
	Remaining uint32 // seconds; 0 for ever, in sets with timeouts
}

// ParseEntry reads an entry of a set of the given type in the form of `ipset save`, without options.
func ParseEntry(typ SetType, text string) (e AnyEntry, err error) {
	_, fields, _ := strings.Cut(string(typ), ":")
	rest := text
	for field := range strings.SplitSeq(fields, ",") {
		var part string
		part, rest, _ = strings.Cut(rest, ",")
		switch field {
		case "ip", "net":
			to := &e.Net
			if e.Net.IsValid() {
				to = &e.Net2
			}
			*to, err = parseNetwork(part, field == "net")
		case "port":
			e.Protocol, e.Port, err = parsePort(part, fields != "port")
		case "mark":
			var n uint64
			n, err = strconv.ParseUint(part, 0, 32)
			e.Mark = uint32(n)
		case "iface":
			e.Interface = part
		case "set":
			e.Member = part
		default:
			err = fmt.Errorf("unknown set type")
		}
		if err != nil {
			break
		}
	}
	if err == nil && rest != "" {
		err = fmt.Errorf("%q is too much", rest)
	}
	if err != nil {
		return AnyEntry{}, fmt.Errorf("parse entry %q of a %s set: %w", text, typ, err)
	}
	return e, nil
}

func parseNetwork(s string, network bool) (netip.Prefix, error) {
	var p netip.Prefix
	var err error
	if network && strings.Contains(s, "/") {
		p, err = netip.ParsePrefix(s)
	} else {
		var a netip.Addr
		a, err = netip.ParseAddr(s)
		p = netip.PrefixFrom(a, a.BitLen())
	}
	switch {
	case err != nil:
	case p.Bits() == 0:
		err = fmt.Errorf("%q: sets take no /0", s)
	case p.Addr().Zone() != "" || p.Addr().Is4In6():
		err = fmt.Errorf("%q isn't a plain address", s)
	}
	return p, err
}

// parsePort reads "tcp:80", or "80" where a set has ports only.
func parsePort(s string, named bool) (uint8, uint16, error) {
	var proto service.Protocol
	if named {
		name, port, ok := strings.Cut(s, ":")
		if !ok {
			return 0, 0, fmt.Errorf("%q has no protocol", s)
		}
		var err error
		if proto, err = service.ParseProtocol(name); err != nil {
			return 0, 0, err
		}
		s = port
	}
	n, err := strconv.ParseUint(s, 10, 16)
	return uint8(proto), uint16(n), err
}

// Text prints an entry of a set of the given type as `ipset save` does, without options.
func (e *AnyEntry) Text(typ SetType) string {
	_, fields, _ := strings.Cut(string(typ), ":")
	b := make([]byte, 0, 48)
	net, last := e.Net, e.Last
	for field := range strings.SplitSeq(fields, ",") {
		if len(b) > 0 {
			b = append(b, ',')
		}
		switch field {
		case "ip", "net":
			if net.IsSingleIP() {
				b = net.Addr().AppendTo(b)
			} else {
				b = net.AppendTo(b)
			}
			if last.IsValid() {
				b = last.AppendTo(append(b, '-'))
			}
			net, last = e.Net2, netip.Addr{}
		case "port":
			if fields != "port" {
				b = append(append(b, service.Protocol(e.Protocol).String()...), ':')
			}
			b = strconv.AppendUint(b, uint64(e.Port), 10)
		case "mark":
			b = fmt.Appendf(b, "%#08x", e.Mark)
		case "iface":
			b = append(b, e.Interface...)
		case "set":
			b = append(b, e.Member...)
		}
	}
	return string(b)
}

// Attributes follow include/uapi/linux/netfilter/ipset/ip_set.h. Numbers that
// mean something are in network byte order, which the attribute's type says.

// appendEntry appends e, of a set of kproxy's own, as one IPSET_ATTR_DATA attribute.
func appendEntry(b []byte, e *AnyEntry, timeout uint32) []byte {
	return netlink.AppendNested(b, nl.IPSET_ATTR_DATA, func(b []byte) []byte {
		if timeout > 0 {
			b = appendUint32(b, nl.IPSET_ATTR_TIMEOUT, timeout)
		}
		b = appendNetwork(b, e.Net, nl.IPSET_ATTR_IP, nl.IPSET_ATTR_CIDR)
		if e.Protocol > 0 {
			b = netlink.Append(b, nl.IPSET_ATTR_PROTO, e.Protocol)
		}
		if e.Protocol > 0 || !e.Net.IsValid() {
			b = netlink.AppendUint16(b, nl.IPSET_ATTR_PORT|netlink.NetByteOrder, e.Port)
		}
		return appendNetwork(b, e.Net2, nl.IPSET_ATTR_IP2, nl.IPSET_ATTR_CIDR2)
	})
}

func appendNetwork(b []byte, p netip.Prefix, address, length uint16) []byte {
	if !p.IsValid() {
		return b
	}
	inner := uint16(nl.IPSET_ATTR_IPADDR_IPV4)
	if p.Addr().Is6() {
		inner = nl.IPSET_ATTR_IPADDR_IPV6
	}
	b = netlink.AppendNested(b, address, func(b []byte) []byte { return netlink.AppendAddr(b, inner|netlink.NetByteOrder, p.Addr()) })
	if !p.IsSingleIP() {
		b = netlink.Append(b, length, byte(p.Bits()))
	}
	return b
}

func appendUint32(b []byte, typ uint16, v uint32) []byte {
	return netlink.AppendUint32(b, typ|netlink.NetByteOrder, v)
}

// Flags of an entry (enum ipset_cadt_flags).
const (
	entryPhysdev = 1 << 1
	entryNoMatch = 1 << 2
)

// entrySize is the least length of a value that decodeEntry reads.
var entrySize = map[uint16]int{
	nl.IPSET_ATTR_CIDR: 1, nl.IPSET_ATTR_CIDR2: 1, nl.IPSET_ATTR_PROTO: 1, nl.IPSET_ATTR_PORT: 2,
	nl.IPSET_ATTR_TIMEOUT: 4, nl.IPSET_ATTR_MARK: 4, nl.IPSET_ATTR_CADT_FLAGS: 4,
}

// decodeEntry reads one entry. An address without a length of its own is that of a network of
// netmask bits; -1 for a single address.
func decodeEntry(data []byte, netmask int) (e AnyEntry) {
	var address, address2 netip.Addr
	bits, bits2 := netmask, -1
	for typ, v := range netlink.Attributes(data) {
		if len(v) < entrySize[typ] {
			continue
		}
		switch typ {
		case nl.IPSET_ATTR_IP:
			address = decodeAddr(v)
		case nl.IPSET_ATTR_IP_TO:
			e.Last = decodeAddr(v)
		case nl.IPSET_ATTR_IP2:
			address2 = decodeAddr(v)
		case nl.IPSET_ATTR_CIDR:
			bits = int(v[0])
		case nl.IPSET_ATTR_CIDR2:
			bits2 = int(v[0])
		case nl.IPSET_ATTR_PROTO:
			e.Protocol = v[0]
		case nl.IPSET_ATTR_PORT:
			e.Port = binary.BigEndian.Uint16(v)
		case nl.IPSET_ATTR_TIMEOUT:
			e.Remaining = binary.BigEndian.Uint32(v)
		case nl.IPSET_ATTR_MARK:
			e.Mark = binary.BigEndian.Uint32(v)
		case nl.IPSET_ATTR_IFACE:
			e.Interface = netlink.Text(v)
		case nl.IPSET_ATTR_NAME:
			e.Member = netlink.Text(v)
		case nl.IPSET_ATTR_ETHER:
			e.MAC = true
		case nl.IPSET_ATTR_CADT_FLAGS:
			flags := binary.BigEndian.Uint32(v)
			e.Physical, e.NoMatch = flags&entryPhysdev != 0, flags&entryNoMatch != 0
		}
	}
	e.Net, e.Net2 = networkOf(address, bits), networkOf(address2, bits2)
	return e
}

func networkOf(a netip.Addr, bits int) netip.Prefix {
	if bits < 0 {
		bits = a.BitLen()
	}
	return netip.PrefixFrom(a, bits)
}

func decodeAddr(nested []byte) netip.Addr {
	for _, value := range netlink.Attributes(nested) {
		if a, ok := netip.AddrFromSlice(value); ok {
			return a
		}
	}
	return netip.Addr{}
}
