package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"kproxy.dev/kproxy/test/bench/result"
	"kproxy.dev/kproxy/test/bench/subject"
	"kproxy.dev/kproxy/test/bench/traffic"
)

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

// isIdleSubject names those with memory of connections; every one of them costs seconds.
func isIdleSubject(name string) bool {
	return slices.Contains([]string{subject.HAProxy, subject.Nginx, subject.Copy, subject.Engine, subject.KProxy}, name)
}

// idleRun is what one round found.
type idleRun struct {
	bytes         float64 // of memory for each connection
	alone, beside float64 // p99 of one active connection, without them and with
	failed        int
	err           string
}

// idleConnections measures what connections cost that do nothing: memory, and
// the time of one that does something.

func (b *bench) idleConnections(ctx context.Context) error {
	// A proxy needs two descriptors for each, and kproxy keeps some for UDP.
	count := min(idleCount, b.rig.Descriptors*3/10)
	if b.quick {
		count = idleCountQuick
	}
	var rigs []*subject.Rig
	for _, r := range b.rigs {
		switch {
		case !isIdleSubject(r.Subject.Name):
		case r.Subject.Name == subject.Copy && count*copyDescriptors > b.rig.Descriptors:
			b.absent = append(b.absent, result.Absent{
				Subject: fmt.Sprintf("%s with %d idle connections", subject.Copy, count),
				Reason:  fmt.Sprintf("each takes %d descriptors (two sockets, and two pipes while it waits), and a process may have %d", copyDescriptors, b.rig.Descriptors),
			})
		default:
			rigs = append(rigs, r)
		}
	}
	runs := make([][]idleRun, len(rigs))
	for round := range b.repeat {
		for i, r := range rigs {
			run, err := b.idleRun(ctx, r, count)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err != nil {
				run.failed, run.err = run.failed+1, err.Error()
				b.failed = append(b.failed, fmt.Sprintf("%s through %s: %s", idleName, r.Subject.Name, err))
			}
			fmt.Fprintf(b.progress, "%s %d %-18s %7.0f bytes each, p99 %.0f µs without and %.0f µs beside them %s\n", idleName, round+1, r.Subject.Name, run.bytes, run.alone, run.beside, run.err)
			runs[i] = append(runs[i], run)
		}
	}
	b.cases = append(b.cases, idleCases(rigs, runs, count)...)
	return nil
}

// idleRun restarts the proxy, so that its memory is that of these connections.
func (b *bench) idleRun(ctx context.Context, r *subject.Rig, count int) (out idleRun, err error) {
	if err := r.Restart(ctx); err != nil {
		return out, err
	}
	l := traffic.Load{Kind: traffic.Exchange, Conns: 1, Time: time.Second}
	if b.time > 0 {
		l.Time = b.time
	}
	active := func() (float64, error) {
		o, err := r.Load(ctx, l)
		out.failed += o.Failed
		return p99(&o), err
	}
	if out.alone, err = active(); err != nil {
		return out, err
	}
	before, err := r.Memory()
	if err != nil {
		return out, err
	}
	err = r.Hold(ctx, count, func() error {
		after, err := r.Memory()
		if err != nil {
			return err
		}
		out.bytes = max(0, float64(after)-float64(before)) / float64(count)
		out.beside, err = active()
		return err
	})
	return out, err
}

func idleCases(rigs []*subject.Rig, runs [][]idleRun, count int) []result.Case {
	work := fmt.Sprintf("%d idle TCP connections", count)
	memory := result.Case{Name: idleName + "/memory", Group: "TCP", Work: work, Figure: "proxy's memory for each", Unit: "bytes", Better: result.Lower}
	effect := result.Case{Name: idleName + "/p99", Group: "TCP", Work: work, Figure: "99th percentile of an active connection beside them, as times of without", Unit: "×", Better: result.Lower}
	for i, r := range rigs {
		var bytes, times []float64
		for _, run := range runs[i] {
			bytes, times = append(bytes, run.bytes), append(times, per(run.beside, run.alone))
		}
		m, e := result.NewSubject(r.Subject.Name, bytes), result.NewSubject(r.Subject.Name, times)
		for _, run := range runs[i] {
			if m.Failures += run.failed; m.Error == "" {
				m.Error = run.err
			}
		}
		e.Failures, e.Error = m.Failures, m.Error
		memory.Subjects, effect.Subjects = append(memory.Subjects, m), append(effect.Subjects, e)
	}
	for _, name := range []string{subject.Engine, subject.KProxy} {
		memory.Targets = append(memory.Targets, result.Target{Subject: name, Bound: 2000})
		// No effect: a tenth is what percentiles of such runs differ by anyway.
		effect.Targets = append(effect.Targets, result.Target{Subject: name, Bound: 1.1})
	}
	memory.Judge()
	effect.Judge()
	return []result.Case{memory, effect}
}
