package userspace

import "time"

// resetPatience bounds how long a reset waits for a peer that takes nothing of what was sent before it: a
// reset throws unsent bytes away, and an endpoint that answers and then resets has
// sent its answer.
const resetPatience = 5 * time.Second

// Waits between checks whether it has arrived.
const (
	resetWaitMin = time.Millisecond
	resetWaitMax = 50 * time.Millisecond
)

// relayState holds what a connection knows while it moves bytes both ways, until
// both are done. The connection passes on to each side what happens to the other: end of
// data as end of data, reset as reset.
type relayState struct {
	ended  [2]bool // direction d's source has finished, and so has its sink been
	dead   [2]bool // writing to side d failed
	active int64   // when bytes last moved, in nanoseconds since epoch
	limit  int64   // of silence, in nanoseconds; 0 for none
	alive  int64   // when the kernel is told to ask the endpoint whether it is there; 0 once it was
	wait   time.Duration
	reset  int64 // when a reset waits no longer
}

// begin relays between the client and the endpoint that has just taken it.
func (x *tcpConn) begin() {
	x.phase = relaying
	x.relayState = relayState{active: x.loop.now, alive: x.loop.now + int64(x.loop.server.cfg.KeepAlive)}
	x.wake()
	for d := range x.pumps {
		x.pumps[d].meter = &x.meters[d]
	}
	x.restrict(x.front.view.plan.Port.IdleTimeout)
	x.record.relaying(x)
	// Its request is there already, most of the time: a read costs less than an event.
	x.relay()
	if x.phase != relaying {
		return
	}
	if x.sides[clientSide].watched {
		return
	}
	if err := x.sides[clientSide].watch(x); err != nil {
		x.cut()
	}
}

// relay moves what can be moved. The endpoint comes first: that it resets first
// thing has to be known before it is written to.
func (x *tcpConn) relay() {
	r := x.record // which leave takes away
	r.move(x)
	for _, d := range []int{endpointSide, clientSide} {
		if x.phase == relaying {
			x.direction(d)
		}
	}
	r.moved(x)
}

// direction lets a pump have its turn, and then says at its sink how it ended.
func (x *tcpConn) direction(d int) {
	if x.pumps[d].over {
		if s := &x.sides[d]; x.ended[d] && s.broken && s.dead() {
			x.sourceDied(d)
		}
		return
	}
	switch x.pumps[d].turn(x, &x.sides[d], &x.sides[1-d]) {
	case finished:
		x.pumps[d].over = true
		x.pumps[d].drop(x.loop.server.pipes) // the other direction may go on for long
		x.sourceFinished(d)
	case sourceDied:
		x.sourceDied(d)
	case sinkDied:
		x.pumps[d].over = true
		x.sinkDied(d)
	case unfinished:
		if !x.queued {
			x.queued = true
			x.loop.busy = append(x.loop.busy, x)
		}
	case blocked:
		x.boundStall(d)
	}
}

// boundStall bounds how long direction d waits for a sink that takes nothing, once its
// source has no more to say: the source's end or reset is read only behind the bytes
// before it. A sink that goes on taking bytes gets all of them first. Where the source has been sent the
// other direction's end, it is closed in either case once it has said its own.
//
// TCP_USER_TIMEOUT wouldn't do: it also ends a connection whose peer answers window
// probes and only pauses (tcp_probe_timer in net/ipv4/tcp_timer.c).
func (x *tcpConn) boundStall(d int) {
	s := &x.sides[d]
	switch {
	case x.pumps[d].pending == 0 || !s.last:
	case x.dead[d] || !x.ended[1-d] && s.broken && s.dead():
		x.restrict(resetPatience)
	default:
		x.restrict(x.loop.server.cfg.HalfCloseTimeout)
	}
}

// sourceFinished passes an end of data on. The last direction to finish closes.
func (x *tcpConn) sourceFinished(d int) {
	sink := 1 - d
	if x.dead[d] { // the other direction's write met the reset first
		x.sourceDied(d)
		return
	}
	if x.ended[sink] {
		x.record.forget()
		x.sides[clientSide].close()
		x.sides[endpointSide].close()
		x.end()
		return
	}
	x.ended[d] = true
	x.sides[sink].finish()
	x.restrict(x.loop.server.cfg.HalfCloseTimeout)
	if s := &x.sides[d]; s.broken && s.dead() {
		x.sourceDied(d)
	}
}

// sourceDied passes a reset on, unless another endpoint may be tried.
func (x *tcpConn) sourceDied(d int) {
	if d == endpointSide && x.mayRetry() {
		x.search.exclude(x.endpoint.Load())
		x.pumps[clientSide].over = false
		x.pumps[endpointSide] = pump{}
		x.loop.timers.stop(&x.timer)
		x.again(errReset)
		return
	}
	x.leave(d)
}

// mayRetry reports whether the endpoint can be replaced: neither side has had a byte from
// the other one, neither has finished, and the search isn't over. In a loop each
// connection on the way would try again what the next one has tried.
func (x *tcpConn) mayRetry() bool {
	return x.search != nil && x.attempt <= x.loop.server.retries(x.front.view.plan.Port) && !x.killed.Load() && x.loop.now < x.until && !x.state.hops.loopedSince(x.began) &&
		x.meters[clientSide].count.Load() == 0 && x.meters[endpointSide].count.Load() == 0 && x.ended == [2]bool{}
}

// sinkDied leaves it to the other direction, which reads what the sink had
// sent before it died, to pass the reset on; unless that has ended. That reading ends
// in sourceDied, within this call where nothing is left to read.
func (x *tcpConn) sinkDied(d int) {
	sink := 1 - d
	x.dead[sink] = true
	x.restrict(x.loop.server.cfg.HalfCloseTimeout)
	switch {
	case x.dead[d]:
		x.cut()
	case x.ended[sink]:
		x.leave(sink)
	default:
		x.sides[sink].readable, x.sides[sink].last = true, true // the error has come by the write
		x.direction(sink)
	}
}

// leave closes a side and resets the other one, once what was sent to that has arrived. The kernel resets it if this process ends
// before: a FIN would make an answer look complete.
func (x *tcpConn) leave(closed int) {
	x.record.forget()
	x.record = nil // the client's descriptor, if that is closed, may be another connection's soon, and the record with it
	x.sides[closed].close()
	x.phase = leaving
	for i := range x.sides {
		x.sides[i].resetOnClose()
	}
	x.wait, x.reset = resetWaitMin, sinceEpoch()+int64(resetPatience)
	x.resetSoon()
}

func (x *tcpConn) resetSoon() {
	now := sinceEpoch()
	for i := range x.sides {
		if s := &x.sides[i]; s.fd >= 0 && s.unsent() && now < x.reset {
			x.loop.timers.set(&x.timer, now+int64(x.wait))
			x.wait = min(2*x.wait, resetWaitMax)
			return
		}
	}
	x.cut()
}

// restrict lets the connection be silent for at most d from now on; 0 changes
// nothing.
func (x *tcpConn) restrict(d time.Duration) {
	if d <= 0 || x.limit > 0 && x.limit <= int64(d) {
		return
	}
	x.limit, x.active = int64(d), x.loop.now
	x.wake()
}

// wake sets the timer to what is due next, if anything is.
func (x *tcpConn) wake() {
	due := x.alive
	if silence := x.active + x.limit; x.limit > 0 && (due == 0 || silence < due) {
		due = silence
	}
	if due > 0 {
		x.loop.timers.set(&x.timer, due)
	}
}

// expire ends a connection that was silent for too long: an end of data would
// make a truncated answer look complete. The timer isn't touched when bytes move;
// instead it finds out here that it has to go on. Only a connection that has got as old as the first keepalive
// needs the options for it: the kernel counts from the last bytes, whenever they are set (tcp_sock_set_keepidle_locked).
func (x *tcpConn) expire() {
	if x.limit > 0 && x.active+x.limit <= x.loop.now {
		x.cut()
		return
	}
	if x.alive != 0 && x.alive <= x.loop.now {
		x.alive = 0
		keepAlive(x.sides[endpointSide].fd, x.loop.server.cfg.KeepAlive)
	}
	x.wake()
}
