package agent

import (
	"context"
	"errors"
	"strings"
	"time"
)

// watchEvery is how often kproxy looks whether somebody else changed its rules;
// with the time a repair takes, damage lasts less than five seconds.
const watchEvery = 2 * time.Second

// watch tells the programmer of damage to the rules, and mends routes itself.
func (a *Agent) watch(ctx context.Context, damaged chan<- error) error {
	defer a.programmer.rules.watch.Close()
	tick := time.NewTicker(watchEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		found, err := a.programmer.rules.watch.Check(ctx)
		if err != nil {
			if ctx.Err() == nil {
				a.log.Warn("kproxy's rules can't be watched", "error", err)
			}
			continue
		}
		if len(found) == 0 {
			continue
		}
		if err := a.routing.Ensure(); err != nil {
			a.log.Error("kproxy's routes can't be mended", "error", err)
		}
		select {
		case damaged <- errors.New(strings.Join(found, "; ")):
		default: // it knows already
		}
	}
}
