package lb

import (
	"net/netip"
	"sync"
	"time"
)

// affinityShard is a bounded table whose entries are linked in order of use.
// The entries are a slab without pointers, which the garbage collector doesn't
// have to look into.
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
// nobody waits.
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
