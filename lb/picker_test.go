package lb

import (
	"math"
	"math/rand/v2"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kproxy.dev/kproxy/service"
)

// targetsOf returns targets 10.0.0.1:80, 10.0.0.2:80 … with these weights.
func targetsOf(weights ...uint32) []Target {
	ts := make([]Target, len(weights))
	for i, w := range weights {
		a := netip.AddrFrom4([4]byte{10, 0, byte((i + 1) >> 8), byte(i + 1)})
		ts[i] = Target{Address: netip.AddrPortFrom(a, 80), Weight: w, Load: new(Load)}
	}
	return ts
}

// uniform returns n weights of 1.
func uniform(n int) []uint32 {
	w := make([]uint32, n)
	for i := range w {
		w[i] = 1
	}
	return w
}

// clientOf returns the i-th of many clients, IPv4 and IPv6 by turns.
func clientOf(i int) netip.Addr {
	if i%2 == 0 {
		return netip.AddrFrom4([4]byte{192, byte(i >> 16), byte(i >> 8), byte(i)})
	}
	return netip.AddrFrom16([16]byte{0: 0xfd, 13: byte(i >> 16), 14: byte(i >> 8), 15: byte(i)})
}

// except skips some targets.
type except map[int]bool

func (e *except) Skip(i int) bool { return (*e)[i] }

// chiSquareLimit is the quantile of the chi-square distribution that only one
// in 10^5 fair samples exceeds (Wilson and Hilferty's approximation).
func chiSquareLimit(freedom int) float64 {
	k := float64(freedom)
	return k * math.Pow(1-2/(9*k)+4.265*math.Sqrt(2/(9*k)), 3)
}

// checkFit fails the test if counts don't fit the weights.
func checkFit(t *testing.T, counts []int, weights []uint32) {
	t.Helper()
	var total, sum, chi float64
	for i := range counts {
		total += float64(counts[i])
		sum += float64(weights[i])
	}
	freedom := -1
	for i, c := range counts {
		want := total * float64(weights[i]) / sum
		if want == 0 {
			if c != 0 {
				t.Errorf("target %d of weight 0 was picked %d times", i, c)
			}
			continue
		}
		chi += (float64(c) - want) * (float64(c) - want) / want
		freedom++
	}
	if freedom > 0 && chi > chiSquareLimit(freedom) {
		t.Errorf("counts %v don't fit weights %v: chi-square %.1f, limit %.1f", counts, weights, chi, chiSquareLimit(freedom))
	}
}

func TestEveryAlgorithmPicksWhatIsLeft(t *testing.T) {
	for _, a := range service.Algorithms {
		t.Run(string(a), func(t *testing.T) {
			rng := rand.New(rand.NewPCG(1, 2))
			for range 60 {
				weights := make([]uint32, 1+rng.IntN(20))
				skip := &except{}
				left := 0
				for i := range weights {
					weights[i] = uint32(rng.IntN(4) * rng.IntN(300))
					(*skip)[i] = rng.IntN(2) == 0
					if weights[i] > 0 && !(*skip)[i] {
						left++
					}
				}
				p := New(a, targetsOf(weights...), rng.Uint64())
				for k := range 20 {
					i := p.Pick(clientOf(k), skip)
					if left == 0 && i != -1 {
						t.Fatalf("picked %d, nothing is left", i)
					}
					if left > 0 && (i < 0 || (*skip)[i] || weights[i] == 0) {
						t.Fatalf("picked %d of weights %v without %v", i, weights, *skip)
					}
				}
			}
		})
	}
}

func TestEveryAlgorithmWithoutTargets(t *testing.T) {
	for _, a := range service.Algorithms {
		for name, targets := range map[string][]Target{"none": nil, "drained": targetsOf(0, 0)} {
			if i := New(a, targets, 1).Pick(clientOf(0), nil); i != -1 {
				t.Errorf("%s, %s: picked %d", a, name, i)
			}
			if i := New(a, targets, 1).Acquire(clientOf(0), &except{}); i != -1 {
				t.Errorf("%s, %s: acquired %d", a, name, i)
			}
		}
	}
}

func TestEveryAlgorithmAcquiresLoads(t *testing.T) {
	for _, a := range service.Algorithms {
		targets := targetsOf(1, 2, 3)
		targets[1].Load = nil
		p := New(a, targets, 5)
		want := make([]int64, 3)
		for i := range 50 {
			want[p.Acquire(clientOf(i), nil)]++
		}
		for i, target := range targets {
			if target.Load != nil && target.Load.Active() != want[i] {
				t.Errorf("%s: target %d has load %d, want %d", a, i, target.Load.Active(), want[i])
			}
		}
	}
}

func TestPickAllocatesNothing(t *testing.T) {
	for _, a := range service.Algorithms {
		p := New(a, targetsOf(3, 1, 0, 7, 2), 1)
		skip := &except{1: true, 3: true}
		c := clientOf(1)
		p.Pick(c, nil) // Maglev makes its table
		if n := testing.AllocsPerRun(200, func() {
			p.Pick(c, nil)
			p.Pick(c, skip)
			p.Acquire(c, skip)
		}); n != 0 {
			t.Errorf("%s: %v allocations", a, n)
		}
	}
}

// countParallel picks from 64 goroutines at once, each n times.
func countParallel(p Picker, targets, n int, skip Skip) []int {
	var mu sync.Mutex
	counts := make([]int, targets)
	var wg sync.WaitGroup
	for g := range 64 {
		wg.Go(func() {
			own := make([]int, targets)
			for k := range n {
				own[p.Pick(clientOf(g*n+k), skip)]++
			}
			mu.Lock()
			defer mu.Unlock()
			for i, c := range own {
				counts[i] += c
			}
		})
	}
	wg.Wait()
	return counts
}

func TestRoundRobinIsExact(t *testing.T) {
	p := New(service.RoundRobin, targetsOf(1, 5, 1), 99)
	counts := make([]int, 3)
	for range 30 {
		counts[p.Pick(clientOf(0), nil)]++
	}
	if diff := cmp.Diff([]int{10, 10, 10}, counts); diff != "" {
		t.Errorf("counts (-want +got):\n%s", diff)
	}
	counts = countParallel(p, 3, 300, nil)
	if diff := cmp.Diff([]int{6400, 6400, 6400}, counts); diff != "" {
		t.Errorf("64 at once (-want +got):\n%s", diff)
	}
}

func TestRoundRobinSkipsExactly(t *testing.T) {
	p := New(service.RoundRobin, targetsOf(uniform(5)...), 3)
	skip := &except{1: true}
	counts := make([]int, 5)
	for range 400 {
		counts[p.Pick(clientOf(0), skip)]++
	}
	if diff := cmp.Diff([]int{100, 0, 100, 100, 100}, counts); diff != "" {
		t.Errorf("counts (-want +got):\n%s", diff)
	}
}

func TestSeedsStartElsewhere(t *testing.T) {
	for _, a := range []service.Algorithm{service.RoundRobin, service.WeightedRoundRobin, service.LeastConnections, service.Random} {
		var firsts []int
		for seed := range uint64(64) {
			firsts = append(firsts, New(a, targetsOf(2, 2, 2, 1), seed).Pick(clientOf(0), nil))
		}
		slices.Sort(firsts)
		if n := len(slices.Compact(firsts)); n < 3 {
			t.Errorf("%s: 64 seeds start at %d targets only", a, n)
		}
	}
}

// only skips every target but those in it.
type only map[int]bool

func (o only) Skip(i int) bool { return !o[i] }

// TestProspect: what is foretold is what comes next, for every algorithm; being
// asked changes nothing; and the shares are what many picks come to.
func TestProspect(t *testing.T) {
	client := netip.MustParseAddr("10.1.0.2")
	for _, algorithm := range service.Algorithms {
		t.Run(string(algorithm), func(t *testing.T) {
			var targets []Target
			for i, w := range []uint32{3, 1, 0, 2} {
				a := netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, 2, 0, byte(i)}), 80)
				targets = append(targets, Target{Address: a, Weight: w, Load: new(Load)})
			}
			p := New(algorithm, targets, 7)
			picked := make([]float64, len(targets))
			const rounds = 6000
			for range rounds {
				before, again := ProspectOf(p, targets, client, nil), ProspectOf(p, targets, client, nil)
				if before.Next != again.Next {
					t.Fatalf("asked twice: %d, then %d", before.Next, again.Next)
				}
				i := p.Acquire(client, nil)
				if before.Next >= 0 && before.Next != i {
					t.Fatalf("foretold %d, got %d", before.Next, i)
				}
				if before.Shares[i] == 0 {
					t.Fatalf("picked %d, whose share was 0 of %v", i, before.Shares)
				}
				picked[i]++
				targets[i].Load.Release()
			}
			foretold := ProspectOf(p, targets, client, nil)
			var sum float64
			for i, s := range foretold.Shares {
				sum += s
				if algorithm != service.LeastConnections && math.Abs(s-picked[i]/rounds) > 0.03 {
					t.Errorf("target %d: share %.3f, picked %.3f", i, s, picked[i]/rounds)
				}
			}
			if math.Abs(sum-1) > 1e-9 {
				t.Errorf("shares %v add up to %v", foretold.Shares, sum)
			}
			if got := ProspectOf(p, targets, client, only{3: true}); got.Shares[3] != 1 {
				t.Errorf("with one target left: %+v, want it certain", got)
			}
			if got := ProspectOf(p, targets, client, only{2: true}); got.Next != -1 || got.Shares[0] != 0 {
				t.Errorf("with none left: %+v", got)
			}
		})
	}
}

func TestPeekRefreshesNothing(t *testing.T) {
	a := NewAffinity(time.Minute)
	client, endpoint, start := netip.MustParseAddr("10.1.0.2"), netip.MustParseAddrPort("10.2.0.2:80"), time.Now()
	a.Set(client, endpoint, start)
	if got, ok := a.Peek(client, start.Add(59*time.Second)); !ok || got != endpoint {
		t.Errorf("Peek = %v, %v", got, ok)
	}
	if _, ok := a.Peek(client, start.Add(61*time.Second)); ok {
		t.Error("an entry that has been looked at lives on")
	}
}
