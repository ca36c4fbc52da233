package userspace

import (
	"net/netip"

	"kproxy.dev/kproxy/service"
)

// roundsAtOnce is how many batches are received before the worker looks after
// what endpoints sent.
const roundsAtOnce = 2

// link chains the datagrams of one session in a batch.
type link struct {
	next    int16 // -1 at the end
	segment int32
}

// serve receives from a listener's socket and hands on what came.
func (w *udpWorker) serve(l *udpListener) {
	for range roundsAtOnce {
		n, err := w.in.receive(l.fds[w.number], 0, batchSize, true)
		if err != nil {
			return // EAGAIN; an error of one of the replies concerns nobody here
		}
		for i := range n {
			w.accept(l, i)
		}
		w.lookUp()
		for i, x := range w.touched {
			w.touched[i] = nil
			x.forward()
		}
		w.touched = w.touched[:0]
		if n < batchSize {
			return
		}
	}
}

// accept hands the datagram in a slot to its session, and opens one if there is
// none.
func (w *udpWorker) accept(l *udpListener, slot int) {
	data, whole := w.in.bytes(slot)
	k, in, segment, ok := keyOf(&w.in.names[slot], w.in.oob(slot))
	if !ok || !whole {
		return
	}
	x := w.sessions[k]
	if x == nil {
		if p := l.probe.Load(); p != nil && *p == k.clientAddress() {
			w.echo(k, data)
			return
		}
		if x = w.open(k, in); x == nil {
			return
		}
	}
	w.chain[slot] = link{next: -1, segment: int32(segment)}
	if x.first < 0 {
		x.first = int16(slot)
		w.touched = append(w.touched, x)
		x.touch()
	} else {
		w.chain[x.last].next = int16(slot)
	}
	x.last = int16(slot)
}

// echo answers a probe.
func (w *udpWorker) echo(k sessionKey, data []byte) {
	x := &session{worker: w, key: k, header: k.replyHeader()}
	w.replies.flush()
	copy(w.out.data, data)
	w.replies.family = k.family
	w.replies.add(x, piece{data: w.out.data[:len(data)]})
	w.replies.flush()
}

// open makes a session. At the bound, one that can be spared makes room; if other workers have to
// look for it, the room of resting sockets serves until they have. With none left,
// the datagram is lost, as datagrams may be.
func (w *udpWorker) open(k sessionKey, in int) *session {
	s := w.server
	if n := s.sessions.Add(1); n > s.maxSessions() && !w.makeRoom() && n > int64(s.udpBudget.size) {
		s.sessions.Add(-1)
		return nil
	}
	if !s.enter() {
		s.sessions.Add(-1)
		return nil
	}
	x := newSession(w, k)
	x.in = in
	w.sessions[k] = x
	w.ask(x)
	return x
}

// maxSessions leaves some of the descriptors to sockets that rest, so that sessions
// to every endpoint find one.
func (s *Server) maxSessions() int64 { return int64(s.udpBudget.size - s.udpBudget.size/restShare) }

// ask has x's origin looked up before the batch in hand is forwarded.
func (w *udpWorker) ask(x *session) { w.asking = append(w.asking, x) }

// quickOrigin is an OriginLookup that waits for nothing. It looks up several
// flows at once, each by where it arrives and its client, and calls found for each
// in turn.
type quickOrigin interface {
	LookupAll(p service.Protocol, flows [][2]netip.AddrPort, found func(i int, orig, client netip.AddrPort, err error))
}

// lookUp looks up the origins that are asked for: at once, if that doesn't take
// time, else each in a goroutine, while the session's datagrams wait.
func (w *udpWorker) lookUp() {
	for len(w.asking) > 0 { // a flow that isn't the same any more asks for another
		var asking []*session
		asking, w.asking, w.asked = w.asking, w.asked[:0], w.asking
		if quick, ok := w.server.cfg.Origin.(quickOrigin); ok {
			w.lookUpNow(quick, asking)
		} else {
			w.lookUpSoon(asking)
		}
		clear(asking)
	}
}

func (w *udpWorker) lookUpNow(o quickOrigin, asking []*session) {
	w.flows = w.flows[:0]
	for _, x := range asking {
		w.flows = append(w.flows, x.flow())
	}
	// What follows from an answer takes system calls: others look up meanwhile.
	w.answers = w.answers[:0]
	o.LookupAll(service.UDP, w.flows, func(_ int, orig, client netip.AddrPort, err error) {
		w.answers = append(w.answers, origin{orig, client, err})
	})
	for i, a := range w.answers {
		asking[i].found(a.orig, a.client, a.err)
	}
	clear(w.answers)
}

// origin is where a flow was headed, and whose it is.
type origin struct {
	orig, client netip.AddrPort
	err          error
}

func (w *udpWorker) lookUpSoon(asking []*session) {
	for _, x := range asking {
		f := x.flow()
		w.server.flows.Go(func() { // x counts as one, so Drain isn't past waiting
			orig, client, err := w.server.cfg.Origin.Lookup(service.UDP, f[0], f[1])
			w.post(func() {
				x.found(orig, client, err)
				w.lookUp()
			})
		})
	}
}
