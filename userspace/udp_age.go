package userspace

import "time"

// class is how much a session has said: what tells how much it loses when it has to
// make room for another one.
type class int

const (
	asked     class = iota // the client sent one datagram
	exchanged              // and the endpoint answered, as in a look-up of a name
	talking                // anything more
	classes
)

// exchangeRest is how long a single exchange must have been silent to make room,
// and then its socket to serve another session of that client's address: what an
// endpoint adds to its answer comes with it.
const exchangeRest = 50 * time.Millisecond

// ageList holds sessions, the one that has been silent longest first.
type ageList struct{ head session }

func (l *ageList) init() { l.head.older, l.head.younger = &l.head, &l.head }

func (l *ageList) oldest() *session {
	if x := l.head.younger; x != &l.head {
		return x
	}
	return nil
}

// append makes x the youngest, wherever it was before.
func (l *ageList) append(x *session) {
	x.unlink()
	x.older, x.younger = l.head.older, &l.head
	x.older.younger, l.head.older = x, x
}

// unlink takes x out of its list.
func (x *session) unlink() {
	if x.older != nil {
		x.older.younger, x.younger.older = x.younger, x.older
		x.older, x.younger = nil, nil
	}
}

// aged puts x where it belongs after a datagram.
func (x *session) aged(c class) {
	x.class = max(x.class, c)
	x.worker.ages[x.class].append(x)
}

// makeRoom is evict that asks the other workers to do so where this one can't: then
// there is room for the next try.
func (w *udpWorker) makeRoom() bool {
	if w.evict() {
		return true
	}
	for _, other := range w.server.workers {
		if other != w && other.pressed.CompareAndSwap(false, true) {
			other.post(func() {
				other.pressed.Store(false)
				other.evict()
			})
		}
	}
	return false
}

// evict ends the session that can best be spared; false if all are talking.
func (w *udpWorker) evict() bool {
	x := w.ages[exchanged].oldest()
	if x == nil || x.silent() <= exchangeRest {
		x = w.longestSilent()
	}
	if x == nil {
		return false
	}
	x.end()
	return true
}

// longestSilent returns the session that has been silent longest, if it's long
// enough to believe that it won't be missed.
func (w *udpWorker) longestSilent() *session {
	var found *session
	for i := range w.ages {
		if x := w.ages[i].oldest(); x != nil && (found == nil || x.heard.Load() < found.heard.Load()) {
			found = x
		}
	}
	if found == nil || found.silent() <= trustFor {
		return nil
	}
	return found
}
