package userspace

import (
	"runtime"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// policy is how the calling thread is scheduled.
func policy() int {
	p, _, _ := unix.RawSyscall(unix.SYS_SCHED_GETSCHEDULER, 0, 0, 0)
	return int(p)
}

// A worker is scheduled in batches while it has much to do, unless somebody has decided
// otherwise for the process.
func TestBusyWorkerIsScheduledInBatches(t *testing.T) {
	const schedIdle = 5
	tests := []struct {
		name                    string
		from, crowded, deserted int
	}{
		{"as usual", schedOther, schedBatch, schedOther},
		{"idle policy", schedIdle, schedIdle, schedIdle},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			done := make(chan struct{})
			go func() { // with a thread of its own, which ends with it
				defer close(done)
				runtime.LockOSThread()
				c := &crowd{}
				c.schedule(tt.from)
				c.crowded = false
				now := int64(time.Second)
				c.note(crowdedFrom, now) // in a second that is the limit
				now += int64(crowdWindow)
				c.note(crowdedFrom, now)
				if got := policy(); got != tt.crowded {
					t.Errorf("with much to do: policy %d, want %d", got, tt.crowded)
				}
				now += int64(crowdWindow)
				c.note(0, now)
				if got := policy(); got != tt.deserted {
					t.Errorf("with nothing to do: policy %d, want %d", got, tt.deserted)
				}
			}()
			<-done
		})
	}
}
