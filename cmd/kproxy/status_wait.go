package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/plan"
	"kproxy.dev/kproxy/web"
)

// waitEvery is how often a kproxy that isn't ready is asked again.
const waitEvery = 100 * time.Millisecond

func waitFlags() []cli.Flag {
	return []cli.Flag{
		&cli.BoolFlag{Name: "wait", Usage: "wait until new connections to every service are carried and the fallback rules are written; exit 1 if that takes longer than --timeout"},
		&cli.DurationFlag{Name: "timeout", Value: time.Minute, Usage: "how long --wait waits"},
	}
}

// waitUntilReady asks until kproxy is ready. One that isn't there yet, or doesn't
// answer, is waited for; one that may not be asked isn't.
func waitUntilReady(ctx context.Context, timeout time.Duration, status func(context.Context) (plan.Status, error)) error {
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	why := "it didn't answer in time"
	for {
		st, err := status(ctx)
		switch {
		case err == nil && st.Ready:
			return nil
		case err == nil:
			why = st.NotReady
		case ctx.Err() != nil: // the last answer says more
		case errors.Is(err, web.ErrNotRunning), errors.Is(err, web.ErrNoAnswer):
			why = err.Error()
		default:
			return err
		}
		if !sleep(ctx, waitEvery) {
			return fmt.Errorf("kproxy isn't ready after %v: %s", timeout, why)
		}
	}
}
