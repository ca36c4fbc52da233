package userspace

import (
	"context"
	"errors"
	"net/netip"
	"runtime"
	"sync"
	"sync/atomic"
	"time"

	"kproxy.dev/kproxy/health"
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
	flows   sync.WaitGroup // connections and sessions, and Run while it accepts
	table   *table

	mu      sync.Mutex // guards plans, and orders changes of table
	plans   plans
	beneath atomic.Bool // the last plan has kernel rules beneath the portal

	// Set by Listen.
	pipes     *pipes
	tcpBudget *budget
	udpBudget *budget
	tcp       []*tcpListener
	loops     []*loop
	looping   bool // they run
	running   sync.WaitGroup
	udp       []*udpListener
	workers   []*udpWorker
	sessions  atomic.Int64   // UDP sessions there are
	receivers sync.WaitGroup // the workers' goroutines
	prober    prober

	shedding chan struct{} // 1 slot: clients wait for descriptors
	short    [shortages]shortage
	shed     [2][shedReasons]atomic.Uint64 // who gave way: TCP, UDP
	toldShed atomic.Int64                  // when the log was told of it

	stopOnce sync.Once
	stopped  chan struct{} // closed when accepting stops
	gate     sync.Mutex    // guards shut, and orders it with flows
	shut     bool          // no session may begin any more
}

// New returns a Server that does nothing yet.
func New(cfg Config) *Server {
	cfg = cfg.filled()
	s := &Server{
		cfg: cfg, table: newTable(), plans: newPlans(),
		stopped: make(chan struct{}), shedding: make(chan struct{}, 1),
	}
	s.locals.list, s.locals.ask = cfg.LocalAddresses, isLocal
	s.dialers = newDialers(cfg.Mark, cfg.KeepAlive)
	return s
}

// Local reports whether an address is one of this node's own, loopback
// included. What it knows may be some seconds old.
func (s *Server) Local(a netip.Addr) bool { return s.locals.contains(a) }

// Run accepts and forwards until ctx is done or Drain is called. Connections
// and sessions outlive it: call Drain to end them.
func (s *Server) Run(ctx context.Context) error {
	if len(s.tcp) == 0 {
		return errors.New("run userspace: not listening")
	}
	if !s.enter() { // so that Drain waits for what is accepted last
		return nil
	}
	defer s.flows.Done()
	s.startLoops()
	s.startReceivers()
	var room sync.WaitGroup
	room.Go(s.makeRoomForClients)
	select {
	case <-ctx.Done():
		s.stop()
	case <-s.stopped:
	}
	room.Wait()
	time.Sleep(acceptGrace)
	s.stopAccepting()
	return nil
}

// makeLoops makes the loops that will serve connections, and the workers, with the descriptors that
// they need.
func (s *Server) makeLoops() error {
	for range s.cfg.Loops {
		l, err := s.newLoop()
		if err != nil {
			return err
		}
		s.loops = append(s.loops, l)
	}
	for i := 0; len(s.udp) > 0 && i < s.cfg.Loops; i++ {
		w, err := s.newUDPWorker(i)
		if err != nil {
			return err
		}
		s.workers = append(s.workers, w)
	}
	return nil
}

// processors is how many goroutines may run at once before makeRoom.
var processors = runtime.GOMAXPROCS(0)

// makeRoom lets as many more goroutines run at once as there are loops. Go counts
// a loop that waits for events as running for the first 10 ms, unless somebody else
// needs its place: then a thread of the runtime's takes it away after 20 µs, another
// one is woken to use it, and the loop has to look for a place when its events
// come (retake and exitsyscall in runtime/proc.go). With places to spare it keeps its own.
func (s *Server) makeRoom() {
	if n := processors + len(s.loops); runtime.GOMAXPROCS(0) < n {
		runtime.GOMAXPROCS(n)
	}
}

// startLoops starts their goroutines, which outlive Run.
func (s *Server) startLoops() {
	s.looping = true
	s.makeRoom()
	for _, l := range s.loops {
		l.post(l.accept)
		s.running.Go(l.run)
	}
}

// closeLoops ends them when they have no connection any more.
func (s *Server) closeLoops() {
	for _, l := range s.loops {
		if l.close(); !s.looping {
			l.shut()
		}
	}
	s.running.Wait()
}

// acceptAgain lets the loops accept, as there are descriptors again.
func (s *Server) acceptAgain() {
	for _, l := range s.loops {
		l.post(l.accept)
	}
}

// stopAccepting takes in the clients that the kernel has connected, and resets
// those that come after. It returns when the listeners are closed.
func (s *Server) stopAccepting() {
	s.everyLoop(func(l *loop) {
		for _, a := range l.acceptors {
			a.stop()
		}
	})
	s.everyLoop(func(*loop) {}) // what loops had handed to each other before has been taken
	for _, l := range s.tcp {
		l.close()
	}
}

// everyLoop has all loops call f and waits until they have, those that run.
func (s *Server) everyLoop(f func(*loop)) {
	var done sync.WaitGroup
	for _, l := range s.loops {
		done.Add(1)
		if !l.post(func() { defer done.Done(); f(l) }) {
			done.Done()
		}
	}
	done.Wait()
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

// endpointFailed counts a failed attempt from an address, and ejects an
// endpoint that fails again and again. A nil error means that it took the
// connection and then reset it.
func (s *Server) endpointFailed(state *serviceState, e *endpoint, from source, err error) {
	e.failures.Add(1)
	ejected, now := false, time.Now()
	if from.transparent {
		ejected = e.ejection.FailedFor(from.addr, health.DefaultEjection(), now)
	} else {
		ejected = e.ejection.Failed(health.DefaultEjection(), now)
	}
	if ejected {
		s.cfg.Logger.Warn("endpoint ejected: connects to it fail", "service", state.key, "endpoint", e.address, "until", e.ejection.Until(now), "error", err)
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
