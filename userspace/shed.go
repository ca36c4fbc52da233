package userspace

import (
	"cmp"
	"net/netip"
	"slices"

	"kproxy.dev/kproxy/plan"
)

// Where room is short, what one client or service holds beyond its share gives way, so that those who hold little lose nothing.

const (
	// shareParts and shareLeast keep a share from getting too small to tell greed from
	// use among many clients: it is at least this part of all, and so many.
	shareParts = 128
	shareLeast = 8 // connections or sessions
	// shedParts is which part gives way at once: looking for it costs a look at all.
	shedParts = 64
	shedLeast = 8
)

// holding is a connection or session as it counts when room is short.
type holding struct {
	client  netip.Addr
	service *serviceState // nil while that isn't known
	weight  int           // what it takes: 1, or bytes of memory
	heard   int64         // when bytes last moved, in nanoseconds since epoch
	class   class         // of a session
	reset   bool          // of a connection: a peer is gone already
	flow    flow
}

// standing is how a holder is placed among the others.
type standing int

const (
	polite        standing = iota // others hold more than their share
	even                          // nobody does
	greedyService                 // its service does, and no client
	greedyClient
)

// shedReason is why a connection or session gave way, as plan.ShedReasons.
type shedReason int

const (
	shedReset shedReason = iota
	shedClient
	shedService
	shedIdle
	shedReasons = len(plan.ShedReasons)
)

// victim is who has to give way.
type victim struct {
	holding
	reason shedReason
}

// shed chooses who of hs has to give way so that want others have room: those that rank
// lowest, and the one silent longest first; none whose rank is negative. A greedy client loses
// no more than what it has beyond its share, and more than those that hold less; where no client is
// greedy, services are looked at in the same way. Only those of a kind count; nil is any. No share is
// less than least.
func shed(hs []holding, want, least int, kind func(*holding) bool, rank func(*holding, standing) int) []victim {
	clients := beyondShare(hs, want, least, kind, func(h *holding) netip.Addr { return h.client })
	var services map[*serviceState]int
	if len(clients) == 0 {
		services = beyondShare(hs, want, least, kind, func(h *holding) *serviceState { return h.service })
	}
	type candidate struct {
		victim
		rank int
	}
	var found []candidate
	for i := range hs {
		h := &hs[i]
		if kind != nil && !kind(h) {
			continue
		}
		c, is := candidate{victim: victim{*h, shedIdle}}, polite
		switch {
		case clients[h.client] > 0:
			c.reason, is = shedClient, greedyClient
		case services[h.service] > 0:
			c.reason, is = shedService, greedyService
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
	slices.SortFunc(found, func(a, b candidate) int { return cmp.Or(cmp.Compare(a.rank, b.rank), cmp.Compare(a.heard, b.heard)) })
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
		out = append(out, c.victim)
	}
	return out
}

// beyondShare returns how much of a kind holders have beyond their share of it, those that have most: what
// they had to give up for want others, if they were to hold equally much then.
func beyondShare[K comparable](hs []holding, want, least int, kind func(*holding) bool, holder func(*holding) K) map[K]int {
	held, all := map[K]int{}, 0
	for i := range hs {
		k, n := holder(&hs[i]), 0
		if kind == nil || kind(&hs[i]) {
			n = hs[i].weight
		}
		held[k] += n
		all += n
	}
	if all == 0 {
		return nil
	}
	level := max(all/len(held), all/shareParts, least)
	counts := make([]int, 0, len(held))
	for _, n := range held {
		counts = append(counts, n)
	}
	slices.SortFunc(counts, func(a, b int) int { return cmp.Compare(b, a) })
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
