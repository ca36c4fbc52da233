package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math"
	"slices"
	"time"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/plan"
)

// labUp runs the lab until Ctrl-C, with a live view.
func labUp(c *cli.Context) (err error) {
	s, err := startLab(c.Context, c.String("mode"), c.Int("backends"), paceOf(c))
	if err != nil {
		return err
	}
	defer func() {
		if stopErr := s.stop(); err == nil {
			err = stopErr
		}
		fmt.Fprintln(c.App.Writer, "\nthe lab is down")
	}()
	var traffic *recentTraffic
	if rate := c.Float64("traffic"); rate > 0 {
		traffic = &recentTraffic{}
		if err := traffic.start(c.Context, s, rate); err != nil {
			return err
		}
	}
	for {
		if err := s.view(c.Context, c.App.Writer, traffic); err != nil && c.Context.Err() == nil {
			return err
		}
		if !sleep(c.Context, time.Second) {
			return nil
		}
	}
}

// view draws one frame: status, traffic, and what to try next.
func (s *labSession) view(ctx context.Context, w io.Writer, traffic *recentTraffic) error {
	var frame bytes.Buffer
	fmt.Fprint(&frame, "\x1b[H\x1b[2J") // home, clear (ECMA-48)
	st, err := s.client.Status(ctx)
	if err != nil {
		fmt.Fprintf(&frame, "kproxy doesn't answer: %v\n", err)
	} else if err := printStatus(&frame, st, true); err != nil {
		return err
	}
	if traffic != nil {
		fmt.Fprintf(&frame, "\nlast second of traffic: %s\n", traffic.second())
	}
	if host, ok := s.net.HostAddress(); ok {
		fmt.Fprintf(&frame, "\nJSON API and metrics: http://%s:10249/\n", host)
	}
	fmt.Fprintf(&frame, `
Try in another terminal:
  kproxy pin --socket %[1]s/kproxy.sock default/web userspace   # or kernel, or auto
  kproxy connections --socket %[1]s/kproxy.sock
  ip netns exec %[2]s-client bash -c 'exec 3<>/dev/tcp/%[3]s; echo hello >&3; head -1 <&3'
  ip netns exec %[2]s-node %[4]s
  $EDITOR %[1]s/manifests/web.yaml                       # it is watched
  pkill -9 -f 'kproxy run.*%[1]s'                        # traffic goes on; the lab doesn't restart it
Ctrl-C takes all of it down.
`, labDir, lab.DefaultPrefix, fmt.Sprintf("%s/%d", labService.Addr(), labService.Port()), rulesCommand(st))
	_, err = w.Write(frame.Bytes())
	return err
}

// rulesCommand shows what lies beneath in the kernel.
func rulesCommand(st plan.Status) string {
	if slices.ContainsFunc(st.Services, func(s plan.ServiceStatus) bool { return s.Beneath == plan.IPVS }) {
		return "ipvsadm -Ln                  # or iptables-save, or ipset list"
	}
	return "iptables-save"
}

// recentTraffic keeps connections coming and remembers the last stretch of
// them: a stream is bounded, so one follows the other.
type recentTraffic struct {
	current *lab.Traffic
	config  lab.TrafficConfig
	ctx     context.Context
}

func (r *recentTraffic) start(ctx context.Context, s *labSession, rate float64) (err error) {
	r.ctx = ctx
	r.config = lab.TrafficConfig{From: s.net.Client, Network: "tcp", Target: labService, Rate: rate, Count: int(math.Ceil(rate * 60))}
	r.current, err = lab.StartTraffic(ctx, r.config)
	return err
}

// second describes the last second, and follows up a stream that is at its end.
func (r *recentTraffic) second() string {
	all := r.current.Results()
	text := all.Since(time.Now().Add(-time.Second)).String()
	if len(all) >= r.config.Count && r.ctx.Err() == nil {
		if next, err := lab.StartTraffic(r.ctx, r.config); err == nil {
			r.current = next
		}
	}
	return text
}
