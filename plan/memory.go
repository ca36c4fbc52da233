package plan

import "time"

// memory is what the next Compute needs to know of a service port besides its
// inputs: Compute has no state of its own.
type memory struct {
	offloaded   bool
	steadySince time.Time
	waitUntil   time.Time
	backoff     time.Duration
}
