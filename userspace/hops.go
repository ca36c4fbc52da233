package userspace

import (
	"errors"
	"net/netip"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// A packet crosses a router with its TTL (hop limit in IPv6) less one, and one that arrives with 1 goes no further: so a loop
// ends. This holds for a loop of proxies as well: what is sent to an endpoint has the TTL of the client's packets less one, as
// if the kernel had forwarded them. 0 is said where the TTL isn't known.

// fewHops is less than what any client's packets have left: they begin with 64 or more, and cross some 30 routers at most.
const fewHops = 16

// loopsAreTold is how often the log tells that a service is part of a loop.
const loopsAreTold = time.Minute

// errNoHops says why a client is refused whose packets may cross no router any more.
var errNoHops = errors.New("it came with a TTL of 1: a loop, unless the client traces its route")

// hopsOf returns the TTL of the packet that established a connection. The kernel keeps it where sockets of other kinds have that of
// their multicasts, and IP_PKTOPTIONS reads it there (tcp_v4_syn_recv_sock and tcp_v6_syn_recv_sock): unlike TCP_SAVED_SYN
// it costs no memory, can be read again after a takeover, and is there with SYN cookies.
func hopsOf(fd int, f service.Family) int32 {
	level, option := unix.SOL_IP, unix.IP_MULTICAST_TTL
	if f == service.IPv6 {
		level, option = unix.SOL_IPV6, unix.IPV6_MULTICAST_HOPS
	}
	var hops int32
	if sysAskOption(fd, level, option, &hops) != 0 {
		return 0
	}
	return max(hops, 1)
}

// unicastHops returns the option of a level, SOL_IP or SOL_IPV6, that has the TTL of a socket's packets.
func unicastHops(level int) int {
	if level == unix.SOL_IPV6 {
		return unix.IPV6_UNICAST_HOPS
	}
	return unix.IP_TTL
}

// limit has the socket's packets leave with one hop less than their client's have left.
func (u *upstream) limit(hops int32) {
	if hops--; hops > 0 && hops != u.hops {
		level := u.key.level()
		if sysOption(u.fd, level, unicastHops(level), hops) == 0 {
			u.hops = hops
		}
	}
}

// level is that of the socket's options.
func (k *socketKey) level() int {
	if k.to.Addr().Is4() {
		return unix.SOL_IP
	}
	return unix.SOL_IPV6
}

// hopCounts counts what a service has had of packets that have crossed many routers.
type hopCounts struct {
	few     atomic.Int64  // when one last had few hops left, in nanoseconds since epoch
	refused atomic.Uint64 // that had none
	last    atomic.Pointer[lastRefused]
}

type lastRefused struct {
	at   time.Time
	from netip.Addr
}

// Looped says which connections or datagrams of a service came with a TTL of 1.
type Looped struct {
	Count uint64
	Last  time.Time
	From  netip.Addr // the last one
}

func (h *hopCounts) looped() Looped {
	l := h.last.Load()
	if l == nil {
		return Looped{}
	}
	return Looped{h.refused.Load(), l.at, l.from}
}

// pass reports whether what came with so many hops left may be forwarded.
func (h *hopCounts) pass(hops int32) bool {
	if hops > 0 && hops < fewHops {
		h.few.Store(sinceEpoch())
	}
	return hops != 1
}

// loopedSince reports whether the service seems to be part of a loop that a connection is in which began then: where that
// comes back with few hops left, it comes after it has left.
func (h *hopCounts) loopedSince(began int64) bool {
	few := h.few.Load()
	return few != 0 && few >= began
}

// expired reports whether err may be a router's answer to a TTL that the client chose, which says nothing of the endpoint.
func expired(err error, hops int32) bool {
	return hops > 0 && hops < fewHops && errors.Is(err, unix.EHOSTUNREACH)
}

// exceeded counts a connection or datagram that isn't forwarded for its TTL, and tells of the first in a while.
func (s *Server) exceeded(x *serviceState, client netip.Addr) {
	now := time.Now()
	x.failed.Add(1)
	x.hops.refused.Add(1)
	if last := x.hops.last.Swap(&lastRefused{now, client}); last == nil || now.Sub(last.at) > loopsAreTold {
		s.cfg.Logger.Warn("refused what came with a TTL of 1: the service is part of a loop, unless the client traces its route", "service", x.key, "client", client)
	}
}

// timeExceededEvery bounds how often a worker has clients told so, as the kernel does (icmp_msgs_per_sec).
const timeExceededEvery = time.Millisecond

// exceed turns a datagram away that may cross no router any more, and tells its client, as a router does.
func (x *session) exceed(datagram []byte) {
	w := x.worker
	w.server.exceeded(x.state, x.client.Addr())
	if w.now-w.told >= int64(timeExceededEvery) {
		w.told = w.now
		flow := x.flow()
		if err := w.server.cfg.TimeExceeded(flow[1], flow[0], datagram); err != nil {
			w.server.untold.Do(func() {
				w.server.cfg.Logger.Warn("clients aren't told that their datagrams' TTL ran out", "error", err)
			})
		}
	}
}
