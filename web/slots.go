package web

import (
	"context"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// Bounds of the requests of a kind that are served at once: in all, and of each
// client (see clientOf).
const (
	// answersAtOnce bounds long answers. At 10,000 services, or with as many
	// connections, one takes megabytes until its client has read it.
	answersAtOnce, answersOfClient = 8, 2
	// tracesAtOnce bounds what traces cost: each reads all rules of the host.
	tracesAtOnce, tracesOfClient = 2, 1
	// maxStreams bounds streams of events, which go on until their client goes.
	maxStreams, streamsOfClient = 64, 16
)

// slotWait is how long a request for a long answer waits for its turn.
const slotWait = 10 * time.Second

// slots bound how many requests are served at once. A client that has its share
// waits for its own requests to end, not others for it. Safe for concurrent use.
type slots struct {
	all, each int

	mu      sync.Mutex
	taken   map[netip.Prefix]int // by client
	inUse   int
	waiting []*slotWaiter // in the order in which they came
}

type slotWaiter struct {
	client netip.Prefix
	ready  chan struct{} // closed once it has a slot
}

func newSlots(all, each int) *slots {
	return &slots{all: all, each: each, taken: map[netip.Prefix]int{}}
}

// try takes a slot for client, if there is one; release gives it back.
func (s *slots) try(client netip.Prefix) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.grant(client)
}

// take waits for a slot for client until ctx ends, and reports whether it has one.
func (s *slots) take(ctx context.Context, client netip.Prefix) bool {
	w := &slotWaiter{client, make(chan struct{})}
	s.mu.Lock()
	if s.grant(client) {
		s.mu.Unlock()
		return true
	}
	s.waiting = append(s.waiting, w)
	s.mu.Unlock()
	select {
	case <-w.ready:
		return true
	case <-ctx.Done():
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if i := slices.Index(s.waiting, w); i >= 0 {
		s.waiting = slices.Delete(s.waiting, i, i+1)
		return false
	}
	return true // it came at the last moment
}

func (s *slots) grant(client netip.Prefix) bool {
	if s.inUse >= s.all || s.taken[client] >= s.each {
		return false
	}
	s.inUse++
	s.taken[client]++
	return true
}

// release gives client's slot to the first that waits and may have it.
func (s *slots) release(client netip.Prefix) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.inUse--
	if s.taken[client]--; s.taken[client] == 0 {
		delete(s.taken, client)
	}
	for i, w := range s.waiting {
		if s.grant(w.client) {
			s.waiting = slices.Delete(s.waiting, i, i+1)
			close(w.ready)
			return
		}
	}
}

// bound has requests for long answers wait for their turn, and refuses those that
// wait too long.
func (s *slots) bound(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		client := requester(r)
		ctx, cancel := context.WithTimeout(r.Context(), slotWait)
		defer cancel()
		if !s.take(ctx, client) {
			w.Header().Set("Retry-After", "1")
			refuse(w, http.StatusServiceUnavailable, "other requests for long answers are under way; try again in a moment")
			return
		}
		defer s.release(client)
		h.ServeHTTP(w, r)
	})
}

// requester is the client of r; the zero value for all at a Unix socket.
func requester(r *http.Request) netip.Prefix {
	a, err := netip.ParseAddrPort(r.RemoteAddr)
	if err != nil {
		return netip.Prefix{}
	}
	return clientAt(a.Addr())
}
