package main

import (
	"fmt"
	"slices"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/agent"
	"kproxy.dev/kproxy/plan"
)

func renderCommand() *cli.Command {
	decisive := decisiveSettings()
	return &cli.Command{
		Name:  "render",
		Usage: "print what would be programmed; needs no root, deterministic",
		Flags: append([]cli.Flag{
			&cli.StringFlag{Name: "mode", Usage: "`MODE`: userspace, iptables, ipvs or auto", Value: string(plan.ModeIPTables)},
			manifestsFlag(), nodeFlag(),
		}, flagsOf(decisive)...),
		Action: func(c *cli.Context) error {
			paths := c.StringSlice("manifests")
			if len(paths) == 0 {
				return usageError("nothing to render: pass --manifests PATH")
			}
			cfg := defaults
			given(c, decisive, &cfg)
			cfg.Mode, cfg.Manifests = c.String("mode"), paths
			if err := cfg.Validate(); err != nil {
				return &exitError{exitUsage, err}
			}
			text, err := agent.RenderText(agent.RenderOptions{Mode: plan.Mode(cfg.Mode), Manifests: paths, Node: c.String("node"), Config: &cfg})
			if err != nil {
				return &exitError{exitUsage, err}
			}
			_, err = fmt.Fprint(c.App.Writer, text)
			return err
		},
	}
}

// decisiveSettings are those flags of `kproxy run` that rules depend on, and that
// aren't about this host.
func decisiveSettings() []setting {
	names := []string{
		"cluster-cidr", "exclude-cluster-cidr", "detect-local-mode", "pod-bridge-interface", "pod-interface-name-prefix",
		"nodeport-addresses", "iptables-localhost-nodeports", "masquerade-all", "ipvs-scheduler",
	}
	return slices.DeleteFunc(settings(), func(s setting) bool { return !slices.Contains(names, s.flag.Names()[0]) })
}
