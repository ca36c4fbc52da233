package lb

import (
	"math"
	"net/netip"
	"testing"
	"time"

	"kproxy.dev/kproxy/service"
)

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
	a := NewAffinity(AffinityConfig{Timeout: time.Minute})
	client, endpoint, start := netip.MustParseAddr("10.1.0.2"), netip.MustParseAddrPort("10.2.0.2:80"), time.Now()
	a.Set(client, endpoint, start)
	if got, ok := a.Peek(client, start.Add(59*time.Second)); !ok || got != endpoint {
		t.Errorf("Peek = %v, %v", got, ok)
	}
	if _, ok := a.Peek(client, start.Add(61*time.Second)); ok {
		t.Error("an entry that has been looked at lives on")
	}
}
