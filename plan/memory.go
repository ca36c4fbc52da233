package plan

import "time"

// Back-off of requalification, as README says: 10s, 20s, 40s and so on
// up to Policy.BackoffMax.
const (
	firstBackoff = 10 * time.Second
	// calmAfter is how long a service must have been offloaded for its next
	// recall to start again at firstBackoff.
	calmAfter = 10 * time.Minute
)

// memory is what the next Compute needs to know of a service port besides its
// inputs: Compute has no state of its own.
type memory struct {
	offloaded   bool
	offloadedAt time.Time

	// steadyHash is the facts.steady that steadySince is about.
	steadyHash  uint64
	steadySince time.Time

	// A recalled service waits. waitHash is the KernelHash whose failure it
	// waits for; 0 where it waits for another reason.
	waitUntil  time.Time
	waitReason string
	waitCause  Cause
	waitHash   uint64
	failedAt   time.Time // Failure.Since of the failure that was last acted on
	backoff    time.Duration
}

// observe starts the clock of steadiness again where h differs.
func (m *memory) observe(h uint64, now time.Time) {
	if m.steadyHash != h || m.steadySince.IsZero() {
		m.steadyHash, m.steadySince = h, now
	}
}

// offload notes that the service is offloaded from now, if it wasn't.
func (m *memory) offload(now time.Time) {
	if !m.offloaded {
		m.offloaded, m.offloadedAt = true, now
	}
	m.stopWaiting()
}

// recall takes the service back at the moment given and makes it wait, twice
// as long as the last time.
func (m *memory) recall(at time.Time, longest time.Duration) {
	if m.offloaded && at.Sub(m.offloadedAt) >= calmAfter {
		m.backoff = 0
	}
	m.backoff = min(max(2*m.backoff, firstBackoff), longest)
	m.offloaded = false
	m.waitUntil = at.Add(m.backoff)
}

// stopWaiting ends a wait; the back-off is remembered.
func (m *memory) stopWaiting() {
	m.waitUntil, m.waitReason, m.waitCause, m.waitHash = time.Time{}, "", "", 0
}

// forgive makes the service as one that was never offloaded nor recalled.
func (m *memory) forgive() {
	m.offloaded, m.backoff, m.failedAt = false, 0, time.Time{}
	m.stopWaiting()
}
