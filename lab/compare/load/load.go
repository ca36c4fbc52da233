package load

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"time"
)

// Kind is a way to load a service.
type Kind string

// The kinds of loads.
const (
	Throughput  Kind = "throughput"  // TCP streams that send as fast as they can
	Connections Kind = "connections" // new TCP connections, several at a time, one exchange each
	Requests    Kind = "requests"    // exchanges on one TCP connection, one after the other
	Datagrams   Kind = "datagrams"   // the same over UDP
	Sessions    Kind = "sessions"    // UDP exchanges, each from a port of its own
	Firsts      Kind = "firsts"      // new TCP connections, one after the other, one exchange each
)

// Kinds are all of them.
var Kinds = []Kind{Throughput, Connections, Requests, Datagrams, Sessions, Firsts}

// Port is the server's port for a kind.
func (k Kind) Port() uint16 {
	switch k {
	case Throughput:
		return 9101
	case Requests, Firsts:
		return 9102
	case Connections:
		return 9103
	case Datagrams, Sessions:
		return 9104
	}
	return 0
}

// Load says what to do. The zero value does nothing.
type Load struct {
	Kind      Kind             `json:"kind"`
	Targets   []netip.AddrPort `json:"targets"` // taken in turn
	Workers   int              `json:"workers"` // at a time; each is a thread
	Time      time.Duration    `json:"time"`    // ends after so long
	Count     int              `json:"count"`   // or after so many, of all workers
	FirstPort uint16           `json:"firstPort,omitempty"`

	// Processes whose time is told apart; 0 for none.
	Backend int `json:"backend"`
	Proxy   int `json:"proxy,omitempty"`
}

// MaxBytes bounds what a stream sends.
const MaxBytes = 1 << 37

// MaxWorkers is how many connections at a time a server serves per address and kind.
const MaxWorkers = 16

// Outcome is what came of a load.
type Outcome struct {
	Seconds   float64      `json:"seconds"`
	Count     int          `json:"count"`           // streams, connections or exchanges that succeeded
	Failed    int          `json:"failed"`          // and that didn't
	Error     string       `json:"error,omitempty"` // of the first that failed
	Bytes     uint64       `json:"bytes"`           // that the server confirmed
	Connect   *Percentiles `json:"connect,omitempty"`
	Exchange  *Percentiles `json:"exchange,omitempty"`
	CPU       CPU          `json:"cpu"`
	Witnesses []Witness    `json:"witnesses"`
}

// Witness is one connection of the load, by which the kernel's tables tell what
// carried it.
type Witness struct {
	Client netip.AddrPort `json:"client"`
	Target netip.AddrPort `json:"target"`
}

// maxWitnesses bounds the witnesses of a worker.
const maxWitnesses = 16

// Validate says what is wrong with a load.
func (l *Load) Validate() error {
	var errs []error
	if !slices.Contains(Kinds, l.Kind) {
		errs = append(errs, fmt.Errorf("kind %q is none of %v", l.Kind, Kinds))
	}
	if len(l.Targets) == 0 {
		errs = append(errs, errors.New("no targets"))
	}
	if l.Workers < 1 || l.Workers > MaxWorkers {
		errs = append(errs, fmt.Errorf("%d workers are not between 1 and %d", l.Workers, MaxWorkers))
	}
	if l.Time <= 0 || l.Time > time.Minute {
		errs = append(errs, fmt.Errorf("time %s is not between 0 and a minute", l.Time))
	}
	if l.Count < 1 || l.Count > 1_000_000 {
		errs = append(errs, fmt.Errorf("count %d is not between 1 and a million", l.Count))
	}
	if l.Kind == Sessions && (l.FirstPort == 0 || int(l.FirstPort)+l.Count > 1<<16) {
		errs = append(errs, fmt.Errorf("%d sessions from port %d on are more than there are ports", l.Count, l.FirstPort))
	}
	return errors.Join(errs...)
}

// worker is one thread of the load. Its fields are its own until it has ended.
type worker struct {
	load      *Load
	number    int
	deadline  time.Time
	count     int // bound on its share
	ok        int
	failed    int
	err       error
	bytes     uint64
	connect   []time.Duration
	exchange  []time.Duration
	witnesses []Witness
	buffer    []byte
}

// Run does what l says, in the network namespace of the process. It fails when
// nothing of it succeeded.
func Run(ctx context.Context, l Load) (Outcome, error) {
	if err := l.Validate(); err != nil {
		return Outcome{}, err
	}
	// A worker holds its thread, and nothing it does should wait for another's.
	runtime.GOMAXPROCS(max(runtime.GOMAXPROCS(0), l.Workers+2))
	workers := make([]*worker, l.Workers)
	for i := range workers {
		workers[i] = newWorker(&l, i)
	}
	runtime.GC()
	defer debug.SetGCPercent(debug.SetGCPercent(-1)) // all memory is there
	reader := NewCPUReader(l.Backend, l.Proxy)
	before, err := reader.Read()
	if err != nil {
		return Outcome{}, err
	}
	start := time.Now()
	var wg sync.WaitGroup
	for _, w := range workers {
		w.deadline = start.Add(l.Time)
		wg.Go(func() {
			runtime.LockOSThread() // never unlocked: the thread ends with it
			w.run(ctx)
		})
	}
	wg.Wait()
	seconds := time.Since(start).Seconds()
	after, err := reader.Read()
	if err != nil {
		return Outcome{}, err
	}
	out := gather(workers)
	out.Seconds, out.CPU = seconds, after.Minus(before)
	if err := ctx.Err(); err != nil {
		return out, err
	}
	if out.Count == 0 {
		return out, fmt.Errorf("nothing of the load %s to %v succeeded: %s", l.Kind, l.Targets, out.Error)
	}
	return out, nil
}

func newWorker(l *Load, i int) *worker {
	share := (l.Count + l.Workers - 1) / l.Workers
	w := &worker{load: l, number: i, count: share, witnesses: make([]Witness, 0, maxWitnesses)}
	switch l.Kind {
	case Throughput:
		w.buffer = make([]byte, streamBuffer)
	default:
		w.buffer = make([]byte, messageSize)
		w.connect = make([]time.Duration, 0, share)
		w.exchange = make([]time.Duration, 0, share)
	}
	return w
}

// target is the one of the i-th connection.
func (w *worker) target(i int) netip.AddrPort {
	return w.load.Targets[(w.number+i)%len(w.load.Targets)]
}

// more reports whether there is time and count for another.
func (w *worker) more(ctx context.Context) bool {
	return w.ok+w.failed < w.count && ctx.Err() == nil && time.Now().Before(w.deadline)
}

func (w *worker) run(ctx context.Context) {
	switch w.load.Kind {
	case Throughput:
		w.note(w.stream())
	case Connections:
		for i := 0; w.more(ctx); i++ {
			w.note(w.connection(i, socket.awaitClose))
		}
	case Firsts:
		for i := 0; w.more(ctx); i++ {
			w.note(w.connection(i, socket.abort))
		}
	case Requests:
		w.exchanges(ctx, dialTCP)
	case Datagrams:
		w.exchanges(ctx, dialUDP)
	case Sessions:
		for i := 0; w.more(ctx); i++ {
			w.note(w.session(i))
		}
	}
}

// note counts one success or failure.
func (w *worker) note(err error) {
	if err == nil {
		w.ok++
		return
	}
	w.failed++
	if w.err == nil {
		w.err = err
	}
}

// witness remembers a connection; the last ones are the best witnesses, as the
// kernel forgets.
func (w *worker) witness(s socket, target netip.AddrPort) {
	client, err := s.local()
	if err != nil {
		return
	}
	if len(w.witnesses) == maxWitnesses {
		copy(w.witnesses, w.witnesses[1:])
		w.witnesses = w.witnesses[:maxWitnesses-1]
	}
	w.witnesses = append(w.witnesses, Witness{client, target})
}

func gather(workers []*worker) Outcome {
	var out Outcome
	var connect, exchange []time.Duration
	for _, w := range workers {
		out.Count += w.ok
		out.Failed += w.failed
		out.Bytes += w.bytes
		if w.err != nil && out.Error == "" {
			out.Error = w.err.Error()
		}
		connect, exchange = append(connect, w.connect...), append(exchange, w.exchange...)
		out.Witnesses = append(out.Witnesses, w.witnesses...)
	}
	out.Connect, out.Exchange = PercentilesOf(connect), PercentilesOf(exchange)
	return out
}
