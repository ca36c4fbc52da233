package kernel

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/net/icmp"
	"golang.org/x/net/ipv4"
	"golang.org/x/net/ipv6"
	"golang.org/x/sys/unix"
)

// Sizes of a time exceeded message: headers, and the most that a router sends (RFC 1812, 4.3.2.3; RFC 4443, 2.4).
const (
	icmpHeader, udpHeader = 8, 8
	ip4Header, icmp4Most  = 20, 576
	ip6Header, icmp6Most  = 40, 1280
)

// TimeExceeded tells a client that its UDP datagram may cross no router any more, as a router does (RFC 792, RFC 4443). The message
// has the datagram as it arrived at a socket of this node's: conntrack puts in the address that the client had sent it to. The
// source is the kernel's choice. TimeExceeded needs CAP_NET_RAW.
func TimeExceeded(client, at netip.AddrPort, datagram []byte) error {
	all := udpHeader + len(datagram)
	protocol, typ, most := unix.IPPROTO_ICMPV6, icmp.Type(ipv6.ICMPTypeTimeExceeded), icmp6Most-2*ip6Header
	ip := []byte{0x60, 0, 0, 0, byte(all >> 8), byte(all), unix.IPPROTO_UDP, 1}
	v4 := client.Addr().Is4()
	if v4 {
		protocol, typ, most = unix.IPPROTO_ICMP, ipv4.ICMPTypeTimeExceeded, icmp4Most-2*ip4Header
		ip = []byte{0x45, 0, byte((ip4Header + all) >> 8), byte(ip4Header + all), 0, 0, 0, 0, 1, unix.IPPROTO_UDP, 0, 0}
	}
	ip = append(append(ip, client.Addr().AsSlice()...), at.Addr().AsSlice()...)
	if v4 {
		binary.BigEndian.PutUint16(ip[10:], ^fold(checksum(0, ip)))
	}
	for _, v := range []uint16{client.Port(), at.Port(), uint16(all), 0} { // the datagram's checksum isn't known
		ip = binary.BigEndian.AppendUint16(ip, v)
	}
	ip = append(ip, datagram[:min(len(datagram), most-icmpHeader-udpHeader)]...)
	message, err := (&icmp.Message{Type: typ, Body: &icmp.TimeExceeded{Data: ip}}).Marshal(nil) // the kernel fills in the checksum of ICMPv6 (raw(7))
	if err != nil {
		return err
	}
	return sendRaw(protocol, client.Addr(), message)
}
