package agent

import (
	"slices"
	"strings"
	"sync"
	"time"

	"kproxy.dev/kproxy/plan"
)

// syncState is what is known of the fast loop's passes. Safe for concurrent use.
type syncState struct {
	mu      sync.Mutex
	status  plan.SyncStatus
	queued  time.Time // when a pass was last due
	pending time.Time // since when a change waits for a successful pass
	last    []plan.SyncTime
}

// announceSync publishes what became of the syncs since it was last called. Only
// the fast loop calls it.
func (a *Agent) announceSync() {
	now := a.syncStatus().LastError
	a.events.publish(syncEvents(a.announced, now))
	a.announced = now
}

// syncEvents returns what a person would want to see of a change of the last
// sync's error, which is empty for none: a failure once, however often it repeats
// itself, and its end.
func syncEvents(was, now string) []plan.Event {
	message := "sync succeeds again"
	switch now {
	case was:
		return nil
	case "":
	default:
		message = "sync failed: " + onOneLine(now)
	}
	return []plan.Event{{Time: time.Now(), Kind: "sync", Message: message}}
}

// onOneLine returns a list of errors, as errors.Join and go-multierror print it, as a
// sentence.
func onOneLine(list string) string {
	var out []string
	for line := range strings.Lines(list) {
		line = strings.TrimPrefix(strings.TrimSpace(line), "* ")
		if line != "" && !strings.HasSuffix(line, " occurred:") { // go-multierror's heading
			out = append(out, line)
		}
	}
	return strings.Join(out, "; ")
}

// maxSyncTimes is how many passes' times are remembered.
const maxSyncTimes = 60

// begun records that a pass was due at start. As long as none succeeds, what it
// is about waits: also while this one hangs.
func (s *syncState) begun(start time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.queued = start
	if s.pending.IsZero() {
		s.pending = start
	}
}

func (s *syncState) lastQueued() time.Time {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.queued
}

// failed records a failed pass and returns its error.
func (s *syncState) failed(start time.Time, err error) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status.LastError = err.Error()
	if s.pending.IsZero() {
		s.pending = start
	}
	return err
}

// done records a pass that took effect.
func (s *syncState) done(took time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status = plan.SyncStatus{
		Generation: s.status.Generation + 1, LastSuccess: time.Now(), DurationSeconds: took.Seconds(),
	}
	s.pending = time.Time{}
	if len(s.last) == maxSyncTimes {
		s.last = append(s.last[:0], s.last[1:]...)
	}
	s.last = append(s.last, plan.SyncTime{Time: s.status.LastSuccess, DurationSeconds: s.status.DurationSeconds})
}

// recent returns when the last passes ended and how long they took, oldest first.
func (s *syncState) recent() []plan.SyncTime {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.last)
}

func (s *syncState) get() (status plan.SyncStatus, pending time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status, s.pending
}
