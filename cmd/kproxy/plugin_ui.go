package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"runtime/debug"

	"github.com/urfave/cli/v2"
	"golang.org/x/sync/errgroup"

	"kproxy.dev/kproxy/cmd/kproxy/cluster"
	"kproxy.dev/kproxy/web"
)

// clusterUI serves the dashboard of all nodes. It has the user's rights, so that nothing but loopback reaches it.
func clusterUI(c *cli.Context) error {
	at, err := netip.ParseAddrPort(c.String("address"))
	if err != nil || !at.Addr().IsLoopback() {
		return usageError("--address %q is no loopback address with a port, such as 127.0.0.1:8249: who reaches it sees what you may see", c.String("address"))
	}
	k, err := theCluster(c)
	if err != nil {
		return err
	}
	nodes := c.StringSlice("node")
	if _, err := k.Nodes(c.Context, nodes); errors.Is(err, cluster.ErrNoNode) {
		return &exitError{exitUsage, err}
	} else if err != nil {
		fmt.Fprintln(c.App.ErrWriter, "kproxy:", err) // the page says so too, until it is otherwise
	}
	ln, err := (&net.ListenConfig{}).Listen(c.Context, "tcp", at.String())
	if err != nil {
		return fmt.Errorf("serve the dashboard: %w; --address chooses another port, 0 any that is free", err)
	}
	fmt.Fprintf(c.App.Writer, "The dashboard of all nodes is at http://%s/ until this command ends.\n", ln.Addr())
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(440 << 20) // what the largest clusters need of what a laptop can spare, as deploy/components/ui has it
	}
	board := cluster.NewBoard(k, nodes, c.Duration("timeout"))
	g, ctx := errgroup.WithContext(c.Context)
	g.Go(func() error { return web.Serve(ctx, ln, board.Handler(), slog.New(slog.DiscardHandler)) })
	g.Go(func() error { return board.Run(ctx) })
	if err := g.Wait(); err != nil && !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}
