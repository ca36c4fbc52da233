package web

import (
	"context"
	"log/slog"
	"net"
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

// share bounds how many slots one client has at once.
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
		release := s.take(ctx, clientOf(r.RemoteAddr))
		if release == nil {
			w.Header().Set("Retry-After", "1")
			refuse(w, http.StatusServiceUnavailable, "other requests for long answers are under way; try again in a moment")
			return
		}
		defer release()
		h.ServeHTTP(w, r)
	})
}

// Connections bounds the HTTP connections of all listeners that it serves, in all
// and for each client: an IPv4 address, or an IPv6 network of /64, whose
// addresses one host can have all of. Each costs a file descriptor and some
// 24 kB, and outsiders reach these listeners.
//
// When a client has its share, its next connection takes the place of its own
// that has been idle longest: between two requests, or before the first. When all
// are taken, the client that holds most gives way. Connections that answer a
// request go last. So a client that holds many costs the others nothing.
//
// It is safe for concurrent use.
type Connections struct {
	max, perClient int
	log            *slog.Logger

	mu      sync.Mutex
	open    map[net.Conn]*openConn
	clients map[netip.Prefix]int // how many each holds
	logged  time.Time            // when the log last said that there are too many
}

type openConn struct {
	client netip.Prefix
	active bool      // a request is being answered
	since  time.Time // it is active, or not
}

// logEvery is the least time between two lines of log about closed connections.
const logEvery = time.Minute

// NewConnections returns bounds of max connections, a quarter of them for each client.
func NewConnections(max int, log *slog.Logger) *Connections {
	return &Connections{
		max: max, perClient: (max + 3) / 4, log: log,
		open: map[net.Conn]*openConn{}, clients: map[netip.Prefix]int{},
	}
}

// Serve is [Serve] within the bounds.
func (c *Connections) Serve(ctx context.Context, ln net.Listener, h http.Handler) error {
	return serve(ctx, ln, h, c.log, c.follow)
}

// follow takes in every change of a connection's state (http.Server.ConnState),
// of a new one before the next is accepted: there is at most one too many, for a
// moment. The server notices by itself what is closed here.
func (c *Connections) follow(conn net.Conn, s http.ConnState) {
	c.mu.Lock()
	defer c.mu.Unlock()
	switch s {
	case http.StateNew:
		c.admit(conn)
	case http.StateClosed, http.StateHijacked:
		c.forget(conn)
	default:
		if o := c.open[conn]; o != nil {
			o.active, o.since = s == http.StateActive, time.Now()
		}
	}
}

// admit takes conn in, and closes the one that has to give way for it.
func (c *Connections) admit(conn net.Conn) {
	client := clientOf(conn.RemoteAddr().String())
	c.open[conn] = &openConn{client: client, since: time.Now()}
	c.clients[client]++
	var victim net.Conn
	switch {
	case c.clients[client] > c.perClient:
		victim = c.givesWay(conn, client, false)
	case len(c.open) <= c.max:
		return
	default:
		most := client
		for p, n := range c.clients {
			if n > c.clients[most] {
				most = p
			}
		}
		if c.clients[most] == 1 { // each client holds one
			victim = c.givesWay(conn, netip.Prefix{}, false)
		} else {
			victim = c.givesWay(conn, most, most != client)
		}
	}
	if now := time.Now(); now.Sub(c.logged) >= logEvery {
		c.logged = now
		from := c.open[victim].client
		c.log.Warn("too many HTTP connections; those that are idle longest are closed, of the clients that hold most",
			"client", from, "holds", c.clients[from], "mayHold", c.perClient, "inAll", len(c.open), "bound", c.max)
	}
	c.forget(victim)
	_ = victim.Close()
}

// givesWay returns the connection that gives way to conn, of one client or, with the zero
// value, of any: the one that has been idle longest; with busyToo, if none is idle, the one
// whose request is oldest; else conn itself.
func (c *Connections) givesWay(conn net.Conn, of netip.Prefix, busyToo bool) net.Conn {
	victim := conn
	for other, o := range c.open {
		if other == conn || of.IsValid() && o.client != of || o.active && !busyToo {
			continue
		}
		if v := c.open[victim]; victim == conn || v.active && !o.active || v.active == o.active && o.since.Before(v.since) {
			victim = other
		}
	}
	return victim
}

func (c *Connections) forget(conn net.Conn) {
	o := c.open[conn]
	if o == nil {
		return // it gave way
	}
	delete(c.open, conn)
	if c.clients[o.client]--; c.clients[o.client] == 0 {
		delete(c.clients, o.client)
	}
}

// clientOf returns the client of a connection's other end, as IP:PORT; the zero value for all at a Unix socket.
func clientOf(end string) netip.Prefix {
	at, err := netip.ParseAddrPort(end)
	if err != nil {
		return netip.Prefix{}
	}
	a := at.Addr().Unmap().WithZone("")
	bits := 32
	if a.Is6() {
		bits = 64
	}
	p, _ := a.Prefix(bits) // fails only where there are fewer bits
	return p
}
