package userspace

import (
	"sync"
	"sync/atomic"
)

const liveShards = 64

// flow is a TCP connection or a UDP session in the live table.
type flow interface {
	describe() Connection
	settle() // moves what was counted since the last time into the counters
	kill()   // ends it now, from outside; it leaves the table by itself
}

// live is the table of connections and sessions. Its locks are sharded and
// held for a map operation only.
type live struct {
	next   atomic.Uint64
	shards [liveShards]struct {
		mu    sync.Mutex
		flows map[uint64]flow
		_     [40]byte // a cache line each
	}
}

// add returns the number under which f is in the table.
func (l *live) add(f flow) uint64 {
	id := l.next.Add(1)
	s := &l.shards[id%liveShards]
	s.mu.Lock()
	if s.flows == nil {
		s.flows = map[uint64]flow{}
	}
	s.flows[id] = f
	s.mu.Unlock()
	return id
}

func (l *live) remove(id uint64) {
	s := &l.shards[id%liveShards]
	s.mu.Lock()
	delete(s.flows, id)
	s.mu.Unlock()
}

// all returns what is in the table, each shard at one moment.
func (l *live) all() []flow {
	var out []flow
	for i := range l.shards {
		s := &l.shards[i]
		s.mu.Lock()
		for _, f := range s.flows {
			out = append(out, f)
		}
		s.mu.Unlock()
	}
	return out
}

// meter counts one flow's bytes. They reach the counters of its service and
// endpoint when somebody asks or the flow ends, so that connections of one
// service don't contend for its counters.
type meter struct {
	count   atomic.Uint64
	settled atomic.Uint64
}

func (m *meter) add(n int) { m.count.Add(uint64(n)) }

// settle adds what is new to each of totals, exactly once whoever calls it.
func (m *meter) settle(totals ...*atomic.Uint64) {
	for {
		done, now := m.settled.Load(), m.count.Load()
		if done == now {
			return
		}
		if m.settled.CompareAndSwap(done, now) {
			for _, t := range totals {
				t.Add(now - done)
			}
			return
		}
	}
}
