package userspace

import (
	"slices"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/userspace/uring"
)

// exchange is what a connection has to do with its loop's ring (see exchanges).
type exchange struct {
	small  uint8 // small messages in a row
	member bool
	errand [2]errand // of each direction
}

// errand is what the ring was asked to do: to receive from a direction's source, or to
// send that to its sink.
type errand struct {
	what  request
	bytes uring.Buffer // that are sent
	n     int32
}

type request uint8

const (
	nothing request = iota
	toReceive
	toSend
)

// countSmall notes how much one read has copied or spliced.
func (e *exchange) countSmall(n int) {
	switch {
	case n >= ringConfig.BufferSize:
		e.small = 0
	case e.small < 255:
		e.small++
	}
}

// mayJoin reports whether x exchanges small messages, and nothing else is going on.
func (x *tcpConn) mayJoin() bool {
	e := &x.loop.exchanges
	if x.small < e.rules.after || !e.crowded || e.members >= maxMembers || x.phase != relaying || x.search != nil {
		return false
	}
	for d := range x.pumps {
		p, s := &x.pumps[d], &x.sides[d]
		if p.over || p.pending > 0 || p.piped || p.bulk || s.readable || !s.writable || s.last || s.broken || s.urgent || !s.watched {
			return false
		}
	}
	return true
}

// join lets the ring serve x instead of epoll.
func (x *tcpConn) join() {
	l := x.loop
	if !l.openRing() {
		return
	}
	x.member = true
	l.exchanges.members++
	for d := range x.sides {
		s := &x.sides[d]
		s.watched = false
		sysControl(l.epoll, unix.EPOLL_CTL_DEL, s.fd, nil)
		s.hurry()
		x.await(d)
	}
}

// await asks for what comes next in a direction.
func (x *tcpConn) await(d int) {
	x.errand[d].what = toReceive
	x.loop.exchanges.ring.Receive(x.sides[d].fd, x.ringTag(d))
}

// received passes on what has come, or leaves the ring with it.
func (x *tcpConn) received(d int, r uring.Result) {
	e := &x.loop.exchanges
	switch {
	case r.N > 0 && r.N < ringConfig.BufferSize:
		e.came++
		x.errand[d] = errand{what: toSend, bytes: r.Bytes, n: int32(r.N)}
		e.ring.Send(x.sides[1-d].fd, e.ring.Bytes(r.Bytes)[:r.N], x.ringTag(d)|sendTag)
	case tryAgain(r.Err):
		e.ring.Return(r.Bytes)
		x.await(d)
	default:
		x.note(d, r)
		x.leaveRing()
	}
}

// tryAgain reports whether a request has had no result.
func tryAgain(err unix.Errno) bool {
	return err == unix.ENOBUFS || err == unix.EAGAIN || err == unix.EINTR
}

// sent goes on with what comes next, or leaves the ring with what the sink didn't take.
func (x *tcpConn) sent(d int, r uring.Result) {
	a := &x.errand[d]
	if r.Err != 0 || r.N < int(a.n) {
		x.note(d, r)
		x.leaveRing()
		return
	}
	x.loop.exchanges.ring.Return(a.bytes)
	x.pumps[d].count(x, r.N)
	x.await(d)
}

// note takes down what became of the last request, as a read or a write would have
// left it.
func (x *tcpConn) note(d int, r uring.Result) {
	ring, a, p := x.loop.exchanges.ring, x.errand[d], &x.pumps[d]
	x.errand[d] = errand{}
	if a.what == toReceive {
		switch {
		case r.N > 0:
			p.keep(ring.Bytes(r.Bytes)[:r.N])
			p.burst += r.N
		case r.Err != 0 && r.Err != unix.ECANCELED && !tryAgain(r.Err):
			x.sides[d].failed = true
		}
		ring.Return(r.Bytes)
		return
	}
	if r.N > 0 {
		p.count(x, r.N)
	}
	if r.N < int(a.n) {
		p.keep(ring.Bytes(a.bytes)[r.N:a.n])
	}
	if r.Err != 0 && !tryAgain(r.Err) {
		x.dead[1-d] = true // this is told once: who reads from there next finds an end
	}
	ring.Return(a.bytes)
}

// leaveRing lets epoll serve x again, which tells of all that is the case by now.
func (x *tcpConn) leaveRing() {
	if !x.land() {
		x.cut()
		return
	}
	for d := range x.sides {
		s := &x.sides[d]
		s.readable = true
		if err := s.watch(x); err != nil {
			x.cut()
			return
		}
	}
	x.relay()
}

// land ends what x has asked the ring for, and notes what became of it. Until that has
// been done, the kernel keeps both sockets open even if they are closed. It returns false if the ring
// has failed: nothing tells then what was sent.
func (x *tcpConn) land() bool {
	if !x.member {
		return true
	}
	e := &x.loop.exchanges
	for d := range x.errand {
		if x.errand[d].what == toReceive {
			e.ring.Cancel(x.ringTag(d), cancelTag)
		}
	}
	e.held = slices.DeleteFunc(e.held, x.takeOwn)
	whole := true
	for x.errand[0].what != nothing || x.errand[1].what != nothing {
		if e.ring.Err() != nil {
			x.errand, whole = [2]errand{}, false
			break
		}
		if r, ok := e.ring.Next(); !ok {
			e.ring.Wait(-1, true)
		} else if !x.takeOwn(r) {
			e.held = append(e.held, r)
		}
	}
	x.member, x.small = false, 0
	e.members--
	e.left = x.loop.now
	return whole
}

// takeOwn notes a result that is x's, and reports whether it was.
func (x *tcpConn) takeOwn(r uring.Result) bool {
	if x.ringTag(0) != r.Tag&^3 {
		return false
	}
	x.note(int(r.Tag>>1&1), r)
	return true
}
