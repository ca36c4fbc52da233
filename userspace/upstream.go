package userspace

import (
	"errors"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

var datagrams = sync.Pool{New: func() any { return new([datagramSize]byte) }}

// upstream is a session's socket towards its endpoint. One goroutine receives;
// sends are ordered by the session's lock.
type upstream struct {
	*net.UDPConn
	from source
	raw  syscall.RawConn

	buf     *[datagramSize]byte // held only while a datagram is in it
	n       int
	recvErr error
	recv    func(fd uintptr) bool

	out     []byte
	sendErr error
	write   func(fd uintptr)
}

func (s *Server) openUpstream(from source, to netip.AddrPort) (*upstream, error) {
	c, err := s.dialers.udp(from, to)
	if err != nil {
		return nil, err
	}
	u := &upstream{UDPConn: c, from: from}
	if u.raw, err = c.SyscallConn(); err == nil {
		err = control(u.raw, func(fd int) error { return reportErrors(fd, service.FamilyOf(to.Addr())) })
	}
	if err != nil {
		c.Close()
		return nil, err
	}
	u.recv, u.write = u.tryReceive, u.trySend
	return u, nil
}

// reportErrors asks for every ICMP error. By default a socket learns of
// unreachable ports, but not of unreachable hosts (udp_err in net/ipv4/udp.c).
func reportErrors(fd int, f service.Family) error {
	if f == service.IPv6 {
		return unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_RECVERR, 1)
	}
	return unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_RECVERR, 1)
}

// receive waits for a datagram, without holding a buffer meanwhile. Hand it
// back with done.
func (u *upstream) receive() ([]byte, error) {
	if err := u.raw.Read(u.recv); err != nil {
		return nil, err
	}
	if u.recvErr != nil {
		return nil, u.recvErr
	}
	return u.buf[:u.n], nil
}

func (u *upstream) tryReceive(fd uintptr) bool {
	if u.buf == nil {
		u.buf = datagrams.Get().(*[datagramSize]byte)
	}
	for {
		u.n, u.recvErr = unix.Read(int(fd), u.buf[:])
		if u.recvErr == nil {
			return true
		}
		if errors.Is(u.recvErr, unix.EINTR) {
			continue
		}
		u.done(nil)
		if errors.Is(u.recvErr, unix.EAGAIN) {
			return false
		}
		forgetErrors(int(fd))
		return true
	}
}

// forgetErrors empties the queue of error reports, which holds memory.
func forgetErrors(fd int) {
	var b [1]byte
	var oob [256]byte
	for {
		if _, _, _, _, err := unix.Recvmsg(fd, b[:], oob[:], unix.MSG_ERRQUEUE|unix.MSG_DONTWAIT); err != nil {
			return
		}
	}
}

// done takes back the buffer of the last datagram.
func (u *upstream) done([]byte) {
	if u.buf != nil {
		datagrams.Put(u.buf)
		u.buf = nil
	}
}

// send sends a datagram, or loses it when the socket's buffer is full: it
// never waits.
func (u *upstream) send(b []byte) error {
	u.out = b
	err := u.raw.Control(u.write)
	u.out = nil
	if err != nil {
		return err
	}
	return u.sendErr
}

func (u *upstream) trySend(fd uintptr) {
	for {
		if _, u.sendErr = unix.Write(int(fd), u.out); !errors.Is(u.sendErr, unix.EINTR) {
			return
		}
	}
}

// expireIn makes receive return in at most d.
func (u *upstream) expireIn(d time.Duration) { u.SetReadDeadline(time.Now().Add(d)) }

// interrupt makes receive return now.
func (u *upstream) interrupt() { u.SetReadDeadline(time.Unix(1, 0)) }
