package agent

import (
	"context"
	"runtime/debug"
	"time"
)

// settleTime is how long after the kernel has all rules a start is over: by then
// services have moved there, and what led to it is garbage.
const settleTime = 5 * time.Second

// giveBack returns to the system, once, the memory that the start took and nobody
// needs any more: objects as they came from the API, plans and rules that were
// replaced. The Go runtime would keep most of it for a heap of that size.
func (a *Agent) giveBack(ctx context.Context) error {
	look := time.NewTicker(time.Second)
	defer look.Stop()
	for a.programmer.report().lastOK.IsZero() {
		select {
		case <-ctx.Done():
			return nil
		case <-look.C:
		}
	}
	select {
	case <-ctx.Done():
	case <-time.After(settleTime):
		debug.FreeOSMemory()
	}
	return nil
}
