package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/lab/load"
	"kproxy.dev/kproxy/lab/report"
)

// reloadName is the case of a proxy that another process of it takes the place of, for another configuration or an upgrade.
const reloadName = "tcp-reload"

// Connections meanwhile: held ones, of which some ask without a pause, and new ones.
const (
	reloadHeld   = 5_000
	reloadAsking = 8
	reloadNew    = 4               // at a time
	reloadBefore = time.Second / 2 // of the load, before
	// reloadTime is how long it all lasts. In longer, new connections would have been through all of the client's ports, and the
	// kernel have given them other ports towards kproxy, where sockets in TIME_WAIT answer some (docs/limits.md).
	reloadTime = 2 * time.Second
)

// reloads measures what clients notice.
func (b *bench) reloads(ctx context.Context) error {
	w := load.Work{Group: "TCP", Title: fmt.Sprintf("another process of the proxy goes on, %d connections held", reloadHeld)}
	figure := func(name, title, unit string) load.Figure {
		return load.Figure{Name: reloadName + "/" + name, Title: title, Unit: unit, Better: report.Lower}
	}
	figures := []load.Figure{
		figure("refused", "new connections that failed", ""), figure("broken", "held connections that broke", ""),
		figure("pause", "longest answer on a held connection", "ms"), figure("before", "the same without a reload", "ms"),
		figure("connect", "longest new connection, connect to close", "ms"), figure("left", "processes besides the new one's, while connections are held", ""),
		figure("rest", "how long connections were at rest, as kproxy logs it", "ms"),
	}
	for round := range b.repeat {
		for _, r := range b.rigs {
			if r.subject.replace == nil {
				continue
			}
			values, err := b.reloadRun(ctx, r)
			for tries := 1; err != nil && b.quick && tries < quickTries && ctx.Err() == nil; tries++ { // it may have been late
				values, err = b.reloadRun(ctx, r)
			}
			if ctx.Err() != nil {
				return ctx.Err()
			}
			fmt.Fprintf(b.progress, "%s %d %-18s %.4g\n", reloadName, round+1, r.subject.name, values)
			for i, f := range figures {
				if i == len(values)-1 && r.subject.class != report.KProxy {
					continue // they leave connections where they are
				}
				if s := b.measured.Add(w, f, r.measured(), round, values[i]); err != nil {
					s.Fail(1, err.Error())
				}
			}
			if err != nil {
				fmt.Fprintf(b.progress, "FAILED: %v\n", err)
				b.failed = append(b.failed, fmt.Sprintf("%s through %s: %s", reloadName, r.subject.name, err))
			}
		}
	}
	return nil
}

// reloadRun returns the figures in the order of reloads.
func (b *bench) reloadRun(ctx context.Context, r *rig) (values [7]float64, err error) {
	if err = r.restart(ctx); err != nil {
		return
	}
	held, lasts := reloadHeld, reloadTime
	if b.quick {
		held, lasts = idleCountQuick, reloadTime/2
	}
	err = r.Hold(ctx, r.target(load.Exchange), held-reloadAsking, func() error {
		var asking, fresh load.Outcome
		both := func(replace func(context.Context) error) error {
			all, ctx := errgroup.WithContext(ctx)
			run := func(out *load.Outcome, k load.Kind, conns int) {
				all.Go(func() (err error) {
					*out, err = r.Load(ctx, load.Load{Kind: k, Conns: conns, Time: lasts, Targets: []netip.AddrPort{r.target(k)}})
					return err
				})
			}
			run(&asking, load.Exchange, reloadAsking)
			run(&fresh, load.Short, reloadNew)
			all.Go(func() error {
				if err := lab.Sleep(ctx, reloadBefore); err != nil {
					return err
				}
				return replace(ctx)
			})
			return all.Wait()
		}
		if err := both(func(context.Context) error { return nil }); err != nil {
			return err
		}
		if asking.Failed+fresh.Failed > 0 {
			return fmt.Errorf("without a reload: %s %s", asking.Error, fresh.Error)
		}
		values[3] = asking.Exchange.Max / 1000 // milliseconds
		old, err := r.processes()
		if err != nil {
			return err
		}
		if err := both(func(ctx context.Context) error { return r.subject.replace(ctx, r) }); err != nil {
			return err
		}
		values[0], values[1] = float64(fresh.Failed), float64(asking.Failed)
		values[2], values[4] = asking.Exchange.Max/1000, fresh.Exchange.Max/1000
		for _, pid := range old {
			if pid != r.Proxy.PID() && unix.Kill(pid, 0) == nil { // nginx's first process stays
				values[5]++
			}
		}
		if r.subject.class == report.KProxy {
			values[6], err = atRest(r.Proxy.Log())
		}
		return err
	})
	if err != nil {
		values[1]++ // one of those that did nothing, and there may be more
	}
	return values, errors.Join(err, r.forget())
}

// atRest returns how long connections were at rest, in milliseconds, as the log tells of the kproxy that took over: from before the last
// one's loops stopped until all of this one's have begun, whenever the clients get their turn.
func atRest(log string) (float64, error) {
	_, after, _ := strings.Cut(log, `"connections were at rest for"=`)
	value, _, _ := strings.Cut(after, " ")
	d, err := time.ParseDuration(value)
	if err != nil {
		return 0, fmt.Errorf("the log doesn't tell how long connections were at rest: %w", err)
	}
	return float64(d.Microseconds()) / 1000, nil
}

// reloadHAProxy reloads HAProxy as its management guide does without a refused connection: the next process gets the listening
// sockets from the last one (-x), and tells it to end with its last connection (-sf).
func reloadHAProxy(_ context.Context, r *rig) error {
	last := r.Proxy
	next := &lab.Process{Namespace: last.Namespace, Path: last.Path, Args: []string{
		"-db", "-q", "-f", filepath.Join(r.Dir, "haproxy.cfg"), "-x", filepath.Join(r.Dir, "haproxy.sock"), "-sf", strconv.Itoa(last.PID()),
	}}
	err := next.Start()
	next.Args = last.Args // for a restart
	r.Proxy = next
	return err
}

// reloadNginx has it start other workers.
func reloadNginx(_ context.Context, r *rig) error { return r.Proxy.Signal(unix.SIGHUP) }

// takeOver has another kproxy take over, and the last one end.
func takeOver(ctx context.Context, r *rig) error {
	last := r.Proxy
	r.Proxy = &lab.Process{Namespace: last.Namespace, Path: last.Path, Args: last.Args}
	if err := r.Proxy.Start(); err != nil {
		return err
	}
	return last.Wait(ctx)
}
