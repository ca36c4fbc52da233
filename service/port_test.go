package service

import "testing"

func TestIsScheduler(t *testing.T) {
	for name, want := range map[string]bool{
		"rr": true, "wlc": true, "sed": true, "my_own-sched-15": true, "0": true,
		"": false, "sixteen-letters-": false, "RR": false, "r r": false, "rr\n": false, "rü": false,
	} {
		if got := IsScheduler(name); got != want {
			t.Errorf("%q: %v, want %v", name, got, want)
		}
	}
}
