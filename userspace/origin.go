package userspace

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"unsafe"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// OriginLookup tells where redirected datagrams were headed.
type OriginLookup interface {
	// Lookup returns the original destination of the flow that arrives at
	// local from client, and the client's address before the kernel gave it
	// another port to keep two of its flows apart. It fails when there is no
	// such flow. It is called from many goroutines.
	Lookup(proto service.Protocol, local, client netip.AddrPort) (orig, realClient netip.AddrPort, err error)
}

// kernelOrigin asks netfilter where an accepted connection was headed. It
// fails when the kernel doesn't track the connection; for one that wasn't
// redirected it returns the listener's own address.
func kernelOrigin(fd int, f service.Family) (netip.AddrPort, error) {
	orig, err := originalDestination(fd, f)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("get original destination: %w", err)
	}
	return orig, nil
}

// originalDestination reads SO_ORIGINAL_DST and its IPv6 twin, which has the
// same number (linux/netfilter_ipv6/ip6_tables.h). x/sys has no wrapper, but
// its structs for other options have the sizes of the socket addresses.
func originalDestination(fd int, f service.Family) (netip.AddrPort, error) {
	if f == service.IPv4 {
		v, err := unix.GetsockoptIPv6Mreq(fd, unix.SOL_IP, unix.SO_ORIGINAL_DST)
		if err != nil {
			return netip.AddrPort{}, err
		}
		sa := v.Multiaddr // struct sockaddr_in
		return netip.AddrPortFrom(netip.AddrFrom4([4]byte(sa[4:8])), binary.BigEndian.Uint16(sa[2:4])), nil
	}
	v, err := unix.GetsockoptIPv6MTUInfo(fd, unix.SOL_IPV6, unix.SO_ORIGINAL_DST)
	if err != nil {
		return netip.AddrPort{}, err
	}
	port := *(*[2]byte)(unsafe.Pointer(&v.Addr.Port)) // network order in memory
	return netip.AddrPortFrom(netip.AddrFrom16(v.Addr.Addr), binary.BigEndian.Uint16(port[:])), nil
}

// addrPort converts the address of a TCP or UDP socket. IPv4-mapped addresses
// become IPv4 ones.
func addrPort(a net.Addr) netip.AddrPort {
	var ap netip.AddrPort
	switch a := a.(type) {
	case *net.TCPAddr:
		ap = a.AddrPort()
	case *net.UDPAddr:
		ap = a.AddrPort()
	}
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}
