package main

import (
	"fmt"
	"strings"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/agent/offline"
	"kproxy.dev/kproxy/config"
)

func cleanupCommand() *cli.Command {
	return &cli.Command{
		Name:  "cleanup",
		Usage: "remove everything kproxy ever programmed, in every mode, and nothing else; or what kube-proxy left behind",
		Flags: []cli.Flag{
			&cli.BoolFlag{Name: "kube-proxy", Usage: "remove what kube-proxy left behind instead: chains, nftables tables, virtual servers, ipsets; beside a running kproxy too"},
			&cli.BoolFlag{Name: "dry-run", Usage: "print what would be removed, and change nothing; beside a running kproxy too"},
			&cli.StringFlag{Name: "state-dir", Usage: "`DIR` with the pins, drain and services to forget", Value: config.Default().StateDir},
			&cli.IntFlag{Name: "route-table", Usage: "routing `TABLE` that kproxy run was given", Value: config.Default().RouteTable},
		},
		Action: func(c *cli.Context) error {
			if c.Bool("kube-proxy") {
				return cleanLeftovers(c)
			}
			if c.Bool("dry-run") {
				return previewCleanup(c)
			}
			if err := offline.Cleanup(c.Context, c.String("state-dir"), c.Int("route-table")); err != nil {
				return hostError(err)
			}
			_, err := fmt.Fprintln(c.App.Writer, "everything kproxy programmed is gone")
			return err
		},
	}
}

// previewCleanup is `kproxy cleanup --dry-run`.
func previewCleanup(c *cli.Context) error {
	lines, err := offline.PreviewCleanup(c.Context, c.String("state-dir"), c.Int("route-table"))
	if err != nil {
		return hostError(err)
	}
	if len(lines) == 0 {
		lines = []string{"nothing to remove"}
	}
	_, err = fmt.Fprintln(c.App.Writer, strings.Join(lines, "\n"))
	return err
}

// cleanLeftovers is `kproxy cleanup --kube-proxy`.
func cleanLeftovers(c *cli.Context) error {
	clean, done := offline.CleanLeftovers, "removed"
	if c.Bool("dry-run") {
		clean, done = offline.PreviewLeftovers, "would remove"
	}
	removed, kept, err := clean(c.Context)
	if err != nil {
		return hostError(err)
	}
	for _, k := range kept {
		if _, err := fmt.Fprintln(c.App.Writer, k); err != nil {
			return err
		}
	}
	_, err = fmt.Fprintln(c.App.Writer, done, "of kube-proxy:", removed)
	return err
}
