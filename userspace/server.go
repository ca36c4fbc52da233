package userspace

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"kproxy.dev/kproxy/lb"
	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
)

// Server forwards connections as plans say. Use it like this: New, Listen,
// Prepare, then Run; at the end Drain, which also frees everything when its
// context is done already.
type Server struct {
	cfg     Config
	locals  locals
	dialers *dialers
	live    live
	flows   sync.WaitGroup // goroutines that serve connections and sessions
	table   atomic.Pointer[table]

	mu     sync.Mutex // orders Prepare and Commit
	states map[service.Key]*serviceState

	// Set by Listen.
	pipes     *pipes
	tcpBudget *budget
	tcp       []*tcpListener

	stopOnce sync.Once
	stopped  chan struct{} // closed when nothing new is accepted any more
	closed   chan struct{} // closed when Drain has ended everything
	endOnce  sync.Once
}

// New returns a Server that does nothing yet.
func New(cfg Config) *Server {
	cfg = cfg.filled()
	s := &Server{
		cfg: cfg, states: map[service.Key]*serviceState{},
		stopped: make(chan struct{}), closed: make(chan struct{}),
	}
	s.locals.list = cfg.LocalAddresses
	s.dialers = newDialers(cfg.Mark, net.KeepAliveConfig{Enable: true, Idle: cfg.KeepAlive, Interval: 15 * time.Second, Count: 4})
	s.table.Store(&table{})
	return s
}

// Prepare serves what p adds from now on; what only earlier plans have is
// still served.
func (s *Server) Prepare(p *plan.Plan) {
	s.mu.Lock()
	defer s.mu.Unlock()
	old := s.table.Load()
	t := newTable(p, old, s.state)
	t.keepOld(old)
	s.table.Store(t)
}

// Commit forgets what p, which was prepared, doesn't hold. TCP connections
// live on, as they do in the kernel's data planes; UDP sessions end when their
// service or endpoint is gone.
func (s *Server) Commit(p *plan.Plan) {
	s.mu.Lock()
	defer s.mu.Unlock()
	t := newTable(p, s.table.Load(), s.state)
	s.table.Store(t)
	for k, state := range s.states {
		v, ok := t.services[k]
		if !ok {
			delete(s.states, k)
			continue
		}
		state.retain(addresses(v.plan))
	}
}

// state returns what is kept of a service. The caller holds mu.
func (s *Server) state(k service.Key) *serviceState {
	st := s.states[k]
	if st == nil {
		st = newServiceState(k)
		s.states[k] = st
	}
	return st
}

// addresses returns every endpoint address in a service's plan.
func addresses(p *plan.Service) map[netip.AddrPort]bool {
	m := make(map[netip.AddrPort]bool, len(p.Endpoints))
	for i := range p.Endpoints {
		m[p.Endpoints[i].Address] = true
	}
	for _, g := range p.Groups {
		for _, b := range g.Cluster {
			m[b.Address] = true
		}
		for _, b := range g.Local {
			m[b.Address] = true
		}
	}
	return m
}

// Affinity returns the table of k's clients, nil if it has no affinity. It may
// be read and written, to take clients along when the service moves.
func (s *Server) Affinity(k service.Key) *lb.Affinity {
	if v := s.table.Load().services[k]; v != nil {
		return v.state.affinity.Load()
	}
	return nil
}

// Run accepts and forwards until ctx is done or Drain is called. Connections
// outlive it: call Drain to end them.
func (s *Server) Run(ctx context.Context) error {
	if len(s.tcp) == 0 {
		return errors.New("run userspace: not listening")
	}
	var loops sync.WaitGroup
	for _, l := range s.tcp {
		s.flows.Add(1) // so that Drain waits for what is accepted last
		loops.Go(func() {
			defer s.flows.Done()
			l.run(s)
		})
	}
	select {
	case <-ctx.Done():
		s.stop()
	case <-s.stopped:
	}
	loops.Wait()
	return nil
}

// Drain stops accepting and waits until every connection and session has
// ended. When ctx is done first, it ends those that are left, and says how many.
func (s *Server) Drain(ctx context.Context) error {
	s.stop()
	gone := make(chan struct{})
	go func() {
		s.flows.Wait()
		close(gone)
	}()
	var err error
	select {
	case <-gone:
	case <-ctx.Done():
		if n := s.killAll(gone); n > 0 {
			err = fmt.Errorf("drain userspace: ended %d connections that were left: %w", n, ctx.Err())
		}
	}
	s.endOnce.Do(func() {
		close(s.closed)
		if s.pipes != nil {
			s.pipes.close()
		}
	})
	return err
}

// killAll ends what is in the live table, and what still gets into it, until
// gone. It returns how many there were at first.
func (s *Server) killAll(gone <-chan struct{}) int {
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	first := -1
	for {
		left := s.live.all()
		if first < 0 {
			first = len(left)
		}
		for _, f := range left {
			f.kill()
		}
		select {
		case <-gone:
			return first
		case <-tick.C:
		}
	}
}

// stop stops accepting.
func (s *Server) stop() {
	s.stopOnce.Do(func() {
		close(s.stopped)
		if s.tcpBudget != nil {
			s.tcpBudget.close()
		}
		for _, l := range s.tcp {
			l.stop()
		}
	})
}

// connected counts a connection or session that an endpoint took; first says
// that it's the client's first endpoint.
func (s *Server) connected(state *serviceState, e *endpoint, first bool) {
	e.counters.total.Add(1)
	if !first {
		return
	}
	state.counters.total.Add(1)
	if state.carried.CompareAndSwap(false, true) {
		s.cfg.OnFirst(state.key)
	}
}

// endpointFailed counts a failed attempt and ejects an endpoint that fails
// again and again. A nil error means that it took the connection and then
// reset it.
func (s *Server) endpointFailed(state *serviceState, e *endpoint, err error) {
	e.failures.Add(1)
	if e.ejection.failed(time.Now()) {
		s.cfg.Logger.Warn("endpoint ejected: connects to it fail", "service", state.key, "endpoint", e.address, "until", e.ejection.ejectedUntil(), "error", err)
	}
}

func (s *Server) connectTimeout(p *service.Port) time.Duration {
	if p.ConnectTimeout > 0 {
		return p.ConnectTimeout
	}
	return s.cfg.ConnectTimeout
}

func (s *Server) retries(p *service.Port) int {
	if p.Retries >= 0 {
		return p.Retries
	}
	return max(s.cfg.Retries, 0)
}
