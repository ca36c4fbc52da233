package agent

import (
	"sync"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/userspace"
)

// carried tells which services have carried enough connections to be
// offloaded. It belongs to the fast loop; the forwarder adds to it through
// pending.
type carried struct {
	enough  uint64                                            // --offload-min-connections
	traffic func(visit func(service.Key, userspace.Counters)) // what userspace has carried
	kick    func()

	// total are the connections and sessions per service, as far as they matter: those
	// that reach enough stay there.
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

// update takes in what was reported, marks the services that got further as dirty,
// and says whether there are any.
func (c *carried) update(dirty map[service.Key]bool) bool {
	c.mu.Lock()
	pending := c.pending
	c.pending = nil
	c.mu.Unlock()
	if c.total == nil {
		c.total = map[service.Key]uint64{}
	}
	more := len(pending) > 0
	for _, k := range pending {
		c.total[k] = max(c.total[k], 1)
		dirty[k] = true
	}
	if c.enough > 1 {
		c.traffic(func(k service.Key, n userspace.Counters) {
			if was := c.total[k]; was < c.enough && n.Total > was {
				c.total[k], dirty[k], more = n.Total, true, true
			}
		})
	}
	return more
}

// forget forgets the services that d removes: one of the same name that comes later
// begins anew, as its state in the forwarder does.
func (c *carried) forget(d plan.Delta) {
	for _, change := range d.Changes {
		if change.Is == nil {
			delete(c.total, change.Key())
		}
	}
}
