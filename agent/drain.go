package agent

import (
	"context"
	"time"

	"kproxy.dev/kproxy/kernel"
)

// drainEvery is how often real servers that drain are looked at: the bound on
// how long one stays when its last connection has gone.
const drainEvery = time.Second

// draining is when the programmer looks again at what drains. The zero value
// never does.
type draining struct {
	active  bool // there may be something that drains, an earlier kproxy's too
	timer   <-chan time.Time
	left    int
	trouble string // the last error, said once
}

// due delivers when it is time to look.
func (d *draining) due() <-chan time.Time {
	if d.active && d.timer == nil {
		d.timer = time.After(0)
	}
	return d.timer
}

// soon has it looked at what a change of rules has left to drain.
func (d *draining) soon() {
	if d.timer == nil {
		d.timer = time.After(drainEvery)
	}
}

// drain lets the backend remove what has drained, and looks again in a moment
// while something is left.
func (g *programmer) drain(ctx context.Context) {
	d := &g.drains
	d.active, d.timer = false, nil
	drainer, drains := g.plane.(kernel.Drainer)
	if !drains {
		return
	}
	left, err := drainer.Drain(ctx)
	if ctx.Err() != nil {
		return
	}
	if err != nil && err.Error() != d.trouble {
		g.log.Warn("what drains can't be looked at", "error", err, "retry", drainEvery)
	}
	d.trouble = ""
	if err != nil {
		d.trouble = err.Error()
	}
	switch {
	case left > 0 && d.left == 0:
		g.log.Info("draining real servers that are still in use", "real servers", left)
	case left == 0 && d.left > 0 && err == nil:
		g.log.Info("every real server has drained")
	}
	d.left = left
	g.figures.draining.Store(int64(left))
	if left > 0 || err != nil {
		d.soon()
	}
}
