package handover

import (
	"encoding/binary"
	"net/netip"
)

// Packed returns an address and port as messages have them.
func Packed(a netip.AddrPort) []byte {
	return binary.BigEndian.AppendUint16(append(make([]byte, 0, 18), a.Addr().AsSlice()...), a.Port())
}

// Unpacked returns the address and port that Packed was given; invalid if Packed didn't make b.
func Unpacked(b []byte) netip.AddrPort {
	if len(b) < 2 {
		return netip.AddrPort{}
	}
	port := len(b) - 2
	a, _ := netip.AddrFromSlice(b[:port])
	return netip.AddrPortFrom(a, binary.BigEndian.Uint16(b[port:]))
}
