package agent

import "testing"

// TestArrivals: kproxy isn't ready while rules send connections to userspace and
// nothing comes; a few that are under way, or none, mean nothing.
func TestArrivals(t *testing.T) {
	var x arrivals
	for i, tt := range []struct {
		steered, came uint64
		ready         bool
	}{
		{100, 0, true}, // counted before this start
		{100, 0, true},
		{102, 0, true},
		{105, 0, false},
		{107, 0, false}, // too few to tell
		{200, 0, false},
		{300, 1, true},
		{400, 1, false},
		{400, 1, true}, // no client tries any more
		{500, 9, true},
	} {
		x.compare(tt.steered, tt.came)
		if got := x.notReady() == ""; got != tt.ready {
			t.Errorf("reading %d, %d steered and %d came: ready %v, want %v", i, tt.steered, tt.came, got, tt.ready)
		}
	}
}
