package health

import (
	"net/netip"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/google/go-cmp/cmp"
)

func TestEjectionNeedsFailuresInARow(t *testing.T) {
	var e Ejection
	for i, failed := range []bool{true, true, false, true, true, true} {
		if !failed {
			e.Succeeded()
			continue
		}
		ejected := e.Failed(epoch)
		if want := i == 5; ejected != want || e.Ejected(epoch) != want {
			t.Errorf("step %d: ejected %t, want %t", i, ejected, want)
		}
	}
}

func TestEjectionGrows(t *testing.T) {
	var e Ejection
	now := epoch
	e.Failed(now)
	e.Failed(now)
	var got []time.Duration
	for range 9 {
		if !e.Failed(now) {
			t.Fatalf("the first failure after %v does not eject again", got)
		}
		d := e.Until(now).Sub(now)
		got = append(got, d)
		if e.Failed(now.Add(d - 1)) {
			t.Error("a failure during an ejection ejects again")
		}
		if !e.Ejected(now.Add(d-1)) || e.Ejected(now.Add(d)) {
			t.Errorf("an ejection of %s doesn't last that long", d)
		}
		now = now.Add(d)
	}
	s := time.Second
	if diff := cmp.Diff([]time.Duration{5 * s, 10 * s, 20 * s, 40 * s, 80 * s, 160 * s, 300 * s, 300 * s, 300 * s}, got); diff != "" {
		t.Errorf("ejection times (-want +got):\n%s", diff)
	}
}

func TestEjectionEndsWithSuccess(t *testing.T) {
	var e Ejection
	for range 3 {
		e.Failed(epoch)
	}
	e.Succeeded() // a connect to it because no other was left
	if e.Ejected(epoch) || !e.Until(epoch).IsZero() {
		t.Error("still ejected after a success")
	}
	e.Failed(epoch)
	e.Failed(epoch)
	if !e.Failed(epoch) || e.Until(epoch).Sub(epoch) != firstEjection {
		t.Errorf("after a success, three failures eject until %s", e.Until(epoch))
	}
}

// Failures that may be the client's own count only after another client's.
func TestEjectionNeedsTwoClients(t *testing.T) {
	tests := map[string]struct {
		steps string // a, b, c: that client's connect failed; n: one from the node's address; +: one succeeded; >: the ejection is over
		want  string // whether each step ejected: y or .
	}{
		"one client, however often":          {"aaaaaaaaaa", ".........."},
		"two clients":                        {"abab", "...y"},
		"many clients":                       {"abca", "...y"},
		"one other among many of one":        {"aaaabaaaaa", ".........."},
		"a success between them":             {"aba+bab", "......."},
		"the node's own address":             {"nnn", "..y"},
		"the node's, and one client":         {"annn", "...y"},
		"on trial, one client":               {"abab>aaa", "...y...."},
		"on trial, two clients":              {"abab>aab", "...y...y"},
		"on trial, the node's":               {"abab>n", "...y.y"},
		"on trial, one client after another": {"nnn>ab", "..y..y"},
	}
	for name, tt := range tests {
		t.Run(name, func(t *testing.T) {
			var e Ejection
			now := epoch
			got := make([]byte, 0, len(tt.steps))
			for _, step := range tt.steps {
				ejected := false
				switch step {
				case '+':
					e.Succeeded()
				case '>':
					now = e.Until(now)
				case 'n':
					ejected = e.Failed(now)
				default:
					ejected = e.FailedFor(netip.AddrFrom4([4]byte{192, 0, 2, byte(step)}), now)
				}
				got = append(got, map[bool]byte{false: '.', true: 'y'}[ejected])
			}
			if diff := cmp.Diff(tt.want, string(got)); diff != "" {
				t.Errorf("%s (-want +got):\n%s", tt.steps, diff)
			}
		})
	}
}

func TestEjectionInParallel(t *testing.T) {
	var e Ejection
	var mu sync.Mutex
	ejections := 0
	var wg sync.WaitGroup
	for range 64 {
		wg.Go(func() {
			if e.Failed(epoch) {
				mu.Lock()
				ejections++
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	if ejections != 1 || e.Until(epoch).Sub(epoch) != firstEjection {
		t.Errorf("one outage ejected %d times, for %s", ejections, e.Until(epoch).Sub(epoch))
	}
}

func TestEjectionAllocatesNothing(t *testing.T) {
	var e Ejection
	if n := testing.AllocsPerRun(100, func() {
		e.Succeeded()
		e.Ejected(epoch)
		e.Failed(epoch)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// setBack is t on a host whose clock was set back by d meanwhile: the wall clock
// says less, the monotonic reading doesn't (time.Time: 33 bits of seconds above 30
// of nanoseconds in its first word, while it has a monotonic reading).
func setBack(t time.Time, d time.Duration) time.Time {
	*(*uint64)(unsafe.Pointer(&t)) -= uint64(d/time.Second) << 30
	return t
}

// TestEjectionsEndWhenTheClockIsSetBack: as NTP does, at its first step after a boot.
func TestEjectionsEndWhenTheClockIsSetBack(t *testing.T) {
	var e Ejection
	now := time.Now()
	for range 3 {
		e.Failed(now)
	}
	for _, tt := range []struct {
		after   time.Duration
		ejected bool
	}{{4 * time.Second, true}, {6 * time.Second, false}} {
		later := setBack(now.Add(tt.after), time.Hour)
		if later.Unix() > now.Unix()-3000 || later.Sub(now) != tt.after {
			t.Fatalf("%s is no time %s after %s with the clock set back by an hour", later, tt.after, now)
		}
		if got := e.Ejected(later); got != tt.ejected {
			t.Errorf("%s after an ejection of 5s: ejected %t, want %t", tt.after, got, tt.ejected)
		}
		if got, want := e.Until(later).Round(0), later.Add(5*time.Second-tt.after).Round(0); !got.Equal(want) {
			t.Errorf("%s after an ejection of 5s, it ends at %s, want %s", tt.after, got, want)
		}
	}
}
