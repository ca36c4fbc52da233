package userspace

import (
	"errors"
	"net"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// replier sends to one client from the address it had sent to. It goes past
// the lock that net has for writers, so that sessions don't wait for each other.
type replier struct {
	raw     syscall.RawConn
	to      unix.Sockaddr
	control []byte // IP_PKTINFO
	out     []byte
	write   func(fd uintptr)
}

func newReplier(l *udpListener, k sessionKey) replier {
	raw, _ := l.SyscallConn() // fails for a nil connection only
	r := replier{raw: raw}
	if l.family == service.IPv4 {
		r.to = &unix.SockaddrInet4{Port: int(k.client.Port()), Addr: k.client.Addr().As4()}
		r.control = unix.PktInfo4(&unix.Inet4Pktinfo{Spec_dst: k.local.Addr().As4()})
		return r
	}
	r.to = &unix.SockaddrInet6{Port: int(k.client.Port()), Addr: k.client.Addr().As16(), ZoneId: zoneID(k.client.Addr())}
	r.control = unix.PktInfo6(&unix.Inet6Pktinfo{Addr: k.local.Addr().As16()})
	return r
}

// zoneID returns the number of the interface that a link-local address is on.
func zoneID(a netip.Addr) uint32 {
	if a.Zone() == "" {
		return 0
	}
	ifi, err := net.InterfaceByName(a.Zone())
	if err != nil {
		return 0
	}
	return uint32(ifi.Index)
}

// send answers the client. A datagram that can't be sent now is lost.
func (r *replier) send(b []byte) {
	if r.write == nil {
		r.write = r.trySend
	}
	r.out = b
	r.raw.Control(r.write)
	r.out = nil
}

func (r *replier) trySend(fd uintptr) {
	for {
		if _, err := unix.SendmsgN(int(fd), r.out, r.control, r.to, unix.MSG_DONTWAIT); !errors.Is(err, unix.EINTR) {
			return
		}
	}
}
