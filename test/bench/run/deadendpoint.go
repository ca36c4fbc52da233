package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/lab/load"
	"kproxy.dev/kproxy/lab/report"
	"kproxy.dev/kproxy/plan"
)

// deadName is the case of an endpoint that falls silent, as one whose node has lost its power, while its API still has it.
const deadName = "tcp-dead-endpoint"

const (
	deadEndpoints = 3
	deadRate      = 20 // connects a second
	deadBefore    = time.Second
	deadTime      = 20 * time.Second
	deadTimeQuick = 3 * time.Second
	// deadPatience is a client's, from its connect to its answer.
	deadPatience      = 10 * time.Second
	deadPatienceQuick = 3 * time.Second
	deadSlow          = 100 * time.Millisecond
	// deadSettled is when none is to be slow any more.
	deadSettled = 2 * time.Second
	deadRounds  = 3 // they last half a minute each, all subjects at once
)

// deadSubjects lists the proxies in front of the endpoint that falls silent, each with its default settings.
var deadSubjects = []subject{
	{name: "haproxy-check", about: "HAProxy with its default checks (check: each 2 s, down after 3) and option redispatch", class: report.Peer, way: toNode, start: haproxy("haproxy-check.cfg")},
	{name: "kproxy-in-nftables", about: "kproxy in mode nftables, the service offloaded", class: report.KProxy, way: toService, start: startKProxy(plan.NFTables)},
	{name: "kproxy-in-iptables", about: "the same in mode iptables", class: report.KProxy, way: toService, start: startKProxy(plan.IPTables)},
	{name: "kproxy-in-userspace", about: "kproxy's userspace data plane", class: report.KProxy, way: toService, start: startKProxy(plan.Userspace, "--mode", "iptables")},
}

// connect is a client's connection, from connect to answer.
type connect struct {
	began time.Time
	took  time.Duration
	err   error
}

// deadEndpoint measures what clients notice. All subjects have their round at once: they have hardly anything to do.
func (b *bench) deadEndpoint(ctx context.Context) error {
	lasts, patience, rounds := deadTime, deadPatience, min(b.repeat, deadRounds)
	if b.quick {
		lasts, patience = deadTimeQuick, deadPatienceQuick
	}
	w := load.Work{Group: "TCP", Title: fmt.Sprintf("one of %d endpoints falls silent, %d connects a second for %s after", deadEndpoints, deadRate, lasts)}
	figure := func(name, title, unit string) load.Figure {
		return load.Figure{Name: deadName + "/" + name, Title: title, Unit: unit, Better: report.Lower}
	}
	figures := []load.Figure{
		figure("longest", "longest connect to answer", "ms"),
		figure("slow", fmt.Sprintf("share above %s or without an answer, of those from %s after on", deadSlow, deadSettled), "%"),
		figure("failed", fmt.Sprintf("share without an answer in %s", patience), "%"),
		figure("until", "when the last slow one began, after the silence did", "s"),
	}
	for round := range rounds {
		values, errs := make([][]float64, len(b.dead)), make([]error, len(b.dead))
		var all sync.WaitGroup
		for i, s := range b.dead {
			all.Go(func() { values[i], errs[i] = b.deadRun(ctx, s, lasts, patience) })
		}
		all.Wait()
		if ctx.Err() != nil {
			return ctx.Err()
		}
		for i, s := range b.dead {
			fmt.Fprintf(b.progress, "%s %d %-22s %.4g\n", deadName, round+1, s.name, values[i])
			for k, f := range figures {
				var v float64
				if errs[i] == nil {
					v = values[i][k]
				}
				if to := b.measured.Add(w, f, load.Subject{Name: s.name, Class: s.class, Proxied: true}, round, v); errs[i] != nil {
					to.Fail(1, errs[i].Error())
				}
			}
			if errs[i] != nil {
				fmt.Fprintf(b.progress, "FAILED: %v\n", errs[i])
				b.failed = append(b.failed, fmt.Sprintf("%s through %s: %s", deadName, s.name, errs[i]))
			}
		}
	}
	return nil
}

// deadRun returns the figures in the order of deadEndpoint. Its network is its own, so no proxy knows of an earlier round.
func (b *bench) deadRun(ctx context.Context, s *subject, lasts, patience time.Duration) (values []float64, err error) {
	r := newRig(b.config, s, deadEndpoints)
	if err := r.up(ctx); err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, r.down()) }()
	var silent time.Time
	stop := make(chan error, 1)
	time.AfterFunc(deadBefore, func() {
		err := swallow(ctx, r.Net.Backends[0].Namespace)
		silent = time.Now()
		stop <- err
	})
	connects := r.connects(ctx, deadBefore+lasts, patience)
	if err := errors.Join(<-stop, ctx.Err()); err != nil {
		return nil, err
	}
	after := slices.DeleteFunc(connects, func(c connect) bool { return c.began.Before(silent) })
	before := len(connects) - len(after)
	if before == 0 || len(after) < int(lasts.Seconds()*deadRate/2) {
		return nil, fmt.Errorf("%d connects before, %d after", before, len(after))
	}
	values = make([]float64, 4)
	settled := 0
	for _, c := range after {
		since, slow := c.began.Sub(silent), c.err != nil || c.took > deadSlow
		values[0] = max(values[0], float64(c.took.Microseconds())/1000)
		if c.err != nil {
			values[2]++
		}
		if since >= deadSettled {
			settled++
			if slow {
				values[1]++
			}
		}
		if slow {
			values[3] = max(values[3], since.Seconds())
		}
	}
	values[1], values[2] = per(100*values[1], float64(settled)), per(100*values[2], float64(len(after)))
	return values, nil
}

// connects connects at an even rate, and returns what came of it when all have been answered or given up, in order.
func (r *rig) connects(ctx context.Context, lasts, patience time.Duration) []connect {
	out := make([]connect, int(lasts.Seconds()*deadRate))
	tick := time.NewTicker(time.Second / deadRate)
	defer tick.Stop()
	var all sync.WaitGroup
	defer all.Wait()
	for i := range out {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		c := &out[i]
		c.began = time.Now()
		all.Go(func() {
			c.err = r.connect(ctx, patience)
			c.took = time.Since(c.began)
		})
	}
	return out
}

// connect connects, asks and awaits the answer, no longer than patience.
func (r *rig) connect(ctx context.Context, patience time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	c, err := r.Net.Client.Dial(ctx, "tcp", r.target(load.Exchange).String())
	if err != nil {
		return err
	}
	defer c.Close()
	if end, ok := ctx.Deadline(); ok {
		err = c.SetDeadline(end)
	}
	if err == nil {
		_, err = c.Write([]byte("x"))
	}
	if err == nil {
		_, err = c.Read(make([]byte, 1))
	}
	return err
}

// swallow has a namespace take packets and answer none.
func swallow(ctx context.Context, ns *lab.Namespace) error {
	for _, chain := range []string{"INPUT", "OUTPUT"} {
		if out, err := ns.Output(ctx, "iptables", "-w", "-P", chain, "DROP"); err != nil {
			return fmt.Errorf("silence an endpoint: %w: %s", err, out)
		}
	}
	return nil
}
