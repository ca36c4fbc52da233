package main

import (
	"fmt"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/agent"
	"kproxy.dev/kproxy/plan"
)

func renderCommand() *cli.Command {
	return &cli.Command{
		Name:  "render",
		Usage: "print what would be programmed; needs no root, deterministic",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "mode", Usage: "`MODE`: userspace, iptables, ipvs or auto", Value: string(plan.ModeIPTables)},
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
