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
	subjects []*subject
	repeat   int
	time     time.Duration // of each run; 0 for what is usual
	quick    bool
	config   rigConfig
	progress io.Writer
	report   *report.Report

	rigs          []*rig
	steal, others []float64
	failed        []string
}

// run sets all subjects up and goes through the works.
func (b *bench) run(ctx context.Context) (err error) {
	defer func() {
		for _, r := range b.rigs {
			err = errors.Join(err, r.down())
		}
		b.report.Host.Steal, b.report.Host.Others = report.SpreadOf(b.steal), report.SpreadOf(b.others)
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
		if !(b.idle && s.idle) && !slices.ContainsFunc(b.works, func(w work) bool { return s.carries(w.load.Kind) }) {
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
		return b.idleConnections(ctx)
	}
	return nil
}

// newCase adds a case with a subject for each rig.
func (b *bench) newCase(c report.Case, rigs []*rig) *report.Case {
	for _, r := range rigs {
		c.Subjects = append(c.Subjects, report.Subject{Name: r.subject.name, Class: r.subject.class})
	}
	b.report.Cases = append(b.report.Cases, c)
	return &b.report.Cases[len(b.report.Cases)-1]
}

// work interleaves: every subject has a run before any has another. Each round
// begins with another subject, so that none is always first.
func (b *bench) work(ctx context.Context, w work) error {
	rigs := slices.DeleteFunc(slices.Clone(b.rigs), func(r *rig) bool { return !r.subject.carries(w.load.Kind) })
	w.load.Time = cmp.Or(b.time, w.load.Time)
	rounds := b.repeat
	if w.load.Kind == load.Session && !b.quick {
		rounds *= sessionRounds
	}
	first := len(b.report.Cases)
	for _, f := range w.figures {
		group := "TCP"
		if w.load.Kind.UDP() {
			group = "UDP"
		}
		b.newCase(report.Case{Name: w.name + "/" + f.name, Group: group, Work: w.title, Figure: f.title, Unit: f.unit, Better: f.better}, rigs)
	}
	for round := range rounds {
		for k := range rigs {
			i := (k + round) % len(rigs)
			out := b.load(ctx, rigs[i], w.load)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			b.note(w.name, round, rounds, rigs[i], &out)
			for n, f := range w.figures {
				s := &b.report.Cases[first+n].Subjects[i]
				if f.proxied && rigs[i].Proxy == nil {
					continue
				}
				if s.Add(round, f.value(&out)); out.Failed > 0 {
					s.Fail(out.Failed, out.Error)
				}
			}
		}
	}
	for i := first; i < len(b.report.Cases); i++ { // figures of proxies leave the others out
		b.report.Cases[i].Subjects = slices.DeleteFunc(b.report.Cases[i].Subjects, func(s report.Subject) bool { return len(s.Values) == 0 })
	}
	return nil
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

// note prints what came of a run.
func (b *bench) note(work string, round, rounds int, r *rig, o *load.Outcome) {
	capacity := o.Seconds * float64(b.report.Host.CPUs)
	b.steal, b.others = append(b.steal, o.CPU.Steal/capacity), append(b.others, o.CPU.Others()/capacity)
	text := fmt.Sprintf("%s %d/%d %-18s %10.0f/s", work, round+1, rounds, r.subject.name, rate(o))
	if o.Bytes > 0 {
		text += fmt.Sprintf("  %6.2f Gbit/s", gigabits(o))
	}
	if o.Exchange != nil {
		text += fmt.Sprintf("  p50 %7.0f µs  p99 %7.0f µs", o.Exchange.P50, o.Exchange.P99)
	}
	text += fmt.Sprintf("  cpu client %.2f server %.2f proxy %.2f s", o.CPU.Client, o.CPU.Backend, o.CPU.Proxy)
	if o.Lost > 0 {
		text += fmt.Sprintf("  lost %d", o.Lost)
	}
	if o.Failed > 0 || o.Count == 0 {
		text += fmt.Sprintf("  FAILED %d: %s", o.Failed, o.Error)
		b.failed = append(b.failed, fmt.Sprintf("%s through %s: %d failed: %s", work, r.subject.name, o.Failed, o.Error))
	}
	fmt.Fprintln(b.progress, text)
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
	title := fmt.Sprintf("%d idle TCP connections", count)
	b.newCase(report.Case{Name: idleName + "/memory", Group: "TCP", Work: title, Figure: "proxy's memory for each", Unit: "bytes", Better: report.Lower}, rigs)
	effect := b.newCase(report.Case{Name: idleName + "/p99", Group: "TCP", Work: title, Figure: "99th percentile of an active connection beside them, as times of without", Unit: "×", Better: report.Lower}, rigs)
	memory := b.report.Case(idleName + "/memory")
	for round := range b.repeat {
		for i, r := range rigs {
			bytes, alone, beside, err := b.idleRun(ctx, r, count)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			fmt.Fprintf(b.progress, "%s %d %-18s %7.0f bytes each, p99 %.0f µs without and %.0f µs beside them\n", idleName, round+1, r.subject.name, bytes, alone, beside)
			memory.Subjects[i].Add(round, bytes)
			effect.Subjects[i].Add(round, per(beside, alone))
			if err != nil {
				fmt.Fprintf(b.progress, "FAILED: %v\n", err)
				memory.Subjects[i].Fail(1, err.Error())
				effect.Subjects[i].Fail(1, err.Error())
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
		return p99(&o), err
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
