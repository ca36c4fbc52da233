package userspace

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// datagramSize holds any datagram: 65,507 bytes over IPv4, 65,527 over IPv6.
const datagramSize = 1<<16 - 1

// listenerBuffer is the size of the shared socket's kernel buffers: all
// services' datagrams pass through it.
const listenerBuffer = 8 << 20

// sessionKey names a session. Under one key come the datagrams of one flow at
// a time: the kernel gives a client whose flows would look alike another port.
type sessionKey struct{ local, client netip.AddrPort }

// udpListener receives one family's datagrams and hands them to sessions. Its
// one goroutine never waits for anything but datagrams.
type udpListener struct {
	*net.UDPConn
	server *Server
	addr   netip.AddrPort
	family service.Family
	prober *net.UDPConn                   // of Probe, nil before its first one
	probe  atomic.Pointer[netip.AddrPort] // prober's; datagrams from there are answered

	mu       sync.Mutex // guards sessions
	sessions map[sessionKey]*session
}

func (l *udpListener) port() uint16 { return l.addr.Port() }
func (l *udpListener) close()       { l.Close() }

func (s *Server) openUDP(f service.Family, port uint16) (*udpListener, error) {
	addr := netip.AddrPortFrom(wildcard(f), port)
	pc, err := new(net.ListenConfig).ListenPacket(context.Background(), "udp"+familyDigit(addr.Addr()), addr.String())
	if err != nil {
		return nil, fmt.Errorf("listen on UDP port %d: %w", port, err)
	}
	l := &udpListener{UDPConn: pc.(*net.UDPConn), server: s, addr: addrPort(pc.LocalAddr()), family: f, sessions: map[sessionKey]*session{}}
	raw, err := l.SyscallConn()
	if err == nil {
		err = control(raw, func(fd int) error { return tuneUDP(fd, f) })
	}
	if err != nil {
		l.Close()
		return nil, fmt.Errorf("set options of UDP listener: %w", err)
	}
	return l, nil
}

func tuneUDP(fd int, f service.Family) error {
	level, option := unix.SOL_IP, unix.IP_PKTINFO
	if f == service.IPv6 {
		level, option = unix.SOL_IPV6, unix.IPV6_RECVPKTINFO
	}
	// Beyond net.core.rmem_max only with CAP_NET_ADMIN; less does as well.
	unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, listenerBuffer)
	unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, listenerBuffer)
	return unix.SetsockoptInt(fd, level, option, 1)
}

// run receives until the socket is closed.
func (l *udpListener) run() {
	b, oob := make([]byte, datagramSize), make([]byte, 128)
	for wait := acceptWaitMin; ; {
		n, oobn, _, from, err := l.ReadMsgUDPAddrPort(b, oob)
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			l.server.cfg.Logger.Warn("receive failed; waiting", "error", err, "wait", wait)
			time.Sleep(wait)
			wait = min(2*wait, acceptWaitMax)
			continue
		}
		wait = acceptWaitMin
		local, in, ok := packetDestination(oob[:oobn])
		if !ok {
			continue
		}
		if p := l.probe.Load(); p != nil && *p == from {
			l.answer(sessionKey{netip.AddrPortFrom(local, l.addr.Port()), from}, b[:n])
			continue
		}
		l.deliver(sessionKey{netip.AddrPortFrom(local, l.addr.Port()), from}, in, b[:n])
	}
}

// answer echoes a probe.
func (l *udpListener) answer(k sessionKey, b []byte) {
	r := newReplier(l, k)
	r.send(b)
}

// deliver hands a datagram, which came in on the interface of index in, to its
// session, and opens one if there is none. It doesn't keep b.
func (l *udpListener) deliver(k sessionKey, in int, b []byte) {
	l.mu.Lock()
	x := l.sessions[k]
	l.mu.Unlock()
	if x == nil || !x.deliver(b) {
		l.open(k, in, b)
	}
}

// open makes a session that begins with datagram b. At the bound, one that has
// been silent makes room; if there is none either, the datagram is lost, as
// datagrams may be.
func (l *udpListener) open(k sessionKey, in int, b []byte) {
	s := l.server
	if !s.udpBudget.tryAcquire(fdsPerSession) && !s.evict() {
		return
	}
	if !s.enter() {
		s.udpBudget.release(fdsPerSession)
		return
	}
	x := newSession(l, k)
	x.in = in
	x.enqueue(b) // nobody else knows x yet
	l.mu.Lock()
	l.sessions[k] = x
	l.mu.Unlock()
	go func() {
		defer s.flows.Done()
		defer x.release()
		x.serve()
	}()
}

// evictSample is how many sessions of a family are looked at to find one that
// is silent.
const evictSample = 32

// evict ends the session of a sample that has been silent longest, and takes
// over its descriptors. It reports false when all are talking.
func (s *Server) evict() bool {
	var oldest *session
	for _, l := range s.udp {
		if x := l.sample(); oldest == nil || x != nil && x.heard.Load() < oldest.heard.Load() {
			oldest = x
		}
	}
	if oldest == nil || oldest.silent() <= trustFor || !oldest.rob() {
		return false
	}
	oldest.listener.forget(oldest)
	return true
}

// sample returns the session that has been silent longest of some: maps are
// iterated in random order.
func (l *udpListener) sample() *session {
	l.mu.Lock()
	defer l.mu.Unlock()
	var oldest *session
	left := evictSample
	for _, x := range l.sessions {
		if oldest == nil || x.heard.Load() < oldest.heard.Load() {
			oldest = x
		}
		if left--; left == 0 {
			break
		}
	}
	return oldest
}

// forget takes a session out of the table, if it's still there.
func (l *udpListener) forget(x *session) {
	l.mu.Lock()
	if l.sessions[x.key] == x {
		delete(l.sessions, x.key)
	}
	l.mu.Unlock()
}

// packetDestination finds where a datagram arrived in its control messages.
func packetDestination(oob []byte) (at netip.Addr, on int, ok bool) {
	info, ok := findPacketInfo(oob)
	switch {
	case !ok:
		return netip.Addr{}, 0, false
	case len(info) == unix.SizeofInet4Pktinfo:
		return netip.AddrFrom4([4]byte(info[8:12])), info.interfaceIndex(), true // ipi_addr: the header's destination
	}
	return netip.AddrFrom16([16]byte(info[:16])), info.interfaceIndex(), true
}
