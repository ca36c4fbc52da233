package kube

import (
	"math"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/utils/clock"
)

// How long a watch that fails waits before the next try.
const (
	retryFirst = 200 * time.Millisecond
	retryMax   = 10 * time.Second // up to twice that, with jitter; client-go's is 30 seconds
	// steady is how long a watch has to last for its end to be news, and the next
	// pause to be a short one.
	steady = 2 * retryMax
)

func backoff() *wait.Backoff {
	return &wait.Backoff{
		Duration: retryFirst, Cap: retryMax, Factor: 2, Jitter: 1,
		Steps: int(math.Ceil(float64(retryMax) / float64(retryFirst))),
	}
}

// retries is what the watches of one API server have in common: when one of
// them works again, none has a reason to wait any longer. The zero value is
// ready to use, and safe for concurrent use.
type retries struct {
	mu    sync.Mutex
	again chan struct{} // closed by the next hurry; nil while nobody waits
}

// hurry ends every pause.
func (r *retries) hurry() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.again != nil {
		close(r.again)
		r.again = nil
	}
}

// pause returns a channel that receives after d, when somebody says to hurry,
// or when done is closed.
func (r *retries) pause(d time.Duration, done <-chan struct{}) <-chan time.Time {
	r.mu.Lock()
	if r.again == nil {
		r.again = make(chan struct{})
	}
	again := r.again
	r.mu.Unlock()
	out := make(chan time.Time, 1)
	go func() {
		t := time.NewTimer(d)
		defer t.Stop()
		select {
		case <-t.C:
		case <-again:
		case <-done:
		}
		out <- time.Now()
	}()
	return out
}

// impatient is the clock of a Reflector. With it, the pauses that a Reflector
// makes while a server refuses connections, which otherwise nothing can cut
// short, are those of retries.
type impatient struct {
	clock.RealClock
	retries *retries
	done    <-chan struct{}
}

// After is time.After, unless the pause is cut short.
func (c impatient) After(d time.Duration) <-chan time.Time { return c.retries.pause(d, c.done) }
