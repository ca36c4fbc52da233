package agent

import (
	"context"
	"log/slog"
	"net/netip"
	"sync"
	"time"

	"kproxy.dev/kproxy/conntrack"
	"kproxy.dev/kproxy/health"
	"kproxy.dev/kproxy/health/probe"
	"kproxy.dev/kproxy/plan"
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
		for k, n := range c.counters() {
			if was := c.total[k]; was < c.enough && n.Total > was {
				c.total[k], dirty[k], more = n.Total, true, true
			}
		}
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

// refusals are the endpoints that refused a connection of the kernel data plane
// a moment ago, as the ends of flows tell. The kernel has swallowed the refusal,
// so the client's next SYN, a second later, is a new connection. Safe for
// concurrent use.
type refusals struct {
	kick func()
	log  *slog.Logger
	// confirm connects to an endpoint from the node's own address. One that
	// refuses a single client must not recall a service for all of them.
	confirm func(netip.AddrPort) error
	// let makes the kernel let refusals of an endpoint through for a while: of one
	// that refuses single clients, and where a service can't be recalled.
	let func(netip.AddrPort, time.Duration) error

	mu    sync.Mutex // events come while plans are made
	until map[netip.AddrPort]time.Time
}

const (
	// refusalMemory is how long a refusal is remembered: as long as the first
	// back-off lasts. After that, health checks have found out, or the next
	// refusal counts again.
	refusalMemory = 10 * time.Second
	// recallTime is ample for a recall. Until then every refusal is swallowed.
	recallTime = 500 * time.Millisecond
	// selectiveMemory is for endpoints that refuse single clients.
	selectiveMemory = time.Minute
	// refusalsMost is far more endpoints than refuse at one time.
	refusalsMost = 10_000
)

// ended takes a flow that has ended. It doesn't wait for anything.
func (r *refusals) ended(f conntrack.Flow) {
	if !f.Rewritten() || !f.Refused() {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.until == nil {
		r.until = map[netip.AddrPort]time.Time{}
	}
	until, known := r.until[f.ReplySrc]
	if known && (until.IsZero() || time.Now().Before(until)) || len(r.until) >= refusalsMost {
		return
	}
	r.until[f.ReplySrc] = time.Time{} // being looked at
	go r.examine(f.ReplySrc)
}

// examine finds out whether an endpoint refuses everybody.
func (r *refusals) examine(endpoint netip.AddrPort) {
	if r.confirm(endpoint) == nil {
		r.log.Info("an endpoint refused a connection of one client only", "endpoint", endpoint)
		r.forget(endpoint)
		r.letThrough(endpoint, selectiveMemory)
		return
	}
	r.mu.Lock()
	r.until[endpoint] = time.Now().Add(refusalMemory)
	r.mu.Unlock()
	r.kick()
	time.AfterFunc(recallTime, func() { r.letThrough(endpoint, refusalMemory) })
}

func (r *refusals) letThrough(endpoint netip.AddrPort, d time.Duration) {
	if err := r.let(endpoint, d); err != nil {
		r.log.Warn("refusals of an endpoint can't be let through", "endpoint", endpoint, "error", err)
	}
}

func (r *refusals) forget(endpoint netip.AddrPort) {
	r.mu.Lock()
	defer r.mu.Unlock()
	delete(r.until, endpoint)
}

// now returns the endpoints that refuse everybody.
func (r *refusals) now(t time.Time) map[netip.AddrPort]bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	var out map[netip.AddrPort]bool
	for e, until := range r.until {
		switch {
		case until.IsZero():
		case t.After(until):
			delete(r.until, e)
		default:
			if out == nil {
				out = map[netip.AddrPort]bool{}
			}
			out[e] = true
		}
	}
	return out
}

// confirmTimeout bounds the connection to an endpoint; a client waits for a second.
const confirmTimeout = 500 * time.Millisecond

// connectOnce connects to an endpoint from the node's own address and hangs up.
func connectOnce(endpoint netip.AddrPort, mark uint32) error {
	ctx, cancel := context.WithTimeout(context.Background(), confirmTimeout)
	defer cancel()
	return probe.Network{Mark: mark}.Probe(ctx, health.Target{Address: endpoint, Check: service.HealthCheck{Kind: service.CheckTCP, Timeout: confirmTimeout}})
}
