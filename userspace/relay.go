package userspace

import (
	"sync"
	"sync/atomic"
	"time"
)

// A relay's two ends. Direction d reads side d and writes the other one.
const (
	clientSide   = 0
	endpointSide = 1
)

// resetPatience bounds how long a reset waits for what was sent before it.
const resetPatience = 5 * time.Second

// relay moves bytes both ways between two sockets until both are done, and
// passes on to each what happens to the other: end of data as end of data,
// reset as reset.
type relay struct {
	sides     [2]side
	pumps     [2]pump
	meters    *[2]meter
	idle      time.Duration // reset both sides after this long without a byte; 0 never
	halfClose time.Duration // the same once one side has finished
	answered  func()        // called when the endpoint's first bytes have reached the client
	mayRetry  bool          // an endpoint that resets first thing may be replaced

	heard atomic.Int64
	limit atomic.Int64 // of silence, in nanoseconds; 0 for none

	mu     sync.Mutex // guards what follows, and orders closing
	timer  *time.Timer
	ended  [2]bool // direction d's source has finished, and its sink was told
	dead   [2]bool // writing to side d failed
	closed bool
	retry  bool // the endpoint reset before a byte was moved; the client is untouched
}

// run returns when both directions have ended and the sockets are closed,
// except that with a true result the client's is open and unused.
func (r *relay) run(p *pipes) (retry bool) {
	for d := range r.pumps {
		r.pumps[d] = pump{src: r.sides[d], dst: r.sides[1-d], pipes: p, meter: &r.meters[d], heard: &r.heard}
	}
	r.pumps[endpointSide].moved = r.answered
	r.heard.Store(sinceEpoch())
	r.mu.Lock()
	r.restrict(r.idle)
	r.mu.Unlock()
	done := make(chan struct{})
	go func() {
		r.direction(endpointSide)
		close(done)
	}()
	r.direction(clientSide)
	<-done
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.timer != nil {
		r.timer.Stop()
	}
	if r.retry && r.pumps[clientSide].read == 0 {
		r.sides[clientSide].SetReadDeadline(time.Time{})
		return true
	}
	if r.retry {
		r.sides[clientSide].abort(0)
	}
	return false
}

// direction pumps from side d to the other and then says so there.
func (r *relay) direction(d int) {
	switch r.pumps[d].run() {
	case finished:
		r.sourceFinished(d)
	case sourceDied:
		r.sourceDied(d)
	case sinkDied:
		r.sinkDied(d)
	case interrupted:
		// Whoever interrupted has closed what is to be closed.
	}
}

// sourceFinished passes an end of data on. The last direction to finish closes.
func (r *relay) sourceFinished(d int) {
	sink := 1 - d
	r.mu.Lock()
	switch {
	case r.closed:
		r.mu.Unlock()
		return
	case r.dead[d]: // the other direction's write met the reset first
		r.closed = true
		r.mu.Unlock()
		r.sides[d].Close()
		r.sides[sink].abort(resetPatience)
		return
	case r.ended[sink]:
		r.closed = true
		r.mu.Unlock()
		r.sides[0].Close()
		r.sides[1].Close()
		return
	}
	r.ended[d] = true
	r.sides[sink].CloseWrite()
	r.restrict(r.halfClose)
	r.mu.Unlock()
	if r.sides[d].awaitDeath() {
		r.sourceDied(d)
	}
}

// sourceDied passes a reset on.
func (r *relay) sourceDied(d int) {
	sink := 1 - d
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return
	}
	r.closed = true
	if d == endpointSide && r.mayRetry && r.unused() {
		r.retry = true
		r.sides[endpointSide].Close()
		r.sides[clientSide].SetReadDeadline(time.Unix(1, 0)) // stops the other direction
		r.mu.Unlock()
		return
	}
	r.mu.Unlock()
	r.sides[d].Close()
	r.sides[sink].abort(resetPatience)
}

// sinkDied leaves it to the other direction, which reads what the sink had
// sent before it died, to pass the reset on; unless that has ended.
func (r *relay) sinkDied(d int) {
	r.mu.Lock()
	r.dead[1-d] = true
	r.restrict(r.halfClose)
	last := r.ended[1-d] && !r.closed
	r.closed = r.closed || last
	r.mu.Unlock()
	if last {
		r.sides[1-d].Close()
		r.sides[d].abort(resetPatience)
	}
}

// unused reports whether the relay hasn't moved a byte and nobody has finished.
func (r *relay) unused() bool {
	return r.meters[0].count.Load() == 0 && r.meters[1].count.Load() == 0 && !r.ended[clientSide] && !r.dead[endpointSide]
}

// restrict lets the relay be silent for at most d from now on; 0 changes
// nothing. The caller holds mu.
func (r *relay) restrict(d time.Duration) {
	if old := r.limit.Load(); d <= 0 || old > 0 && old <= int64(d) {
		return
	}
	r.limit.Store(int64(d))
	r.heard.Store(sinceEpoch())
	if r.timer == nil {
		r.timer = time.AfterFunc(d, r.expire)
		return
	}
	r.timer.Reset(d)
}

// expire ends a relay that was silent for too long, as kill does: an end of
// data would make a truncated answer look complete. Where both directions have
// finished, they have closed already. The timer isn't touched when bytes move;
// instead it finds out here that it has to go on.
func (r *relay) expire() {
	r.mu.Lock()
	if r.closed {
		r.mu.Unlock()
		return
	}
	silent := sinceEpoch() - r.heard.Load()
	if left := r.limit.Load() - silent; left > 0 {
		r.timer.Reset(time.Duration(left))
		r.mu.Unlock()
		return
	}
	r.closed = true
	r.mu.Unlock()
	r.sides[0].abort(0)
	r.sides[1].abort(0)
}

// kill ends the relay at once, with a reset to both sides: they must not take
// what they have for all there is.
func (r *relay) kill() {
	r.mu.Lock()
	r.closed, r.retry, r.mayRetry = true, false, false
	r.mu.Unlock()
	r.sides[0].abort(0)
	r.sides[1].abort(0)
}
