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

// Connections bounds the HTTP connections of all listeners that it serves, in all
// and for each client: an IPv4 address, or an IPv6 network of /64, whose
// addresses one host can have all of. Each costs a file descriptor and some
// 24 kB, and outsiders reach these listeners.
//
// When a client has its share, its next connection takes the place of its own
// that has rested longest: between two requests, or before the first. When all
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
	client := clientOf(conn.RemoteAddr())
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
		c.log.Warn("too many HTTP connections; those that rest longest are closed, of the clients that hold most",
			"client", from, "holds", c.clients[from], "mayHold", c.perClient, "inAll", len(c.open), "bound", c.max)
	}
	c.forget(victim)
	_ = victim.Close()
}

// givesWay returns the connection that gives way to conn, of one client or, with the zero
// value, of any: the one that has rested longest; with busyToo, where none rests, the one
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

func clientOf(a net.Addr) netip.Prefix {
	tcp, ok := a.(*net.TCPAddr)
	if !ok {
		return netip.Prefix{}
	}
	return clientAt(tcp.AddrPort().Addr())
}

func clientAt(a netip.Addr) netip.Prefix {
	a = a.Unmap().WithZone("")
	bits := 32
	if a.Is6() {
		bits = 64
	}
	p, _ := a.Prefix(bits) // fails only where there are fewer bits
	return p
}
