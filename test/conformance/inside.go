package main

import (
	"context"
	"errors"
	"fmt"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

// runInside makes the cluster in the namespaces that the outer program made, and does with it
// what was asked for.
func runInside(o options) error {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	c := &cluster{options: o}
	defer c.keepLogs()
	began := time.Now()
	if err := c.start(ctx); err != nil {
		return err
	}
	if err := c.importImages(ctx); err != nil {
		return err
	}
	fmt.Printf("a cluster of %d nodes after %.0f s\n", o.nodes, time.Since(began).Seconds())
	b, err := newBalancer(c.server.Config(), c.nodes)
	if err != nil {
		return err
	}
	go b.run(ctx)
	if o.readme {
		return c.follow(ctx)
	}
	if o.rollout {
		if err := c.serve(ctx, "kube-proxy"); err != nil {
			return err
		}
		return c.rollout(ctx)
	}
	failed := 0
	for i, mode := range strings.Split(o.modes, ",") {
		if err := c.serve(ctx, mode); err != nil {
			return fmt.Errorf("start %s: %w", mode, err)
		}
		if i == 0 {
			if err := c.startDNS(ctx); err != nil {
				return err
			}
		}
		if o.keep {
			fmt.Printf("%s serves. Enter it: nsenter -a -t $(pgrep -f 'inside -state %s' | tail -n 1); KUBECONFIG=%s\n", mode, c.state, c.kube)
			<-ctx.Done()
			return nil
		}
		if o.plugin {
			if err := c.plugin(ctx); err != nil {
				return err
			}
			continue
		}
		n, err := c.test(ctx)
		if err != nil {
			return err
		}
		failed += n
		if ctx.Err() != nil {
			return nil // the outer program says that it was interrupted
		}
	}
	if failed > 0 {
		return errors.New("tests failed")
	}
	return nil
}
