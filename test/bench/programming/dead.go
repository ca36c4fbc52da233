package programming

import (
	"context"
	_ "embed"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"kproxy.dev/kproxy/lab"
)

// A case of an endpoint that swallows everything, as one whose node has lost its power, while the API goes on to list it:
// what new connections notice. It is measured with the least number of services only.
const (
	deadEndpoints = 3
	deadRate      = 20 // connects a second
	deadFor       = 20 * time.Second
	deadQuick     = 4 * time.Second
	deadPatience  = 10 * time.Second // of a client, from its connect to its answer
	deadLate      = 100 * time.Millisecond
	deadSettled   = 2 * time.Second // after which no connection should be late
)

// deadEndpoint adds a service of three endpoints, one of which falls silent, and takes it away.
func (r *rig) deadEndpoint(ctx context.Context, p *proxy) (err error) {
	endpoints, added := r.deadOnes(), time.Now()
	if err := r.cluster.add(ctx, r.world.services, deadEndpoints); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, r.cluster.remove(context.WithoutCancel(ctx), r.world.services)) }()
	if p.kernel() {
		if _, err := p.log.await(ctx, p.process, added); err != nil {
			return err
		}
	}
	if err := r.silence(ctx, p.subject, address(r.world.services), endpoints[0].Addr()); err != nil {
		return err
	}
	if p.kind == kproxy && r.Quick { // that it is found at all
		if log := p.process.Log(); !strings.Contains(log, "endpoint ejected") || !slices.Contains(strings.Fields(log), "endpoint="+endpoints[0].String()) {
			return fmt.Errorf("kproxy hasn't ejected %s", endpoints[0])
		}
	}
	return nil
}

// deadOnes returns the endpoints of the service that comes after the last one of world.
func (r *rig) deadOnes() (out []netip.AddrPort) {
	for _, e := range r.world.slice(r.world.services, 0).Endpoints[:deadEndpoints] {
		out = append(out, netip.AddrPortFrom(netip.MustParseAddr(e.Addresses[0]), serverPort))
	}
	return out
}

//go:embed haproxy.cfg
var haproxyConfig string

// haproxy measures the case with HAProxy, which knows nothing of the API.
func (r *rig) haproxy(ctx context.Context, s subject) error {
	endpoints := r.deadOnes()
	listen := netip.AddrPortFrom(r.net.Config.NodeAddresses()[0], serverPort)
	config := strings.NewReplacer("LISTEN", listen.String(), "FIRST", endpoints[0].String(), "SECOND", endpoints[1].String(), "THIRD", endpoints[2].String()).Replace(haproxyConfig)
	file := filepath.Join(r.dir, "haproxy.cfg")
	if err := os.WriteFile(file, []byte(config), 0o644); err != nil {
		return fmt.Errorf("write HAProxy's configuration: %w", err)
	}
	p := &lab.Process{Namespace: r.net.Node, Path: "haproxy", Args: []string{"-db", "-f", file}}
	if err := p.Start(); err != nil {
		return err
	}
	r.try(ctx, s, caseDead, func(ctx context.Context) error { return r.silence(ctx, s, listen, endpoints[0].Addr()) })
	return errors.Join(p.Kill(), r.clean(&proxy{subject: s}))
}

// silence has an endpoint of those behind target fall silent, and measures connects from then on.
func (r *rig) silence(ctx context.Context, s subject, target netip.AddrPort, endpoint netip.Addr) (err error) {
	err = r.atClient(func() error {
		_, err := follow(ctx, target, func(answer) bool { return true })
		return err
	})
	if err != nil {
		return err
	}
	swallow := func(ctx context.Context, verb string) error {
		return command(ctx, r.net.Backends[0].Namespace, "iptables", "-w", verb, "INPUT", "-d", endpoint.String(), "-j", "DROP")
	}
	if err := swallow(ctx, "-I"); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, swallow(context.WithoutCancel(ctx), "-D")) }()
	lasts, patience := deadFor, deadPatience
	if r.Quick {
		lasts, patience = deadQuick, deadQuick
	}
	var wg sync.WaitGroup
	var mu sync.Mutex
	var longest, last time.Duration
	failed, late, settled := 0, 0, 0
	began := time.Now()
	tick := time.NewTicker(time.Second / deadRate)
	defer tick.Stop()
	all := int(lasts.Seconds() * deadRate)
	for range all {
		select {
		case <-tick.C:
		case <-ctx.Done():
			wg.Wait()
			return ctx.Err()
		}
		wg.Go(func() {
			start := time.Now()
			err := r.atClient(func() error { _, err := ask(target, patience); return err }) // one that gives up took as long as its patience
			took, since := time.Since(start), start.Sub(began)
			mu.Lock()
			defer mu.Unlock()
			longest = max(longest, took)
			if err != nil {
				failed++
			}
			slow := err != nil || took > deadLate
			if slow {
				last = max(last, since)
			}
			if since >= deadSettled {
				if settled++; slow {
					late++
				}
			}
		})
	}
	wg.Wait()
	r.add(s, figDeadLongest, ms(longest))
	r.add(s, figDeadLate, 100*float64(late)/float64(settled))
	r.add(s, figDeadFailed, 100*float64(failed)/float64(all))
	r.add(s, figDeadLast, last.Seconds())
	return nil
}
