package userspace

import "time"

// class is how much a session has said: what tells how much it loses when it has to
// make room for another one.
type class int

const (
	asked     class = iota // the endpoint hasn't answered
	exchanged              // the client sent one datagram and the endpoint answered, as in a look-up of a name
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

// shedding is what a worker knows of sessions that have to give way.
type shedding struct {
	victims []victim // of the last look, that haven't yet
	looked  int64    // when that was
	next    int64    // when the next one may be
	even    bool     // nobody had more than the others
}

// evict ends the session that can best be spared; false if there is none.
func (w *udpWorker) evict() bool {
	s := &w.shedding
	if w.now-s.looked > int64(trustFor) {
		s.victims, s.even = nil, false
	}
	if s.even && w.giveUp(w.ages[exchanged].oldest(), shedIdle) {
		return true
	}
	for looks := 0; ; looks++ {
		for len(s.victims) > 0 {
			v := s.victims[0]
			s.victims = s.victims[1:]
			if x := v.flow.(*session); x.heard.Load() == v.heard && w.giveUp(x, v.reason) {
				return true
			}
		}
		if looks > 0 || w.now < s.next {
			w.server.short[shortSessions].note()
			return false
		}
		w.lookForVictims()
	}
}

// giveUp ends x to make room, unless it's gone, moves to another endpoint just now, or an
// exchange that may go on.
func (w *udpWorker) giveUp(x *session, why shedReason) bool {
	if x == nil || x.phase == over || x.older == nil {
		return false
	}
	if x.class == exchanged && x.silent() <= exchangeRest && why == shedIdle {
		return false
	}
	if !x.spent() {
		w.server.short[shortSessions].note()
		w.server.shed[1][why].Add(1)
	}
	x.end()
	return true
}

// spent reports whether x was a single exchange, which loses nothing when it ends.
func (x *session) spent() bool { return x.class == exchanged && x.silent() > exchangeRest }

// lookForVictims chooses sessions that have to give way. First come those that were single
// exchanges, then those that were never answered, then the others; where most were never answered, as in
// a flood, these come first. In each of these, where somebody holds more than its share, only its
// sessions go, else those that were silent for long enough to believe that they won't be missed.
func (w *udpWorker) lookForVictims() {
	began := sinceEpoch()
	hs, unanswered := make([]holding, 0, len(w.sessions)), 0
	for _, x := range w.sessions {
		h := holding{weight: 1, client: x.key.address(&x.key.client, 0), heard: x.heard.Load(), class: x.class, flow: x}
		if v := x.route.front.view; v != nil {
			h.service = v.state
		}
		if hs = append(hs, h); h.class == asked {
			unanswered++
		}
	}
	silent := func(h *holding) time.Duration { return time.Duration(w.now - h.heard) }
	spent := func(h *holding) bool { return h.class == exchanged && silent(h) > exchangeRest }
	s := &w.shedding
	want := max(len(hs)/shedParts, shedLeast)
	s.looked, s.even, s.victims = w.now, true, nil
	look := func(kind func(*holding) bool, rank func(*holding, standing) int) {
		if left := want - len(s.victims); left > 0 {
			s.victims = append(s.victims, shed(hs, left, shareLeast, kind, rank)...)
		}
	}
	sooner := func(from standing) func(h *holding, is standing) int {
		return func(h *holding, is standing) int {
			if is >= from || is >= even && silent(h) > trustFor {
				return 0
			}
			return -1
		}
	}
	never := func(h *holding) bool { return h.class == asked }
	if unanswered > len(hs)/2 {
		look(never, sooner(greedyService))
	}
	before := len(s.victims)
	look(spent, func(_ *holding, is standing) int {
		s.even = s.even && is == even
		return min(int(is)-int(even), 0) // none of the polite
	})
	s.even = s.even && before == 0 && len(s.victims) == want
	if unanswered <= len(hs)/2 {
		look(never, sooner(greedyService))
	}
	look(func(h *holding) bool { return h.class != asked && !spent(h) }, sooner(greedyClient))
	if took := sinceEpoch() - began; len(s.victims) == 0 || len(s.victims) < want && took > int64(time.Millisecond) {
		s.next = w.now + shedCost*took
	}
	if len(s.victims) > 0 && s.victims[0].reason != shedIdle {
		w.server.tellShed("room for UDP sessions is short: ended some", s.victims)
	}
}
