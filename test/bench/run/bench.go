package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"kproxy.dev/kproxy/test/bench/result"
	"kproxy.dev/kproxy/test/bench/subject"
	"kproxy.dev/kproxy/test/bench/traffic"
)

// options say what to measure.
type options struct {
	works    []work
	idle     bool
	subjects []*subject.Subject
	repeat   int
	time     time.Duration // of each run; 0 for what is usual
	quick    bool
	rig      subject.Config
	progress io.Writer
}

// bench measures.
type bench struct {
	options
	rigs          []*subject.Rig
	cases         []result.Case
	steal, others []float64
	cpus          int
	failed        []string
	absent        []result.Absent
}

// run sets all subjects up and goes through the works.
func (b *bench) run(ctx context.Context) (err error) {
	defer func() {
		for _, r := range b.rigs {
			err = errors.Join(err, r.Down())
		}
	}()
	for i := range subject.All { // what a run that was killed has left
		if err := subject.New(b.rig, &subject.All[i]).Down(); err != nil {
			return err
		}
	}
	for _, s := range b.subjects {
		if !b.needs(s) {
			continue
		}
		r := subject.New(b.rig, s)
		if err := r.Up(ctx); err != nil {
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

func (b *bench) needs(s *subject.Subject) bool {
	return b.idle && isIdleSubject(s.Name) || slices.ContainsFunc(b.works, func(w work) bool { return s.Carries(w.load.Kind) })
}

// work interleaves: every subject has a run before any has another. Each round
// begins with another subject, so that none is always first.
func (b *bench) work(ctx context.Context, w work) error {
	var rigs []*subject.Rig
	for _, r := range b.rigs {
		if r.Subject.Carries(w.load.Kind) {
			rigs = append(rigs, r)
		}
	}
	if b.time > 0 {
		w.load.Time = b.time
	}
	rounds := b.repeat
	if w.load.Kind == traffic.Session && !b.quick {
		rounds *= sessionRounds
	}
	outcomes := make([][]traffic.Outcome, len(rigs))
	for round := range rounds {
		for k := range rigs {
			i := (k + round) % len(rigs)
			out := b.load(ctx, rigs[i], w.load)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			b.note(w.name, round, rounds, rigs[i], &out)
			outcomes[i] = append(outcomes[i], out)
		}
	}
	for _, f := range w.figures {
		b.cases = append(b.cases, w.figure(f, rigs, outcomes))
	}
	return nil
}

// quickTries is how often a short run may be late before that counts: others on the machine
// may have had the processors for as long as it took, and what a quick bench is to show
// is that the rig works.
const quickTries = 4

// load is one run, and a failure is a result.
func (b *bench) load(ctx context.Context, r *subject.Rig, l traffic.Load) traffic.Outcome {
	for tries := 1; ; tries++ {
		out, err := r.Load(ctx, l)
		if err != nil {
			out = traffic.Outcome{Seconds: l.Time.Seconds(), Failed: max(out.Failed, 1), Error: err.Error()}
		}
		if fine := out.Failed == 0 && out.Count > 0; fine || !b.quick || tries == quickTries || !out.Late() || ctx.Err() != nil {
			return out
		}
		fmt.Fprintf(b.progress, "%s: %d failed: %s; once more\n", r.Subject.Name, out.Failed, out.Error)
	}
}

// note tells what came of a run.
func (b *bench) note(work string, round, rounds int, r *subject.Rig, o *traffic.Outcome) {
	capacity := o.Seconds * float64(b.cpus)
	b.steal, b.others = append(b.steal, o.CPU.Steal/capacity), append(b.others, o.CPU.Others()/capacity)
	text := fmt.Sprintf("%s %d/%d %-18s %10.0f/s", work, round+1, rounds, r.Subject.Name, rate(o))
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
		b.failed = append(b.failed, fmt.Sprintf("%s through %s: %d failed: %s", work, r.Subject.Name, o.Failed, o.Error))
	}
	fmt.Fprintln(b.progress, text)
}

// figure makes a case of the outcomes of each rig.
func (w *work) figure(f figure, rigs []*subject.Rig, outcomes [][]traffic.Outcome) result.Case {
	c := result.Case{Name: w.name + "/" + f.name, Group: "TCP", Work: w.title, Figure: f.title, Unit: f.unit, Better: f.better}
	if w.load.Kind.UDP() {
		c.Group = "UDP"
	}
	for i, r := range rigs {
		if f.proxied && !r.Proxied() {
			continue
		}
		var values []float64
		for k := range outcomes[i] {
			values = append(values, f.value(&outcomes[i][k]))
		}
		s := result.NewSubject(r.Subject.Name, values)
		for k := range outcomes[i] {
			if s.Failures += outcomes[i][k].Failed; s.Error == "" {
				s.Error = outcomes[i][k].Error
			}
		}
		c.Subjects = append(c.Subjects, s)
	}
	if f.bound > 0 {
		c.Targets = []result.Target{
			{Subject: subject.Engine, Against: f.against.engine, Bound: f.bound},
			{Subject: subject.KProxyMasq, Against: f.against.kproxy, Bound: f.bound},
			{Subject: subject.KProxy, Against: f.against.kproxy, Bound: f.bound},
		}
	}
	c.Judge()
	return c
}
