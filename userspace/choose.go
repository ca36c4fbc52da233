package userspace

import (
	"net/netip"
	"slices"
	"time"

	"kproxy.dev/kproxy/lb"
)

// choice is one client's search for an endpoint that takes it. It is used by
// one goroutine.
type choice struct {
	group    *group
	affinity *lb.Affinity // nil without
	client   netip.Addr
	tried    []int
	room     [4]int // what tried needs with the default number of retries
	ejected  bool   // ejected endpoints are acceptable
	now      time.Time
}

func newChoice(g *group, a *lb.Affinity, client netip.Addr) *choice {
	c := &choice{group: g, affinity: a, client: client}
	c.tried = c.room[:0]
	return c
}

// next returns an endpoint that wasn't tried yet, its Load acquired, or nil
// when none is left. A client with affinity gets its endpoint first; those in
// ejection come when all others were tried.
func (c *choice) next() *endpoint {
	c.now = time.Now()
	i := -1
	if len(c.tried) == 0 {
		i = c.sticky()
	}
	if i < 0 {
		i = c.group.picker.Acquire(c.client, c)
	}
	if i < 0 && !c.ejected {
		c.ejected = true
		i = c.group.picker.Acquire(c.client, c)
	}
	if i < 0 {
		return nil
	}
	c.tried = append(c.tried, i)
	return c.group.endpoints[i]
}

// sticky acquires the endpoint that the client has affinity to, if it still
// takes connections.
func (c *choice) sticky() int {
	if c.affinity == nil {
		return -1
	}
	addr, ok := c.affinity.Get(c.client, c.now)
	if !ok {
		return -1
	}
	for i := range c.group.backends {
		if b := &c.group.backends[i]; b.Address == addr {
			if b.Weight == 0 || c.Skip(i) {
				return -1
			}
			c.group.endpoints[i].load.Acquire()
			return i
		}
	}
	return -1
}

// exclude makes next leave out e, which has failed already.
func (c *choice) exclude(e *endpoint) {
	if i := slices.Index(c.group.endpoints, e); i >= 0 {
		c.tried = append(c.tried, i)
	}
}

// settled makes the client stick to e.
func (c *choice) settled(e *endpoint) {
	if c.affinity != nil {
		c.affinity.Set(c.client, e.address, c.now)
	}
}

// Skip excludes endpoints that were tried or are ejected (lb.Skip).
func (c *choice) Skip(i int) bool {
	return slices.Contains(c.tried, i) || !c.ejected && c.group.endpoints[i].ejection.Ejected(c.now)
}
