package userspace

import (
	"cmp"
	"math"
	"slices"
	"sync/atomic"
	"time"
)

const (
	// spentAfter is how long a session of one question and its answer must have been silent to make
	// room at no loss: what an endpoint adds to its answer comes with it.
	spentAfter = 50 * time.Millisecond
	// snapshotFor is how long what another worker says of its sessions is believed.
	snapshotFor = 500 * time.Millisecond
)

// sessionShedding is a worker's part in making room for sessions: it ends its own at once, and has
// other workers end theirs. Victims are chosen among the sessions of all workers, by what these have last said.
type sessionShedding struct {
	victims  []victim // that haven't given way yet
	chosen   int64    // when they were chosen
	next     int64    // when others may be chosen
	waits    int64    // until when, for what other workers say
	snapshot atomic.Pointer[snapshot]
	asked    atomic.Bool // for another snapshot
}

// snapshot is what a worker's sessions were at a time.
type snapshot struct {
	at       int64
	holdings []holding
}

// makeRoom has a session give way while few more have room: one of its own, if there are any among those chosen
// last, else another worker's, which takes until that has its turn.
func (w *udpWorker) makeRoom() {
	d := &w.shedding
	if w.now-d.chosen > int64(trustFor) {
		d.victims = nil
	}
	if w.endVictim(true) || w.now >= d.next && w.chooseSessions() && w.endVictim(true) {
		return
	}
	w.endVictim(false)
}

// endVictim has the next victim that is still one give way, of its own or of another worker.
func (w *udpWorker) endVictim(own bool) bool {
	d := &w.shedding
	for len(d.victims) > 0 {
		v := d.victims[0]
		x := v.flow.(*session)
		if own && x.worker != w {
			return false
		}
		d.victims = d.victims[1:]
		switch {
		case x.active.Load() != v.active:
		case x.worker != w:
			x.worker.post(func() { x.giveWay(v) })
			return true
		case x.giveWay(v):
			return true
		}
	}
	return false
}

// giveWay ends x as a victim, unless a datagram has come since it was chosen. What its client may miss is counted.
func (x *session) giveWay(v victim) bool {
	if x.phase == ended || x.active.Load() != v.active {
		return false
	}
	if s := x.worker.server; x.class() != exchanged || x.silent() <= spentAfter {
		s.shed[1][v.reason].Add(1)
		s.short[shortSessions].note()
		s.logShed("room for UDP sessions is short: ended one", []victim{v})
	}
	x.end()
	return true
}

// chooseSessions chooses sessions that have to give way; false if there are none yet. First
// come single questions that were answered, then those that were never answered, then the others; where most
// were never answered, as in a flood, these come first. In each of these, where a holder has more than its
// share, only its sessions go, else those that were silent for long enough to believe that they won't be missed.
func (w *udpWorker) chooseSessions() bool {
	d, room := &w.shedding, !w.server.udpBudget.exhausted()
	if room && w.now < d.waits {
		return false
	}
	all, complete := w.everySnapshot()
	if room && !complete { // others will have said soon, and there is room until then
		d.waits = w.now + int64(time.Millisecond)
		return false
	}
	began := sinceEpoch()
	var kinds [classes]int
	kind := func(h *holding) class {
		if h.class == unanswered || h.class == exchanged && w.now-h.active > int64(spentAfter) {
			return h.class
		}
		return talking
	}
	for i := range all {
		kinds[kind(&all[i])]++
	}
	order := []class{exchanged, unanswered, talking}
	if kinds[unanswered] > len(all)/2 {
		order = []class{unanswered, exchanged, talking}
	}
	want := max(len(all)/shedParts, shedLeast) * len(w.server.workers)
	var victims []victim
	for _, now := range order {
		for i := range all {
			if all[i].weight = 0; kind(&all[i]) == now {
				all[i].weight = 1
			}
		}
		victims = append(victims, chooseVictims(all, want-len(victims), shareLeast, func(h *holding, is greed) int {
			switch {
			case now == exchanged && is != polite, now == unanswered && is >= greedyService, is == greedyClient,
				is != polite && w.now-h.active > int64(trustFor):
				return 0
			}
			return -1
		})...)
	}
	// Its own first: they give way at once.
	slices.SortStableFunc(victims, func(a, b victim) int {
		return cmp.Compare(w.distance(a), w.distance(b))
	})
	d.victims, d.chosen = victims, w.now
	if took := sinceEpoch() - began; len(victims) == 0 || len(victims) < want && took > int64(time.Millisecond) {
		d.next = w.now + shedCost*took
	}
	if len(victims) > 0 && w.distance(victims[0]) > 0 { // it has none of its own: not for each datagram again
		d.next = max(d.next, w.now+int64(time.Millisecond))
	}
	return len(victims) > 0
}

// distance is 0 for its own session, and 1 for another's.
func (w *udpWorker) distance(v victim) int {
	if v.flow.(*session).worker == w {
		return 0
	}
	return 1
}

// everySnapshot returns all workers' sessions, as far as these have said lately; complete if all have.
func (w *udpWorker) everySnapshot() (all []holding, complete bool) {
	complete = true
	for _, other := range w.server.workers {
		d := &other.shedding
		if other == w {
			w.publish()
		} else if p := d.snapshot.Load(); p == nil || w.now-p.at > int64(snapshotFor/2) {
			if d.asked.CompareAndSwap(false, true) {
				other.post(func() {
					other.pool.closeBefore(math.MaxInt64) // before any session, on whichever worker
					other.publish()
				})
			}
		}
		p := d.snapshot.Load()
		if p == nil || w.now-p.at >= int64(snapshotFor) {
			complete = false
			continue
		}
		for i := range p.holdings {
			if p.holdings[i].flow.(*session).active.Load() >= 0 { // it hasn't ended since
				all = append(all, p.holdings[i])
			}
		}
	}
	return all, complete
}

// publish tells other workers of the sessions.
func (w *udpWorker) publish() {
	p := &snapshot{at: sinceEpoch(), holdings: make([]holding, 0, len(w.sessions))}
	for _, x := range w.sessions {
		h := holding{client: x.key.address(&x.key.client, 0), weight: 1, active: x.active.Load(), class: x.class(), flow: x}
		if v := x.route.front.view; v != nil {
			h.service = v.state
		}
		p.holdings = append(p.holdings, h)
	}
	w.shedding.snapshot.Store(p)
	w.shedding.asked.Store(false)
}
