package userspace

import (
	"sync"
	"time"

	"kproxy.dev/kproxy/plan"
)

const (
	// greedyIdle is how long a connection of who holds too many has to be silent to give way,
	// until others have waited as long as urgentAfter: then those silent longest do.
	greedyIdle  = time.Second
	urgentAfter = time.Second
	// evenIdle is how long it has to be where nobody holds more than the others and the kernel
	// can't serve new connections instead.
	evenIdle = 5 * time.Second
	// shedAgain is after how long who gives way is looked for again while clients wait, and
	// shedCost how many times as long as a look the next one is put off when it found too few.
	shedAgain = 100 * time.Millisecond
	shedCost  = 10
)

// askForRoom has somebody give way, as there are no descriptors to accept with.
func (s *Server) askForRoom() {
	s.short[shortDescriptors].note()
	select {
	case s.shedding <- struct{}{}:
	default:
	}
}

// makeRoomForClients has connections give way while clients wait for descriptors, or while
// sockets take too much memory. It returns when accepting stops.
func (s *Server) makeRoomForClients() {
	var again <-chan time.Time
	var memory memoryWatch
	tick := time.NewTicker(memoryTick)
	defer tick.Stop()
	var first, last, next int64 // when clients began to wait, and still did; when to look next
	for {
		asked := false
		select {
		case <-s.stopped:
			return
		case <-s.shedding:
			asked = true
		case <-again:
		case <-tick.C:
			s.boundMemory(&memory)
			continue
		}
		again = nil
		since, now := s.waitingSince(asked), sinceEpoch()
		switch {
		case since == 0:
			continue
		case now < next:
			again = time.After(time.Duration(next - now))
			continue
		case now-last > int64(urgentAfter):
			first = since
		}
		last = now
		s.short[shortDescriptors].note()
		enough := s.shedConnections(now-first >= int64(urgentAfter))
		took := sinceEpoch() - now
		again = time.After(max(shedAgain, time.Duration(shedCost*took)))
		if !enough {
			next = now + (shedCost+1)*took
		}
	}
}

// waitingSince returns since when a listener has waited for descriptors, in nanoseconds
// since epoch; 0 if none does. That the process had none counts only when an accept has just
// shown it: nothing shows that it has some again while no client comes.
func (s *Server) waitingSince(shown bool) (since int64) {
	for _, l := range s.tcp {
		at := l.waiting.Load()
		if at == 0 && shown {
			at = l.starved.Load()
		}
		if at != 0 && (since == 0 || at < since) {
			since = at
		}
	}
	return since
}

// shedConnections ends some of those that have to give way; false if there are fewer than
// it looked for.
func (s *Server) shedConnections(urgent bool) bool {
	hs := s.holdings((*loop).holdings)
	now, beneath := sinceEpoch(), s.beneath.Load()
	want := max(len(hs)/shedParts, shedLeast)
	victims := shed(hs, want, shareLeast, nil, func(h *holding, is standing) int {
		silent := time.Duration(now - h.heard)
		switch {
		case h.reset:
			return 0
		case is >= greedyService && (urgent || silent >= greedyIdle), is == even && !beneath && silent >= evenIdle:
			return 1
		}
		return -1
	})
	if len(victims) == 0 {
		return false
	}
	s.end(victims, urgent)
	s.tellShed("file descriptors are short: ended connections", victims)
	return len(victims) == want
}

// holdings returns what own says of each loop.
func (s *Server) holdings(own func(*loop) []holding) (all []holding) {
	var mu sync.Mutex
	s.everyLoop(func(l *loop) {
		hs := own(l)
		mu.Lock()
		defer mu.Unlock()
		all = append(all, hs...)
	})
	return all
}

// end ends connections; those that have moved bytes since they were chosen only if busy is set.
func (s *Server) end(victims []victim, busy bool) {
	s.everyLoop(func(l *loop) {
		for _, v := range victims {
			if x := v.flow.(*tcpConn); x.loop == l && x.phase != gone && (busy || x.heard == v.heard) {
				x.shed()
				s.shed[0][v.reason].Add(1)
			}
		}
	})
}

// holdings returns the loop's connections.
func (l *loop) holdings() []holding {
	out := make([]holding, 0, len(l.slots)-len(l.free))
	for _, x := range l.slots {
		if x != nil {
			out = append(out, holding{
				weight: 1, client: x.client.Addr(), service: x.front.view.state, heard: x.heard, flow: x,
				reset: x.phase == leaving || x.limit == int64(resetPatience),
			})
		}
	}
	return out
}

// shed ends x at once, wherever it is.
func (x *tcpConn) shed() {
	if x.killed.CompareAndSwap(false, true) {
		x.die()
	}
}

// tellEvery is how often the log tells of those that gave way.
const tellEvery = 10 * time.Second

// tellShed logs whom room was taken from, now and then.
func (s *Server) tellShed(message string, victims []victim) {
	now, last := sinceEpoch(), s.toldShed.Load()
	if last != 0 && now-last < int64(tellEvery) || !s.toldShed.CompareAndSwap(last, now) {
		return
	}
	v := victims[0]
	args := []any{"ended", len(victims), "reason", plan.ShedReasons[v.reason], "client", v.client}
	if v.service != nil {
		args = append(args, "service", v.service.key)
	}
	s.cfg.Logger.Warn(message, args...)
}
