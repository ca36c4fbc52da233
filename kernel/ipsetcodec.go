package kernel

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"iter"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/service"
)

// Attributes follow include/uapi/linux/netfilter/ipset/ip_set.h. Numbers that
// mean something are in network byte order, which the attribute's type says.

// appendElement appends e as one IPSET_ATTR_DATA attribute.
func appendElement(b []byte, e element, timeout uint32) []byte {
	b, whole := openAttr(b, nl.IPSET_ATTR_DATA|nl.NLA_F_NESTED)
	if timeout > 0 {
		b = appendUint32(b, nl.IPSET_ATTR_TIMEOUT, timeout)
	}
	if e.addr.IsValid() {
		b = appendAddr(b, nl.IPSET_ATTR_IP, e.addr)
	}
	if e.bits > 0 {
		b = appendAttr(b, nl.IPSET_ATTR_CIDR, []byte{byte(e.bits)})
	}
	if e.proto > 0 {
		b = appendAttr(b, nl.IPSET_ATTR_PROTO, []byte{byte(e.proto)})
	}
	if e.proto > 0 || !e.addr.IsValid() {
		b = appendAttr(b, nl.IPSET_ATTR_PORT|nl.NLA_F_NET_BYTEORDER, binary.BigEndian.AppendUint16(nil, e.port))
	}
	if e.addr2.IsValid() {
		b = appendAddr(b, nl.IPSET_ATTR_IP2, e.addr2)
	}
	if e.bits2 > 0 {
		b = appendAttr(b, nl.IPSET_ATTR_CIDR2, []byte{byte(e.bits2)})
	}
	return closeAttr(b, whole)
}

func appendAddr(b []byte, typ uint16, a netip.Addr) []byte {
	b, at := openAttr(b, typ|nl.NLA_F_NESTED)
	inner := uint16(nl.IPSET_ATTR_IPADDR_IPV4)
	if a.Is6() {
		inner = nl.IPSET_ATTR_IPADDR_IPV6
	}
	b = appendAttr(b, inner|nl.NLA_F_NET_BYTEORDER, a.AsSlice())
	return closeAttr(b, at)
}

func openAttr(b []byte, typ uint16) ([]byte, int) {
	at := len(b)
	b = binary.NativeEndian.AppendUint16(b, 0)
	return binary.NativeEndian.AppendUint16(b, typ), at
}

func closeAttr(b []byte, at int) []byte {
	binary.NativeEndian.PutUint16(b[at:], uint16(len(b)-at))
	for len(b)%unix.NLA_ALIGNTO != 0 {
		b = append(b, 0)
	}
	return b
}

func appendUint32(b []byte, typ uint16, v uint32) []byte {
	return appendAttr(b, typ|nl.NLA_F_NET_BYTEORDER, binary.BigEndian.AppendUint32(nil, v))
}

func appendString(b []byte, typ uint16, s string) []byte {
	return appendAttr(b, typ, append([]byte(s), 0))
}

func appendAttr(b []byte, typ uint16, value []byte) []byte {
	b, at := openAttr(b, typ)
	return closeAttr(append(b, value...), at)
}

// Attributes iterates over netlink attributes: type without flags, and value.
// It stops at one that is cut short. (nl.ParseAttributes starts a goroutine.)
func Attributes(b []byte) iter.Seq2[uint16, []byte] {
	return func(yield func(uint16, []byte) bool) {
		for len(b) >= unix.SizeofRtAttr {
			n := int(binary.NativeEndian.Uint16(b))
			typ := binary.NativeEndian.Uint16(b[2:]) & nl.NLA_TYPE_MASK
			if n < unix.SizeofRtAttr || n > len(b) || !yield(typ, b[unix.SizeofRtAttr:n]) {
				return
			}
			b = b[min(len(b), (n+unix.NLA_ALIGNTO-1)&^(unix.NLA_ALIGNTO-1)):]
		}
	}
}

// AttributeText is a string attribute: up to its NUL, if it has one.
func AttributeText(b []byte) string {
	s, _, _ := bytes.Cut(b, []byte{0})
	return string(s)
}

// decode adds what one message of a LIST answer says to st. A big set comes in
// several messages; only the first has the header.
func (st *SetState) decode(msg []byte) error {
	if len(msg) < nl.SizeofNfgenmsg {
		return fmt.Errorf("decode set: message of %d bytes", len(msg))
	}
	var adt []byte
	for typ, value := range Attributes(msg[nl.SizeofNfgenmsg:]) {
		switch typ {
		case nl.IPSET_ATTR_SETNAME:
			st.Name = AttributeText(value)
		case nl.IPSET_ATTR_TYPENAME:
			st.Type = SetType(AttributeText(value))
		case nl.IPSET_ATTR_FAMILY:
			if len(value) > 0 && value[0] == unix.AF_INET6 {
				st.Family = service.IPv6
			}
		case nl.IPSET_ATTR_DATA:
			st.decodeHeader(value)
		case nl.IPSET_ATTR_ADT:
			adt = value
		}
	}
	for _, value := range Attributes(adt) {
		e, timeout, timed := decodeElement(value)
		st.Entries = append(st.Entries, e.format(st.Type))
		if timed {
			st.Remaining = append(st.Remaining, timeout)
		}
	}
	return nil
}

func (st *SetState) decodeHeader(data []byte) {
	for typ, value := range Attributes(data) {
		if len(value) != 4 {
			continue
		}
		v := binary.BigEndian.Uint32(value)
		switch typ {
		case nl.IPSET_ATTR_TIMEOUT:
			st.Timeout = v
		case nl.IPSET_ATTR_ELEMENTS:
			st.Count = int(v)
		}
	}
}

// elementSize is the least length of a value that decodeElement reads.
var elementSize = map[uint16]int{
	nl.IPSET_ATTR_CIDR: 1, nl.IPSET_ATTR_CIDR2: 1, nl.IPSET_ATTR_PROTO: 1,
	nl.IPSET_ATTR_PORT: 2, nl.IPSET_ATTR_TIMEOUT: 4,
}

func decodeElement(data []byte) (e element, timeout uint32, timed bool) {
	for typ, v := range Attributes(data) {
		if len(v) < elementSize[typ] {
			continue
		}
		switch typ {
		case nl.IPSET_ATTR_IP:
			e.addr = decodeAddr(v)
		case nl.IPSET_ATTR_IP2:
			e.addr2 = decodeAddr(v)
		case nl.IPSET_ATTR_CIDR:
			e.bits = int(v[0])
		case nl.IPSET_ATTR_CIDR2:
			e.bits2 = int(v[0])
		case nl.IPSET_ATTR_PROTO:
			e.proto = service.Protocol(v[0])
		case nl.IPSET_ATTR_PORT:
			e.port = binary.BigEndian.Uint16(v)
		case nl.IPSET_ATTR_TIMEOUT:
			timeout, timed = binary.BigEndian.Uint32(v), true
		}
	}
	return e, timeout, timed
}

func decodeAddr(nested []byte) netip.Addr {
	for _, value := range Attributes(nested) {
		if a, ok := netip.AddrFromSlice(value); ok {
			return a
		}
	}
	return netip.Addr{}
}
