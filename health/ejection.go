package health

import (
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// EjectAfter is how many failed connects in a row eject an endpoint: as many as failed
	// probes by which active checks call it down.
	EjectAfter = 3
	// firstEjection is how long the first one lasts. Each further one lasts twice as long as
	// that before, but no longer than maxEjection.
	firstEjection = 5 * time.Second
	maxEjection   = 5 * time.Minute
)

// Ejection is passive health: what connects to one endpoint prove about it, between
// two probes and without any. Consecutive failures eject it for
// a time. When that is over it is on trial: its next failure ejects it again,
// for twice as long; a success ends the trial.
//
// It has no clock; times that it is given go by their monotonic reading, where
// they have one. The zero value has no failures. It is safe for
// concurrent use, and costs a connect that succeeds one atomic load. It must
// not be copied.
type Ejection struct {
	until atomic.Int64 // when it ends, in nanoseconds since begin; 0 if there is none
	bad   atomic.Bool  // failures or times isn't 0, or last is valid

	mu       sync.Mutex // orders Failed, FailedFor and Succeeded
	failures int        // in a row
	times    int        // ejected in a row
	last     netip.Addr // client of the last FailedFor; invalid if none
}

// begin is a time with a monotonic reading to count from. Nanoseconds of the wall
// clock would end an ejection late, by an hour, when that is set back an hour.
var begin = time.Now()

// Failed records a failed connect, and reports whether it ejected the
// endpoint. Failures during an ejection don't count: they belong to connects
// that began before it.
func (e *Ejection) Failed(now time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.failed(now)
}

// FailedFor is Failed for a connect that was made from the client's own
// address, which may be why it failed: the answer finds no way back, or the
// endpoint's firewall refuses that client. So it counts only if it follows the
// failure of another client, with no success between the two. What one client
// alone meets ejects nothing, however often it comes back.
func (e *Ejection) FailedFor(client netip.Addr, now time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.Ejected(now) {
		return false
	}
	before := e.last
	e.last = client
	e.bad.Store(true)
	return before.IsValid() && before != client && e.failed(now)
}

// failed counts a failure. The caller holds mu.
func (e *Ejection) failed(now time.Time) bool {
	if e.Ejected(now) {
		return false
	}
	e.bad.Store(true)
	if e.failures++; e.times == 0 && e.failures < EjectAfter {
		return false
	}
	d := min(firstEjection<<min(e.times, 30), maxEjection)
	e.times++
	e.last = netip.Addr{} // on trial, one client's failure isn't enough either
	e.until.Store(int64(now.Add(d).Sub(begin)))
	return true
}

// Succeeded records a connect that succeeded, or of another proof that
// the endpoint is back.
func (e *Ejection) Succeeded() {
	if !e.bad.Load() {
		return
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.failures, e.times, e.last = 0, 0, netip.Addr{}
	e.until.Store(0)
	e.bad.Store(false)
}

// Ejected reports whether the endpoint is ejected at now.
func (e *Ejection) Ejected(now time.Time) bool {
	until := e.until.Load()
	return until != 0 && int64(now.Sub(begin)) < until
}

// Until returns when the last ejection ends or ended, by the clock of now; the zero
// time if there was none since the last success.
func (e *Ejection) Until(now time.Time) time.Time {
	if until := e.until.Load(); until != 0 {
		return now.Add(time.Duration(until) - now.Sub(begin))
	}
	return time.Time{}
}

// EjectionState is an Ejection at some moment, for another process to go on with.
type EjectionState struct {
	Failures, Times int           // in a row
	Left            time.Duration // until it ends, if it hasn't
	Last            netip.Addr    // client of the last FailedFor; invalid if none
}

// State returns it; false if it is the zero value's.
func (e *Ejection) State(now time.Time) (EjectionState, bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	s := EjectionState{Failures: e.failures, Times: e.times, Last: e.last}
	if e.Ejected(now) {
		s.Left = e.Until(now).Sub(now)
	}
	return s, e.bad.Load()
}

// Restore makes it what State had returned.
func (e *Ejection) Restore(s EjectionState, now time.Time) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.failures, e.times, e.last = s.Failures, s.Times, s.Last
	e.until.Store(0)
	if s.Left > 0 {
		e.until.Store(int64(now.Add(s.Left).Sub(begin)))
	}
	e.bad.Store(true)
}
