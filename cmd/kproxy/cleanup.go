package main

import (
	"fmt"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/agent"
)

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
