package agent

import (
	"sync"

	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace"
)

// carried tells which services have carried enough connections to be
// offloaded. Its map belongs to the fast loop; the forwarder adds to it through
// pending.
type carried struct {
	enough   uint64 // --offload-min-connections
	counters func() map[service.Key]userspace.Counters
	kick     func()

	total map[service.Key]uint64

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
	if c.total == nil {
		c.total = map[service.Key]uint64{}
	}
	for _, k := range pending {
		c.total[k] = max(c.total[k], 1)
	}
	more := len(pending) > 0
	if c.enough <= 1 {
		return more
	}
	for k, n := range c.counters() {
		if was := c.total[k]; was < c.enough && n.Total > was {
			c.total[k] = n.Total
			more = true
		}
	}
	return more
}
