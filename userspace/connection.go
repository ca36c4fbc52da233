package userspace

import (
	"context"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/pires/go-proxyproto"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// tcpConn is one client's connection through a service.
type tcpConn struct {
	server  *Server
	front   front
	client  netip.AddrPort
	orig    netip.AddrPort
	from    plan.Client
	started time.Time
	meters  [2]meter
	carried bool // an endpoint has taken it at least once

	mu       sync.Mutex // guards what describe and kill need
	conn     side
	endpoint *endpoint
	relay    *relay
	cancel   context.CancelFunc // of the last dial
	killed   bool
}

// serveTCP forwards one accepted connection and returns when it has ended.
func (s *Server) serveTCP(c *net.TCPConn) {
	conn, err := newSide(c)
	if err != nil {
		c.Close()
		return
	}
	x, group := s.admitTCP(conn)
	if x == nil {
		conn.abort(0)
		return
	}
	id := s.live.add(x)
	defer s.live.remove(id)
	state := x.front.view.state
	state.active.Add(1)
	defer state.active.Add(-1)
	x.forward(newChoice(group, state.affinity.Load(), x.from.Address))
	x.settle()
}

// admitTCP finds out where a connection was headed. It returns nil for one
// that no plan knows, or that may not pass: it gets a reset.
func (s *Server) admitTCP(c side) (*tcpConn, *group) {
	orig, err := s.cfg.TCPOrigin(c.TCPConn)
	if err != nil || orig == addrPort(c.LocalAddr()) {
		return nil, nil
	}
	client := addrPort(c.RemoteAddr())
	f, ok := s.table.lookup(service.TCP, orig, s.locals.mustContain)
	if !ok {
		return nil, nil
	}
	from, ok := s.admit(f, client.Addr(), func() string { return incomingTCP(c.TCPConn, f.Family) })
	if !ok {
		return nil, nil
	}
	x := &tcpConn{server: s, front: f, client: client, orig: orig, from: from, started: time.Now(), conn: c}
	return x, f.group(from, s.table.rules())
}

// admit reports whether a client may use f. It asks for the interface that the
// client's packets come in on where that matters.
func (s *Server) admit(f front, client netip.Addr, in func() string) (plan.Client, bool) {
	c := plan.Client{Address: client.WithZone(""), Node: s.locals.contains(client.WithZone(""))}
	rules := s.table.rules()
	if !c.Node && rules.DetectsInterface() {
		c.Interface = in()
	}
	return c, f.view.plan.VerdictFor(f.Frontend, c, rules) == plan.Forward
}

// forward finds an endpoint and relays until the connection has ended.
func (x *tcpConn) forward(c *choice) {
	state := x.front.view.state
	port := x.front.view.plan.Port
	retries := x.server.retries(port)
	end := x.started.Add(max(x.server.cfg.ConnectTotal, x.server.connectTimeout(port)))
	for attempt := 0; attempt <= retries && !x.dying(); attempt++ {
		e := c.next()
		if e == nil {
			break
		}
		if attempt > 0 {
			state.retried.Add(1)
		}
		from := x.server.table.source(x.front, x.from, e.address.Addr())
		up, err := x.dial(e, from, port, end)
		if err == nil {
			c.settled(e)
			retry := x.run(e, up, attempt < retries)
			e.load.Release()
			if !retry {
				return
			}
		} else {
			e.load.Release()
		}
		if err == nil || blames(err) {
			x.server.endpointFailed(state, e, from, err)
		}
		if !time.Now().Before(end) {
			break
		}
	}
	state.failed.Add(1)
	x.conn.abort(0)
}

// dial connects to e and, where the service asks for it, says first who the
// client is.
func (x *tcpConn) dial(e *endpoint, from source, port *service.Port, end time.Time) (*net.TCPConn, error) {
	deadline := time.Now().Add(x.server.connectTimeout(port))
	if end.Before(deadline) {
		deadline = end
	}
	// Not derived from a context that all connections share: its lock would be
	// theirs too.
	ctx, cancel := context.WithDeadline(context.Background(), deadline)
	defer cancel()
	x.mu.Lock()
	x.cancel = cancel
	x.mu.Unlock()
	up, err := x.server.dialers.tcp(ctx, from, e.address)
	if err != nil {
		return nil, err
	}
	if port.ProxyProtocol != 0 {
		h := proxyproto.HeaderProxyFromAddrs(byte(port.ProxyProtocol), net.TCPAddrFromAddrPort(x.client), net.TCPAddrFromAddrPort(x.orig))
		if _, err := h.WriteTo(up); err != nil {
			up.Close()
			return nil, err
		}
	}
	return up, nil
}

// run relays to e until the connection has ended, or until e has shown that
// it doesn't take it and another endpoint may.
func (x *tcpConn) run(e *endpoint, up *net.TCPConn, mayRetry bool) (retry bool) {
	raw, err := newSide(up)
	if err != nil {
		up.Close()
		return mayRetry
	}
	r := &relay{
		sides: [2]side{x.conn, raw}, meters: &x.meters, mayRetry: mayRetry,
		answered: e.ejection.Succeeded,
		idle:     x.front.view.plan.Port.IdleTimeout, halfClose: x.server.cfg.HalfCloseTimeout,
	}
	x.mu.Lock()
	if x.killed {
		x.mu.Unlock()
		raw.abort(0)
		return false
	}
	x.endpoint, x.relay = e, r
	x.mu.Unlock()
	x.server.connected(x.front.view.state, e, !x.carried)
	x.carried = true
	retry = r.run(x.server.pipes)
	x.settle()
	if !retry {
		e.ejection.Succeeded()
	}
	return retry
}

// describe implements flow.
func (x *tcpConn) describe() Connection {
	x.mu.Lock()
	defer x.mu.Unlock()
	c := Connection{
		Protocol: service.TCP, Service: x.front.view.state.key, Client: x.client, Address: x.orig, Started: x.started,
		BytesIn: x.meters[clientSide].count.Load(), BytesOut: x.meters[endpointSide].count.Load(),
	}
	if x.endpoint != nil {
		c.Endpoint = x.endpoint.address
	}
	return c
}

// settle implements flow. Only an endpoint that moved bytes gets here with any:
// where another one is tried, none were moved.
func (x *tcpConn) settle() {
	x.mu.Lock()
	e := x.endpoint
	x.mu.Unlock()
	if e == nil {
		return
	}
	s := x.front.view.state
	x.meters[clientSide].settle(&s.counters.bytesIn, &e.counters.bytesIn)
	x.meters[endpointSide].settle(&s.counters.bytesOut, &e.counters.bytesOut)
}

func (x *tcpConn) dying() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.killed
}

// kill implements flow.
func (x *tcpConn) kill() {
	x.mu.Lock()
	x.killed = true
	r := x.relay
	if x.cancel != nil {
		x.cancel()
	}
	x.mu.Unlock()
	if r != nil {
		r.kill()
	}
	x.conn.abort(0)
}
