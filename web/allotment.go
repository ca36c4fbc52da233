package web

import "iter"

// counters are the counters of a service port or an endpoint; each kind uses the
// first few.
type counters [7]uint64

// allotment decides who has series of their own, so that many services don't make
// more series than a Prometheus can hold of every node. The rest share one.
//
// Who has them is decided once: in the order of keys at first, then by who comes
// when there is room. One keeps what it got for as long as it exists, and the
// shared counters only grow, by what was added since the last scrape: no counter
// runs backwards when others come and go, and nothing is counted twice. Of those who
// share and have never done anything it keeps nothing: there may be very many.
type allotment[K comparable] struct {
	limit   int
	own     map[K]bool     // who has series of their own
	shared  map[K]counters // last figures of those who share and have done something
	other   counters       // what the shared series show
	sharing int            // how many share
}

// assign forgets who is gone and gives free series to new ones that may have
// them. Keys come in the same order every time.
func (a *allotment[K]) assign(n int, all iter.Seq2[K, bool]) {
	if a.own == nil {
		a.own, a.shared = map[K]bool{}, map[K]counters{}
	}
	present := make(map[K]bool, n)
	for k := range all {
		present[k] = true
	}
	for k := range a.own {
		if !present[k] {
			delete(a.own, k)
		}
	}
	for k := range a.shared {
		if !present[k] {
			delete(a.shared, k)
		}
	}
	for k, may := range all {
		if _, shares := a.shared[k]; shares || a.own[k] {
			continue
		}
		if may && len(a.own) < a.limit {
			a.own[k] = true
		}
	}
	a.sharing = len(present) - len(a.own)
}

// add adds to the shared counters what k did since the last scrape.
func (a *allotment[K]) add(k K, now counters) {
	last := a.shared[k]
	if now == last {
		return
	}
	a.shared[k] = now
	for i := range now {
		a.other[i] += grown(last[i], now[i])
	}
}

// grown is the growth of a counter; one that fell began anew (its service was
// deleted and created between two scrapes).
func grown(last, now uint64) uint64 {
	if now < last {
		return now
	}
	return now - last
}

// used reports whether the shared series show anything.
func (a *allotment[K]) used() bool { return a.sharing > 0 || a.other != counters{} }
