package conntrack

import (
	"encoding/binary"
	"errors"
	"net/netip"
)

var errShort = errors.New("attribute is cut short")

// Flags in the type of an attribute (linux/netlink.h).
const (
	attrNested   = 0x8000
	attrTypeMask = 0x3fff
)

// attributes iterates over a buffer of netlink attributes without allocating:
// a dump has dozens for each of some hundred thousand entries. f gets the type
// without its flags.
func attributes(b []byte, f func(typ uint16, data []byte) error) error {
	for len(b) >= 4 {
		n := int(binary.NativeEndian.Uint16(b))
		if n < 4 || n > len(b) {
			return errShort
		}
		if err := f(binary.NativeEndian.Uint16(b[2:])&attrTypeMask, b[4:n]); err != nil {
			return err
		}
		b = b[min(align(n), len(b)):]
	}
	return nil
}

func align(n int) int { return (n + 3) &^ 3 }

// appendAttribute appends one attribute, padded.
func appendAttribute(b []byte, typ uint16, data ...byte) []byte {
	b = binary.NativeEndian.AppendUint16(b, uint16(4+len(data)))
	b = binary.NativeEndian.AppendUint16(b, typ)
	b = append(b, data...)
	return append(b, make([]byte, align(len(data))-len(data))...)
}

func appendUint16(b []byte, typ, v uint16) []byte {
	return appendAttribute(b, typ, byte(v>>8), byte(v))
}

func appendAddress(b []byte, typ uint16, a netip.Addr) []byte {
	if a.Is4() {
		v4 := a.As4()
		return appendAttribute(b, typ, v4[:]...)
	}
	v6 := a.As16()
	return appendAttribute(b, typ, v6[:]...)
}

// appendNested appends an attribute whose content f appends.
func appendNested(b []byte, typ uint16, f func([]byte) []byte) []byte {
	start := len(b)
	b = f(append(b, 0, 0, 0, 0))
	binary.NativeEndian.PutUint16(b[start:], uint16(len(b)-start))
	binary.NativeEndian.PutUint16(b[start+2:], typ|attrNested)
	return b
}

// The numbers of linux/netfilter/nfnetlink_conntrack.h that are used here.
const (
	ctaTupleOrig     = 1
	ctaTupleReply    = 2
	ctaStatus        = 3
	ctaProtoInfo     = 4
	ctaTimeout       = 7
	ctaMark          = 8
	ctaCountersOrig  = 9
	ctaCountersReply = 10
	ctaID            = 12
	ctaZone          = 18
	ctaTimestamp     = 20
	ctaFilter        = 25
	ctaStatusMask    = 26

	ctaTupleIP    = 1
	ctaTupleProto = 2

	ctaIPv4Src = 1
	ctaIPv4Dst = 2
	ctaIPv6Src = 3
	ctaIPv6Dst = 4

	ctaProtoNum     = 1
	ctaProtoSrcPort = 2
	ctaProtoDstPort = 3

	ctaProtoInfoTCP      = 1
	ctaProtoInfoTCPState = 1

	ctaCountersPackets = 1
	ctaCountersBytes   = 2

	ctaTimestampStart = 1

	ctaFilterOrigFlags = 1
	// filterProtoNum is CTA_FILTER_F_CTA_PROTO_NUM of the kernel's
	// net/netfilter/nf_internals.h: not exported, but part of the interface.
	filterProtoNum = 1 << 3
)
