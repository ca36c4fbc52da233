package kernel

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"

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
	family, protocol := unix.AF_INET6, unix.IPPROTO_ICMPV6
	var address unix.Sockaddr
	if client.Addr().Is4() {
		family, protocol = unix.AF_INET, unix.IPPROTO_ICMP
		address = &unix.SockaddrInet4{Addr: client.Addr().As4()}
	} else {
		v6 := &unix.SockaddrInet6{Addr: client.Addr().As16()}
		if link, err := net.InterfaceByName(client.Addr().Zone()); err == nil {
			v6.ZoneId = uint32(link.Index)
		}
		address = v6
	}
	fd, err := unix.Socket(family, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return fmt.Errorf("open a raw socket: %w", err)
	}
	defer unix.Close(fd)
	if err := unix.Sendto(fd, timeExceeded(client, at, datagram), 0, address); err != nil {
		return fmt.Errorf("send to %s: %w", client.Addr(), err)
	}
	return nil
}

// timeExceeded returns a message without its IP header. The kernel fills in the checksum of ICMPv6 (raw(7)).
func timeExceeded(from, to netip.AddrPort, datagram []byte) []byte {
	v4, all := from.Addr().Is4(), udpHeader+len(datagram)
	message, most := []byte{3, 0, 0, 0, 0, 0, 0, 0}, icmp6Most-2*ip6Header
	ip := []byte{0x60, 0, 0, 0, byte(all >> 8), byte(all), unix.IPPROTO_UDP, 1}
	if v4 {
		message[0], most = 11, icmp4Most-2*ip4Header
		ip = []byte{0x45, 0, byte((ip4Header + all) >> 8), byte(ip4Header + all), 0, 0, 0, 0, 1, unix.IPPROTO_UDP, 0, 0}
	}
	ip = append(append(ip, from.Addr().AsSlice()...), to.Addr().AsSlice()...)
	if v4 {
		binary.BigEndian.PutUint16(ip[10:], ^fold(checksum(0, ip)))
	}
	message = append(message, ip...)
	for _, v := range []uint16{from.Port(), to.Port(), uint16(all), 0} { // the datagram's checksum isn't known
		message = binary.BigEndian.AppendUint16(message, v)
	}
	message = append(message, datagram[:min(len(datagram), most-icmpHeader-udpHeader)&^1]...) // an even number, as checksum takes
	if v4 {
		binary.BigEndian.PutUint16(message[2:], ^fold(checksum(0, message)))
	}
	return message
}
