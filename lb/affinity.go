package lb

import (
	"iter"
	"maps"
	"math"
	"net/netip"
	"sync"
	"time"
)

// maxClients bounds the memory of an Affinity: beyond it, clients that have been silent for
// long lose their affinity. A client takes about 100 bytes.
const maxClients = 65536

// Affinity remembers which endpoint each client had (sessionAffinity:
// ClientIP). A client is an address; IPv4-mapped addresses are IPv4, zones
// don't count. It is safe for concurrent use.
type Affinity struct {
	limit int
	base  time.Time // times are kept as distance from it, 8 bytes instead of 24

	mu      sync.Mutex
	timeout time.Duration
	clients map[[16]byte]affine // no pointers, which the garbage collector would follow
}

type affine struct {
	addr [16]byte
	port uint16
	last time.Duration // since Affinity.base
}

func (e affine) endpoint() netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16(e.addr).Unmap(), e.port)
}

// Affine is one client's entry in an Affinity.
type Affine struct {
	Client    netip.Addr
	Endpoint  netip.AddrPort
	Remaining time.Duration // until it expires, if the client stays silent
}

// NewAffinity returns an empty table, in which a client that is silent keeps its endpoint for
// as long as timeout (sessionAffinityConfig.clientIP.timeoutSeconds, 1s to 24h).
func NewAffinity(timeout time.Duration) *Affinity {
	return &Affinity{timeout: timeout, limit: maxClients, base: time.Now(), clients: map[[16]byte]affine{}}
}

// Timeout returns how long a silent client keeps its endpoint.
func (a *Affinity) Timeout() time.Duration {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.timeout
}

// SetTimeout changes how long a silent client keeps its endpoint, those that have one included.
func (a *Affinity) SetTimeout(d time.Duration) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.timeout = d
}

// Get returns the client's endpoint, and refreshes its time-out.
func (a *Affinity) Get(client netip.Addr, now time.Time) (netip.AddrPort, bool) {
	return a.find(client, now, true)
}

// Peek returns the client's endpoint like Get, but leaves its time-out alone.
func (a *Affinity) Peek(client netip.Addr, now time.Time) (netip.AddrPort, bool) {
	return a.find(client, now, false)
}

func (a *Affinity) find(client netip.Addr, now time.Time, refresh bool) (netip.AddrPort, bool) {
	key, at := client.As16(), now.Sub(a.base)
	a.mu.Lock()
	defer a.mu.Unlock()
	e, ok := a.clients[key]
	switch {
	case !ok:
		return netip.AddrPort{}, false
	case at-e.last >= a.timeout:
		delete(a.clients, key)
		return netip.AddrPort{}, false
	case refresh && at > e.last:
		e.last = at
		a.clients[key] = e
	}
	return e.endpoint(), true
}

// Set gives the client an endpoint, as if it had last connected at now. To
// restore an entry that has d left, pass the time d before which it expires
// minus the time-out: now.Add(d - Timeout).
func (a *Affinity) Set(client netip.Addr, endpoint netip.AddrPort, now time.Time) {
	key, at := client.As16(), now.Sub(a.base)
	a.mu.Lock()
	defer a.mu.Unlock()
	was, known := a.clients[key]
	if !known {
		a.makeRoom(at)
	} else {
		at = max(at, was.last)
	}
	a.clients[key] = affine{endpoint.Addr().As16(), endpoint.Port(), at}
}

// sampled is how many clients are looked at for each that is added: of those that expire,
// about one for seven that haven't is left.
const sampled = 8

// makeRoom looks at some clients, at random as maps are iterated over. It removes those that
// have expired, and where the table is full the one that has been silent longest.
func (a *Affinity) makeRoom(at time.Duration) {
	var silent [16]byte
	since, n := time.Duration(math.MaxInt64), 0
	for key, e := range a.clients {
		if at-e.last >= a.timeout {
			delete(a.clients, key)
		} else if e.last < since {
			silent, since = key, e.last
		}
		if n++; n == sampled {
			break
		}
	}
	if len(a.clients) >= a.limit {
		delete(a.clients, silent)
	}
}

// Forget removes every client of an endpoint. It takes time in proportion to
// the clients there are.
func (a *Affinity) Forget(endpoint netip.AddrPort) {
	addr, port := endpoint.Addr().As16(), endpoint.Port()
	a.mu.Lock()
	defer a.mu.Unlock()
	maps.DeleteFunc(a.clients, func(_ [16]byte, e affine) bool { return e.addr == addr && e.port == port })
}

// All iterates over the entries that haven't expired at now, as they were at one moment and
// in no particular order. The body may use the Affinity.
func (a *Affinity) All(now time.Time) iter.Seq[Affine] {
	return func(yield func(Affine) bool) {
		for _, e := range a.live(now.Sub(a.base)) {
			if !yield(e) {
				return
			}
		}
	}
}

func (a *Affinity) live(at time.Duration) []Affine {
	a.mu.Lock()
	defer a.mu.Unlock()
	out := make([]Affine, 0, len(a.clients))
	for key, e := range a.clients {
		if left := a.timeout - (at - e.last); left > 0 {
			out = append(out, Affine{netip.AddrFrom16(key).Unmap(), e.endpoint(), left})
		}
	}
	return out
}

// Len returns the number of clients that take memory; some may have expired.
func (a *Affinity) Len() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return len(a.clients)
}
