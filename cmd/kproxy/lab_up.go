package main

import (
	"context"
	"fmt"
	"math"
	"os"
	"time"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/cmd/kproxy/screen"
	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
)

// labUp runs the lab until the user leaves: on a terminal with a screen to
// watch it by, else with a line for what happens.
func labUp(c *cli.Context) (err error) {
	if err := checkLabUp(c); err != nil {
		return err
	}
	s, err := startLab(c.Context, c.String("mode"), labConfig(c.Int("backends")), paceOf(c))
	if err != nil {
		return err
	}
	defer func() {
		if stopErr := s.stop(); err == nil {
			err = stopErr
		}
		fmt.Fprintln(c.App.Writer, "the lab is down")
	}()
	ctx, cancel := context.WithCancel(c.Context)
	defer cancel()
	var traffic *recentTraffic
	if rate := c.Float64("traffic"); rate > 0 {
		traffic = &recentTraffic{}
		if err := traffic.start(ctx, s, rate); err != nil {
			return err
		}
	}
	st, err := s.client.Status(ctx)
	if err != nil {
		return err
	}
	tasks, err := s.writeTour(st)
	if err != nil {
		return fmt.Errorf("write the tour: %w", err)
	}
	if canDraw(c.App.Writer) {
		return s.watch(ctx, st, newGuide(shell{string(st.Mode)}, tasks), traffic)
	}
	if _, err := fmt.Fprintf(c.App.Writer, "the lab is up in mode %s; Ctrl-C takes all of it down\n\n%s\n\n", st.Mode, tourText(tasks)); err != nil {
		return err
	}
	return followEvents(ctx, s.client, []string{""}, eventsAtMost, &eventPrinter{w: c.App.Writer})
}

// maxTraffic bounds --traffic: the lab's client keeps a minute of what came of it.
const maxTraffic = 1000

// checkLabUp says what of the flags makes no sense.
func checkLabUp(c *cli.Context) error {
	if err := checkLabFlags(c); err != nil {
		return err
	}
	if n := c.Int("backends"); n < 1 || n > lab.MaxBackends {
		return usageError("--backends %d: want 1 to %d", n, lab.MaxBackends)
	}
	if rate := c.Float64("traffic"); !(rate >= 0 && rate <= maxTraffic) { // NaN neither
		return usageError("--traffic %g: want 0, for none, to %d connections a second", rate, maxTraffic)
	}
	return nil
}

// watch is the lab's screen: the status, the traffic, and the tour step by step.
func (s *labSession) watch(ctx context.Context, st plan.Status, g *guide, traffic *recentTraffic) error {
	c := screen.Config{Theme: screen.ThemeOf(os.Getenv), Endpoints: true}
	if traffic != nil {
		c.Note = func() string { return "the client's last second: " + traffic.second() }
	}
	return watchStatus(ctx, s.client, c, st, s.client.Status, g)
}

// recentTraffic keeps connections coming and remembers the last stretch of
// them: a stream is bounded, so one follows the other. For one goroutine.
type recentTraffic struct {
	current *lab.Traffic
	config  lab.TrafficConfig
	ctx     context.Context
}

func (r *recentTraffic) start(ctx context.Context, s *labSession, rate float64) (err error) {
	r.ctx = ctx
	r.config = lab.TrafficConfig{From: s.net.Client, Network: "tcp", Target: labService, Rate: rate, Count: int(math.Ceil(rate * 60))}
	r.current, err = lab.StartTraffic(ctx, r.config)
	for i := range heldConnections {
		go r.hold(i)
	}
	return err
}

// The client also has connections that last: with those that are over in a
// millisecond alone, no list would ever show one.
const (
	heldConnections = 3
	heldFor         = 9 * time.Second
)

// hold keeps a connection open for a while, then another one, until ctx ends. The first
// is shorter by what the i-th of them is to be ahead of the others.
func (r *recentTraffic) hold(i int) {
	age := heldFor * time.Duration(i) / heldConnections
	for r.ctx.Err() == nil {
		held, err := lab.Hold(r.ctx, lab.HoldConfig{From: r.config.From, Network: "tcp", Target: r.config.Target, Every: time.Second})
		if err != nil {
			sleep(r.ctx, time.Second) // what fails, the traffic tells
			continue
		}
		sleep(r.ctx, heldFor-age)
		_ = held.Close() // it may have ended with a backend, or with kproxy
		age = 0
	}
}

// second describes what came out in the last second, and follows up a stream that is at
// its end. What times out began longer ago.
func (r *recentTraffic) second() string {
	all := r.current.Results()
	first, since := len(all), time.Now().Add(-time.Second) // they are in the order in which they came
	for first > 0 && all[first-1].Start.Add(all[first-1].Latency).After(since) {
		first--
	}
	recent := all[first:]
	if len(all) >= r.config.Count && r.ctx.Err() == nil {
		if next, err := lab.StartTraffic(r.ctx, r.config); err == nil {
			r.current = next
		}
	}
	if len(recent) == 0 {
		return "no exchange"
	}
	return recent.String()
}
