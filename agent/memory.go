package agent

import (
	"context"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

// settleTime is how long after the kernel has all rules a start is over: by then
// services have moved there, and what led to it is garbage.
const settleTime = 5 * time.Second

// Between two collections the heap grows by what is alive (GOGC=100), which for
// thousands of services is far more than their changes need. So it grows by
// headroom at most; but by leastGrowth percent, because a collection looks at
// everything that is alive, and is to be paid for by what it finds. A small heap
// is collected as ever.
const (
	headroom    = 32 << 20
	leastGrowth = 30
	usualGrowth = 100
)

// growth is by how many percent a heap of which so many bytes are alive may grow
// before it is collected.
func growth(live uint64) int {
	if live <= headroom {
		return usualGrowth
	}
	return max(int(headroom*100/live), leastGrowth)
}

// growthStep is by how much growth has to be another before it is set, which
// stops the process for a moment.
const growthStep = 5

// keepSmall returns to the system the memory that the start took and nobody needs
// any more: objects as they came from the API, plans and rules that were
// replaced. Then it bounds the garbage there may be. Whoever sets GOGC has decided
// on that himself.
func (a *Agent) keepSmall(ctx context.Context) error {
	if !a.awaitStart(ctx) {
		return nil
	}
	_, decided := os.LookupEnv("GOGC")
	if decided {
		debug.FreeOSMemory()
		return nil
	}
	look := time.NewTicker(time.Second)
	defer look.Stop()
	live := []metrics.Sample{{Name: "/gc/heap/live:bytes"}}
	set := usualGrowth
	defer debug.SetGCPercent(usualGrowth)
	debug.FreeOSMemory()
	for {
		metrics.Read(live)
		if want := growth(live[0].Value.Uint64()); want != set && (want == usualGrowth || max(want-set, set-want) >= growthStep) {
			debug.SetGCPercent(want)
			set = want
		}
		select {
		case <-ctx.Done():
			return nil
		case <-look.C:
		}
	}
}

// awaitStart waits until the start is over; false says that ctx was done before.
func (a *Agent) awaitStart(ctx context.Context) bool {
	look := time.NewTicker(time.Second)
	defer look.Stop()
	for a.programmer.report().lastOK.IsZero() {
		select {
		case <-ctx.Done():
			return false
		case <-look.C:
		}
	}
	select {
	case <-ctx.Done():
		return false
	case <-time.After(settleTime):
		return true
	}
}
