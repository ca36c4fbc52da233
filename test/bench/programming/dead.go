package programming

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"
)

// A case of an endpoint that swallows everything, and that the API goes on to list: what new connections notice.
const (
	deadRate     = 60 // connects a second, to one service
	deadFor      = 8 * time.Second
	deadQuick    = 4 * time.Second
	deadPatience = 4 * time.Second // of a client; more than any that is answered needs
	deadLate     = 100 * time.Millisecond
	deadSettled  = 2 * time.Second // after which no connection should be late
)

// deadEndpoint measures connects while one of a service's endpoints is silent.
func (r *rig) deadEndpoint(ctx context.Context, p *proxy) (err error) {
	i := 0
	for r.world.isMovable(i) {
		i++
	}
	endpoint := r.world.slice(i, 0).Endpoints[0].Addresses[0]
	swallow := func(verb string) error {
		return command(ctx, r.net.Backends[0].Namespace, "iptables", "-w", verb, "INPUT", "-d", endpoint, "-j", "DROP")
	}
	if err := swallow("-I"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, swallow("-D")) }()
	lasts := deadFor
	if r.Quick {
		lasts = deadQuick
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var longest time.Duration
	late, settled := 0, 0
	began := time.Now()
	tick := time.NewTicker(time.Second / deadRate)
	defer tick.Stop()
	for time.Since(began) < lasts && ctx.Err() == nil {
		<-tick.C
		wg.Go(func() {
			start := time.Now()
			_ = r.atClient(func() error { _, err := ask(address(i), deadPatience); return err }) // one that gives up took as long as its patience
			took := time.Since(start)
			mu.Lock()
			defer mu.Unlock()
			longest = max(longest, took)
			if start.Sub(began) >= deadSettled {
				if settled++; took > deadLate {
					late++
				}
			}
		})
	}
	wg.Wait()
	if settled == 0 {
		return fmt.Errorf("no connection was tried: %w", ctx.Err())
	}
	r.add(p.subject, figDeadLongest, ms(longest))
	r.add(p.subject, figDeadLate, 100*float64(late)/float64(settled))
	if p.kind == kproxy && r.Quick { // that it is found at all
		if log := p.process.Log(); !strings.Contains(log, "endpoint ejected") || !slices.Contains(strings.Fields(log), "endpoint="+endpoint+fmt.Sprintf(":%d", serverPort)) {
			return fmt.Errorf("kproxy hasn't ejected %s", endpoint)
		}
	}
	return nil
}
