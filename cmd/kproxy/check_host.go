package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/agent"
	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/plan"
)

func hostFlag() cli.Flag {
	return &cli.BoolFlag{Name: "host", Usage: "say what this host lacks for each mode, and change nothing of it; fails with status 3 where --mode, else userspace, isn't possible"}
}

// checkHost is `kproxy check --host`.
func checkHost(c *cli.Context) error {
	mode := plan.ModeUserspace
	if c.IsSet("mode") {
		cfg := defaults
		cfg.Mode, cfg.InCluster = c.String("mode"), true
		if err := cfg.Validate(); err != nil {
			return &exitError{exitUsage, err}
		}
		mode = plan.Mode(cfg.Mode)
	}
	report, err := agent.CheckHost(c.Context)
	if err != nil {
		return hostError(err)
	}
	if err := printHost(c.App.Writer, report); err != nil {
		return err
	}
	if report.Missing[mode] != nil {
		return &exitError{exitHost, fmt.Errorf("mode %s isn't possible on this host", mode)}
	}
	return nil
}

func printHost(w io.Writer, r agent.HostReport) error {
	var b strings.Builder
	for _, m := range config.Modes {
		err := r.Missing[plan.Mode(m)]
		if err == nil {
			fmt.Fprintf(&b, "%-12spossible\n", m+":")
			continue
		}
		fmt.Fprintf(&b, "%-12snot possible\n", m+":")
		for line := range strings.Lines(err.Error()) {
			fmt.Fprintf(&b, "  %s\n", strings.TrimSuffix(line, "\n"))
		}
	}
	for _, c := range r.Without {
		fmt.Fprintf(&b, "without %s: %s\n", c.Name, c.Reason)
	}
	if len(r.Loaded) > 0 {
		fmt.Fprintf(&b, "the kernel loaded modules when they were tried: modprobe -r %s removes them\n", strings.Join(r.Loaded, " "))
	}
	_, err := io.WriteString(w, b.String())
	return err
}
