package userspace

import "net/netip"

// How many connections more than another loop one may have before it hands over what
// it accepts: so many, and an eighth. A loop that has none takes one at once: of two
// connections on one loop each waits for the other.
const (
	unevenBy    = 4
	unevenShare = 8
)

// place has a connection that l has accepted served by l, unless another loop has
// clearly fewer, which serves it then. The kernel wakes a loop for a client, not
// for its share of them: in a burst, the one that is awake takes nearly all, and would
// serve them alone for as long as they last while other processors idle. The next
// loop in turn is looked at, not all: with many loops that evens them out as well.
func (l *loop) place(t *tcpListener, fd int, client netip.AddrPort) {
	other := l.neighbour()
	if l.keeps(other.taken.Load()) {
		l.taken.Add(1)
		l.admit(t, fd, client)
		return
	}
	other.taken.Add(1) // before it can end
	if !other.post(func() { other.admit(t, fd, client) }) {
		other.taken.Add(-1)
		l.taken.Add(1)
		l.admit(t, fd, client)
	}
}

// keeps reports whether l serves one connection more itself, beside a loop with so
// many.
func (l *loop) keeps(theirs int32) bool {
	own := l.taken.Load()
	if theirs == 0 {
		return own == 0
	}
	return own <= theirs+theirs/unevenShare+unevenBy
}

// neighbour is another loop, in turn; l itself where it is the only one.
func (l *loop) neighbour() *loop {
	loops := l.server.loops
	l.turn++
	if other := loops[l.turn%len(loops)]; other != l || len(loops) == 1 {
		return other
	}
	l.turn++
	return loops[l.turn%len(loops)]
}
