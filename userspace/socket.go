package userspace

import (
	"golang.org/x/sys/unix"
)

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
	failed   bool // a read has told of an error, which it does once
	urgent   bool // it got urgent data, at which reads stop short
	watched  bool // the kernel tells of events
	asksOut  bool // and when it can be written to
}

// Events of a socket. The endpoint's is written to first, and connected before.
const (
	clientEvents   = unix.EPOLLIN | unix.EPOLLPRI | unix.EPOLLRDHUP | unix.EPOLLET
	endpointEvents = clientEvents | unix.EPOLLOUT
)

// note takes down what events say.
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
	return err != nil || info.State == tcpClose
}

// established reports whether its peer has taken the connection, though it may have
// finished sending already.
func (s *side) established() bool {
	info, err := unix.GetsockoptTCPInfo(s.fd, unix.SOL_TCP, unix.TCP_INFO)
	return err == nil && (info.State == tcpEstablished || info.State == tcpCloseWait)
}

// Some of enum in net/tcp_states.h.
const (
	tcpEstablished = 1
	tcpClose       = 7
	tcpCloseWait   = 8
)

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
	if s.fd >= 0 {
		unix.SetsockoptLinger(s.fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
		s.close()
	}
}
