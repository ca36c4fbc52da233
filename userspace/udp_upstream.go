package userspace

import (
	"net/netip"
	"slices"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"
)

// upstream is a connected socket towards an endpoint, of one session at a time.
type upstream struct {
	key       socketKey
	fd        int
	number    int32    // in its worker
	tag       uint32   // tells it from those that had the number before
	session   *session // nil while it is in the pool
	idleSince int64
	answered  bool  // all that its last session was to get had come
	hops      int32 // TTL of its packets; 0 for the node's default
	to        destination
	queued    bool // has more to receive
}

// upstream returns a socket of the pool, or a new one.
func (w *udpWorker) upstream(k socketKey) (*upstream, error) {
	if u := w.pool.take(k); u != nil {
		return u, nil
	}
	fd, err := w.server.dialers.connect(target{kind: unix.SOCK_DGRAM, source: k.from, to: k.to})
	if err != nil {
		return nil, err
	}
	return w.adopt(k, fd)
}

// adopt makes an upstream of a socket.
func (w *udpWorker) adopt(k socketKey, fd int) (*upstream, error) {
	u := &upstream{key: k, fd: fd, tag: w.upstreams.tag()}
	u.number = w.upstreams.add(u)
	if err := w.watch(fd, unix.EPOLLIN|unix.EPOLLET, u.number, u.tag); err != nil {
		w.closeUpstream(u)
		return nil, err
	}
	return u, nil
}

func (w *udpWorker) closeUpstream(u *upstream) {
	unix.Close(u.fd)
	u.fd = -1
	w.upstreams.remove(u.number)
}

// send sends datagrams and returns how many are done with, and the error of the next
// one. A full buffer is no error: what doesn't fit is lost, nothing waits.
func (u *upstream) send(w *udpWorker, ds [][]byte) (done int, err error) {
	o := &w.outgoing
	for done < len(ds) {
		o.reset()
		for i := done; i < len(ds) && o.parts < batchSize; {
			i += o.add(ds[i:min(len(ds), i+batchSize-o.parts)], &u.to)
		}
		n, err := o.send(u.fd)
		switch {
		case err == unix.EAGAIN || err == unix.ENOBUFS:
			n = o.counts[0]
		case err != nil:
			return done, err
		}
		done += n
	}
	return done, nil
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

const (
	// idleSocketFor is how long a socket waits for its next session.
	idleSocketFor = 10 * time.Second
	// idleSockets is how many of a worker do so.
	idleSockets = 1024
)

// socketKey holds what sockets towards endpoints have in common that can stand in for each other.
// One client's sockets never serve another client, however they are masqueraded: what an endpoint sends
// very late stays on the host that asked.
type socketKey struct {
	client netip.Addr
	from   source
	to     netip.AddrPort
}

// socketPool holds a worker's sockets that serve no session now. To take one of them
// costs a quarter less processor time for each session than a new one, and no new flow in the kernel's
// table. But what an endpoint sends late must not reach another session. So only those get here whose
// session had all the answers that the service says, and those that carried one question and its answer,
// which are silent for a while first.
type socketPool struct {
	worker *udpWorker
	idle   map[socketKey][]*upstream // the one that was put first comes first
	n      atomic.Int32              // how many they are: others read it
	timer  timer                     // closes those that were in it for long
}

// put takes a socket, or closes it. That all answers have come is said by answered.
func (p *socketPool) put(u *upstream, answered bool) {
	w := p.worker
	u.session, u.idleSince, u.answered = nil, w.now, answered
	if b := w.server.udpBudget; p.n.Load() >= idleSockets || w.server.isStopped() || b.low() || !b.tryAcquire(fdsPerSession) {
		w.closeUpstream(u)
		return
	}
	p.idle[u.key] = append(p.idle[u.key], u)
	p.n.Add(1)
	if p.timer.at == 0 {
		w.timers.set(&p.timer, w.now+int64(idleSocketFor))
	}
}

// take returns a socket on which nothing more is to come, or nothing has come for long enough, nil if there is none.
func (p *socketPool) take(k socketKey) *upstream {
	us := p.idle[k]
	if len(us) == 0 || !us[0].answered && p.worker.now-us[0].idleSince < int64(trustFor) {
		return nil
	}
	u := us[0]
	p.remove(u)
	if nothingToReceive(u.fd) {
		return u
	}
	p.worker.closeUpstream(u) // its endpoint still sends
	return nil
}

// remove takes a socket out.
func (p *socketPool) remove(u *upstream) {
	us := p.idle[u.key]
	i := slices.Index(us, u)
	if p.idle[u.key] = slices.Delete(us, i, i+1); len(us) == 1 {
		delete(p.idle, u.key)
	}
	p.n.Add(-1)
	p.worker.server.udpBudget.release(fdsPerSession)
}

// closeBefore closes the sockets that were put before a time.
func (p *socketPool) closeBefore(at int64) {
	for _, us := range p.idle {
		for len(us) > 0 && us[0].idleSince < at {
			u := us[0]
			p.remove(u)
			p.worker.closeUpstream(u)
			us = p.idle[u.key]
		}
	}
}

// expired implements the timer's owner.
func (p *socketPool) expired() {
	w := p.worker
	p.closeBefore(w.now - int64(idleSocketFor) + 1)
	if p.n.Load() > 0 {
		w.timers.set(&p.timer, w.now+int64(idleSocketFor))
	}
}
