package probe

import (
	"fmt"
	"math"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/health"
)

// probed returns how many probes began in each of the buckets that follow from.
func (n *network) probed(from time.Time, bucket time.Duration, buckets int) []int {
	n.mu.Lock()
	defer n.mu.Unlock()
	counts := make([]int, buckets)
	for _, times := range n.probes {
		for _, at := range times {
			if i := int(at.Sub(from) / bucket); !at.Before(from) && i < buckets {
				counts[i]++
			}
		}
	}
	return counts
}

// 10,000 endpoints every 2s: evenly spread from the beginning on, each at its
// interval, with a handful of probes under way and no goroutine for those that
// wait.
func TestTenThousandTargets(t *testing.T) {
	n := newNetwork()
	run(t, 0, n, func(t *testing.T, s *Scheduler) {
		began := time.Now()
		s.Update(targetsOf(10_000))
		time.Sleep(20 * time.Second)
		// Jitter makes the seams of the first rounds uneven for a moment.
		counts := n.probed(began, 100*time.Millisecond, 200)
		if low, high := slices.Min(counts), slices.Max(counts); low < 230 || high > 770 {
			t.Errorf("from %d to %d probes begin in 100ms, want about 500", low, high)
		}
		if low, high := slices.Min(counts[150:]), slices.Max(counts[150:]); low < 370 || high > 630 {
			t.Errorf("in the end, from %d to %d probes begin in 100ms, want about 500", low, high)
		}
		for i := range 10_000 {
			if got := len(n.times(i)); got < 9 || got > 12 {
				t.Fatalf("target %d was probed %d times in 20s, want 10", i, got)
			}
		}
		if n.mostUnder > 50 || n.goroutine > 100 {
			t.Errorf("up to %d probes under way and %d goroutines", n.mostUnder, n.goroutine)
		}
	})
}

// TestGreedyNamespacesSlowDownThemselves: with a namespace that asks for a hundred
// times the probes there are, each of a hundred others is probed as it asks, and
// all together no more than there are.
func TestGreedyNamespacesSlowDownThemselves(t *testing.T) {
	n := newNetwork()
	runWith(t, func(c *Config) { c.Rate = 1000 }, n, func(t *testing.T, s *Scheduler) {
		var targets []health.Wanted
		for i := range 100 {
			targets = append(targets, wanted(fmt.Sprint("polite-", i), targetOf(i))...)
		}
		for i := 100; i < 1100; i++ {
			greedy := targetOf(i)
			greedy.Check.Interval, greedy.Check.Timeout = 10*time.Millisecond, 10*time.Millisecond
			targets = append(targets, wanted("greedy", greedy)...)
		}
		began := time.Now()
		s.Update(targets)
		time.Sleep(20 * time.Second)
		counts := n.probed(began, time.Second, 20)
		if high := slices.Max(counts); high > 1050 {
			t.Errorf("%d probes in a second, want at most 1000 and a burst of 50", high)
		}
		for i := range 100 {
			if got := len(n.times(i)); got < 9 || got > 12 {
				t.Errorf("polite target %d was probed %d times in 20s, want 10", i, got)
			}
		}
		for i := 100; i < 1100; i++ {
			if got := len(n.times(i)); got < 15 || got > 23 { // 950 a second for 1000
				t.Errorf("greedy target %d was probed %d times in 20s, want 19", i, got)
			}
		}
		if polite, greedy := s.Pace("polite-7"), s.Pace("greedy"); polite != 1 || greedy < 100 || greedy > 110 {
			t.Errorf("a polite namespace is probed %g times slower, the greedy one %g; want 1 and 105", polite, greedy)
		}
		s.Update(targets[:100])
		synctest.Wait()
		if got := s.Pace("greedy"); got != 1 {
			t.Errorf("once it asks for nothing, the greedy namespace is probed %g times slower", got)
		}
	})
}

// TestNewTargetsThatHangLeaveRoom: targets that come, hang and go, over and over,
// don't hold up those that are known to answer.
func TestNewTargetsThatHangLeaveRoom(t *testing.T) {
	n := newNetwork()
	n.hang = func(a netip.AddrPort) bool { return a.Addr().As4()[2] > 0 }
	run(t, 64, n, func(t *testing.T, s *Scheduler) {
		s.Update(targetsOf(100))
		time.Sleep(10 * time.Second)
		from := time.Now()
		for round := range 10 {
			targets := targetsOf(100)
			for i := range 500 {
				hangs := targetOf(256 + 500*round + i)
				hangs.Check.Timeout = 10 * time.Second
				targets = append(targets, wanted("greedy", hangs)...)
			}
			s.Update(targets)
			time.Sleep(2 * time.Second)
		}
		for i := range 100 {
			probes := 0
			for _, at := range n.times(i) {
				if at.After(from) {
					probes++
				}
			}
			if probes < 9 {
				t.Errorf("target %d was probed %d times in 20s, want 10", i, probes)
			}
		}
	})
}

func TestPaces(t *testing.T) {
	ask := func(namespace string, interval time.Duration, n int) (out []health.Wanted) {
		for i := range n {
			target := targetOf(i)
			target.Check.Interval = interval
			out = append(out, wanted(namespace, target)...)
		}
		return out
	}
	for _, tt := range []struct {
		name   string
		wanted []health.Wanted
		rate   float64
		want   map[string]float64
	}{
		{"nothing", nil, 10, nil},
		{"no bound", ask("a", time.Second, 100), 0, nil},
		{"as many as there are", ask("a", time.Second, 10), 10, nil},
		{"one asks for twice as many", ask("a", time.Second, 20), 10, map[string]float64{"a": 2}},
		{"one of two asks for more", slices.Concat(ask("a", time.Second, 20), ask("b", time.Second, 2)), 10, map[string]float64{"a": 2.5}},
		{"both do", slices.Concat(ask("a", time.Second, 20), ask("b", time.Second, 10)), 10, map[string]float64{"a": 4, "b": 2}},
		{"what one leaves is the others'", slices.Concat(ask("a", time.Second, 1), ask("b", time.Second, 10), ask("c", 500*time.Millisecond, 10)), 13, map[string]float64{"b": 10. / 6, "c": 20. / 6}},
	} {
		near := cmp.Comparer(func(a, b float64) bool { return math.Abs(a-b) < 1e-9 })
		if diff := cmp.Diff(tt.want, paces(tt.wanted, tt.rate), near); diff != "" {
			t.Errorf("%s (-want +got):\n%s", tt.name, diff)
		}
	}
}

// A tenth of them hang: all keep their cadence.
func TestHangingTargetsKeepCadence(t *testing.T) {
	n := newNetwork()
	n.hang = func(a netip.AddrPort) bool { return a.Addr().As4()[3]%10 == 0 }
	run(t, 0, n, func(t *testing.T, s *Scheduler) {
		s.Update(targetsOf(10_000))
		time.Sleep(12 * time.Second)
		for i := range 10_000 {
			if got := len(n.times(i)); got < 5 || got > 7 {
				t.Fatalf("target %d was probed %d times in 12s, want 6", i, got)
			}
		}
		if n.goroutine > 1100 {
			t.Errorf("up to %d goroutines", n.goroutine)
		}
	})
}

// More hang than there are slots for: those that answer keep their cadence
// after the first round, and those that hang take turns.
func TestHangingTargetsDontStarveOthers(t *testing.T) {
	n := newNetwork()
	n.hang = func(a netip.AddrPort) bool { return a.Addr().As4()[3]%2 == 0 }
	run(t, 64, n, func(t *testing.T, s *Scheduler) {
		s.Update(targetsOf(1000))
		time.Sleep(40 * time.Second)
		from := time.Now()
		time.Sleep(40 * time.Second)
		gaps := map[bool][]int{}
		for i := range 1000 {
			probes := 0
			for _, at := range n.times(i) {
				if at.After(from) {
					probes++
				}
			}
			slow := n.hang(targetOf(i).Address)
			gaps[slow] = append(gaps[slow], probes)
		}
		if low := slices.Min(gaps[false]); low < 18 {
			t.Errorf("an endpoint that answers was probed %d times in 40s, want 20", low)
		}
		// 48 slots for 500 that take a second each: every 10.4s.
		if low, high := slices.Min(gaps[true]), slices.Max(gaps[true]); low < 3 || high > 4 {
			t.Errorf("endpoints that hang were probed from %d to %d times in 40s, want 3 to 4 each", low, high)
		}
		if n.mostUnder > 64 {
			t.Errorf("%d probes under way with 64 workers", n.mostUnder)
		}
		for i := range 1000 {
			want := map[bool]string{true: "down", false: "up"}[n.hang(targetOf(i).Address)]
			if got := statusOf(s, i); got != want {
				t.Fatalf("target %d is %s, want %s", i, got, want)
			}
		}
	})
}

// Thousands of changes at once make few Views.
func TestViewsAreCoalesced(t *testing.T) {
	n := newNetwork()
	run(t, 0, n, func(t *testing.T, s *Scheduler) {
		views := map[*health.View]bool{}
		s.Update(targetsOf(5000))
		for range 5000 {
			time.Sleep(time.Millisecond)
			synctest.Wait()
			views[s.View()] = true
		}
		if len(views) > 52 {
			t.Errorf("%d views in 5s, want 10 a second at most", len(views))
		}
		if got := statusOf(s, 4999); got != "up" {
			t.Errorf("status %s", got)
		}
	})
}

func BenchmarkScheduler(b *testing.B) {
	for _, count := range []int{100, 10_000} {
		b.Run(fmt.Sprintf("observe/%d", count), func(b *testing.B) {
			l := newLoop(New(configOf(nil)))
			l.wanted = targetsOf(count)
			l.update(time.Now())
			now := time.Now().Add(time.Minute)
			for range count { // a new target counts as slow until it has answered
				l.observe(result{entry: l.slow.take()}, now)
			}
			for b.Loop() {
				l.observe(result{entry: l.fast.take()}, now)
			}
		})
		b.Run(fmt.Sprintf("publish/%d", count), func(b *testing.B) {
			l := newLoop(New(configOf(nil)))
			l.wanted = targetsOf(count)
			l.update(time.Now())
			now := time.Now()
			for b.Loop() {
				now = now.Add(time.Second)
				l.dirty = true
				l.publish(now)
			}
		})
	}
}
