package main

import (
	"fmt"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/agent"
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
