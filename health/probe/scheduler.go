package probe

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service/wake"
)

// Scheduler probes a set of Targets for as long as Run runs. Its methods are
// safe for concurrent use.
type Scheduler struct {
	cfg     Config
	view    atomic.Pointer[health.View]
	changes chan struct{}
	updates chan struct{}

	mu     sync.Mutex // guards wanted, which is handed from Update to the loop
	wanted []health.Wanted
	known  map[health.Target]health.State // by question, for the loop's first update; not written once it runs
	paces  atomic.Pointer[map[string]float64]
	shown  atomic.Pointer[map[health.Target]*entry] // of the loop; the map isn't written any more
}

// New returns a Scheduler that knows nothing yet: its View is empty.
func New(cfg Config) *Scheduler {
	cfg.Workers = max(cfg.Workers, minWorkers)
	s := &Scheduler{
		cfg: cfg, changes: make(chan struct{}, 1), updates: make(chan struct{}, 1),
	}
	s.view.Store(health.NewView(cfg.Defaults, nil))
	return s
}

// Update replaces the set of Targets. Those that stay keep their state and
// their schedule, also if only interval, time-out, rise or fall of their check
// changed; new ones are Unknown. Duplicates are probed once. It returns at once, and
// takes targets over; their checks have an interval and a time-out.
func (s *Scheduler) Update(targets []health.Wanted) {
	s.mu.Lock()
	s.wanted = targets
	s.mu.Unlock()
	wake.Up(s.updates)
}

// Resume begins with what another Scheduler knew of targets: whose intervals, time-outs, rises and falls may be
// others. It includes an Update. Call it before Run.
func (s *Scheduler) Resume(targets []health.Wanted, known map[health.Target]health.State) {
	s.known = make(map[health.Target]health.State, len(known))
	for t, state := range known {
		s.known[question(t)] = state
	}
	states := make(map[health.Target]health.State, len(targets))
	for _, t := range targets {
		if state, ok := s.known[question(t.Target)]; ok {
			states[t.Target] = state
		}
	}
	s.view.Store(health.NewView(s.cfg.Defaults, states))
	s.Update(targets)
}

// View returns what is known now. States that change are in it within 100ms.
func (s *Scheduler) View() *health.View { return s.view.Load() }

// Changes receives a signal when some Target's Status in View is another. Signals that
// aren't received coalesce.
func (s *Scheduler) Changes() <-chan struct{} { return s.changes }

// Pace returns how many times as long as Targets ask for is between two probes
// for a namespace: 1, unless more are asked for than Config.Rate.
func (s *Scheduler) Pace(namespace string) float64 {
	if m := s.paces.Load(); m != nil {
		return max(1, (*m)[namespace])
	}
	return 1
}

// Check is one probe of a Target.
type Check struct {
	At   time.Time // when it ended
	Took time.Duration
}

// Last returns the last probe of a Target; zero if there was none. A successful one by TCP took as long as a connect from
// this node.
func (s *Scheduler) Last(t health.Target) Check {
	if entries := s.shown.Load(); entries != nil {
		if e := (*entries)[t]; e != nil {
			if c := e.last.Load(); c != nil {
				return *c
			}
		}
	}
	return Check{}
}

// Run probes until ctx ends, and returns nil when every probe has stopped. It
// runs once.
func (s *Scheduler) Run(ctx context.Context) error {
	newLoop(s).run(ctx)
	return nil
}
