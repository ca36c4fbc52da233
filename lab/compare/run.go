package compare

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"

	"kproxy.dev/kproxy/lab/compare/load"
)

// sample is one run.
type sample struct {
	plane    Plane
	kind     load.Kind
	services int // 0 where their number isn't what is looked at
	round    int
	outcome  load.Outcome
}

// comparison is a run of all.
type comparison struct {
	config  Config
	rigs    []*rig
	report  Report
	samples []sample
}

// Run compares. What it returns with an error is of no use.
func Run(ctx context.Context, c Config) (report *Report, err error) {
	if err := c.Validate(); err != nil {
		return nil, err
	}
	if err := Down(c.Prefix); err != nil {
		return nil, fmt.Errorf("remove an earlier comparison: %w", err)
	}
	start := time.Now()
	x := &comparison{config: c}
	x.report = Report{Version: c.Version, Command: c.Command, Time: start.UTC().Truncate(time.Second), Repeat: c.Repeat, Services: c.Services, Sizes: c.Sizes}
	defer func() {
		if ctx.Err() != nil {
			err = fmt.Errorf("the comparison was ended before its time: %w", ctx.Err())
		}
		err = errors.Join(err, x.down())
	}()
	if x.report.Host, err = ReadHost(); err != nil {
		return nil, err
	}
	for _, step := range []func(context.Context) error{x.up, x.compare, x.stayed} {
		if err := step(ctx); err != nil {
			return nil, err
		}
	}
	x.report.LoadAfter = loadAverage()
	x.report.Seconds = time.Since(start).Seconds()
	x.summarize()
	return &x.report, nil
}

func (x *comparison) down() error {
	var errs []error
	for _, r := range x.rigs {
		errs = append(errs, r.down())
	}
	return errors.Join(errs...)
}

// up builds a rig for every plane that this host has.
func (x *comparison) up(ctx context.Context) error {
	for _, p := range Planes {
		x.config.say("%s: building its network", p)
		r := newRig(&x.config, p)
		row := PlaneReport{Plane: p, Available: true}
		err := r.up(ctx)
		var u *unavailable
		switch {
		case errors.As(err, &u):
			row.Available, row.Reason = false, u.reason
			x.config.say("%s: not on this host: %s", p, u.reason)
		case err != nil:
			return fmt.Errorf("prepare %s: %w", p, err)
		default:
			x.rigs = append(x.rigs, r)
			if r.iptables != "" {
				x.report.Host.IPTables = r.iptables
			}
		}
		x.report.Planes = append(x.report.Planes, row)
	}
	if len(x.rigs) < 2 {
		return fmt.Errorf("compare: %w: none of kproxy's data planes: %s", ErrNoPlane, x.report.Planes[len(x.report.Planes)-1].Reason)
	}
	return nil
}

// ErrNoPlane is the error where there is nothing to compare.
var ErrNoPlane = errors.New("this host lacks what is to be compared")

// compare goes through the numbers of services; the other loads run at the
// first of them.
func (x *comparison) compare(ctx context.Context) error {
	for i, n := range x.config.Services {
		if err := x.grow(ctx, n); err != nil {
			return err
		}
		if i == 0 {
			if err := x.rounds(ctx, x.config.workloads(), 0, netip.Addr{}); err != nil {
				return err
			}
		}
		first := []workload{{x.config.firsts(), fmt.Sprintf("first packets among %d services", n)}}
		if err := x.rounds(ctx, first, n, filler(n/2)); err != nil {
			return err
		}
	}
	return nil
}

func (x *comparison) grow(ctx context.Context, n int) error {
	for _, r := range x.rigs {
		took, err := r.grow(ctx, n)
		if err != nil {
			return err
		}
		if r.plane != Direct {
			x.config.say("%s: %d services programmed after %.1f s", r.plane, n, took.Seconds())
			x.report.Programming = append(x.report.Programming, Programming{Plane: r.plane, Services: n, Seconds: took.Seconds()})
		}
	}
	return nil
}

// rounds interleaves: every plane has a load before any has it again.
func (x *comparison) rounds(ctx context.Context, loads []workload, services int, first netip.Addr) error {
	for round := range x.config.Repeat {
		for _, w := range loads {
			x.config.say("round %d of %d: %s", round+1, x.config.Repeat, w.title)
			for _, r := range x.rigs {
				out, err := r.measure(ctx, w.load, first)
				if err != nil {
					return err
				}
				x.samples = append(x.samples, sample{r.plane, w.load.Kind, services, round, out})
			}
		}
	}
	return nil
}

// stayed makes sure that at the end every service is still where it was.
func (x *comparison) stayed(ctx context.Context) error {
	for _, r := range x.rigs {
		if r.plane == Direct {
			continue
		}
		st, err := r.client.Status(ctx)
		if err == nil {
			err = r.programmed(st, r.services)
		}
		if err != nil {
			return fmt.Errorf("check %s after the loads: %w", r.plane, err)
		}
	}
	return nil
}
