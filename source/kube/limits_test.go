package kube

import (
	"testing"
	"testing/synctest"
	"time"
)

// However many Services move at a time, the API hears of a bounded number.
func TestLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newLimits()
		flood := func(warning bool) (allowed int) {
			for range 5000 {
				if m.allow(warning) {
					allowed++
				}
			}
			return allowed
		}
		if got := flood(false); got != eventsBurst {
			t.Errorf("5000 at once: %d events, want %d", got, eventsBurst)
		}
		if got := flood(true); got != eventsBurst {
			t.Errorf("5000 warnings meanwhile: %d events, want %d", got, eventsBurst)
		}
		time.Sleep(time.Minute)
		if got := flood(false); got != eventsPerMin {
			t.Errorf("5000 a minute later: %d events, want %d", got, eventsPerMin)
		}
	})
}
