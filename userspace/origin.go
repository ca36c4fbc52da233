package userspace

import (
	"fmt"
	"net"
	"net/netip"

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
// same number (linux/netfilter_ipv6/ip6_tables.h). Both want room for an address
// of their family at least.
func originalDestination(fd int, f service.Family) (netip.AddrPort, error) {
	level := unix.SOL_IP
	if f == service.IPv6 {
		level = unix.SOL_IPV6
	}
	var r rawAddress
	if err := sysAskOption(fd, level, unix.SO_ORIGINAL_DST, &r); err != 0 {
		return netip.AddrPort{}, err
	}
	return r.addrPort(), nil
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
