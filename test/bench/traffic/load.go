package traffic

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/lab/compare/load"
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
)

// Kinds are all of them.
var Kinds = []Kind{Bulk, Short, Exchange, Datagram, Session, Window, Flood}

// Port is the server's port for a kind.
func (k Kind) Port() uint16 { return 9201 + uint16(slices.Index(Kinds, k)) }

// UDP reports whether a kind is of datagrams.
func (k Kind) UDP() bool { return !slices.Contains([]Kind{Bulk, Short, Exchange}, k) }

// large reports whether a kind is of large datagrams.
func (k Kind) large() bool { return k == Window || k == Flood }

// controlPort is where the server tells what it has received.
const controlPort = 9200

// Threads is how many threads a client has, and how many a server.
const Threads = 2

// messageSize is how long a request is, and its answer.
const messageSize = 64

// DatagramSize is how long the datagrams of [Window] and [Flood] are.
const DatagramSize = 1400

// Load says what to do.
type Load struct {
	Kind   Kind           `json:"kind"`
	Target netip.AddrPort `json:"target"`
	Server netip.Addr     `json:"server"` // the server's own address, to be asked what it received
	Conns  int            `json:"conns"`  // connections or sessions at a time
	Time   time.Duration  `json:"time"`
	Count  int            `json:"count,omitempty"` // at most so many [Session]s or [Short] connections; 0 for any number

	// Sources are the client's addresses and FirstPort the first port of [Session]s,
	// which begin there and take each port of each address once.
	Sources   []netip.Addr `json:"sources,omitempty"`
	FirstPort int          `json:"firstPort,omitempty"`

	// Processes whose time is told apart.
	ServerPID int   `json:"serverPID"`
	Proxies   []int `json:"proxies,omitempty"`
}

// Outcome is what came of a load.
type Outcome struct {
	Seconds  float64           `json:"seconds"`
	Count    int               `json:"count"`  // streams, connections, exchanges or datagrams that arrived in time
	Failed   int               `json:"failed"` // those that didn't; for datagrams of Window and Flood they are Lost
	Error    string            `json:"error,omitempty"`
	Bytes    uint64            `json:"bytes"`          // that the server confirmed
	Lost     int               `json:"lost,omitempty"` // datagrams
	Exchange *load.Percentiles `json:"exchange,omitempty"`
	CPU      load.CPU          `json:"cpu"`
}

// Late reports whether nothing came in time, and nothing else was seen to go wrong:
// that may be the machine's fault, where a closed connection or other bytes are the
// proxy's.
func (o *Outcome) Late() bool {
	late := func(err error) bool { return strings.HasSuffix(o.Error, err.Error()) }
	return o.Count == 0 && o.Failed == 0 || late(errNoAnswer) || late(unix.ETIMEDOUT)
}

// Bounds of a load.
const (
	maxConns  = 1024
	maxTime   = time.Minute
	firstPort = 1024 // of sessions
	portCount = 1<<16 - firstPort
)

// Validate says what is wrong with a load.
func (l *Load) Validate() error {
	var errs []error
	if !slices.Contains(Kinds, l.Kind) {
		errs = append(errs, fmt.Errorf("kind %q is none of %v", l.Kind, Kinds))
	}
	if !l.Target.Addr().Is4() || !l.Server.Is4() {
		errs = append(errs, errors.New("target and server must be IPv4 addresses"))
	}
	if l.Conns < 1 || l.Conns > maxConns {
		errs = append(errs, fmt.Errorf("%d connections are not between 1 and %d", l.Conns, maxConns))
	}
	if l.Time <= 0 || l.Time > maxTime {
		errs = append(errs, fmt.Errorf("time %s is not between 0 and %s", l.Time, maxTime))
	}
	if l.Kind == Session && len(l.Sources) == 0 {
		errs = append(errs, errors.New("sessions need the client's addresses"))
	}
	return errors.Join(errs...)
}
