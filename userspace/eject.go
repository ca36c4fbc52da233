package userspace

import (
	"sync"
	"time"
)

// Passive ejection: ejectAfter failed connects in a row put an endpoint aside
// for ejectFirst, and for twice as long each time it fails again on its first
// connect afterwards, up to ejectMax.
const (
	ejectAfter = 3
	ejectFirst = 2 * time.Second
	ejectMax   = time.Minute
)

// ejection is what connects to an endpoint tell about it. It has no clock and
// opens no sockets. The zero value is an endpoint in good standing.
//
// An ejected endpoint is the last resort, not gone: a choice falls back to the
// ejected ones when no other is left, so the last one is never taken away.
type ejection struct {
	mu       sync.Mutex
	failures int // in a row
	times    int // ejected in a row
	until    time.Time
}

// failed notes a failed connect, and reports whether it ejected the endpoint.
// While it is ejected, connects that fail don't make it longer: connections
// that hung since before would count one outage many times.
func (e *ejection) failed(now time.Time) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.failures++
	if now.Before(e.until) || e.times == 0 && e.failures < ejectAfter {
		return false
	}
	e.until = now.Add(min(ejectFirst<<min(e.times, 16), ejectMax))
	e.times++
	return true
}

// succeeded notes a connect that succeeded: the endpoint is in good standing.
func (e *ejection) succeeded() {
	e.mu.Lock()
	e.failures, e.times, e.until = 0, 0, time.Time{}
	e.mu.Unlock()
}

// ejectedUntil returns when the ejection ends; a time that has passed, or the
// zero time, if there is none.
func (e *ejection) ejectedUntil() time.Time {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.until
}
