package userspace

import (
	"encoding/binary"
	"net/netip"

	"golang.org/x/sys/unix"
)

// rawAddress is a socket address as the kernel has it, struct sockaddr_in or
// sockaddr_in6, in place: those of x/sys are allocated, and to tell which kind
// they are it asks for the socket's protocol after each accept.
type rawAddress struct {
	family uint16
	port   [2]byte // network order, as is all that follows
	v4     [4]byte // flow information in an IPv6 address
	v6     [16]byte
	zone   uint32
}

const (
	sizeofAddress4 = unix.SizeofSockaddrInet4
	sizeofAddress6 = unix.SizeofSockaddrInet6
)

// newRawAddress is a's. It leaves zones out.
func newRawAddress(a netip.AddrPort) (r rawAddress) {
	r.family = unix.AF_INET6
	if a.Addr().Is4() {
		r.family, r.v4 = unix.AF_INET, a.Addr().As4()
	} else {
		r.v6 = a.Addr().As16()
	}
	binary.BigEndian.PutUint16(r.port[:], a.Port())
	return r
}

func (r *rawAddress) size() uint32 {
	if r.family == unix.AF_INET {
		return sizeofAddress4
	}
	return sizeofAddress6
}

// addrPort is r without its zone. IPv4-mapped addresses become IPv4 ones.
func (r *rawAddress) addrPort() netip.AddrPort {
	port := binary.BigEndian.Uint16(r.port[:])
	switch r.family {
	case unix.AF_INET:
		return netip.AddrPortFrom(netip.AddrFrom4(r.v4), port)
	case unix.AF_INET6:
		return netip.AddrPortFrom(netip.AddrFrom16(r.v6).Unmap(), port)
	}
	return netip.AddrPort{}
}

// failure is e as an error: nil if it is 0.
func failure(e unix.Errno) error {
	if e == 0 {
		return nil
	}
	return e
}
