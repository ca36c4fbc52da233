package agent

import (
	"context"
	"os"
	"runtime/debug"
	"runtime/metrics"
	"sync"
	"time"
)

// Between two collections the heap grows by what is alive (GOGC=100), which for
// thousands of services is far more than their changes need. So it grows by
// headroom at most; but by leastGrowth percent, because a collection goes through
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

// Memory that isn't needed goes back to the system when it is more than spareMax,
// which takes a collection, once in some readings, readEvery apart, less than
// quietBytes were taken: quietStart readings at the end of a start, which leaves objects
// as they came from the API, plans and rules that were replaced, and quietLater after
// that, longer than changes pause in a rollout. The Go runtime would keep most of it
// for a heap of that size.
const (
	spareMax   = headroom / 2
	readEvery  = time.Second
	quietBytes = 1 << 20
	quietStart = 1
	quietLater = 3
)

// keepSmall bounds garbage from when the kernel has all rules. A user who sets GOGC
// has decided himself by how much the heap may grow.
func (a *Agent) keepSmall(ctx context.Context) error {
	tick := time.NewTicker(readEvery)
	defer tick.Stop()
	_, decided := os.LookupEnv("GOGC")
	set, quiet, patience, taken := usualGrowth, 0, quietStart, uint64(0)
	if !decided {
		defer debug.SetGCPercent(usualGrowth)
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		if a.programmer.report().lastOK.IsZero() || !collector.TryLock() {
			continue
		}
		h := readHeap()
		if want := growth(h.live); !decided && want != set && (want == usualGrowth || max(want-set, set-want) >= growthStep) {
			debug.SetGCPercent(want)
			set = want
		}
		if quiet++; h.taken-taken > quietBytes {
			quiet = 0
		}
		if taken = h.taken; quiet == patience && h.spare > spareMax {
			debug.FreeOSMemory()
			patience = quietLater
		}
		collector.Unlock()
	}
}

// collector is held by what changes how the Go runtime collects garbage.
var collector sync.Mutex

// pauseCollector keeps garbage from being collected until the function that it returns is called: while connections
// are at rest, that would take a sixth of the processor time that they wait for.
func pauseCollector() (resume func()) {
	collector.Lock()
	percent := debug.SetGCPercent(-1) // waits for the end of a collection
	return func() {
		debug.SetGCPercent(percent)
		collector.Unlock()
	}
}

// heap holds what the Go runtime tells of its heap, in bytes.
type heap struct {
	live  uint64 // by the last collection
	spare uint64 // taken from the system, and garbage or free
	taken uint64 // by allocations since the process began
}

func readHeap() heap {
	m := []metrics.Sample{
		{Name: "/gc/heap/live:bytes"}, {Name: "/memory/classes/heap/objects:bytes"},
		{Name: "/memory/classes/heap/free:bytes"}, {Name: "/gc/heap/allocs:bytes"},
	}
	metrics.Read(m)
	live, objects, free := m[0].Value.Uint64(), m[1].Value.Uint64(), m[2].Value.Uint64()
	return heap{live: live, spare: max(objects, live) - live + free, taken: m[3].Value.Uint64()}
}
