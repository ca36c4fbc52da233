package userspace

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"time"

	"kproxy.dev/kproxy/plan"
)

// Where room is short, connections and sessions beyond the share of their client or service are ended, so that
// clients within theirs lose nothing. Shares are compared over all loops, or all workers.

const (
	// shareParts and shareLeast bound a share from below, or ordinary use would
	// exceed it among many clients: it is at least this part of all, and this number.
	shareParts = 128
	shareLeast = 8 // connections or sessions
	// shedParts is the part that is ended at once: finding it takes a pass over all.
	shedParts = 64
	shedLeast = 8
	// shedAgain is after how long the next victims are chosen while clients wait, and
	// shedCost how many times as long as a pass the next one is put off.
	shedAgain = 100 * time.Millisecond
	shedCost  = 10
	// overIdle is how long a connection beyond its client's or service's share has to be silent to
	// give way, until others have waited as long as urgentAfter: then those silent longest do.
	overIdle    = time.Second
	urgentAfter = time.Second
	// evenIdle is how long it has to be where no holder has more than the others and the kernel
	// can't serve new connections instead.
	evenIdle = 5 * time.Second
	// logShedEvery bounds how often the log mentions it.
	logShedEvery = 10 * time.Second
)

// holding is a connection or session as it counts when room is short.
type holding struct {
	client  netip.Addr
	service *serviceState // nil while that isn't known
	weight  int           // what it takes: 1, or bytes of memory; with 0 it doesn't give way
	active  int64         // when bytes last moved, in nanoseconds since epoch
	class   class         // of a session
	reset   bool          // of a connection: a peer is gone already
	flow    flow
}

// share says what a holding's client and service hold, compared with others.
type share int

const (
	within      share = iota // others hold more than their share
	even                     // none does
	serviceOver              // its service does, and no client
	clientOver
)

// shedReason says why a connection or session gave way: it is an index of plan.ShedReasons.
type shedReason int

const (
	shedReset shedReason = iota
	shedClient
	shedService
	shedIdle
	shedReasons = len(plan.ShedReasons)
)

// victim is to be ended.
type victim struct {
	holding
	reason shedReason
}

// chooseVictims chooses which of hs have to give way so that want others have room: those that rank
// lowest, and the one silent longest first; none whose rank is negative. A greedy client loses
// no more than what it has beyond its share, and more than those that hold less; where no client is
// greedy, services are compared in the same way; clients aren't compared if byClient is false. No share is less than least. What is
// chosen weighs nothing in hs then.
func chooseVictims(hs []holding, want, least int, byClient bool, rank func(*holding, share) int) []victim {
	var clients map[netip.Addr]int
	if byClient {
		clients = beyondShare(hs, want, least, func(h *holding) netip.Addr { return h.client })
	}
	var services map[*serviceState]int
	if len(clients) == 0 {
		services = beyondShare(hs, want, least, func(h *holding) *serviceState { return h.service })
	}
	type candidate struct {
		victim
		of   *holding
		rank int
	}
	var found []candidate
	for i := range hs {
		h := &hs[i]
		if h.weight == 0 {
			continue
		}
		c, is := candidate{victim: victim{*h, shedIdle}, of: h}, within
		switch {
		case clients[h.client] > 0:
			c.reason, is = shedClient, clientOver
		case services[h.service] > 0:
			c.reason, is = shedService, serviceOver
		case len(clients)+len(services) == 0:
			is = even
		}
		if h.reset {
			c.reason = shedReset
		}
		if c.rank = rank(h, is); c.rank >= 0 {
			found = append(found, c)
		}
	}
	slices.SortFunc(found, func(a, b candidate) int { return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(a.active, b.active)) })
	var out []victim
	for _, c := range found {
		if want <= 0 {
			break
		}
		switch c.reason {
		case shedClient:
			if clients[c.client] <= 0 {
				continue
			}
			clients[c.client] -= c.weight
		case shedService:
			if services[c.service] <= 0 {
				continue
			}
			services[c.service] -= c.weight
		}
		want -= c.weight
		c.of.weight = 0
		out = append(out, c.victim)
	}
	return out
}

// beyondShare returns how much holders have beyond their share, those that have most: what
// they had to give up for want others, if they were to hold equally much then.
func beyondShare[K comparable](hs []holding, want, least int, holder func(*holding) K) map[K]int {
	held, all := map[K]int{}, 0
	for i := range hs {
		held[holder(&hs[i])] += hs[i].weight
		all += hs[i].weight
	}
	if all == 0 {
		return nil
	}
	level := max(all/len(held), all/shareParts, least)
	counts := slices.SortedFunc(maps.Values(held), func(a, b int) int { return cmp.Compare(b, a) })
	for i, sum := 0, 0; i < len(counts); i++ {
		sum += counts[i]
		if even := (sum - want) / (i + 1); i+1 == len(counts) || even >= counts[i+1] {
			level = max(level, even)
			break
		}
	}
	for k, n := range held {
		if n > level {
			held[k] = n - level
		} else {
			delete(held, k)
		}
	}
	return held
}

// logShed logs what was taken for room, now and then.
func (s *Server) logShed(message string, victims []victim) {
	now, last := sinceEpoch(), s.shedLogged.Load()
	if last != 0 && now-last < int64(logShedEvery) || !s.shedLogged.CompareAndSwap(last, now) {
		return
	}
	v := victims[0]
	args := []any{"ended", len(victims), "reason", plan.ShedReasons[v.reason], "client", v.client}
	if v.service != nil {
		args = append(args, "service", v.service.key)
	}
	s.cfg.Logger.Warn(message, args...)
}
