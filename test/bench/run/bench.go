package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"kproxy.dev/kproxy/lab/load"
	"kproxy.dev/kproxy/lab/report"
)

// bench measures the data plane.
type bench struct {
	works    []work
	idle     bool
	reload   bool
	subjects []*subject
	repeat   int
	time     time.Duration // of each run; 0 for what is usual
	quick    bool
	config   rigConfig
	progress io.Writer
	report   *report.Report

	rigs     []*rig
	measured load.Measurement
	failed   []string
}

// run sets all subjects up and goes through the works.
func (b *bench) run(ctx context.Context) (err error) {
	b.measured = load.Measurement{
		Report: b.report,
		Begins: func(load.Work, int, int) {},
		Ended: func(s load.Subject, w load.Work, round int, o *load.Outcome) {
			fmt.Fprintf(b.progress, "%s %d: %-18s %s\n", w.Title, round+1, s.Name, line(o))
		},
	}
	defer func() {
		for _, r := range b.rigs {
			err = errors.Join(err, r.down())
		}
		if b.quick && len(b.failed) > 0 {
			err = errors.Join(err, fmt.Errorf("these carried no load without failure: %q", b.failed))
		}
	}()
	for i := range subjects { // what a run that was killed has left
		if err := newRig(b.config, &subjects[i]).down(); err != nil {
			return err
		}
	}
	for _, s := range b.subjects {
		if !(b.idle && s.idle) && !(b.reload && s.replace != nil) && !slices.ContainsFunc(b.works, func(w work) bool { return s.carries(w.Load.Kind) }) {
			continue
		}
		r := newRig(b.config, s)
		if err := r.up(ctx); err != nil {
			return err
		}
		b.rigs = append(b.rigs, r)
	}
	for _, w := range b.works {
		if err := b.work(ctx, w); err != nil {
			return err
		}
	}
	if b.idle {
		if err := b.idleConnections(ctx); err != nil {
			return err
		}
	}
	if b.reload {
		return b.reloads(ctx)
	}
	return nil
}

// work has every subject that can carry a work do it.
func (b *bench) work(ctx context.Context, w work) error {
	var of []load.Subject
	for _, r := range b.rigs {
		if !r.subject.carries(w.Load.Kind) {
			continue
		}
		s := r.measured()
		s.Run = func(ctx context.Context, l load.Load) (load.Outcome, error) {
			out := b.load(ctx, r, l)
			if out.Failed > 0 || out.Count == 0 {
				b.failed = append(b.failed, fmt.Sprintf("%s through %s: %d failed: %s", w.name, s.Name, out.Failed, out.Error))
			}
			return out, nil
		}
		of = append(of, s)
	}
	w.Load.Time = cmp.Or(b.time, w.Load.Time)
	rounds := b.repeat
	if w.Load.Kind == load.Session && !b.quick {
		rounds *= sessionRounds
	}
	return b.measured.Rounds(ctx, w.Work, rounds, of)
}

// line says what came of a load.
func line(o *load.Outcome) string {
	text := fmt.Sprintf("%10.0f/s", o.Rate())
	if o.Bytes > 0 {
		text += fmt.Sprintf("  %6.2f Gbit/s", o.Gigabits())
	}
	if o.Exchange.Max > 0 {
		text += fmt.Sprintf("  p50 %7.0f µs  p99 %7.0f µs", o.P50(), o.P99())
	}
	text += fmt.Sprintf("  cpu client %.2f server %.2f proxy %.2f s", o.CPU.Client, o.CPU.Backend, o.CPU.Proxy)
	if o.Lost > 0 {
		text += fmt.Sprintf("  lost %d", o.Lost)
	}
	if o.Failed > 0 || o.Count == 0 {
		text += fmt.Sprintf("  FAILED %d: %s", o.Failed, o.Error)
	}
	return text
}

// quickTries is how often a short run may be late before it counts as failed: other
// programs may have had the processors for as long as it took, and a quick bench is
// to show that the rig works.
const quickTries = 4

// load is one run; an error is an outcome with a failure.
func (b *bench) load(ctx context.Context, r *rig, l load.Load) load.Outcome {
	for tries := 1; ; tries++ {
		out, err := r.load(ctx, l)
		if err != nil {
			out = load.Outcome{Seconds: l.Time.Seconds(), Failed: max(out.Failed, 1), Error: err.Error()}
		}
		if fine := out.Failed == 0 && out.Count > 0; fine || !b.quick || tries == quickTries || !out.Late() || ctx.Err() != nil {
			return out
		}
		fmt.Fprintf(b.progress, "%s: %d failed: %s; once more\n", r.subject.name, out.Failed, out.Error)
	}
}

// idleName is the case of connections that do nothing.
const idleName = "tcp-idle"

// Idle connections at once.
const (
	idleCount      = 20_000
	idleCountQuick = 1_000
)

// copyDescriptors is what a connection takes of a proxy of io.Copy: it holds a pipe
// for each direction while it waits (splice in Go's internal/poll).
const copyDescriptors = 6

// idleConnections measures what connections cost that do nothing: memory, and
// the time of one that does something.
func (b *bench) idleConnections(ctx context.Context) error {
	// A proxy needs two descriptors for each, and kproxy keeps some for UDP.
	count := min(idleCount, b.config.descriptors*3/10)
	if b.quick {
		count = idleCountQuick
	}
	rigs := slices.DeleteFunc(slices.Clone(b.rigs), func(r *rig) bool {
		if r.subject.name == ioCopy && count*copyDescriptors > b.config.descriptors {
			b.report.Absent = append(b.report.Absent, report.Absent{
				Subject: fmt.Sprintf("%s with %d idle connections", ioCopy, count),
				Reason:  fmt.Sprintf("each takes %d descriptors (two sockets, and two pipes while it waits), and a process may have %d", copyDescriptors, b.config.descriptors),
			})
			return true
		}
		return !r.subject.idle
	})
	w := load.Work{Group: "TCP", Title: fmt.Sprintf("%d idle TCP connections", count)}
	memory := load.Figure{Name: idleName + "/memory", Title: "proxy's memory for each", Unit: "bytes", Better: report.Lower}
	effect := load.Figure{Name: idleName + "/p99", Title: "99th percentile of an active connection beside them, as times of without", Unit: "×", Better: report.Lower}
	for round := range b.repeat {
		for _, r := range rigs {
			bytes, alone, beside, err := b.idleRun(ctx, r, count)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			fmt.Fprintf(b.progress, "%s %d %-18s %7.0f bytes each, p99 %.0f µs without and %.0f µs beside them\n", idleName, round+1, r.subject.name, bytes, alone, beside)
			to := [2]*report.Subject{b.measured.Add(w, memory, r.measured(), round, bytes), b.measured.Add(w, effect, r.measured(), round, per(beside, alone))}
			if err != nil {
				to[0].Fail(1, err.Error())
				to[1].Fail(1, err.Error())
				fmt.Fprintf(b.progress, "FAILED: %v\n", err)
				b.failed = append(b.failed, fmt.Sprintf("%s through %s: %s", idleName, r.subject.name, err))
			}
		}
	}
	return nil
}

// idleRun restarts the proxy, so that its memory is that of these connections. It
// returns the memory of each in bytes, and the p99 of an active connection, without
// them and with.
func (b *bench) idleRun(ctx context.Context, r *rig, count int) (bytes, alone, beside float64, err error) {
	active := func() (float64, error) {
		o, err := r.load(ctx, load.Load{Kind: load.Exchange, Conns: 1, Time: cmp.Or(b.time, time.Second)})
		if err == nil && o.Failed > 0 {
			err = errors.New(o.Error)
		}
		return o.P99(), err
	}
	if err = r.restart(ctx); err != nil {
		return
	}
	if alone, err = active(); err != nil {
		return
	}
	before, err := r.memory()
	if err != nil {
		return
	}
	err = r.Hold(ctx, r.target(load.Exchange), count, func() error {
		after, err := r.memory()
		if err != nil {
			return err
		}
		bytes = max(0, float64(after)-float64(before)) / float64(count)
		beside, err = active()
		return err
	})
	return bytes, alone, beside, errors.Join(err, r.forget())
}
