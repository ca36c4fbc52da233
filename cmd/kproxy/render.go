package main

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/agent/offline"
	"kproxy.dev/kproxy/config"
)

func renderCommand() *cli.Command {
	return &cli.Command{
		Name:  "render",
		Usage: "print what would be programmed for manifests, or for the Services of a cluster; needs no root, deterministic",
		Flags: append([]cli.Flag{
			&cli.StringFlag{Name: "mode", Usage: "`MODE`: " + strings.Join(config.Modes, ", "), Value: defaults.Mode},
			configFlag(), manifestsFlag(), nodeFlag(),
			&cli.BoolFlag{Name: "diff", Usage: "print instead what of it the kernel doesn't hold (+) and what it holds besides (-); needs root, fails with status 1 where they differ"},
		}, flagsOf(slices.DeleteFunc(settings(), func(s setting) bool { return !s.decides }))...),
		Action: func(c *cli.Context) error {
			cfg, err := configure(c)
			if err == nil && len(cfg.Manifests) == 0 && !cfg.Kubernetes() {
				return usageError("nothing to render: pass --manifests PATH or --kubeconfig FILE")
			} else if err == nil {
				err = cfg.validate()
			}
			if err != nil {
				return &exitError{exitUsage, err}
			}
			node := c.String("node")
			if cfg.HostnameOverride != "" && !c.IsSet("node") {
				node = cfg.HostnameOverride
			}
			options := offline.RenderOptions{Config: cfg.Config, Node: node}
			if c.Bool("diff") {
				return renderDiff(c, options)
			}
			text, err := offline.RenderText(c.Context, options)
			if err != nil && cfg.Kubernetes() {
				return err
			} else if err != nil {
				return &exitError{exitUsage, err}
			}
			_, err = fmt.Fprint(c.App.Writer, text)
			return err
		},
	}
}

// renderDiff is `kproxy render --diff`.
func renderDiff(c *cli.Context, o offline.RenderOptions) error {
	text, err := offline.RenderDiff(c.Context, o)
	if err != nil {
		return hostError(err)
	}
	if _, err := fmt.Fprint(c.App.Writer, text); err != nil {
		return err
	}
	if text != "" {
		return errors.New("the kernel holds something else")
	}
	return nil
}
