package userspace

import (
	"encoding/binary"
	"net"
	"net/netip"
	"strconv"
	"unsafe"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// sessionKey names a session within a worker, whose datagrams all come to the
// same port. Under one key come the datagrams of one flow at a time: the kernel
// gives a client whose flows would look alike another port. IPv4 addresses are
// in the first bytes.
type sessionKey struct {
	local, client [16]byte
	zone          uint32 // of a link-local client
	port          uint16 // the client's
	family        service.Family
}

// keyOf makes the key of a datagram; false if its control messages don't say
// where it arrived. in is the index of the interface.
func keyOf(name *unix.RawSockaddrInet6, oob []byte) (k sessionKey, in int, ok bool) {
	info, ok := findPacketInfo(oob)
	switch {
	case !ok:
		return k, 0, false
	case name.Family == unix.AF_INET:
		v4 := (*unix.RawSockaddrInet4)(unsafe.Pointer(name))
		k.port = networkOrder(v4.Port)
		*(*[4]byte)(k.client[:]) = v4.Addr
		if len(info) != unix.SizeofInet4Pktinfo {
			return k, 0, false
		}
		*(*[4]byte)(k.local[:]) = [4]byte(info[8:12]) // ipi_addr: the header's destination
	default:
		k.family, k.port, k.client, k.zone = service.IPv6, networkOrder(name.Port), name.Addr, name.Scope_id
		if len(info) != unix.SizeofInet6Pktinfo {
			return k, 0, false
		}
		k.local = [16]byte(info[:16])
	}
	return k, info.interfaceIndex(), true
}

// networkOrder converts a port, which is in network order in memory.
func networkOrder(port uint16) uint16 {
	return binary.BigEndian.Uint16((*[2]byte)(unsafe.Pointer(&port))[:])
}

// address returns an address of the key's family.
func (k *sessionKey) address(a *[16]byte, zone uint32) netip.Addr {
	if k.family == service.IPv4 {
		return netip.AddrFrom4([4]byte(a[:4]))
	}
	addr := netip.AddrFrom16(*a)
	if zone != 0 {
		addr = addr.WithZone(zoneName(zone))
	}
	return addr
}

func (k *sessionKey) clientAddress() netip.AddrPort {
	return netip.AddrPortFrom(k.address(&k.client, k.zone), k.port)
}

// zoneName returns the name of the interface that a link-local address is on.
func zoneName(zone uint32) string {
	if ifi, err := net.InterfaceByIndex(int(zone)); err == nil {
		return ifi.Name
	}
	return strconv.Itoa(int(zone))
}

// destination is the key's client, for answers from the address that it had sent to.
func (k *sessionKey) destination() (d destination) {
	if k.family == service.IPv4 {
		*(*unix.RawSockaddrInet4)(unsafe.Pointer(&d.name)) = unix.RawSockaddrInet4{Family: unix.AF_INET, Port: networkOrder(k.port), Addr: [4]byte(k.client[:4])}
		d.size, d.control = unix.SizeofSockaddrInet4, unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: [4]byte(k.local[:4])})
		return d
	}
	d.name = unix.RawSockaddrInet6{Family: unix.AF_INET6, Port: networkOrder(k.port), Addr: k.client, Scope_id: k.zone}
	d.size, d.control = unix.SizeofSockaddrInet6, unix.PktInfo6(&unix.Inet6Pktinfo{Addr: k.local})
	return d
}
