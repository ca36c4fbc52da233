package agent

import (
	"slices"
	"testing"
	"time"

	"kproxy.dev/kproxy/plan"
)

func TestSyncTimesAreBounded(t *testing.T) {
	var s syncState
	if got := s.get().last; len(got) != 0 {
		t.Fatalf("before the first pass: %v", got)
	}
	for i := range maxSyncTimes + 5 {
		s.done(time.Duration(i) * time.Second)
	}
	got := s.get().last
	if len(got) != maxSyncTimes || got[0].DurationSeconds != 5 || got[maxSyncTimes-1].DurationSeconds != maxSyncTimes+4 {
		t.Errorf("got %d times from %v to %v, want the last %d in order", len(got), got[0], got[len(got)-1], maxSyncTimes)
	}
	s.done(0)
	if got[0].DurationSeconds != 5 {
		t.Error("what was handed out has changed")
	}
}

func TestDeepSubscribersKeepUp(t *testing.T) {
	var e events
	deep, cancel := e.subscribe(deepEventBuffer)
	defer cancel()
	shallow, cancel := e.subscribe(eventBuffer)
	defer cancel()
	for range 5000 { // what a start with as many services publishes at once
		e.publish([]plan.Event{{Kind: "dataplane"}})
	}
	if len(deep) != 5000 || len(shallow) != eventBuffer {
		t.Errorf("%d and %d events wait, want 5000 and %d", len(deep), len(shallow), eventBuffer)
	}
}

// A failure is an event once, however often it is retried, and so is its end.
func TestSyncEvents(t *testing.T) {
	var got []string
	was := ""
	for _, now := range []string{"", "update sets: busy", "update sets: busy", "2 errors occurred:\n\t* program a\n\t* program b\n\n\nread rules", "", ""} {
		for _, e := range syncEvents(was, now) {
			if e.Kind != "sync" || e.Service != "" || e.Time.IsZero() {
				t.Errorf("%+v is no event of a sync", e)
			}
			got = append(got, e.Message)
		}
		was = now
	}
	want := []string{
		"sync failed: update sets: busy",
		"sync failed: program a; program b; read rules",
		"sync succeeds again",
	}
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}
