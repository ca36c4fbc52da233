package kernel

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

	"golang.org/x/sys/unix"
)

// Challenge has the end of a TCP connection at to say where it is: it sends it a SYN with an ACK that seems to come from the
// other end, which a connection answers with an ACK and is no worse for (a challenge ACK, RFC 5961, 4.2). Where conntrack
// doesn't know the connection, it takes the SYN for invalid and remembers nothing of it (tcp_conntracks in
// net/netfilter/nf_conntrack_proto_tcp.c); the ACK then goes where any packet of an unknown connection goes, and what
// that meets resets the connection. Challenge needs CAP_NET_RAW.
func Challenge(from, to netip.AddrPort) error {
	return sendRaw(unix.IPPROTO_RAW, to.Addr(), synACK(from, to)) // the IP header is ours (raw(7))
}

func sendRaw(protocol int, to netip.Addr, packet []byte) error {
	version := 6
	if to.Is4() {
		version = 4
	}
	c, err := net.ListenIP(fmt.Sprintf("ip%d:%d", version, protocol), nil)
	if err != nil {
		return fmt.Errorf("open a raw socket: %w", err)
	}
	defer c.Close()
	if _, err := c.WriteToIP(packet, &net.IPAddr{IP: to.AsSlice(), Zone: to.Zone()}); err != nil {
		return fmt.Errorf("send to %s: %w", to, err)
	}
	return nil
}

// synACK returns a packet with its IP header.
func synACK(from, to netip.AddrPort) []byte {
	const header, window, hops = 20, 1024, 64
	tcp := make([]byte, header)
	binary.BigEndian.PutUint16(tcp, from.Port())
	binary.BigEndian.PutUint16(tcp[2:], to.Port())
	tcp[12], tcp[13] = header/4<<4, 0x12 // SYN, ACK
	binary.BigEndian.PutUint16(tcp[14:], window)
	src, dst := from.Addr().AsSlice(), to.Addr().AsSlice()
	sum := checksum(checksum(checksum(unix.IPPROTO_TCP+header, src), dst), tcp) // with the pseudo header
	binary.BigEndian.PutUint16(tcp[16:], ^fold(sum))
	var ip []byte
	if to.Addr().Is4() {
		ip = []byte{0x45, 0, 0, 2 * header, 0, 0, 0, 0, hops, unix.IPPROTO_TCP, 0, 0} // the kernel fills in the checksum
	} else {
		ip = []byte{0x60, 0, 0, 0, 0, header, unix.IPPROTO_TCP, hops}
	}
	return append(append(append(ip, src...), dst...), tcp...)
}

// checksum adds b to the Internet checksum (RFC 1071), fold finishes it.
func checksum(sum uint32, b []byte) uint32 {
	for i := 0; i+1 < len(b); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(b[i:]))
	}
	return sum
}

func fold(sum uint32) uint16 {
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return uint16(sum)
}
