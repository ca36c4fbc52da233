package userspace

import (
	"encoding/binary"
	"fmt"
	"net/netip"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/kernel/netlink"
	"kproxy.dev/kproxy/service"
)

// OriginLookup tells where redirected datagrams were headed.
type OriginLookup interface {
	// LookupAll calls found for each of flows in turn, which are given by where they arrive and their
	// client. It says the flow's original destination, and the client's address before the kernel gave it
	// another port to keep two of its flows apart, or that there is no such flow. It is called from many
	// goroutines, and holds up none of them.
	LookupAll(p service.Protocol, flows [][2]netip.AddrPort, found func(i int, orig, client netip.AddrPort, err error))
}

// origin says where a flow was headed, and which client it is from.
type origin struct {
	orig, client netip.AddrPort
	err          error
}

// kernelOrigin asks netfilter where an accepted connection was headed (SO_ORIGINAL_DST and its IPv6
// twin, which has the same number, linux/netfilter_ipv6/ip6_tables.h; both want room for an address of their family
// at least). It fails when the kernel doesn't track the connection; for one that wasn't
// redirected it returns the listener's own address.
func kernelOrigin(fd int, f service.Family) (netip.AddrPort, error) {
	level := unix.SOL_IP
	if f == service.IPv6 {
		level = unix.SOL_IPV6
	}
	var r rawAddress
	if err := sysAskOption(fd, level, unix.SO_ORIGINAL_DST, &r); err != 0 {
		return netip.AddrPort{}, fmt.Errorf("get original destination: %w", err)
	}
	return r.addrPort(), nil
}

// The interface that a client's packets come in on, which the kernel's rules
// match with -i: a socket of TCP remembers where the packet came in that
// established its connection (tcp_v4_syn_recv_sock and tcp_v6_syn_recv_sock), and
// each datagram says it. So pods are recognized alike in every data plane, however the
// route back to them goes.

// incomingTCP returns the name of the interface that an accepted connection came
// in on; empty if it is gone.
func incomingTCP(fd int, f service.Family, client netip.Addr) string {
	i, err := incomingIndex(fd, f)
	if err != nil {
		return ""
	}
	return arrival(fd, i, client)
}

// arrival returns the name of the interface that packets of a client on another
// host came in on, given what a socket says of them. Where a bridge shows packets
// of IPv6 to the rules (net.bridge.bridge-nf-call-ip6tables) and these redirect
// them, the socket says that it was lo, to which the new destination belongs
// (ip6_rcv_core); then it is where the route back leads.
func arrival(fd, index int, client netip.Addr) string {
	if index == loopbackIndex && client.Is6() {
		return routeInterface(fd, client)
	}
	return interfaceName(fd, index)
}

// incomingIndex asks an accepted socket, which says it in the form of a control
// message. The option has to be set, and not for good: that costs a copy of every
// packet (tcp_v6_do_rcv).
func incomingIndex(fd int, f service.Family) (int, error) {
	level, tell, ask := unix.SOL_IP, unix.IP_PKTINFO, unix.IP_PKTOPTIONS
	if f == service.IPv6 {
		level, tell, ask = unix.SOL_IPV6, unix.IPV6_RECVPKTINFO, unix.IPV6_2292PKTOPTIONS
	}
	if err := unix.SetsockoptInt(fd, level, tell, 1); err != nil {
		return 0, err
	}
	var b [128]byte // zeros, which end the messages
	errno := sysAskOption(fd, level, ask, &b)
	if err := unix.SetsockoptInt(fd, level, tell, 0); err != nil {
		return 0, err
	}
	if errno != 0 {
		return 0, errno
	}
	info, _ := findPacketInfo(b[:])
	if info == nil {
		return 0, unix.ENODATA
	}
	return info.interfaceIndex(), nil
}

// interfaceName returns the name of an interface; empty if there is none. Any
// socket will do to ask.
func interfaceName(fd, index int) string {
	req, err := unix.NewIfreq("")
	if err != nil {
		return ""
	}
	req.SetUint32(uint32(index))
	if err := unix.IoctlIfreq(fd, unix.SIOCGIFNAME, req); err != nil {
		return ""
	}
	return req.Name()
}

// loopbackIndex is that of lo (LOOPBACK_IFINDEX).
const loopbackIndex = 1

// routeInterface returns the name of the interface by which packets to an IPv6 address
// leave; empty if there is no route.
func routeInterface(fd int, to netip.Addr) string {
	s, err := netlink.Open(unix.NETLINK_ROUTE, 4<<10)
	if err != nil {
		return ""
	}
	defer s.Close()
	name := ""
	_ = s.Do(1, func(b []byte, _ int) []byte { // struct rtmsg, then the address
		b = append(netlink.AppendRequest(b, unix.RTM_GETROUTE, 0), unix.AF_INET6, 128, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
		return netlink.AppendAddr(b, unix.RTA_DST, to)
	}, func(_ int, route []byte, _ error) {
		for typ, value := range netlink.Attributes(route[min(len(route), unix.SizeofRtMsg):]) {
			if typ == unix.RTA_OIF && len(value) == 4 {
				name = interfaceName(fd, int(binary.NativeEndian.Uint32(value)))
			}
		}
	})
	return name
}

// packetInfo is struct in_pktinfo or struct in6_pktinfo, in memory's order.
type packetInfo []byte

func (p packetInfo) interfaceIndex() int {
	at := 0
	if len(p) == unix.SizeofInet6Pktinfo {
		at = 16 // ipi6_addr comes first
	}
	return int(binary.NativeEndian.Uint32(p[at:]))
}

// findPacketInfo finds where a packet arrived in control messages, and its TTL; nil and 0 where they don't say. They
// are read by hand because the parsers of net and x/sys allocate.
func findPacketInfo(oob []byte) (info packetInfo, hops int32) {
	for len(oob) >= unix.SizeofCmsghdr {
		size := int(binary.NativeEndian.Uint64(oob))
		level, kind := int32(binary.NativeEndian.Uint32(oob[8:])), int32(binary.NativeEndian.Uint32(oob[12:]))
		if size < unix.SizeofCmsghdr || size > len(oob) {
			break
		}
		data := oob[unix.SizeofCmsghdr:size]
		switch {
		case info == nil && level == unix.SOL_IP && kind == unix.IP_PKTINFO && len(data) >= unix.SizeofInet4Pktinfo:
			info = data[:unix.SizeofInet4Pktinfo]
		case info == nil && level == unix.SOL_IPV6 && kind == unix.IPV6_PKTINFO && len(data) >= unix.SizeofInet6Pktinfo:
			info = data[:unix.SizeofInet6Pktinfo]
		case (level == unix.SOL_IP && kind == unix.IP_TTL || level == unix.SOL_IPV6 && kind == unix.IPV6_HOPLIMIT) && len(data) >= 4:
			hops = max(1, int32(binary.NativeEndian.Uint32(data)))
		}
		oob = oob[min(len(oob), unix.CmsgSpace(size-unix.SizeofCmsghdr)):]
	}
	return info, hops
}
