package lb

import (
	"iter"
	"net/netip"
	"sync"
	"time"
)

// AffinityConfig configures an Affinity.
type AffinityConfig struct {
	// Timeout is how long a client that is silent keeps its endpoint
	// (sessionAffinityConfig.clientIP.timeoutSeconds, 1s to 24h).
	Timeout time.Duration
	// MaxClients bounds the memory: beyond it, the clients that were silent
	// longest lose their affinity. A client takes about 130 bytes.
	MaxClients int
}

// DefaultAffinityConfig returns Kubernetes' default time-out, and room for
// 65536 clients.
func DefaultAffinityConfig() AffinityConfig {
	return AffinityConfig{Timeout: 10800 * time.Second, MaxClients: 65536}
}

// affinityShards is the number of locks; a table for fewer clients than
// shardedClients has a single one, so that its bound is exact.
const (
	affinityShards = 32
	shardedClients = 4096
)

// Affinity remembers which endpoint each client had (sessionAffinity:
// ClientIP). A client is an address; IPv4-mapped addresses are IPv4, zones
// don't count. It is safe for concurrent use; each method locks one shard.
type Affinity struct {
	timeout time.Duration
	base    time.Time // times are kept as distance from it, 8 bytes instead of 24
	shards  []affinityShard
}

// Affine is one client's entry in an Affinity.
type Affine struct {
	Client    netip.Addr
	Endpoint  netip.AddrPort
	Remaining time.Duration // until it expires, if the client stays silent
}

// NewAffinity returns an empty table. Zero fields of cfg mean the defaults.
func NewAffinity(cfg AffinityConfig) *Affinity {
	d := DefaultAffinityConfig()
	if cfg.Timeout <= 0 {
		cfg.Timeout = d.Timeout
	}
	if cfg.MaxClients <= 0 {
		cfg.MaxClients = d.MaxClients
	}
	n := 1
	if cfg.MaxClients >= shardedClients {
		n = affinityShards
	}
	a := &Affinity{timeout: cfg.Timeout, base: time.Now(), shards: make([]affinityShard, n)}
	for i := range a.shards {
		a.shards[i].limit = (cfg.MaxClients + i) / n
	}
	return a
}

// Timeout returns how long a silent client keeps its endpoint.
func (a *Affinity) Timeout() time.Duration { return a.timeout }

// Get returns the client's endpoint, and refreshes its time-out.
func (a *Affinity) Get(client netip.Addr, now time.Time) (netip.AddrPort, bool) {
	s := a.shard(client)
	s.mu.Lock()
	defer s.mu.Unlock()
	i, ok := s.find(client)
	if !ok {
		return netip.AddrPort{}, false
	}
	e := &s.entries[i]
	at := now.Sub(a.base)
	if at-e.last >= a.timeout {
		s.remove(i)
		return netip.AddrPort{}, false
	}
	e.last = max(e.last, at)
	s.toFront(i)
	return e.endpoint(), true
}

// Set gives the client an endpoint, as if it had last connected at now. To
// restore an entry that has d left, pass the time d before which it expires
// minus the time-out: now.Add(d - Timeout).
func (a *Affinity) Set(client netip.Addr, endpoint netip.AddrPort, now time.Time) {
	s := a.shard(client)
	s.mu.Lock()
	defer s.mu.Unlock()
	at := now.Sub(a.base)
	s.expire(at - a.timeout)
	i, ok := s.find(client)
	if !ok {
		i = s.insert(client)
		s.entries[i].last = at
	}
	e := &s.entries[i]
	e.addr, e.port, e.last = endpoint.Addr().As16(), endpoint.Port(), max(e.last, at)
	s.toFront(i)
}

// Forget removes every client of an endpoint. It takes time in proportion to
// the clients there are.
func (a *Affinity) Forget(endpoint netip.AddrPort) {
	addr, port := endpoint.Addr().As16(), endpoint.Port()
	for k := range a.shards {
		s := &a.shards[k]
		s.mu.Lock()
		s.forget(addr, port)
		s.mu.Unlock()
	}
}

// All iterates over the entries that haven't expired at now, of each shard at
// one moment and in no particular order. The body may use the Affinity.
func (a *Affinity) All(now time.Time) iter.Seq[Affine] {
	at := now.Sub(a.base)
	return func(yield func(Affine) bool) {
		for k := range a.shards {
			for _, e := range a.shards[k].live(at, a.timeout) {
				if !yield(e) {
					return
				}
			}
		}
	}
}

// Len returns the number of clients that take memory; some may have expired.
func (a *Affinity) Len() int {
	n := 0
	for k := range a.shards {
		s := &a.shards[k]
		s.mu.Lock()
		n += len(s.index)
		s.mu.Unlock()
	}
	return n
}

func (a *Affinity) shard(client netip.Addr) *affinityShard {
	if len(a.shards) == 1 {
		return &a.shards[0]
	}
	return &a.shards[hashAddr(client)%affinityShards]
}

// affinityShard is a bounded table whose entries are linked in order of use.
// The entries are a slab without pointers, which the garbage collector doesn't
// scan.
type affinityShard struct {
	mu    sync.Mutex
	limit int
	index map[[16]byte]int32
	// entries[0] is the anchor of the ring of used entries: its next is the
	// one used last, its prev the one silent longest.
	entries []affinityEntry
	free    int32 // first of the unused entries, linked by next; 0 for none
}

type affinityEntry struct {
	client     [16]byte
	addr       [16]byte
	last       time.Duration // since Affinity.base
	port       uint16
	prev, next int32
}

func (e *affinityEntry) endpoint() netip.AddrPort {
	return netip.AddrPortFrom(netip.AddrFrom16(e.addr).Unmap(), e.port)
}

func (s *affinityShard) find(client netip.Addr) (int32, bool) {
	i, ok := s.index[client.As16()]
	return i, ok
}

// insert adds a client, at the cost of the one silent longest if the table is
// full. The caller fills the rest of the entry.
func (s *affinityShard) insert(client netip.Addr) int32 {
	if s.index == nil {
		s.index = map[[16]byte]int32{}
		s.entries = make([]affinityEntry, 1)
	}
	if len(s.index) >= s.limit {
		s.remove(s.entries[0].prev)
	}
	i := s.free
	if i == 0 {
		i = int32(len(s.entries))
		s.entries = append(s.entries, affinityEntry{})
	} else {
		s.free = s.entries[i].next
	}
	s.entries[i] = affinityEntry{client: client.As16(), prev: i, next: i}
	s.index[client.As16()] = i
	return i
}

func (s *affinityShard) remove(i int32) {
	delete(s.index, s.entries[i].client)
	s.unlink(i)
	s.entries[i].next, s.free = s.free, i
}

func (s *affinityShard) unlink(i int32) {
	e := &s.entries[i]
	s.entries[e.prev].next, s.entries[e.next].prev = e.next, e.prev
}

// toFront makes entry i the one used last.
func (s *affinityShard) toFront(i int32) {
	s.unlink(i)
	first := s.entries[0].next
	s.entries[i].prev, s.entries[i].next = 0, first
	s.entries[first].prev, s.entries[0].next = i, i
}

// expire removes up to two entries that were last used at or before deadline:
// more than are added, so that expired ones don't pile up, and few enough that
// no caller waits.
func (s *affinityShard) expire(deadline time.Duration) {
	if len(s.index) == 0 {
		return
	}
	for range 2 {
		if i := s.entries[0].prev; i != 0 && s.entries[i].last <= deadline {
			s.remove(i)
		}
	}
}

// forget removes the clients of an endpoint.
func (s *affinityShard) forget(addr [16]byte, port uint16) {
	if len(s.index) == 0 {
		return
	}
	for i := s.entries[0].next; i != 0; {
		next := s.entries[i].next
		if e := &s.entries[i]; e.addr == addr && e.port == port {
			s.remove(i)
		}
		i = next
	}
}

// live copies the entries that haven't expired at now, the one used last first.
func (s *affinityShard) live(now, timeout time.Duration) []Affine {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.index) == 0 {
		return nil
	}
	out := make([]Affine, 0, len(s.index))
	for i := s.entries[0].next; i != 0; i = s.entries[i].next {
		e := &s.entries[i]
		if left := timeout - (now - e.last); left > 0 {
			out = append(out, Affine{netip.AddrFrom16(e.client).Unmap(), e.endpoint(), left})
		}
	}
	return out
}
