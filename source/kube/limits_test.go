package kube

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"
)

func TestLimitsRepeat(t *testing.T) {
	now := time.Unix(1000, 0)
	m := newLimits()
	m.now = func() time.Time { return now }
	l := limited{name{Namespace: "default", Name: "web"}, "DataPlaneChanged", "Offload"}
	other := l
	other.action = "Recall"
	for _, step := range []struct {
		after time.Duration
		what  limited
		want  bool
	}{
		{0, l, true}, {0, l, false}, {0, other, true}, {59 * time.Second, l, false}, {time.Second, l, true}, {time.Second, l, false},
	} {
		now = now.Add(step.after)
		if got := m.allow(step.what, false); got != step.want {
			t.Errorf("at %s, %v: allowed %v, want %v", now.UTC().Format(time.TimeOnly), step.what, got, step.want)
		}
	}
}

// However many Services move at a time, the API hears of a bounded number.
func TestLimitsBudget(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := newLimits()
		flood := func(warning bool) (allowed int) {
			for i := range 5000 {
				if m.allow(limited{name{Name: fmt.Sprint(i)}, "DataPlaneChanged", fmt.Sprint("at ", time.Now())}, warning) {
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

// What is remembered doesn't grow for ever.
func TestLimitsForget(t *testing.T) {
	now := time.Unix(1000, 0)
	m := newLimits()
	m.now = func() time.Time { return now }
	for i := range maxLimited {
		m.last[limited{service: name{Name: fmt.Sprint(i)}}] = now
	}
	now = now.Add(repeatAfter)
	if !m.allow(limited{service: name{Name: "new"}}, false) || len(m.last) != 1 {
		t.Errorf("%d are remembered, want 1", len(m.last))
	}
}
