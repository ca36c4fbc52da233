package userspace

import (
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// How many datagrams a worker handles in a second when it begins to work in
// batches, and when it stops to. In between is what a processor does with a
// quarter of its time.
const (
	crowdedFrom  = 40_000
	crowdedUntil = 20_000
	crowdWindow  = 10 * time.Millisecond
	// giveWayAtMost is how long giving way may take. Where it takes longer, somebody
	// else needs the processor for other things, and it isn't tried again for
	// giveWayPause.
	giveWayAtMost = 500 * time.Microsecond
	giveWayPause  = 200 * time.Millisecond
)

// crowd makes a worker that has much to do let clients and endpoints on the same
// processors go first: then datagrams come in batches, and what costs most, waking
// each other for every single one, is done once for many. It doesn't preempt whoever
// wakes it (SCHED_BATCH, see sched(7)) and gives way after each turn
// (sched_yield(2)). As long as there is little to do it is scheduled like everybody
// else, because that is quicker.
type crowd struct {
	count   int   // datagrams since
	since   int64 // in nanoseconds since epoch
	crowded bool
	pause   int64 // until when it doesn't give way
}

// note takes note of how many datagrams there were in a turn.
func (c *crowd) note(n int, now int64) {
	c.count += n
	passed := now - c.since
	if passed < int64(crowdWindow) {
		return
	}
	rate := float64(c.count) / time.Duration(passed).Seconds()
	c.count, c.since = 0, now
	switch {
	case !c.crowded && rate > crowdedFrom && scheduledAsUsual():
		c.schedule(schedBatch)
	case c.crowded && rate < crowdedUntil:
		c.schedule(schedOther)
	}
}

// The scheduling policies of linux/sched.h.
const (
	schedOther = 0
	schedBatch = 3
)

// scheduledAsUsual reports whether the calling thread has the normal policy. Another
// one, SCHED_FIFO say, is somebody's decision, and stays.
func scheduledAsUsual() bool {
	policy, _, err := unix.RawSyscall(unix.SYS_SCHED_GETSCHEDULER, 0, 0, 0)
	return err == 0 && policy == schedOther
}

// schedule sets the policy of the calling thread, which the worker has for itself.
func (c *crowd) schedule(policy int) {
	var priority int32 // struct sched_param; always 0 for these policies
	unix.RawSyscall(unix.SYS_SCHED_SETSCHEDULER, 0, uintptr(policy), uintptr(unsafe.Pointer(&priority)))
	c.crowded = policy == schedBatch
}

// giveWay lets others go first.
func (c *crowd) giveWay(now int64) {
	if !c.crowded || now < c.pause {
		return
	}
	start := sinceEpoch()
	sysYield()
	if end := sinceEpoch(); end-start > int64(giveWayAtMost) {
		c.pause = end + int64(giveWayPause)
	}
}
