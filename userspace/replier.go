package userspace

import (
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/service"
)

// replies are datagrams on their way to clients: they go in as few system calls
// as possible, whichever sessions they belong to. They wait in the worker's out batch.
type replies struct {
	worker *udpWorker
	to     [batchSize]*session
	pieces [batchSize]piece
	n      int
	used   int            // slots, of the batch
	family service.Family // of all of them
}

// next returns the next slot, for a session of a family. There is room in it.
func (r *replies) next(f service.Family) int {
	if r.used == batchSize || r.used > 0 && r.family != f {
		r.flush()
	}
	r.family = f
	return r.used
}

// add takes what is in one of the slots to be sent to x's client.
func (r *replies) add(x *session, p piece) {
	r.to[r.n], r.pieces[r.n] = x, p
	r.n++
}

// flush sends them. What can't be sent now is lost.
func (r *replies) flush() {
	if r.n == 0 {
		r.used = 0
		return
	}
	w := r.worker
	fd, o := w.descriptor(r.family), &w.outgoing
	for begin := 0; begin < r.n; {
		o.reset()
		for i := begin; i < r.n; {
			end := i + 1
			for end < r.n && r.to[end] == r.to[i] {
				end++
			}
			i += o.add(r.pieces[i:end], &r.to[i].header)
		}
		begin += r.send(fd, r.pieces[begin:r.n], r.to[begin:r.n])
	}
	clear(r.to[:r.n])
	r.n, r.used = 0, 0
}

// send sends what is in outgoing, and returns how many of ps are done with.
func (r *replies) send(fd int, ps []piece, to []*session) (done int) {
	o := &r.worker.outgoing
	sent, err := sendMany(fd, o.hdrs[:o.n])
	for i := range sent {
		done += o.pieces[i]
	}
	if err == nil {
		return done
	}
	n := o.pieces[0]
	if (n > 1 || ps[0].segment != 0) && cannotSegment(err) {
		r.apart(fd, ps[:n], &to[0].header)
	}
	return n
}

// apart sends the datagrams of a train one by one.
func (r *replies) apart(fd int, ps []piece, to *replyHeader) {
	h := mmsghdr{}
	h.Name, h.Namelen = to.first(), to.size
	h.Control = &to.control[0]
	h.SetControllen(len(to.control))
	var v unix.Iovec
	h.Iov = &v
	h.SetIovlen(1)
	hs := []mmsghdr{h}
	for _, p := range ps {
		p.split(func(b []byte) {
			v.Base = &b[0]
			v.SetLen(len(b))
			sendMany(fd, hs)
		})
	}
}
