package web

import (
	"context"
	"net/http"
	"net/netip"
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
	all  chan struct{} // one element for each slot that is taken; those who wait are in order
	each int

	mu      sync.Mutex
	clients map[netip.Prefix]*share
}

// share is what one client may have.
type share struct {
	taken chan struct{}
	users int // that have a slot or wait for one
}

func newSlots(all, each int) *slots {
	return &slots{all: make(chan struct{}, all), each: each, clients: map[netip.Prefix]*share{}}
}

// take waits until ctx ends for a slot for client, and returns what gives it back; nil
// if there was none. With a context that has ended it takes what is free.
func (s *slots) take(ctx context.Context, client netip.Prefix) (release func()) {
	s.mu.Lock()
	own := s.clients[client]
	if own == nil {
		own = &share{taken: make(chan struct{}, s.each)}
		s.clients[client] = own
	}
	own.users++
	s.mu.Unlock()
	leave := func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if own.users--; own.users == 0 {
			delete(s.clients, client)
		}
	}
	if !enter(ctx, own.taken) {
		leave()
		return nil
	}
	if !enter(ctx, s.all) {
		<-own.taken
		leave()
		return nil
	}
	return func() {
		<-s.all
		<-own.taken
		leave()
	}
}

func enter(ctx context.Context, slots chan<- struct{}) bool {
	select {
	case slots <- struct{}{}:
		return true
	default:
	}
	select {
	case slots <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

// try takes a slot for client, if there is one.
func (s *slots) try(client netip.Prefix) (release func()) {
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	return s.take(ended, client)
}

// bound has requests for long answers wait for their turn, and refuses those that
// wait too long.
func (s *slots) bound(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), slotWait)
		defer cancel()
		release := s.take(ctx, requester(r))
		if release == nil {
			w.Header().Set("Retry-After", "1")
			refuse(w, http.StatusServiceUnavailable, "other requests for long answers are under way; try again in a moment")
			return
		}
		defer release()
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
