package traffic

import (
	"fmt"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"kproxy.dev/kproxy/lab/compare/load"
)

// answerWait is how long an answer may take before it counts as failed.
const answerWait = time.Second

// worker is one thread of a load.
type worker interface {
	// open makes what must be there before the clock starts.
	open() error
	// run works until the deadline and tells about it in the tally.
	run(deadline time.Time)
	close()
	result() *tally
}

// tally is what a worker counts.
type tally struct {
	done, failed int
	sent         uint64 // large datagrams
	bytes        uint64
	err          error
	exchange     []time.Duration
}

// fail counts n failures.
func (t *tally) fail(n int, err error) {
	t.failed += n
	if t.err == nil {
		t.err = err
	}
}

func (t *tally) result() *tally { return t }

// Run does what l says, in the network namespace of the process.
func Run(l Load) (Outcome, error) {
	if err := l.Validate(); err != nil {
		return Outcome{}, err
	}
	ready()
	workers := newWorkers(&l)
	for _, w := range workers {
		defer w.close()
		if err := w.open(); err != nil {
			return Outcome{}, fmt.Errorf("begin load %s on %s: %w", l.Kind, l.Target, err)
		}
	}
	var had, bad uint64
	if l.Kind.large() {
		var err error
		if had, bad, err = received(l.Server); err != nil {
			return Outcome{}, err
		}
	}
	reader := load.NewCPUReader(l.ServerPID, l.Proxies...)
	before, err := reader.Read()
	if err != nil {
		return Outcome{}, err
	}
	start := time.Now()
	var wg sync.WaitGroup
	for _, w := range workers {
		wg.Go(func() {
			runtime.LockOSThread()
			w.run(start.Add(l.Time))
		})
	}
	wg.Wait()
	took := time.Since(start)
	after, err := reader.Read()
	if err != nil {
		return Outcome{}, err
	}
	out := gather(workers)
	out.CPU = after.Minus(before)
	// Streams end when all of them has arrived; of the others only what came in time counts.
	if out.Seconds = l.Time.Seconds(); l.Kind == Bulk || l.Kind == Session || took < l.Time {
		out.Seconds = took.Seconds()
	}
	if l.Kind.large() {
		var sent uint64
		for _, w := range workers {
			sent += w.result().sent
		}
		err = out.settle(l.Server, sent, had, bad)
	}
	return out, err
}

// ready makes the process one in which only the workers run.
func ready() {
	runtime.GOMAXPROCS(Threads + 4)
	debug.SetGCPercent(-1)
}

func newWorkers(l *Load) []worker {
	n := min(Threads, l.Conns)
	if l.Kind == Flood {
		n = 1
	}
	var out []worker
	for i := range n {
		conns := l.Conns / n
		if i < l.Conns%n {
			conns++
		}
		out = append(out, newWorker(l, i, n, conns))
	}
	return out
}

func newWorker(l *Load, i, of, conns int) worker {
	switch l.Kind {
	case Bulk:
		return newBulk(l, conns)
	case Short:
		return newShort(l, conns, l.Count/of)
	case Exchange, Datagram:
		return newExchanger(l, conns)
	case Session:
		return newSessions(l, conns, i, of)
	case Window:
		return newWindow(l, conns)
	}
	return newFlood(l, conns)
}

func gather(workers []worker) Outcome {
	var out Outcome
	var all [][]time.Duration
	for _, w := range workers {
		t := w.result()
		out.Count += t.done
		out.Failed += t.failed
		out.Bytes += t.bytes
		if t.err != nil && out.Error == "" {
			out.Error = t.err.Error()
		}
		all = append(all, t.exchange)
	}
	out.Exchange = load.PercentilesOf(slices.Concat(all...))
	return out
}
