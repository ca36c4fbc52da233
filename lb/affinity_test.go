package lb

import (
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

var (
	epoch     = time.Unix(1_700_000_000, 0)
	endpointA = netip.MustParseAddrPort("10.0.0.1:80")
	endpointB = netip.MustParseAddrPort("[fd00::1]:8080")
)

func TestAffinitySlides(t *testing.T) {
	a := NewAffinity(10 * time.Second)
	c := clientOf(0)
	a.Set(c, endpointA, epoch)
	steps := []struct {
		after time.Duration
		want  bool
	}{
		{0, true}, {9 * time.Second, true}, {18 * time.Second, true}, {27999 * time.Millisecond, true},
		{37999 * time.Millisecond, false}, {38 * time.Second, false},
	}
	for _, s := range steps {
		got, ok := a.Get(c, epoch.Add(s.after))
		if ok != s.want || ok && got != endpointA {
			t.Errorf("after %s: %s %t, want %t", s.after, got, ok, s.want)
		}
	}
	if n := a.Len(); n != 0 {
		t.Errorf("%d clients left after the only one expired", n)
	}
}

// bounded returns an Affinity that has room for so many clients.
func bounded(timeout time.Duration, clients int) *Affinity {
	a := NewAffinity(timeout)
	a.limit = clients
	return a
}

func TestAffinitySetAndForget(t *testing.T) {
	a := NewAffinity(time.Hour)
	four := netip.MustParseAddr("192.0.2.1")
	mapped := netip.AddrFrom16(four.As16())
	six := netip.MustParseAddr("fe80::1%eth0")
	a.Set(four, endpointA, epoch)
	a.Set(six, endpointA, epoch)
	a.Set(mapped, endpointB, epoch.Add(time.Second)) // the same client
	want := []Affine{
		{Client: four, Endpoint: endpointB, Remaining: a.Timeout()},
		{Client: six.WithZone(""), Endpoint: endpointA, Remaining: a.Timeout() - time.Second},
	}
	byClient := func(x, y Affine) int { return x.Client.Compare(y.Client) }
	opt := cmpopts.EquateComparable(netip.Addr{}, netip.AddrPort{})
	got := slices.SortedFunc(a.All(epoch.Add(time.Second)), byClient)
	if diff := cmp.Diff(want, got, opt); diff != "" {
		t.Errorf("entries (-want +got):\n%s", diff)
	}
	a.Forget(endpointA)
	got = slices.SortedFunc(a.All(epoch.Add(time.Second)), byClient)
	if diff := cmp.Diff(want[:1], got, opt); diff != "" {
		t.Errorf("after forgetting an endpoint (-want +got):\n%s", diff)
	}
	for range a.All(epoch.Add(a.Timeout() + time.Second)) {
		t.Error("an expired entry is listed")
	}
}

func TestAffinityRestoresRemainingTime(t *testing.T) {
	a := NewAffinity(time.Minute)
	a.Set(clientOf(0), endpointA, epoch.Add(5*time.Second-a.Timeout()))
	for e := range a.All(epoch) {
		if e.Remaining != 5*time.Second {
			t.Errorf("%s remain, want 5s", e.Remaining)
		}
	}
	if _, ok := a.Get(clientOf(0), epoch.Add(6*time.Second)); ok {
		t.Error("an entry with 5s left is there after 6s")
	}
}

func TestAffinityIsBounded(t *testing.T) {
	t.Run("the one silent longest goes first", func(t *testing.T) {
		a := bounded(time.Hour, 3)
		for i := range 3 {
			a.Set(clientOf(i), endpointA, epoch.Add(time.Duration(i)*time.Second))
		}
		a.Get(clientOf(0), epoch.Add(3*time.Second))
		a.Set(clientOf(3), endpointA, epoch.Add(4*time.Second))
		for i, want := range []bool{true, false, true, true} {
			if _, ok := a.Get(clientOf(i), epoch.Add(4*time.Second)); ok != want {
				t.Errorf("client %d: %t, want %t", i, ok, want)
			}
		}
	})
	t.Run("of many, those that were silent for long", func(t *testing.T) {
		const most, talking = 5000, 500
		a := bounded(time.Hour, most)
		for i := range 20_000 {
			now := epoch.Add(time.Duration(i) * time.Millisecond)
			a.Set(clientOf(i), endpointA, now)
			a.Get(clientOf(i%talking), now)
		}
		if n := a.Len(); n != most {
			t.Errorf("%d clients, want %d", n, most)
		}
		left := 0
		for i := range talking {
			if _, ok := a.Peek(clientOf(i), epoch.Add(20*time.Second)); ok {
				left++
			}
		}
		if left < talking*9/10 {
			t.Errorf("%d of %d clients that talk have kept their endpoint", left, talking)
		}
	})
	t.Run("expired ones make room", func(t *testing.T) {
		a := bounded(time.Second, 1000)
		for i := range 10_000 {
			a.Set(clientOf(i), endpointA, epoch.Add(time.Duration(i)*10*time.Millisecond))
		}
		if n := a.Len(); n > 200 {
			t.Errorf("%d clients, of which 100 haven't expired", n)
		}
	})
}

func TestAffinityAllocatesNothing(t *testing.T) {
	a := bounded(time.Hour, 100)
	for i := range 200 {
		a.Set(clientOf(i), endpointA, epoch)
	}
	c := clientOf(199)
	if n := testing.AllocsPerRun(100, func() {
		a.Get(c, epoch)
		a.Set(c, endpointB, epoch)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

func TestAffinityInParallel(t *testing.T) {
	a := bounded(time.Hour, 4096)
	var wg sync.WaitGroup
	for g := range 64 {
		wg.Go(func() {
			for i := range 500 {
				c := clientOf((g*37 + i) % 6000)
				if _, ok := a.Get(c, epoch); !ok {
					a.Set(c, endpointA, epoch)
				}
				if i%250 == 0 {
					a.Forget(endpointB)
					for range a.All(epoch) {
						break
					}
				}
			}
		})
	}
	wg.Wait()
	n := 0
	for e := range a.All(epoch) {
		if e.Endpoint != endpointA {
			t.Fatalf("endpoint %s", e.Endpoint)
		}
		n++
	}
	if n != a.Len() || n > 4096 {
		t.Errorf("%d entries listed, %d counted, at most %d allowed", n, a.Len(), 4096)
	}
}
