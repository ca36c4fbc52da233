package userspace

import (
	"errors"
	"net/netip"

	"golang.org/x/sys/unix"
)

// upstreamKey is what sockets have in common that can stand in for each other. One
// client's never serve another, however they are masqueraded: what an endpoint
// sends very late stays on the host that asked.
type upstreamKey struct {
	client netip.Addr
	from   source
	to     netip.AddrPort
}

// upstream is a connected socket towards an endpoint. It serves one session at a
// time, and others after it has rested.
type upstream struct {
	key     upstreamKey
	fd      int
	number  int32  // in its worker
	tag     uint32 // tells it from those that had the number before
	session *session
	heard   int64 // while it rests: when a datagram last came or went
	plain   bool  // can't send trains
	trains  bool  // receives them
	queued  bool  // has more to receive
	older   *upstream
	younger *upstream
}

// upstream returns a socket for a session: one that has rested, or a new one. Where
// descriptors are short, one that rests is closed for it, or a session ended.
func (w *udpWorker) upstream(k upstreamKey) (*upstream, error) {
	if u := w.resting.take(k, trustFor); u != nil {
		return u, nil
	}
	budget := w.server.udpBudget
	for tries := 0; !budget.tryAcquire(fdsPerSession); tries++ {
		if u := w.resting.take(k, exchangeRest); u != nil {
			return u, nil
		}
		if !w.resting.closeOldest() && !w.evict() || tries > evictTries {
			return nil, unix.EMFILE
		}
	}
	u, err := w.openUpstream(k)
	if err != nil {
		budget.release(fdsPerSession)
	}
	return u, err
}

// evictTries bounds how much is given up for one session.
const evictTries = 4

func (w *udpWorker) openUpstream(k upstreamKey) (*upstream, error) {
	fd, err := w.server.dialers.udpSocket(k.from, k.to)
	if err != nil {
		return nil, err
	}
	u := &upstream{key: k, fd: fd}
	w.tags++
	u.tag = w.tags
	if n := len(w.free); n > 0 {
		u.number = w.free[n-1]
		w.free = w.free[:n-1]
		w.upstreams[u.number] = u
	} else {
		u.number = int32(len(w.upstreams))
		w.upstreams = append(w.upstreams, u)
	}
	if err := w.watch(fd, unix.EPOLLIN|unix.EPOLLET, u.number, u.tag); err != nil {
		w.drop(u)
		return nil, err
	}
	return u, nil
}

// drop closes a socket that isn't budgeted.
func (w *udpWorker) drop(u *upstream) {
	unix.Close(u.fd)
	u.fd = -1
	w.upstreams[u.number] = nil
	w.free = append(w.free, u.number)
}

func (w *udpWorker) closeUpstream(u *upstream) {
	w.drop(u)
	w.server.udpBudget.release(fdsPerSession)
}

// send sends datagrams and returns how many of ps are done with, and the error
// of the next one. A full buffer is no error: what doesn't fit is lost, nobody
// waits.
func (u *upstream) send(w *udpWorker, ps []piece) (done int, err error) {
	if len(ps) == 1 && ps[0].segment == 0 {
		if err := sendOne(u.fd, ps[0].data); err != nil && !full(err) {
			return 0, err
		}
		return 1, nil
	}
	for done < len(ps) {
		n, err := 0, error(nil)
		if u.plain {
			n, err = u.sendPlain(w, ps[done])
		} else {
			n, err = u.sendTrains(w, ps[done:])
		}
		done += n
		if err != nil {
			return done, err
		}
	}
	return done, nil
}

// sendTrains sends some of ps in one system call.
func (u *upstream) sendTrains(w *udpWorker, ps []piece) (done int, err error) {
	o := &w.outgoing
	o.reset()
	for i := 0; i < len(ps) && o.parts < batchSize; {
		i += o.add(ps[i:min(len(ps), i+batchSize-o.parts)], nil)
	}
	n, err := sendMany(u.fd, o.hdrs[:o.n])
	for i := range n {
		done += o.pieces[i]
	}
	switch {
	case err == nil:
		return done, nil
	case full(err):
		return o.pieces[0], nil
	case (o.pieces[0] > 1 || ps[0].segment != 0) && cannotSegment(err):
		u.plain = true
		return 0, nil
	}
	return 0, err
}

// sendPlain sends the datagrams of a piece one by one.
func (u *upstream) sendPlain(w *udpWorker, p piece) (done int, err error) {
	p.split(func(b []byte) {
		if err == nil {
			if err = sendOne(u.fd, b); full(err) {
				err = nil
			}
		}
	})
	if err != nil {
		return 0, err
	}
	return 1, nil
}

// full reports whether there was no room for a datagram.
func full(err error) bool {
	return errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.ENOBUFS)
}

// receivesAtOnce is how many datagrams, or trains, of an endpoint are received by
// one system call, and turnsAtOnce how many such calls there are before others have
// their turn.
const (
	receivesAtOnce = 8
	turnsAtOnce    = 8
)

// receive brings back what an endpoint sends. Events come when there is
// something new, so it doesn't stop before nothing is left.
func (w *udpWorker) receive(u *upstream, failed bool) {
	for range turnsAtOnce {
		x := u.session
		if x == nil {
			w.discard(u)
			return
		}
		slot := w.replies.next(x.key.family)
		asked := min(receivesAtOnce, batchSize-slot)
		n, err := w.out.receive(u.fd, slot, asked, false)
		switch {
		case err == unix.EAGAIN:
			return
		case err != nil:
			forgetErrors(u.fd)
			x.broken(err)
			failed = true
		default:
			w.bring(x, slot, n)
		}
		if u.session != x || n < asked && !failed {
			return
		}
		if n == receivesAtOnce && !u.trains {
			u.trains = true
			unix.SetsockoptInt(u.fd, unix.SOL_UDP, unix.UDP_GRO, 1)
		}
	}
	if !u.queued {
		u.queued = true
		w.again = append(w.again, u)
	}
}

// bring takes what is in n slots to x's client.
func (w *udpWorker) bring(x *session, slot, n int) {
	count, total := 0, 0
	for i := slot; i < slot+n; i++ {
		data, whole := w.out.bytes(i)
		if !whole {
			continue
		}
		p := piece{data: data}
		if oob := w.out.oob(i); len(oob) > 0 {
			if _, segment, _ := readControl(oob); segment < len(data) {
				p.segment = segment
			}
		}
		w.replies.add(x, p)
		count += p.datagrams()
		total += len(p.data)
	}
	w.replies.used += n
	if count > 0 {
		x.answered(count, total)
	}
}

// resume gives another turn to those who had more to receive.
func (w *udpWorker) resume() {
	if len(w.again) == 0 {
		return
	}
	w.again, w.resumed = w.resumed, w.again
	for _, u := range w.resumed {
		u.queued = false
		if u.fd >= 0 {
			w.receive(u, true)
		}
	}
	clear(w.resumed) // and holds none of them
	w.resumed = w.resumed[:0]
}

// discard empties a socket that rests: what comes now is nobody's.
func (w *udpWorker) discard(u *upstream) {
	for range turnsAtOnce {
		n, err := w.in.receive(u.fd, 0, receivesAtOnce, false)
		if err == unix.EAGAIN {
			return
		}
		u.heard = w.now
		if err != nil {
			forgetErrors(u.fd)
		} else if n < receivesAtOnce {
			return
		}
	}
	w.resting.remove(u) // somebody keeps talking to it
	w.closeUpstream(u)
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
