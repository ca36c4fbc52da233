package kernel

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
	"kproxy.dev/kproxy/kernel/nlmsg"
	"kproxy.dev/kproxy/service"
)

// Attributes follow include/uapi/linux/netfilter/ipset/ip_set.h. Numbers that
// mean something are in network byte order, which the attribute's type says.

// appendElement appends e as one IPSET_ATTR_DATA attribute.
func appendElement(b []byte, e element, timeout uint32) []byte {
	return nlmsg.AppendNested(b, nl.IPSET_ATTR_DATA, func(b []byte) []byte {
		if timeout > 0 {
			b = appendUint32(b, nl.IPSET_ATTR_TIMEOUT, timeout)
		}
		if e.addr.IsValid() {
			b = appendAddr(b, nl.IPSET_ATTR_IP, e.addr)
		}
		if e.bits > 0 {
			b = nlmsg.Append(b, nl.IPSET_ATTR_CIDR, byte(e.bits))
		}
		if e.proto > 0 {
			b = nlmsg.Append(b, nl.IPSET_ATTR_PROTO, byte(e.proto))
		}
		if e.proto > 0 || !e.addr.IsValid() {
			b = nlmsg.AppendUint16(b, nl.IPSET_ATTR_PORT|nlmsg.NetByteOrder, e.port)
		}
		if e.addr2.IsValid() {
			b = appendAddr(b, nl.IPSET_ATTR_IP2, e.addr2)
		}
		if e.bits2 > 0 {
			b = nlmsg.Append(b, nl.IPSET_ATTR_CIDR2, byte(e.bits2))
		}
		return b
	})
}

func appendAddr(b []byte, typ uint16, a netip.Addr) []byte {
	inner := uint16(nl.IPSET_ATTR_IPADDR_IPV4)
	if a.Is6() {
		inner = nl.IPSET_ATTR_IPADDR_IPV6
	}
	return nlmsg.AppendNested(b, typ, func(b []byte) []byte { return nlmsg.AppendAddr(b, inner|nlmsg.NetByteOrder, a) })
}

func appendUint32(b []byte, typ uint16, v uint32) []byte {
	return nlmsg.AppendUint32(b, typ|nlmsg.NetByteOrder, v)
}

// decode adds what one message of a LIST answer says to st. A big set comes in
// several messages; only the first has the header.
func (st *SetState) decode(msg []byte) error {
	if len(msg) < nl.SizeofNfgenmsg {
		return fmt.Errorf("decode set: message of %d bytes", len(msg))
	}
	var adt []byte
	for typ, value := range nlmsg.Attributes(msg[nl.SizeofNfgenmsg:]) {
		switch typ {
		case nl.IPSET_ATTR_SETNAME:
			st.Name = nlmsg.Text(value)
		case nl.IPSET_ATTR_TYPENAME:
			st.Type = SetType(nlmsg.Text(value))
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
	for _, value := range nlmsg.Attributes(adt) {
		e, timeout, timed := decodeElement(value)
		st.Entries = append(st.Entries, e.format(st.Type))
		if timed {
			st.Remaining = append(st.Remaining, timeout)
		}
	}
	return nil
}

func (st *SetState) decodeHeader(data []byte) {
	for typ, value := range nlmsg.Attributes(data) {
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
	for typ, v := range nlmsg.Attributes(data) {
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
	for _, value := range nlmsg.Attributes(nested) {
		if a, ok := netip.AddrFromSlice(value); ok {
			return a
		}
	}
	return netip.Addr{}
}
