package agent

import (
	"sync"
	"time"

	"kproxy.dev/kproxy/plan"
)

// syncState is what is known of the fast loop's passes. Safe for concurrent use.
type syncState struct {
	observe func(time.Duration) // takes the duration of each successful pass

	mu      sync.Mutex
	status  plan.SyncStatus
	pending time.Time // since when a change waits for a successful pass
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
func (s *syncState) done(start time.Time) {
	took := time.Since(start)
	s.mu.Lock()
	s.status = plan.SyncStatus{
		Generation: s.status.Generation + 1, LastSuccess: time.Now(), DurationSeconds: took.Seconds(),
	}
	s.pending = time.Time{}
	s.mu.Unlock()
	if s.observe != nil {
		s.observe(took)
	}
}

func (s *syncState) get() (status plan.SyncStatus, pending time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status, s.pending
}
