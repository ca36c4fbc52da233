// Package load makes traffic to measure with: clients that load an address in
// one of several ways ([Run]), the server behind it ([Serve]), and the network
// in which both run, with a proxy between them ([Rig]). `kproxy lab compare` and
// `make bench` measure with it.
//
// Client and server are processes of their own ([Main]) and must cost less than
// what is between them. The client has a thread for each stream, or session of large
// datagrams, with blocking system calls. Requests, and the server, are event loops over
// epoll on two threads. Their system calls bypass Go's scheduler, and their memory is allocated
// before the clock starts.
//
// Everything received is checked: messages byte by byte, streams at a mark in
// every [markEvery] bytes and by their length. What is wrong, missing or late
// is counted as failed.
//
// A load runs on threads of its own; nothing here is safe for concurrent use.
package load

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"math"
	"net/netip"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// Kind is a way to load an address.
type Kind string

// The kinds of loads.
const (
	Bulk     Kind = "bulk"     // TCP streams that send as fast as they can
	Short    Kind = "short"    // TCP connections with one exchange each, which the server closes
	Exchange Kind = "exchange" // exchanges on open TCP connections, one at a time on each
	Datagram Kind = "datagram" // the same in UDP sessions
	Session  Kind = "session"  // UDP sessions of one exchange each, every one from another port
	Window   Kind = "window"   // large datagrams, a number of them on the way in each session
	Flood    Kind = "flood"    // large datagrams as fast as one thread can send them
	First    Kind = "first"    // TCP connections with one exchange each, which the client resets
)

// Kinds are those with a port of their own; [First] uses that of [Exchange].
var Kinds = []Kind{Bulk, Short, Exchange, Datagram, Session, Window, Flood}

// Port is the server's port for a kind.
func (k Kind) Port() uint16 {
	if k == First {
		k = Exchange
	}
	return 9201 + uint16(slices.Index(Kinds, k))
}

// UDP reports whether a kind is of datagrams.
func (k Kind) UDP() bool { return slices.Contains([]Kind{Datagram, Session, Window, Flood}, k) }

// large reports whether a kind is of large datagrams.
func (k Kind) large() bool { return k == Window || k == Flood }

// controlPort is where the server reports what it has received.
const controlPort = 9200

// messageSize is the size of a request, and of its answer, in bytes.
const messageSize = 64

// DatagramSize is the size of the datagrams of [Window] and [Flood], in bytes.
const DatagramSize = 1400

// Load says what to do.
type Load struct {
	Kind    Kind             `json:"kind"`
	Targets []netip.AddrPort `json:"targets"` // IPv4; connections go to them in turn
	Server  netip.Addr       `json:"server"`  // its own address; Window and Flood ask it what arrived
	Conns   int              `json:"conns"`   // connections or sessions at a time
	Time    time.Duration    `json:"time"`
	Count   int              `json:"count,omitempty"` // at most so many Short or First connections, or Sessions; 0 for any number

	// Sources are the client's addresses and FirstPort the number of the first port
	// of Sessions, which use each port of each address once.
	Sources   []netip.Addr `json:"sources,omitempty"`
	FirstPort int          `json:"firstPort,omitempty"`

	// Processes whose processor time is measured.
	Servers []int `json:"servers"`
	Proxies []int `json:"proxies,omitempty"`
}

// Outcome holds what came of a load.
type Outcome struct {
	Seconds  float64     `json:"seconds"`
	Count    int         `json:"count"`  // streams, connections, exchanges or datagrams that arrived in time
	Failed   int         `json:"failed"` // those that didn't; for datagrams of Window and Flood they are Lost
	Error    string      `json:"error,omitempty"`
	Bytes    uint64      `json:"bytes"`            // confirmed by the server
	Lost     int         `json:"lost,omitempty"`   // datagrams
	Connect  Percentiles `json:"connect,omitzero"` // until a TCP connection was established
	Exchange Percentiles `json:"exchange,omitzero"`
	CPU      CPU         `json:"cpu"`
	// Witnesses are some of the connections: conntrack's table tells what carried them.
	Witnesses []Witness `json:"witnesses,omitempty"`
}

// Witness is the client's end of a connection, and where it went.
type Witness struct{ Client, Target netip.AddrPort }

// Late reports whether answers were only late or missing. Then the machine may be
// to blame; a closed connection or other bytes are the proxy's fault.
func (o *Outcome) Late() bool {
	late := func(err error) bool { return strings.HasSuffix(o.Error, err.Error()) }
	return o.Count == 0 && o.Failed == 0 || late(errNoAnswer) || late(unix.ETIMEDOUT)
}

// Percentiles sum up durations, in microseconds; zero where there are none.
type Percentiles struct {
	P50 float64 `json:"p50"`
	P99 float64 `json:"p99"`
	Max float64 `json:"max"`
}

// percentilesOf sorts d.
func percentilesOf(d []time.Duration) Percentiles {
	if len(d) == 0 {
		return Percentiles{}
	}
	slices.Sort(d)
	at := func(p float64) float64 {
		// Nearest rank: the smallest value that at least p of all don't exceed.
		return float64(d[max(0, int(math.Ceil(p*float64(len(d))))-1)]) / float64(time.Microsecond)
	}
	return Percentiles{P50: at(0.5), P99: at(0.99), Max: at(1)}
}

// The ports of sessions.
const (
	firstPort = 1024
	portCount = 1<<16 - firstPort
)

// Run does what l says, in the network namespace of the process.
func Run(l Load) (Outcome, error) {
	workers := newWorkers(&l)
	prepareProcess(len(workers))
	for _, w := range workers {
		defer w.base().close()
		if err := w.open(); err != nil {
			return Outcome{}, fmt.Errorf("begin load %s on %v: %w", l.Kind, l.Targets, err)
		}
	}
	var had, bad uint64
	if l.Kind.large() {
		var err error
		if had, bad, err = received(l.Server); err != nil {
			return Outcome{}, err
		}
	}
	reader := newCPUReader(l.Servers, l.Proxies)
	before, err := reader.read()
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
	after, err := reader.read()
	if err != nil {
		return Outcome{}, err
	}
	out, sent := gather(workers)
	out.CPU = after.minus(before)
	// Streams end when all of them has arrived; of the others only what came in time counts.
	if out.Seconds = l.Time.Seconds(); l.Kind == Bulk || l.Kind == Session || took < l.Time {
		out.Seconds = took.Seconds()
	}
	if l.Kind.large() {
		err = out.settle(l.Server, sent, had, bad)
	}
	return out, err
}

// prepareProcess makes the process one in which only so many threads run, whose system
// calls don't tell Go's scheduler that they wait.
func prepareProcess(threads int) {
	runtime.GOMAXPROCS(threads + 4)
	debug.SetGCPercent(-1)
}

func gather(workers []worker) (out Outcome, sent uint64) {
	var connect, exchange []time.Duration
	for _, w := range workers {
		c := w.base()
		out.Count += c.done
		out.Failed += c.failed
		out.Bytes += c.bytes
		sent += c.sent
		if c.err != nil && out.Error == "" {
			out.Error = c.err.Error()
		}
		connect, exchange = append(connect, c.connect...), append(exchange, c.exchange...)
		out.Witnesses = append(out.Witnesses, c.witnesses...)
	}
	out.Connect, out.Exchange = percentilesOf(connect), percentilesOf(exchange)
	return out, sent
}

// Ready is what a process prints when it serves, or holds its connections.
const Ready = "ready"

// Main is the client or the server as a process of its own: "serve", "load" with
// a [Load] as JSON, or "hold" with a target and a number of connections.
func Main(ctx context.Context, w io.Writer, args []string) error {
	ready := func() { fmt.Fprintln(w, Ready) }
	switch {
	case len(args) == 1 && args[0] == "serve":
		return Serve(ctx, ready)
	case len(args) == 2 && args[0] == "load":
		var l Load
		if err := json.Unmarshal([]byte(args[1]), &l); err != nil {
			return fmt.Errorf("read load: %w", err)
		}
		out, err := Run(l)
		if err != nil {
			return err
		}
		return json.NewEncoder(w).Encode(out)
	case len(args) == 3 && args[0] == "hold":
		to, err := netip.ParseAddrPort(args[1])
		if err != nil {
			return err
		}
		var n int
		if _, err := fmt.Sscan(args[2], &n); err != nil {
			return err
		}
		return hold(ctx, to, n, ready)
	}
	return fmt.Errorf("%q is no load, server or holder of connections", args)
}
