package main

import (
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/lab"
	"kproxy.dev/kproxy/lab/compare"
	"kproxy.dev/kproxy/lab/load"
	"kproxy.dev/kproxy/lab/report"
	"kproxy.dev/kproxy/plan"
)

// labCompareCommand runs kproxy as load and server too: processes of their own.
func labCompareCommand() *cli.Command {
	usual, quick := compare.DefaultConfig(), compare.QuickConfig()
	return &cli.Command{
		Name: "compare", Usage: "measure every data plane that this host has, side by side; prints a table and writes a page with charts",
		Flags: []cli.Flag{
			outputFlag("table", "json"),
			&cli.StringFlag{Name: "html", Value: "./kproxy-compare.html", Usage: "`PATH` of the page; empty for none"},
			&cli.BoolFlag{Name: "quick", Usage: "under a minute: shorter and fewer runs, which say less"},
			&cli.StringFlag{Name: "planes", Usage: "measure these data planes only: a `LIST` of names", DefaultText: "all: " + listed(compare.Planes[1:])},
			&cli.IntFlag{Name: "repeat", Usage: "`N` rounds", DefaultText: fmt.Sprintf("%d, or %d with --quick", usual.Repeat, quick.Repeat)},
			&cli.StringFlag{Name: "services", Usage: "how many services there are when first packets are measured: a `LIST` of numbers", DefaultText: listed(usual.Services) + ", or " + listed(quick.Services) + " with --quick"},
			slowFlag(),
			&cli.StringFlag{Name: "prefix", Value: lab.DefaultPrefix, Hidden: true, Usage: "of the namespaces' names, so that tests don't meet"},
		},
		Action: func(c *cli.Context) error { return hostError(labCompare(c)) },
	}
}

// compareProcessCommand is the load or the server.
func compareProcessCommand() *cli.Command {
	return &cli.Command{Name: "compare-process", Hidden: true, Action: func(c *cli.Context) error {
		return load.Main(c.Context, c.App.Writer, c.Args().Slice())
	}}
}

// listed prints values as the flags take them.
func listed[T any](values []T) string {
	return strings.ReplaceAll(strings.Trim(fmt.Sprint(values), "[]"), " ", ",")
}

func labCompare(c *cli.Context) error {
	cfg, err := compareConfig(c)
	if err != nil {
		return err
	}
	if err := needRoot(); err != nil {
		return err
	}
	// A path that can't be written shows before minutes of measuring, and an earlier page
	// stays until there is a new one.
	path, page := c.String("html"), (*os.File)(nil)
	if path != "" {
		if page, err = os.Create(path + ".tmp"); err != nil {
			return usageError("--html: %w", err)
		}
		defer os.Remove(page.Name()) // not there once it was renamed
		defer page.Close()
	}
	result, err := compare.Run(c.Context, cfg)
	if errors.Is(err, compare.ErrNoPlane) {
		return &exitError{exitHost, err}
	}
	if err != nil {
		return err
	}
	if page != nil {
		if err = errors.Join(result.WriteHTML(page), page.Close()); err == nil {
			err = os.Rename(page.Name(), path)
		}
		if err != nil {
			return fmt.Errorf("write %s: %w", path, err)
		}
	}
	return printer(c, func(w io.Writer, r *report.Report) error {
		err := r.WriteTable(w)
		if err == nil && page != nil {
			_, err = fmt.Fprintf(w, "\nWith charts and explanations: %s\n", path)
		}
		return err
	})(c.App.Writer, result)
}

func compareConfig(c *cli.Context) (compare.Config, error) {
	cfg := compare.DefaultConfig()
	if c.Bool("quick") {
		cfg = compare.QuickConfig()
	}
	if c.IsSet("planes") {
		cfg.Planes = nil
		for name := range strings.SplitSeq(c.String("planes"), ",") {
			cfg.Planes = append(cfg.Planes, plan.DataPlane(strings.TrimSpace(name)))
		}
	}
	if c.IsSet("repeat") {
		cfg.Repeat = c.Int("repeat")
	}
	if c.IsSet("services") {
		cfg.Services = nil
		for word := range strings.SplitSeq(c.String("services"), ",") {
			n, err := strconv.Atoi(strings.TrimSpace(word))
			if err != nil {
				return cfg, usageError("--services: %q is no number", word)
			}
			cfg.Services = append(cfg.Services, n)
		}
	}
	self, err := os.Executable()
	if err != nil {
		return cfg, fmt.Errorf("find own executable: %w", err)
	}
	cfg.Program, cfg.Version, cfg.Prefix, cfg.Slow = self, version, c.String("prefix"), int(paceOf(c))
	cfg.Command = strings.Join(append([]string{"kproxy"}, os.Args[1:]...), " ")
	cfg.Progress = func(line string) { fmt.Fprintln(c.App.ErrWriter, line) }
	if err := cfg.Validate(); err != nil {
		return cfg, &exitError{exitUsage, err}
	}
	return cfg, nil
}
