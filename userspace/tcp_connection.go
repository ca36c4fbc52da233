package userspace

import (
	"math"
	"net"
	"net/netip"
	"sync/atomic"
	"time"

	"github.com/pires/go-proxyproto"
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// A connection's two ends. Direction d reads side d and writes the other one.
const (
	clientSide   = 0
	endpointSide = 1
)

// connPhase says where in its life a connection is.
type connPhase uint8

const (
	dialing  connPhase = iota // it looks for an endpoint
	relaying                  // it has one
	leaving                   // one side is closed, the other gets a reset soon
	gone
)

// tcpConn is one client's connection through a service. Its loop alone touches
// it, except for what describe, settle and kill need.
type tcpConn struct {
	described
	loop   *loop
	slot   int32
	phase  connPhase
	queued bool    // in the loop's list of busy ones
	record *record // nil where nothing outlives this process
	front  front
	from   plan.Client
	hops   int32 // that the client's packets have left

	sides [2]side
	pumps [2]pump
	relayState

	search  *choice // nil once no other endpoint may be tried
	attempt int     // endpoints tried
	began   int64   // when the last attempt did, in nanoseconds since epoch
	missed  *missed // the last attempt that failed; nil for none
	refused bool    // no endpoint took it
	cutOff  bool    // it ended by a reset
	until   int64   // when the search has to end
	source  source  // of the endpoint's socket
	timer   timer   // of the dial, of silence, or of the reset
	killed  atomic.Bool
}

// admit serves an accepted connection, or refuses one that no plan knows or
// that may not pass, with a reset.
func (l *loop) admit(t *listener, fd int, client netip.AddrPort) {
	s := l.server
	x, group := l.admitTCP(t, fd, client)
	if x == nil {
		s.records.of(fd).forget()
		(&side{fd: fd}).abort()
		s.tcpBudget.release(fdsPerConnection)
		l.assigned.Add(-1)
		return
	}
	s.flows.Add(1)
	x.slot = l.conns.add(x)
	s.live.add(x)
	x.state.active.Add(1)
	x.timer.owner, x.active = x, l.now
	x.search = newChoice(group, x.state.affinity.Load(), x.from.Address)
	port := x.front.view.plan.Port
	x.until = l.now + int64(max(s.cfg.ConnectTotal, s.connectTimeout(port)))
	x.dial()
}

// admitTCP finds out where a connection was headed. It returns nil for one that
// may not pass.
func (l *loop) admitTCP(t *listener, fd int, client netip.AddrPort) (*tcpConn, *group) {
	s := l.server
	orig, err := s.cfg.TCPOrigin(fd, t.family)
	if err != nil || direct(t, fd, orig) {
		return nil, nil
	}
	f, ok := s.table.lookup(service.TCP, orig, s.locals.mustContain)
	if !ok {
		s.turnedAway(front{}, service.TCP, client, orig, plan.Client{})
		return nil, nil
	}
	from, ok := s.admit(f, client.Addr(), func() string { return incomingTCP(fd, f.Family, client.Addr()) })
	if !ok {
		s.turnedAway(f, service.TCP, client, orig, from)
		return nil, nil
	}
	x := &tcpConn{loop: l, front: f, from: from, hops: hopsOf(fd, t.family), record: s.records.of(fd)}
	x.state, x.client, x.orig, x.started = f.view.state, client, orig, time.Now()
	if !x.state.hops.pass(x.hops) {
		s.exceeded(x.state, client.Addr())
		s.cfg.OnEnd(End{Connection: x.describe(), Refused: errNoHops})
		return nil, nil
	}
	x.sides = [2]side{{fd: fd, tag: l.conns.tag(), readable: true, writable: true}, {fd: -1}}
	return x, f.group(from, s.table.rules())
}

// direct reports whether a connection wasn't redirected: it was headed to where
// it arrived.
func direct(t *listener, fd int, orig netip.AddrPort) bool {
	if orig.Port() != t.port {
		return false
	}
	var local rawAddress
	return sysLocal(fd, &local) != 0 || orig == local.addrPort()
}

// admit reports whether a client may use f. It asks for the interface that the
// client's packets come in on where that matters.
func (s *Server) admit(f front, client netip.Addr, in func() string) (plan.Client, bool) {
	c := plan.Client{Address: client.WithZone(""), Node: s.locals.contains(client.WithZone(""))}
	rules := s.table.rules()
	if !c.Node && rules.DetectsInterface() {
		c.Interface = in()
	}
	return c, f.view.plan.VerdictFor(f.Frontend, c, rules) == plan.Forward
}

// dial begins to connect to the next endpoint; with none left to try, the client
// is refused.
func (x *tcpConn) dial() {
	l, s := x.loop, x.loop.server
	port := x.front.view.plan.Port
	x.phase = dialing
	for !x.killed.Load() && x.attempt <= s.retries(port) {
		e := x.search.next()
		if e == nil {
			break
		}
		if x.attempt > 0 {
			x.state.retried.Add(1)
		}
		x.attempt++
		x.endpoint.Store(e)
		x.source = s.table.source(x.front, x.from, e.address.Addr())
		now := sinceEpoch()
		x.began = now
		fd, err := s.dialers.connect(target{unix.SOCK_STREAM, x.source, e.address, x.hops - 1})
		if err == nil {
			end := &x.sides[endpointSide]
			*end = side{fd: fd, tag: l.conns.tag(), asksOut: true}
			if err = end.watch(x); err == nil {
				l.timers.set(&x.timer, min(now+int64(s.connectTimeout(port)), x.until))
				return
			}
			end.close()
		}
		x.failed(err)
		if sinceEpoch() >= x.until {
			break
		}
	}
	x.state.failed.Add(1)
	x.cutOff = x.killed.Load() // before its endpoints had their say
	x.refused = !x.cutOff
	x.record.forget()
	x.sides[clientSide].abort()
	x.end()
}

// failed counts the failure of the endpoint that was tried last.
func (x *tcpConn) failed(err error) {
	e := x.endpoint.Swap(nil)
	x.missed = &missed{e.address, err}
	x.state.release(e)
	if blames(err) && !expired(err, x.hops) {
		x.loop.server.endpointFailed(x.state, e, x.client.Addr(), err)
	}
}

// again gives the endpoint up for the next one.
func (x *tcpConn) again(err error) {
	x.record.accepted()
	x.sides[endpointSide].close()
	x.failed(err)
	if sinceEpoch() >= x.until {
		x.attempt = math.MaxInt // no more
	}
	x.dial()
}

// event notes what has changed at a side, and goes on.
func (x *tcpConn) event(i int, events uint32) {
	s := &x.sides[i]
	s.note(events)
	switch {
	case x.phase == relaying:
		x.relay()
	case x.phase == dialing && i == endpointSide:
		x.dialed()
	}
}

// dialed finds out how an attempt has ended.
func (x *tcpConn) dialed() {
	end := &x.sides[endpointSide]
	if end.broken {
		errno, err := unix.GetsockoptInt(end.fd, unix.SOL_SOCKET, unix.SO_ERROR)
		if err == nil && errno != 0 {
			err = unix.Errno(errno)
		}
		if err != nil {
			x.again(err)
			return
		}
	}
	if !end.writable {
		return
	}
	x.loop.timers.stop(&x.timer)
	e := x.endpoint.Load()
	if x.began > 0 { // else another process began it
		e.connects.add(time.Duration(sinceEpoch() - x.began))
	}
	x.search.connected(e)
	x.loop.server.cfg.OnAnswered(service.TCP, e.address)
	if err := x.sendProxyHeader(end); err != nil {
		x.again(err)
		return
	}
	x.loop.server.connected(x.state, e, !x.taken.Load())
	x.taken.Store(true)
	x.begin()
}

// sendProxyHeader tells the endpoint the client's address (PROXY protocol), where the service asks for it.
// A new socket takes that much at once.
func (x *tcpConn) sendProxyHeader(end *side) error {
	version := x.front.view.plan.Port.ProxyProtocol
	if version == 0 {
		return nil
	}
	h := proxyproto.HeaderProxyFromAddrs(byte(version), net.TCPAddrFromAddrPort(x.client), net.TCPAddrFromAddrPort(x.orig))
	b, err := h.Format()
	if err != nil {
		return err
	}
	n, errno := sysSend(end.fd, b)
	switch {
	case errno != 0:
		return errno
	case n < len(b):
		return unix.EAGAIN
	}
	return nil
}

// end is the end of x, when both sides are closed.
func (x *tcpConn) end() {
	l, s := x.loop, x.loop.server
	x.phase = gone
	l.timers.stop(&x.timer)
	for i := range x.pumps {
		x.pumps[i].drop(s.pipes)
	}
	x.settle()
	over := End{Connection: x.describe(), Reset: x.cutOff}
	if x.refused {
		over.Endpoint, over.Refused = x.missed.explain(len(x.search.tried))
	}
	s.cfg.OnEnd(over)
	if e := x.endpoint.Load(); e != nil {
		x.state.release(e)
	}
	x.state.active.Add(-1)
	s.live.remove(x)
	l.conns.remove(x.slot)
	l.assigned.Add(-1)
	s.tcpBudget.release(fdsPerConnection)
	s.flows.Done()
}

// kill implements flow.
func (x *tcpConn) kill() {
	if x.killed.CompareAndSwap(false, true) {
		x.loop.post(x.die)
	}
}

// die ends x at once, with a reset to both sides: they must not take what they
// have for all there is.
func (x *tcpConn) die() {
	switch x.phase {
	case dialing:
		x.sides[endpointSide].close()
		x.failed(unix.ECANCELED)
		x.dial()
	case relaying, leaving:
		x.cut()
	}
}

// cut resets both sides.
func (x *tcpConn) cut() {
	x.cutOff = true
	x.record.forget()
	x.sides[clientSide].abort()
	x.sides[endpointSide].abort()
	x.end()
}

// expired implements the timer's owner.
func (x *tcpConn) expired() {
	switch x.phase {
	case dialing:
		if end := &x.sides[endpointSide]; end.established() { // its event waits for its turn in a busy loop
			end.writable = true
			x.dialed()
			return
		}
		x.again(unix.ETIMEDOUT)
	case relaying:
		x.expire()
	case leaving:
		x.resetSoon()
	}
}

// side is one of a connection's two sockets, and what is known of it. Its flags
// are set by events and cleared by calls that couldn't go on, as events come only
// when something changes.
type side struct {
	fd       int    // -1 when there is none
	tag      uint32 // tells its events from those of a socket before it; 0 when there is none
	readable bool
	writable bool
	last     bool // there is an end to be read, or an error
	broken   bool // both directions are shut, or it has an error
	urgent   bool // it got urgent data, at which reads stop short
	watched  bool // epoll reports its events
	asksOut  bool // and when it can be written to
}

// Events of a socket. The endpoint's is written to first, and connected before.
const (
	clientEvents   = unix.EPOLLIN | unix.EPOLLPRI | unix.EPOLLRDHUP | unix.EPOLLET
	endpointEvents = clientEvents | unix.EPOLLOUT
)

// note sets the flags by events.
func (s *side) note(events uint32) {
	if events&(unix.EPOLLIN|unix.EPOLLPRI|unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
		s.readable = true
	}
	if events&(unix.EPOLLOUT|unix.EPOLLHUP|unix.EPOLLERR) != 0 {
		s.writable = true
	}
	s.last = s.last || events&(unix.EPOLLRDHUP|unix.EPOLLHUP|unix.EPOLLERR) != 0
	s.broken = s.broken || events&(unix.EPOLLHUP|unix.EPOLLERR) != 0
	s.urgent = s.urgent || events&unix.EPOLLPRI != 0
}

// watch asks for events of it.
func (s *side) watch(c *tcpConn) error {
	events := uint32(clientEvents)
	if s.asksOut {
		events = endpointEvents
	}
	s.watched = true
	return c.loop.watch(s.fd, events, c.slot, s.tag)
}

// full notes that the kernel takes no more for now.
func (s *side) full(c *tcpConn) {
	s.writable = false
	if s.asksOut {
		return
	}
	s.asksOut = true
	if !s.watched {
		return // the flag is for when it is
	}
	ev := unix.EpollEvent{Events: endpointEvents, Fd: c.slot, Pad: int32(s.tag)}
	sysControl(c.loop.epoll, unix.EPOLL_CTL_MOD, s.fd, &ev)
}

// dead reports whether the connection is gone, rather than that its peer has
// finished sending: a reset after a FIN goes unnoticed by reads.
func (s *side) dead() bool {
	info, err := unix.GetsockoptTCPInfo(s.fd, unix.SOL_TCP, unix.TCP_INFO)
	return err != nil || info.State == unix.BPF_TCP_CLOSE
}

// established reports whether its peer has taken the connection, though it may have
// finished sending already.
func (s *side) established() bool {
	info, err := unix.GetsockoptTCPInfo(s.fd, unix.SOL_TCP, unix.TCP_INFO)
	return err == nil && (info.State == unix.BPF_TCP_ESTABLISHED || info.State == unix.BPF_TCP_CLOSE_WAIT)
}

// unsent reports whether the peer hasn't acknowledged everything.
func (s *side) unsent() bool {
	n, err := unix.IoctlGetInt(s.fd, unix.SIOCOUTQ)
	return err == nil && n > 0
}

// finish tells the peer that no more comes.
func (s *side) finish() { sysShutdown(s.fd, unix.SHUT_WR) }

// close closes it in good order, or what the kernel takes for that.
func (s *side) close() {
	if s.fd >= 0 {
		sysClose(s.fd)
		*s = side{fd: -1}
	}
}

// abort closes it with a reset instead of a FIN.
func (s *side) abort() {
	s.resetOnClose()
	s.close()
}

// resetOnClose has the kernel reset it instead when it is closed, by whatever.
func (s *side) resetOnClose() {
	if s.fd >= 0 {
		unix.SetsockoptLinger(s.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	}
}
