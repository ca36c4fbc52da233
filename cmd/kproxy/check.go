package main

import (
	"errors"
	"fmt"
	"os"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/agent"
	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/plan"
)

func checkCommand() *cli.Command {
	return &cli.Command{
		Name:  "check",
		Usage: "validate manifests and print every problem as `file:line: what`; needs no root",
		Flags: []cli.Flag{manifestsFlag(), nodeFlag()},
		Action: func(c *cli.Context) error {
			paths := c.StringSlice("manifests")
			if len(paths) == 0 {
				return usageError("nothing to check: pass --manifests PATH")
			}
			report, err := agent.Check(paths, c.String("node"))
			if err != nil {
				return &exitError{exitUsage, err}
			}
			for _, p := range report.Problems {
				fmt.Fprintln(c.App.Writer, p)
			}
			if n := len(report.Problems); n > 0 {
				return usageError("%d problems in %d service ports", n, report.Services)
			}
			_, err = fmt.Fprintf(c.App.Writer, "%d service ports, %d endpoints: no problem\n", report.Services, report.Endpoints)
			return err
		},
	}
}

func renderCommand() *cli.Command {
	return &cli.Command{
		Name:  "render",
		Usage: "print what would be programmed; needs no root, deterministic",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "mode", Usage: "`MODE`: userspace or iptables", Value: string(plan.ModeIPTables)},
			manifestsFlag(), nodeFlag(),
		},
		Action: func(c *cli.Context) error {
			paths := c.StringSlice("manifests")
			if len(paths) == 0 {
				return usageError("nothing to render: pass --manifests PATH")
			}
			text, err := agent.RenderText(agent.RenderOptions{Mode: plan.Mode(c.String("mode")), Manifests: paths, Node: c.String("node")})
			if err != nil {
				return &exitError{exitUsage, err}
			}
			_, err = fmt.Fprint(c.App.Writer, text)
			return err
		},
	}
}

func cleanupCommand() *cli.Command {
	return &cli.Command{
		Name:  "cleanup",
		Usage: "remove everything kproxy ever programmed, in every mode, and nothing else",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "state-dir", Usage: "`DIR` with the pins to forget", Value: agent.DefaultStateDir},
			&cli.IntFlag{Name: "route-table", Usage: "routing `TABLE` that kproxy run was given", Value: agent.DefaultRouteTable},
		},
		Action: func(c *cli.Context) error {
			if err := agent.Cleanup(c.Context, c.String("state-dir"), c.Int("route-table")); err != nil {
				return hostError(err)
			}
			_, err := fmt.Fprintln(c.App.Writer, "everything kproxy programmed is gone")
			return err
		},
	}
}

// hostError gives errors about what this host, or this version, lacks their
// exit status.
func hostError(err error) error {
	var missing *kernel.Missing
	switch {
	case errors.As(err, &missing):
		return &exitError{exitHost, err}
	case errors.Is(err, os.ErrPermission) && os.Geteuid() != 0:
		return &exitError{exitHost, fmt.Errorf("%w; run kproxy as root", err)}
	case errors.Is(err, os.ErrPermission):
		return &exitError{exitHost, err}
	case errors.Is(err, agent.ErrNoMode):
		return &exitError{exitUsage, err}
	}
	return err
}
