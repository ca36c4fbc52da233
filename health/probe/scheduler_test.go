package probe

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"runtime"
	"slices"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/service"
)

var errDown = errors.New("refused")

// standard are the defaults of the flags.
var standard = health.Defaults{Kind: service.CheckTCP, Interval: 2 * time.Second, Timeout: time.Second, Rise: 2, Fall: 3}

func configOf(p Prober) Config {
	return Config{Defaults: standard, Workers: 1024, Prober: p, Logger: slog.New(slog.DiscardHandler)}
}

// targetOf returns the i-th of many Targets, probed every 2s for 1s at most.
func targetOf(i int) health.Target {
	a := netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)})
	return health.Target{
		Protocol: service.TCP, Address: netip.AddrPortFrom(a, 80),
		Check: standard.Fill(service.HealthCheck{}, service.TCP),
	}
}

func targetsOf(n int) []health.Wanted {
	ts := make([]health.Wanted, n)
	for i := range ts {
		ts[i].Target = targetOf(i)
	}
	return ts
}

// wanted are targets that a namespace asks for.
func wanted(namespace string, targets ...health.Target) (out []health.Wanted) {
	for _, t := range targets {
		out = append(out, health.Wanted{Target: t, Namespace: namespace})
	}
	return out
}

// network is a model of a network in which time is the test's: endpoints
// answer at once, unless they are down or hang. It records the probes.
type network struct {
	mu        sync.Mutex
	down      map[netip.AddrPort]error
	hang      func(netip.AddrPort) bool
	probes    map[netip.AddrPort][]time.Time
	under     int
	mostUnder int
	goroutine int // the most there ever were
}

func newNetwork() *network {
	return &network{down: map[netip.AddrPort]error{}, probes: map[netip.AddrPort][]time.Time{}}
}

func (n *network) Probe(ctx context.Context, t health.Target) error {
	n.mu.Lock()
	n.probes[t.Address] = append(n.probes[t.Address], time.Now())
	n.under++
	n.mostUnder, n.goroutine = max(n.mostUnder, n.under), max(n.goroutine, runtime.NumGoroutine())
	err := n.down[t.Address]
	hangs := n.hang != nil && n.hang(t.Address)
	n.mu.Unlock()
	if hangs {
		<-ctx.Done()
		err = ctx.Err()
	} else {
		time.Sleep(200 * time.Microsecond)
	}
	n.mu.Lock()
	n.under--
	n.mu.Unlock()
	return err
}

func (n *network) set(i int, err error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.down[targetOf(i).Address] = err
}

// times returns when target i was probed.
func (n *network) times(i int) []time.Time {
	n.mu.Lock()
	defer n.mu.Unlock()
	return slices.Clone(n.probes[targetOf(i).Address])
}

// run runs a Scheduler in a bubble in which time passes when all wait.
func run(t *testing.T, workers int, n *network, f func(t *testing.T, s *Scheduler)) {
	runWith(t, func(c *Config) {
		if workers > 0 {
			c.Workers = workers
		}
	}, n, f)
}

func runWith(t *testing.T, set func(*Config), n *network, f func(t *testing.T, s *Scheduler)) {
	synctest.Test(t, func(t *testing.T) {
		cfg := configOf(n)
		set(&cfg)
		s := New(cfg)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- s.Run(ctx) }()
		f(t, s)
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
		if n.under != 0 {
			t.Errorf("%d probes are under way after Run has returned", n.under)
		}
	})
}

// statusOf returns what the View says of target i.
func statusOf(s *Scheduler, i int) string {
	target := targetOf(i)
	return s.View().Of(&service.Port{Key: service.Key{Protocol: target.Protocol}}, target.Address).Status.String()
}

func TestSchedulerFindsEndpointsUpAndDown(t *testing.T) {
	n := newNetwork()
	n.set(1, errDown)
	run(t, 0, n, func(t *testing.T, s *Scheduler) {
		s.Update(targetsOf(2))
		synctest.Wait()
		if got := statusOf(s, 0) + " " + statusOf(s, 1); got != "unknown unknown" {
			t.Errorf("before the first results: %s", got)
		}
		<-s.Changes() // Rise is 2
		if got := statusOf(s, 0) + " " + statusOf(s, 1); got != "up unknown" {
			t.Errorf("after the first change: %s", got)
		}
		<-s.Changes() // Fall is 3
		if got := statusOf(s, 0) + " " + statusOf(s, 1); got != "up down" {
			t.Errorf("after the second change: %s", got)
		}
		probed := n.times(1)
		want := Check{At: probed[len(probed)-1].Add(200 * time.Microsecond), Took: 200 * time.Microsecond}
		if got := s.Last(targetOf(1)); !got.At.Equal(want.At) || got.Took != want.Took {
			t.Errorf("the last check is %v, want %v", got, want)
		}
		if got := s.Last(targetOf(9)); got != (Check{}) {
			t.Errorf("one that isn't probed has a last check: %v", got)
		}
		n.set(1, nil)
		<-s.Changes()
		n.set(1, errDown)
		<-s.Changes()
		state := s.View().Of(&service.Port{Key: service.Key{Protocol: service.TCP}}, targetOf(1).Address)
		if state.Status != health.Down || len(state.Flaps) != 2 || state.LastError != "refused" {
			t.Errorf("after up and down again: %+v", state)
		}
	})
}

func TestChangesTellsOfStatusOnly(t *testing.T) {
	n := newNetwork()
	run(t, 0, n, func(t *testing.T, s *Scheduler) {
		s.Update(targetsOf(1))
		<-s.Changes()
		n.set(0, errDown)
		time.Sleep(2300 * time.Millisecond)
		n.set(0, nil)
		synctest.Wait()
		port := &service.Port{Key: service.Key{Protocol: service.TCP}}
		if got := s.View().Of(port, targetOf(0).Address); got.Status != health.Up || got.LastError != "refused" {
			t.Errorf("after one failure: %+v", got)
		}
		time.Sleep(20 * time.Second)
		if got := s.View().Of(port, targetOf(0).Address); got.LastError != "" {
			t.Errorf("after a success: %+v", got)
		}
		select {
		case <-s.Changes():
			t.Error("a single failure is a change")
		default:
		}
	})
}

func TestUpdateKeepsWhatStays(t *testing.T) {
	n := newNetwork()
	n.set(0, errDown)
	run(t, 0, n, func(t *testing.T, s *Scheduler) {
		s.Update(targetsOf(2))
		time.Sleep(10 * time.Second)
		before := len(n.times(0))
		for range 20 { // updates don't disturb the schedule
			s.Update(targetsOf(3))
			time.Sleep(500 * time.Millisecond)
		}
		if got := len(n.times(0)) - before; got < 4 || got > 6 {
			t.Errorf("%d probes in 10s, want 5", got)
		}
		if got := statusOf(s, 0) + " " + statusOf(s, 1) + " " + statusOf(s, 2); got != "down up up" {
			t.Errorf("after updates: %s", got)
		}
		s.Update(targetsOf(3)[1:])
		time.Sleep(time.Second)
		before = len(n.times(0))
		if got := statusOf(s, 0) + " " + statusOf(s, 1); got != "unknown up" {
			t.Errorf("after the first one went: %s", got)
		}
		time.Sleep(10 * time.Second)
		if got := len(n.times(0)) - before; got != 0 {
			t.Errorf("%d probes of a target that's gone", got)
		}
		s.Update(nil)
		time.Sleep(time.Second)
		if got := maps.Collect(s.View().States()); len(got) != 0 {
			t.Errorf("after an empty update: %v", got)
		}
	})
}

// Other parameters don't make an endpoint that is down usable again.
func TestUpdateOfParametersKeepsState(t *testing.T) {
	n := newNetwork()
	n.set(0, errDown)
	run(t, 0, n, func(t *testing.T, s *Scheduler) {
		s.Update(targetsOf(1))
		<-s.Changes()
		faster := targetOf(0)
		faster.Check.Interval, faster.Check.Fall = time.Second, 7
		s.Update(wanted("", faster))
		<-s.Changes()
		port := &service.Port{Key: service.Key{Protocol: service.TCP}, Health: faster.Check}
		if got := s.View().Of(port, faster.Address); got.Status != health.Down {
			t.Errorf("after a change of parameters: %+v", got)
		}
		other := faster
		other.Check.Kind, other.Check.Path = service.CheckHTTP, "/"
		s.Update(wanted("", other))
		time.Sleep(100 * time.Millisecond)
		port.Health = other.Check
		if got := s.View().Of(port, faster.Address); got.Status != health.Unknown {
			t.Errorf("another kind of check knows already: %+v", got)
		}
	})
}

func TestTargetsAreShared(t *testing.T) {
	n := newNetwork()
	run(t, 0, n, func(t *testing.T, s *Scheduler) {
		s.Update(wanted("", targetOf(0), targetOf(0), targetOf(0)))
		time.Sleep(20 * time.Second)
		if got := len(n.times(0)); got < 9 || got > 12 {
			t.Errorf("%d probes in 20s, want 10", got)
		}
		if got := maps.Collect(s.View().States()); len(got) != 1 {
			t.Errorf("states %v, want one", got)
		}
	})
}

func TestUpdateBeforeRun(t *testing.T) {
	n := newNetwork()
	synctest.Test(t, func(t *testing.T) {
		s := New(configOf(n))
		s.Update(targetsOf(1))
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		if err := s.Run(ctx); err != nil {
			t.Error(err)
		}
		if got := statusOf(s, 0); got != "up" {
			t.Errorf("status %s", got)
		}
	})
}

// TestResume: what another process knew holds at once and until probes say otherwise, also of checks that are now made
// at another pace; of the rest nothing is known.
func TestResume(t *testing.T) {
	n := newNetwork()
	n.hang = func(netip.AddrPort) bool { return true }
	synctest.Test(t, func(t *testing.T) {
		s := New(configOf(n))
		slower := targetOf(0)
		slower.Check.Interval *= 2
		s.Resume(targetsOf(3), map[health.Target]health.State{
			slower: {Status: health.Up}, targetOf(1): {Status: health.Down, LastError: "refused"}, targetOf(7): {Status: health.Up},
		})
		now := func() (out []string) { return []string{statusOf(s, 0), statusOf(s, 1), statusOf(s, 2), statusOf(s, 7)} }
		want := []string{"up", "down", "unknown", "unknown"}
		if diff := cmp.Diff(want, now()); diff != "" {
			t.Errorf("at once (-want +got):\n%s", diff)
		}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- s.Run(ctx) }()
		time.Sleep(time.Second)
		s.Update(targetsOf(4))
		time.Sleep(time.Second)
		if diff := cmp.Diff(want, now()); diff != "" {
			t.Errorf("after a second, and an update (-want +got):\n%s", diff)
		}
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
}

func TestInconclusiveProbesChangeNothing(t *testing.T) {
	n := newNetwork()
	run(t, 0, n, func(t *testing.T, s *Scheduler) {
		s.Update(targetsOf(1))
		<-s.Changes()
		n.set(0, fmt.Errorf("socket: %w", syscall.EMFILE))
		time.Sleep(time.Minute)
		if got := statusOf(s, 0); got != "up" {
			t.Errorf("an endpoint is %s because this host has no file descriptors left", got)
		}
		if got := len(n.times(0)); got < 25 {
			t.Errorf("%d probes in a minute, want 30", got)
		}
	})
}

// A View never changes.
func TestViewsAreImmutable(t *testing.T) {
	n := newNetwork()
	n.set(0, errDown)
	run(t, 0, n, func(t *testing.T, s *Scheduler) {
		s.Update(targetsOf(1))
		<-s.Changes()
		port := &service.Port{Key: service.Key{Protocol: service.TCP}}
		view := s.View()
		before := view.Of(port, targetOf(0).Address)
		n.set(0, nil)
		<-s.Changes()
		if diff := cmp.Diff(before, view.Of(port, targetOf(0).Address)); diff != "" {
			t.Errorf("a view has changed (-before +after):\n%s", diff)
		}
	})
}

// A random walk of updates leaves exactly the wanted Targets scheduled.
func TestRandomUpdates(t *testing.T) {
	n := newNetwork()
	n.hang = func(a netip.AddrPort) bool { return a.Addr().As4()[3]%7 == 0 }
	run(t, 16, n, func(t *testing.T, s *Scheduler) {
		want := map[int]bool{}
		for step := range 300 {
			for k := range 5 {
				i := (step*31 + k*k*17) % 60
				if want[i] = !want[i]; !want[i] {
					delete(want, i)
				}
			}
			var targets []health.Wanted
			for i := range maps.Keys(want) {
				targets = append(targets, wanted("", targetOf(i))...)
			}
			s.Update(targets)
			time.Sleep(time.Duration(step%50) * 37 * time.Millisecond)
		}
		time.Sleep(30 * time.Second)
		from := time.Now()
		time.Sleep(30 * time.Second)
		for i := range 60 {
			probes := 0
			for _, at := range n.times(i) {
				if at.After(from) {
					probes++
				}
			}
			if (probes > 0) != want[i] {
				t.Errorf("target %d: wanted is %t, and it was probed %d times", i, want[i], probes)
			}
		}
	})
}
