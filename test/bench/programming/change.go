package main

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// spacing is from when a change has been carried out to the next: more than
// kube-proxy's minSyncPeriod, unless it is only about whether the rig works.
func (r *options) spacing() time.Duration {
	if r.quick {
		return 100 * time.Millisecond
	}
	return 1300 * time.Millisecond
}

// A case whose changes take long has fewer of them.
const (
	fewChanges = 4
	longCase   = 20 * time.Second
)

// enough reports whether n changes will do, of a case that began then: each there and
// back.
func (o *options) enough(n int, began time.Time) bool {
	wanted := 2 * ((o.changes + 1) / 2)
	return n >= wanted || n >= fewChanges && n%2 == 0 && time.Since(began) > longCase
}

// changes measures single changes: from the write until new connections follow.
func (r *rig) changes(ctx context.Context, p *proxy) error {
	defer r.cpuProfile(p, "changes")()
	var connections, sinceTold, kernel []float64
	for n, start := 0, time.Now(); !r.options.enough(n, start); n++ {
		i, side := r.movable(n/2), (n+1)%sides
		began := time.Now()
		followed, err := r.moveAndFollow(ctx, i, side)
		if err != nil {
			return err
		}
		connections = append(connections, ms(followed.Sub(began)))
		if told, ok := r.source.told(i); ok {
			sinceTold = append(sinceTold, max(0, ms(followed.Sub(told))))
		}
		if p.kernel() {
			written, err := p.log.await(ctx, p.process, began)
			if err != nil {
				return err
			}
			kernel = append(kernel, ms(written.Sub(began)))
		}
		if err := pause(ctx, r.spacing()); err != nil {
			return err
		}
	}
	r.findings.add(p.subject, figChange, median(connections))
	if len(sinceTold) > 0 {
		r.findings.add(p.subject, figChangeTold, median(sinceTold))
	}
	if len(kernel) > 0 {
		r.findings.add(p.subject, figChangeKernel, median(kernel))
	}
	return r.calm(ctx, p)
}

func ms(d time.Duration) float64 { return float64(d) / 1e6 }

// moveAndFollow moves an endpoint and returns when the first connection that
// follows began.
func (r *rig) moveAndFollow(ctx context.Context, i, side int) (time.Time, error) {
	written := make(chan error, 1)
	go func() { written <- r.source.move(ctx, i, side) }()
	var followed time.Time
	err := r.atClient(func() (err error) {
		followed, err = follow(ctx, address(i), func(a answer) bool { return a.side == side })
		return err
	})
	if e := <-written; e != nil {
		err = e
	}
	return followed, err
}

// changeCPU measures what changes cost the proxy and its children, without any
// connection meanwhile: all it has used until it is idle again, less what it uses
// when nothing happens.
func (r *rig) changeCPU(ctx context.Context, p *proxy) error {
	defer r.cpuProfile(p, "cpu")()
	before, err := r.idleRate(ctx, p)
	if err != nil {
		return err
	}
	was, err := p.cpuTime()
	if err != nil {
		return err
	}
	began, n := time.Now(), 0
	for ; !r.options.enough(n, began); n++ {
		if err := r.moveQuietly(ctx, p, r.movable(n/2), (n+1)%sides); err != nil {
			return err
		}
	}
	is, err := p.cpuTime()
	if err != nil {
		return err
	}
	took := time.Since(began).Seconds()
	after, err := r.idleRate(ctx, p)
	if err != nil {
		return err
	}
	// The lesser one: what is left of a change mustn't make changes look cheaper.
	idle := min(before, after)
	used := is.own - was.own + is.children - was.children - idle*took
	r.findings.add(p.subject, figChangeCPU, 1000*max(0, used)/float64(n))
	r.findings.add(p.subject, figChangeChildren, 1000*(is.children-was.children)/float64(n))
	r.findings.add(p.subject, figIdleCPU, 1000*idle)
	return nil
}

// moveQuietly moves an endpoint and waits until the proxy has done with it.
func (r *rig) moveQuietly(ctx context.Context, p *proxy, i, side int) error {
	at := time.Now()
	if err := r.source.move(ctx, i, side); err != nil {
		return err
	}
	if p.kernel() {
		if _, err := p.log.await(ctx, p.process, at); err != nil {
			return err
		}
	}
	return pause(ctx, r.spacing())
}

// idleRate is how many processors the proxy uses when nothing happens.
func (r *rig) idleRate(ctx context.Context, p *proxy) (float64, error) {
	const looks = 3 // each as long as between changes
	was, err := p.cpu()
	if err != nil {
		return 0, err
	}
	began := time.Now()
	for range looks {
		if err := pause(ctx, r.spacing()); err != nil {
			return 0, err
		}
	}
	is, err := p.cpu()
	return (is - was) / time.Since(began).Seconds(), err
}

// backToBack measures changes of which each follows the one before at once.
func (r *rig) backToBack(ctx context.Context, p *proxy) (err error) {
	// New connections follow a change before the rules do: those of the last one are
	// written before the next case, also where this one fails.
	defer func() { err = errors.Join(err, r.calm(ctx, p)) }()
	began := time.Now()
	n := 0
	for ; !r.options.enough(n, began); n++ {
		if _, err := r.moveAndFollow(ctx, r.movable(n/2), (n+1)%sides); err != nil {
			return fmt.Errorf("change %d: %w", n+1, err)
		}
	}
	r.findings.add(p.subject, figBackToBack, ms(time.Since(began))/float64(n))
	return nil
}
