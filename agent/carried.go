package agent

import (
	"maps"
	"sync"

	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace"
)

// carried tells which services have carried enough connections to be
// offloaded. It belongs to the fast loop; the forwarder adds to it through
// pending.
type carried struct {
	enough   uint64 // --offload-min-connections
	counters func() map[service.Key]userspace.Counters
	kick     func()

	total map[service.Key]uint64 // replaced, never modified: plans have it

	mu      sync.Mutex // the forwarder's goroutines report first connections
	pending []service.Key
}

// first is called by the forwarder for each service's first connection.
func (c *carried) first(k service.Key) {
	c.mu.Lock()
	c.pending = append(c.pending, k)
	c.mu.Unlock()
	c.kick()
}

// counts returns the connections and sessions per service, as far as they
// matter: those that reach c.enough stay there.
func (c *carried) counts() map[service.Key]uint64 {
	c.changed()
	return c.total
}

// changed takes in what was reported and says whether a service got further.
func (c *carried) changed() bool {
	c.mu.Lock()
	pending := c.pending
	c.pending = nil
	c.mu.Unlock()
	next := updates{old: c.total}
	for _, k := range pending {
		next.atLeast(k, 1)
	}
	more := len(pending) > 0
	if c.enough > 1 {
		for k, n := range c.counters() {
			if was := c.total[k]; was < c.enough && n.Total > was {
				next.atLeast(k, n.Total)
				more = true
			}
		}
	}
	c.total = next.done()
	return more
}

// updates copies a map of counts as soon as one of them changes.
type updates struct{ old, changed map[service.Key]uint64 }

// atLeast makes k's count n unless it is more.
func (u *updates) atLeast(k service.Key, n uint64) {
	if u.done()[k] >= n {
		return
	}
	if u.changed == nil {
		u.changed = make(map[service.Key]uint64, len(u.old)+1)
		maps.Copy(u.changed, u.old)
	}
	u.changed[k] = n
}

func (u *updates) done() map[service.Key]uint64 {
	if u.changed != nil {
		return u.changed
	}
	return u.old
}
