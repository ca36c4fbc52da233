package userspace

import (
	"math"
	"sync"
	"time"

	"kproxy.dev/kproxy/service"
)

// spentAfter is how long a session of one question and its answer must have been silent to make
// room at no loss: what an endpoint adds to its answer comes with it.
const spentAfter = 50 * time.Millisecond

// choiceTakes is what it takes to choose, in nanoseconds for each session. On a host short of
// processors a clock would show what others take.
const choiceTakes = 500

// sessionsChosenFrom is how many of its own sessions a worker chooses among, at random, when it has more: the worker
// serves none meanwhile, which takes some milliseconds. The kernel spreads each client's over all workers.
const sessionsChosenFrom = 1 << 11

// sessionParts is the part of the sessions chosen among that is chosen at once: each of those is ended only when another
// one begins.
const sessionParts = 8

// sessionVictims are the sessions that are to be ended, chosen among those of all workers.
type sessionVictims struct {
	mu   sync.Mutex // held while they are chosen
	next int64      // when others may be chosen
	of   []victims  // by the worker that needs room
}

// victims holds the sessions chosen for a worker that needs room, its own first: a worker ends its own at once.
type victims struct {
	queue  []victim
	chosen int64 // when they were
}

// makeRoom ends a session while there is room for few more: one of the worker's own, if there is any among those
// chosen, else another worker's, which takes until that has its turn. Idle sockets of all workers come first.
func (w *udpWorker) makeRoom() {
	s := w.server
	w.pool.closeBefore(math.MaxInt64)
	idle := false
	for _, other := range s.workers {
		if other != w && other.pool.n.Load() > 0 {
			idle = other.post(func() { other.pool.closeBefore(math.MaxInt64) }) || idle
		}
	}
	if b := s.Budget(service.UDP); idle && b.Used < b.Limit {
		return
	}
	for {
		v, found := s.victims.take(w)
		if !found {
			return
		}
		if x := v.flow.(*session); x.worker != w {
			x.worker.post(func() { x.giveWay(v) })
			return
		} else if x.giveWay(v) {
			return
		}
	}
}

// take returns a victim that has had no datagram since it was chosen, one of w's own if there is any: another
// worker's makes room only when that has its turn, and new clients' datagrams come until then. It returns false
// if there is none.
func (d *sessionVictims) take(w *udpWorker) (victim, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.of == nil {
		d.of = make([]victims, len(w.server.workers))
	}
	vs := &d.of[w.number]
	if w.now-vs.chosen > int64(trustFor) {
		vs.queue = nil
	}
	if v, found := vs.first(); found || w.now < d.next {
		return v, found
	}
	vs.queue, vs.chosen = d.choose(w), w.now
	return vs.first()
}

func (vs *victims) first() (victim, bool) {
	for len(vs.queue) > 0 {
		v := vs.queue[0]
		vs.queue = vs.queue[1:]
		if v.flow.(*session).active.Load() == v.active {
			return v, true
		}
	}
	return victim{}, false
}

// giveWay ends x as a victim, unless a datagram has come since it was chosen. What its client may miss is counted.
func (x *session) giveWay(v victim) bool {
	if x.phase == ended || x.active.Load() != v.active {
		return false
	}
	if s := x.worker.server; class(x.class.Load()) != exchanged || x.silent() <= spentAfter {
		s.shed[1][v.reason].Add(1)
		s.short[shortSessions].note()
		s.logShed("room for UDP sessions is short: ended one", []victim{v})
	}
	x.end()
	return true
}

// choose chooses sessions that have to give way, among those of all workers or, where w has many, its own. First
// come single questions that were answered, then those that were never answered, then the others; where most
// were never answered, as in a flood, these come first. In each of these, where a holder has more than its
// share, only its sessions go, else those that were silent for long enough to believe that they won't be missed;
// those of worker w before others. Of those that were never answered, if the clients that hold most aren't enough, the
// services' go that do.
func (d *sessionVictims) choose(w *udpWorker) (out []victim) {
	s, now := w.server, w.now
	var all []holding
	var kinds [classes]int
	consider := func(x *session) {
		h := x.holding()
		if h.class == exchanged && now-h.active <= int64(spentAfter) {
			h.class = talking
		}
		kinds[h.class]++
		all = append(all, h)
	}
	if len(w.sessions) > sessionsChosenFrom {
		for _, x := range w.sessions { // begins anywhere
			if consider(x); len(all) == sessionsChosenFrom {
				break
			}
		}
	} else {
		for _, f := range s.live.all() {
			if x, ok := f.(*session); ok {
				consider(x)
			}
		}
	}
	order := []class{exchanged, unanswered, talking}
	if kinds[unanswered] > len(all)/2 {
		order = []class{unanswered, exchanged, talking}
	}
	want := max(len(all)/sessionParts, shedLeast*len(s.workers))
	for _, c := range order {
		for i := range all {
			if all[i].weight = 0; all[i].class == c {
				all[i].weight = 1
			}
		}
		more := func(byClient bool) {
			out = append(out, chooseVictims(all, want-len(out), shareLeast, byClient, func(h *holding, is share) int {
				switch {
				case c == exchanged && is != within, c == unanswered && is >= serviceOver, is == clientOver,
					is != within && now-h.active > int64(trustFor):
					if h.flow.(*session).worker == w {
						return 0
					}
					return 1
				}
				return -1
			})...)
		}
		more(true)
		if c == unanswered { // a flood comes from many addresses, none of which holds much
			more(false)
		}
	}
	if took := choiceTakes * int64(len(all)); len(out) == 0 || len(out) < want && took > int64(time.Millisecond) {
		d.next = now + shedCost*took
	}
	return out
}

// holding is x as others count it.
func (x *session) holding() holding {
	return holding{
		client: x.key.address(&x.key.client, 0), service: x.state, weight: 1,
		active: x.active.Load(), class: class(x.class.Load()), flow: x,
	}
}
