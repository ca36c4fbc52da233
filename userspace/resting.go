package userspace

import "time"

const (
	// restAtMost is how long a socket waits for its next session.
	restAtMost = 10 * time.Second
	// restingAtMost is how many do so.
	restingAtMost = 1024
	// restShare is the part of the descriptors that sessions leave to them.
	restShare = 16
)

// resting are a worker's sockets that serve no session now. To take one of them
// costs less than a quarter of a new one, and no new flow in the kernel's table.
// But what an endpoint sends late must not reach another session, of another host
// behind the same address perhaps. So only those rest that carried one question and its
// answer, each is silent for a while first, and stays with its client's address.
type resting struct {
	worker *udpWorker
	by     map[upstreamKey]*restList
	all    int
	sweep  timer
}

// restList holds those of one key, the one that rests longest first.
type restList struct{ oldest, youngest *upstream }

// add lets a socket rest.
func (r *resting) add(u *upstream) {
	w := r.worker
	if r.all >= restingAtMost || w.server.isStopped() {
		w.closeUpstream(u)
		return
	}
	l := r.by[u.key]
	if l == nil {
		l = &restList{}
		r.by[u.key] = l
	}
	u.older, u.younger = l.youngest, nil
	if l.youngest != nil {
		l.youngest.younger = u
	} else {
		l.oldest = u
	}
	l.youngest = u
	r.all++
	if r.sweep.at == 0 {
		w.timers.set(&r.sweep, w.now+int64(restAtMost))
	}
}

// take returns a socket that has been silent for a while, nil if there is none.
func (r *resting) take(k upstreamKey, silent time.Duration) *upstream {
	for l := r.by[k]; l != nil && r.worker.now-l.oldest.heard >= int64(silent); l = r.by[k] {
		u := l.oldest
		r.remove(u)
		if nothingIn(u.fd) {
			return u
		}
		r.worker.closeUpstream(u) // somebody still talks to it
	}
	return nil
}

// remove takes a socket out.
func (r *resting) remove(u *upstream) {
	l := r.by[u.key]
	if u.older != nil {
		u.older.younger = u.younger
	} else {
		l.oldest = u.younger
	}
	if u.younger != nil {
		u.younger.older = u.older
	} else {
		l.youngest = u.older
	}
	if l.oldest == nil {
		delete(r.by, u.key)
	}
	u.older, u.younger = nil, nil
	r.all--
}

// closeOldest closes one; false if there is none.
func (r *resting) closeOldest() bool {
	for _, l := range r.by { // of any key
		u := l.oldest
		r.remove(u)
		r.worker.closeUpstream(u)
		return true
	}
	return false
}

// alarm implements the timer's owner: it closes those that nobody took.
func (r *resting) alarm() {
	w := r.worker
	for _, l := range r.by {
		for u := l.oldest; u != nil; {
			next := u.younger
			if w.now-u.heard >= int64(restAtMost) {
				r.remove(u)
				w.closeUpstream(u)
			}
			u = next
		}
	}
	if r.all > 0 {
		w.timers.set(&r.sweep, w.now+int64(restAtMost))
	}
}

func (r *resting) closeAll() {
	for r.closeOldest() {
	}
}
