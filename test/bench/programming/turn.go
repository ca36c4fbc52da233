package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"
)

// turn takes a subject through the cases. A case that fails is reported and the
// next one goes on; what is returned is about the rig.
func (r *rig) turn(ctx context.Context, s subject) error {
	if s.kind == nobody {
		return r.nobody(ctx, s)
	}
	began := time.Now()
	p, stop, err := r.start(s)
	if err != nil {
		return err
	}
	if err := r.try(ctx, s, caseStart, func(ctx context.Context) error { return r.coldStart(ctx, p, began) }); err == nil {
		r.cases(ctx, p)
	}
	return stop()
}

// nobody has only connections that concern no service.
func (r *rig) nobody(ctx context.Context, s subject) error {
	if !r.wants(caseConnect) {
		return nil
	}
	if s.mode == tracking {
		err := command(ctx, r.net.Node, "nft", "add table ip bench; add chain ip bench nat { type nat hook postrouting priority 100 ; } ; add rule ip bench nat ip saddr 192.0.2.1 masquerade")
		if err != nil {
			return err
		}
	}
	// Both kinds of a proxy's connections are compared with these.
	r.try(ctx, s, caseConnect, func(context.Context) error {
		return errors.Join(r.connectDirect(s, figConnectOther), r.connectDirect(s, figConnectService))
	})
	return r.clean(&proxy{subject: s})
}

// cases are those after the start.
func (r *rig) cases(ctx context.Context, p *proxy) {
	for _, c := range []struct {
		name string
		does func(context.Context, *proxy) error
	}{
		{caseMemory, r.steadyMemory},
		{caseConnect, r.connects},
		{caseChange, r.changes},
		{caseCPU, r.changeCPU},
		{caseBackToBack, r.backToBack},
		{caseMove, r.moves},
		{caseMemory, r.memoryAfterChanges},
	} {
		if r.wants(c.name) && ctx.Err() == nil {
			r.try(ctx, p.subject, c.name, func(ctx context.Context) error { return c.does(ctx, p) })
		}
	}
	r.heapProfile(ctx, p)
}

// try runs a case within the deadline.
func (r *rig) try(ctx context.Context, s subject, name string, does func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, r.deadline)
	defer cancel()
	err := does(ctx)
	if err != nil {
		r.say("%s, %s: %v", s.name, name, err)
		r.findings.fail(s, name, err)
	}
	return err
}

// atClient runs f in the client's namespace.
func (r *rig) atClient(f func() error) error { return r.net.Client.Do(f) }

// samples are services all over the table, the first and the last among them.
func (w world) samples() []int {
	out := []int{0, w.services - 1}
	for k := 1; k < 7; k++ {
		out = append(out, k*w.services/7)
	}
	return out
}

// askPatience is short: before there are rules, nobody answers.
const askPatience = 20 * time.Millisecond

// coldStart measures from the process's start until every sample has answered,
// and until the log says that the rules are in the kernel; then it connects to
// every service and counts the rules, in case one of the two was wrong.
func (r *rig) coldStart(ctx context.Context, p *proxy, began time.Time) error {
	defer r.cpuProfile(p, "start")()
	var answered time.Time
	err := r.atClient(func() error {
		left := r.samples()
		for len(left) > 0 {
			if err := ctx.Err(); err != nil {
				return fmt.Errorf("wait until %d of the services answer: %w: %s", len(left), err, end(p.process.Log()))
			}
			if !p.process.Running() {
				return fmt.Errorf("it ended: %s", end(p.process.Log()))
			}
			a, err := ask(address(left[0]), askPatience)
			if err != nil {
				time.Sleep(2 * time.Millisecond)
				continue
			}
			answered, left = a.start, left[1:]
		}
		return nil
	})
	if err != nil {
		return err
	}
	programmed := answered
	if p.kernel() {
		if programmed, err = p.log.await(ctx, p.process, began); err != nil {
			return err
		}
	}
	used, err := p.cpu()
	if err != nil {
		return err
	}
	if r.wants(caseStart) {
		r.findings.add(p.subject, figStartAnswer, answered.Sub(began).Seconds())
		if p.kernel() {
			r.findings.add(p.subject, figStartKernel, programmed.Sub(began).Seconds())
		}
		r.findings.add(p.subject, figStartCPU, used)
	}
	if err := r.calm(ctx, p); err != nil {
		return err
	}
	if used, err = p.cpu(); err != nil {
		return err
	}
	r.findings.add(p.subject, figStartCalm, used)
	if !r.verify || !r.wants(caseStart) {
		return nil
	}
	return r.verifyAll(ctx, p)
}

// verifyAll connects to every service and counts rules.
func (r *rig) verifyAll(ctx context.Context, p *proxy) error {
	var errs []error
	err := r.atClient(func() error {
		for i := range r.world.services {
			if _, err := ask(address(i), time.Second); err != nil {
				errs = append(errs, err)
			}
			if len(errs) > 10 || ctx.Err() != nil {
				break
			}
		}
		return errors.Join(errs...)
	})
	if err != nil || !p.kernel() {
		return err
	}
	n, err := r.ruleCount(ctx, p.subject)
	if want := r.endpointCount(); err == nil && n != want {
		err = fmt.Errorf("rules lead to %d endpoints, of which there are %d", n, want)
	}
	return errors.Join(err, r.calm(ctx, p))
}

// calm waits until the proxy uses next to no time; no longer than some seconds,
// for one that is never idle.
func (r *rig) calm(ctx context.Context, p *proxy) error {
	look, looks := 500*time.Millisecond, 30
	if r.quick {
		look, looks = 50*time.Millisecond, 10
	}
	was, err := p.cpu()
	for i, quiet := 0, 0; err == nil && i < looks && quiet < 3; i++ {
		if err := pause(ctx, look); err != nil {
			return fmt.Errorf("wait until %s is idle: %w", p.name, err)
		}
		var now float64
		now, err = p.cpu()
		if quiet++; now-was > 0.05*look.Seconds() {
			quiet = 0
		}
		was = now
	}
	return err
}

// connects measures connect to a backend and to services.
func (r *rig) connects(ctx context.Context, p *proxy) error {
	if err := r.connectDirect(p.subject, figConnectOther); err != nil {
		return err
	}
	// A prime step meets services all over the table.
	err := r.connectP50(p.subject, figConnectService, func(i int) netip.AddrPort { return address(i * 7919 % r.world.services) })
	return errors.Join(err, r.calm(ctx, p))
}

func (r *rig) connectDirect(s subject, of figure) error {
	return r.connectP50(s, of, func(int) netip.AddrPort { return r.direct() })
}

// batch is how many connections wait to be accepted: less than a listener's queue
// holds (net.core.somaxconn, 4096).
const batch = 1000

func (r *rig) connectP50(s subject, of figure, target func(i int) netip.AddrPort) error {
	var times []float64
	for n := range r.batches() {
		for _, s := range r.servers {
			s.serving.Lock()
		}
		err := r.atClient(func() error {
			t, err := connectTimes(batch, func(i int) netip.AddrPort { return target(n*batch + i) })
			times = append(times, t...)
			return err
		})
		for _, s := range r.servers {
			s.serving.Unlock()
		}
		if err != nil {
			return err
		}
		time.Sleep(300 * time.Millisecond) // until those are accepted and gone
	}
	r.findings.add(s, of, median(times))
	return nil
}

func (r *rig) batches() int {
	if r.quick {
		return 1
	}
	return 5
}

func median(values []float64) float64 {
	slices.Sort(values)
	return values[len(values)/2]
}

// steadyMemory is measured before anything has changed.
func (r *rig) steadyMemory(_ context.Context, p *proxy) error {
	m, err := p.memory()
	if err == nil {
		r.findings.add(p.subject, figRSS, m["VmRSS"])
		r.findings.add(p.subject, figPss, m["Pss"])
		r.findings.add(p.subject, figPeak, m["VmHWM"])
	}
	return err
}

// memoryAfterChanges is measured after a hundred changes, twenty a second; all of
// the movable ones are back then.
func (r *rig) memoryAfterChanges(ctx context.Context, p *proxy) error {
	changes := 100
	if r.quick {
		changes = 2 * movables
	}
	for n := range changes {
		// Every movable one goes there and back.
		if err := r.source.move(ctx, r.movable(n), (n/movables+1)%sides); err != nil {
			return err
		}
		if err := pause(ctx, time.Second/20); err != nil {
			return err
		}
	}
	if err := r.calm(ctx, p); err != nil {
		return err
	}
	m, err := p.memory()
	if err == nil {
		r.findings.add(p.subject, figRSSLater, m["VmRSS"])
	}
	return err
}
