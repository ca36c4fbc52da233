package userspace

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

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

	mu       sync.Mutex // guards plans, and orders changes of table
	plans    plans
	fallback atomic.Bool // the last plan has a kernel data plane to fall back to

	// Set by Listen.
	pipes     *pipes
	tcpBudget *budget
	udpBudget *budget
	tcp       []*listener
	loops     []*loop
	udp       []*listener
	workers   []*udpWorker
	records   *records       // nil where nothing outlives this process
	tookOver  int64          // when TakeOver began, in nanoseconds since epoch; 0 without
	started   bool           // Run was called; under gate until shut
	running   sync.WaitGroup // loops and workers
	prober    prober
	before    atomic.Pointer[remembered] // nil without, and when it is old
	untold    sync.Once                  // the log has that TimeExceeded fails

	starvation
	wantDescriptors chan struct{} // 1 slot: clients wait for them
	short           [shortages]shortage
	victims         sessionVictims
	shed            [2][shedReasons]atomic.Uint64 // connections and sessions that gave way: TCP, UDP
	shedLogged      atomic.Int64                  // when the log told of it

	stopped context.Context // done when accepting stops
	stop    context.CancelFunc
	gate    sync.Mutex // guards shut, and orders it with flows
	shut    bool       // no session may begin any more

	handing sync.Mutex // held from HandOver to Resume, and from Release on
}

// New returns a Server that does nothing yet.
func New(cfg Config) *Server {
	cfg = cfg.filled()
	s := &Server{
		cfg: cfg, table: newTable(), wantDescriptors: make(chan struct{}, 1),
		plans: plans{views: map[service.Key]*view{}, gone: map[service.Key]bool{}, changed: map[service.Key]bool{}},
	}
	s.stopped, s.stop = context.WithCancel(context.Background())
	s.locals.list, s.locals.ask = interfaceAddresses, isLocal
	s.dialers = newDialers(cfg.Mark)
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
	if !s.enter(true) { // so that Drain waits for what is accepted last
		return nil
	}
	defer s.flows.Done()
	if s.tookOver > 0 {
		rest(s.tookOver)
	}
	s.Confirm()
	s.start()
	var beside sync.WaitGroup
	beside.Go(s.makeRoomForClients)
	beside.Go(func() {
		everyPoller(s.loops, func(*loop) {})
		everyPoller(s.workers, func(*udpWorker) {})
		s.cfg.OnServing()
	})
	select {
	case <-ctx.Done():
		s.stop()
	case <-s.stopped.Done():
	}
	beside.Wait()
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
	for i := 0; len(s.udp) > 0 && i < len(s.udp[0].fds); i++ {
		w, err := s.newUDPWorker(i)
		if err != nil {
			return err
		}
		s.workers = append(s.workers, w)
	}
	return nil
}

// processors is how many goroutines may run at once before raiseProcessors.
var processors = runtime.GOMAXPROCS(0)

// raiseProcessors lets as many more goroutines run at once as there are loops. Go counts
// a loop that waits for events as running for the first 10 ms, unless another goroutine
// needs its place: then a thread of the runtime's takes it away after 20 µs, another
// one is woken to use it, and the loop has to look for a place when its events
// come (retake and exitsyscall in runtime/proc.go). With places to spare it keeps its own.
func (s *Server) raiseProcessors() {
	if n := processors + len(s.loops); runtime.GOMAXPROCS(0) < n {
		runtime.GOMAXPROCS(n)
	}
}

// start starts the goroutines of loops and workers, which outlive Run.
func (s *Server) start() {
	s.raiseProcessors()
	for _, l := range s.loops {
		l.post(l.startAccepting)
		s.running.Go(l.run)
	}
	for _, w := range s.workers {
		w.admitPosts()
		s.running.Go(w.run)
	}
}

// acceptAgain lets the loops accept, as there are descriptors again.
func (s *Server) acceptAgain() {
	for _, l := range s.loops {
		l.post(l.startAccepting)
	}
}

// stopAccepting accepts the clients that the kernel has connected, and resets
// those that come after. It returns when the listeners are closed.
func (s *Server) stopAccepting() {
	everyPoller(s.loops, (*loop).stopAccepting)
	everyPoller(s.loops, func(*loop) {}) // what loops had handed to each other before has been taken
	for _, l := range s.tcp {
		l.close()
	}
}

// connected counts a connection or session that an endpoint took; first says
// that it's the client's first endpoint.
func (s *Server) connected(state *serviceState, e *endpoint, first bool) {
	e.counters.total.Add(1)
	if !first {
		return
	}
	state.counters.total.Add(1)
	if state.reached.CompareAndSwap(false, true) {
		s.cfg.OnFirst(state.key)
	}
}

// endpointFailed counts a failed attempt for a client, and tells of it.
func (s *Server) endpointFailed(state *serviceState, e *endpoint, client netip.Addr, err error) {
	e.failures.Add(1)
	s.cfg.OnFailed(state.key.Protocol, e.address, client, err)
}

// Reset ends the TCP connections to an endpoint, with a reset to both ends, and returns how many there were.
func (s *Server) Reset(endpoint netip.AddrPort) (n int) {
	for _, f := range s.live.all() {
		x, is := f.(*tcpConn)
		if !is {
			continue
		}
		if e := x.endpoint.Load(); e != nil && e.address == endpoint {
			x.kill()
			n++
		}
	}
	return n
}

func (s *Server) connectTimeout(p *service.Port) time.Duration {
	return cmp.Or(p.ConnectTimeout, s.cfg.ConnectTimeout)
}

func (s *Server) retries(p *service.Port) int {
	if p.Retries >= 0 {
		return p.Retries
	}
	return max(s.cfg.Retries, 0)
}

// Drain stops accepting and waits until every connection has ended. A session ends when it is
// silent for a second, or a second after the last connection: its client's next datagram may begin another
// one elsewhere. When ctx is done first, it ends those that are left, and says how many. After it nothing is left: no
// goroutine, no socket. It may be called instead of ending Run's context, or
// after it.
func (s *Server) Drain(ctx context.Context) error {
	s.stop()
	s.shutGate(ctx)
	if !s.started { // nor will it be: what was taken over has no loop that would end it
		s.abandon()
	}
	gone := make(chan struct{})
	go func() {
		s.flows.Wait()
		close(gone)
	}()
	err := s.untilOnlySessions(ctx, gone)
	if n := s.killAll(gone); err != nil && n > 0 {
		err = fmt.Errorf("drain userspace: ended %d connections that were left: %w", n, err)
	} else {
		err = nil
	}
	s.closeAll()
	return err
}

// untilOnlySessions returns when all is gone, when there has been no connection for a second, or with its error when ctx is done.
func (s *Server) untilOnlySessions(ctx context.Context, gone <-chan struct{}) error {
	tick := time.NewTicker(trustFor / 10)
	defer tick.Stop()
	for last := time.Now(); ; {
		select {
		case <-gone:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		case now := <-tick.C:
			if slices.ContainsFunc(s.live.all(), func(f flow) bool { _, is := f.(*session); return !is }) {
				last = now
			} else if now.Sub(last) > trustFor {
				return nil
			}
		}
	}
}

// shutGate lets no session begin any more, once the clients that were on their
// way when accepting stopped have had their time.
func (s *Server) shutGate(ctx context.Context) {
	select {
	case <-ctx.Done():
	case <-time.After(acceptGrace):
	}
	s.gate.Lock() // what is counted in flows was counted before
	s.shut = true
	s.gate.Unlock()
	s.everySession(func(x *session) { // their idle time is short from now on
		if x.timer.at != 0 {
			x.worker.timers.set(&x.timer, x.worker.now+int64(trustFor))
		}
	})
}

// enter counts a goroutine that begins connections or is a session, unless
// none may begin any more. Starts says that it is Run.
func (s *Server) enter(starts bool) bool {
	s.gate.Lock()
	defer s.gate.Unlock()
	if s.shut {
		return false
	}
	s.started = s.started || starts
	s.flows.Add(1)
	return true
}

// closeAll frees what is left when no connection and no session is.
func (s *Server) closeAll() {
	for _, l := range s.loops {
		l.close()
	}
	for _, w := range s.workers {
		w.close()
	}
	s.prober.mu.Lock() // a Probe ends soon after stop
	for _, l := range s.udp {
		l.closeProber()
	}
	s.prober.mu.Unlock()
	s.running.Wait()
	if !s.started {
		for _, l := range s.loops {
			l.shut()
		}
		for _, w := range s.workers {
			w.release()
		}
	}
	for _, l := range slices.Concat(s.tcp, s.udp) {
		l.close()
	}
	if s.pipes != nil {
		s.pipes.close()
	}
	s.records.close()
}

func (s *Server) isStopped() bool { return s.stopped.Err() != nil }

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
