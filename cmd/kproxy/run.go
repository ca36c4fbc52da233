package main

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/agent"
	"kproxy.dev/kproxy/config"
)

func runCommand() *cli.Command {
	return &cli.Command{
		Name:  "run",
		Usage: "run the proxy on this node, in the foreground; logs go to stderr",
		Flags: runFlags(),
		Action: func(c *cli.Context) error {
			// Before anything that takes time: what hasn't been read yet will be.
			services, file := hangups(), hangups()
			if c.Bool("version") {
				return printVersion(c)
			}
			if err := refused(c); err != nil {
				return err
			}
			cfg, err := configureValid(c)
			if err != nil {
				return &exitError{exitUsage, err}
			}
			level := new(slog.LevelVar)
			level.Set(cfg.LogLevel())
			lines := new(lastLines)
			log := newLogger(cfg.Config, level, lines)
			switch {
			case c.IsSet("write-config-to"):
				return writeConfig(c, cfg)
			case c.Bool("init-only"):
				return hostError(agent.New(agent.Options{Config: cfg.Config, Version: version, Log: log}).Prepare(c.Context))
			}
			if err := manifestsExist(cfg.Config); err != nil {
				return err
			}
			for _, line := range notices(c, cfg) {
				log.Info("configuration", "note", line)
			}
			supervisor, _ := c.App.Metadata[supervisorMetadata].(*supervised)
			if cfg.Supervise && supervisor == nil {
				return supervise(log)
			}
			adjustOOMScore(cfg.Config, log)
			s := &settled{configure: func() (configured, error) { return configureValid(c) }, log: log, lines: lines, level: level, reread: file}
			s.now.Store(&cfg)
			o := agent.Options{Config: cfg.Config, Version: version, Log: log, Reread: services}
			supervisor.recover(&o)
			return hostError(runProxy(c.Context, o, s))
		},
	}
}

// hangups tells of SIGHUP, which ends a process that doesn't listen for it.
func hangups() <-chan os.Signal {
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGHUP)
	return c
}

// configureValid is configure and validate.
func configureValid(c *cli.Context) (configured, error) {
	cfg, err := configure(c)
	if err == nil {
		err = cfg.validate()
	}
	return cfg, err
}

// manifestsExist refuses paths that lead nowhere, such as a disk that isn't mounted
// yet, before anything is touched: what an earlier kproxy has programmed serves on, and
// the supervisor starts this again.
func manifestsExist(cfg config.Config) error {
	var errs []error
	for _, path := range cfg.Manifests {
		if _, err := os.Stat(path); err != nil {
			errs = append(errs, fmt.Errorf("--manifests: %w; name a file or directory that is there", err))
		}
	}
	if len(errs) == 0 {
		return nil
	}
	return &exitError{exitUsage, errors.Join(errs...)}
}

// notices are lines about what was asked for and has no effect, and where.
func notices(c *cli.Context, cfg configured) []string {
	var out []string
	for _, o := range cfg.outcomes() {
		if o.Asks() && (o.Ignored != "" || o.Instead != "") {
			out = append(out, fmt.Sprintf("%s:%d: %s", cfg.File, o.Line, o))
		}
	}
	for _, f := range ignored(c) {
		out = append(out, f.line(c))
	}
	return append(out, idle(c, cfg.Config)...)
}

// writeConfig writes cfg as a KubeProxyConfiguration, and to stderr what such a
// file can't say or kproxy ignores.
func writeConfig(c *cli.Context, cfg configured) error {
	text, err := cfg.KubeProxyYAML()
	if err != nil {
		return err
	}
	lost, err := cfg.NotInFile()
	if err != nil {
		return fmt.Errorf("--write-config-to: %w", err)
	}
	if err := os.WriteFile(c.String("write-config-to"), text, 0o644); err != nil {
		return fmt.Errorf("--write-config-to: %w", err)
	}
	for _, l := range lost {
		fmt.Fprintln(c.App.ErrWriter, l)
	}
	for _, line := range notices(c, cfg) {
		fmt.Fprintln(c.App.ErrWriter, line)
	}
	return nil
}

func configFlag() cli.Flag {
	return &cli.StringFlag{Name: "config", Usage: "`FILE` with a KubeProxyConfiguration; flags win over it"}
}

func runFlags() []cli.Flag {
	initOnly := &cli.BoolFlag{Name: "init-only", Usage: "only do what needs a privileged container (kernel settings, modules) and end; then CAP_NET_ADMIN and CAP_NET_RAW are enough to run"}
	flags := slices.Concat([]cli.Flag{configFlag(),
		&cli.StringFlag{Name: "write-config-to", Usage: "write all this says to `FILE`, as a KubeProxyConfiguration, name on stderr what that can't say, and end"},
		initOnly,
		&cli.BoolFlag{Name: "version", Usage: "print what kproxy version does, and end"},
		&cli.BoolFlag{Name: "cleanup", Usage: "kube-proxy's; a command of its own here: kproxy cleanup"},
	}, flagsOf(settings()))
	for _, f := range ignoredFlags() {
		setText(f.flag, "Category", "Without effect, for kube-proxy's command lines")
		flags = append(flags, f.flag)
	}
	return flags
}

// newLogger logs to stderr, and has lines remember the last.
func newLogger(cfg config.Config, level slog.Leveler, lines *lastLines) *slog.Logger {
	opts := &slog.HandlerOptions{Level: level}
	to := io.MultiWriter(lines, os.Stderr)
	if cfg.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(to, opts))
	}
	return slog.New(slog.NewTextHandler(to, opts))
}

// lastLines remembers the last of what is written to it, for bug reports. It is safe for concurrent use.
type lastLines struct {
	mu       sync.Mutex
	old, now []byte // each of half of linesAtMost
}

// linesAtMost is how many bytes lastLines remembers.
const linesAtMost = 256 << 10

// Write takes a line, as handlers of slog write one at a time.
func (l *lastLines) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.now)+len(line) > linesAtMost/2 {
		l.old, l.now = l.now, l.old[:0]
	}
	l.now = append(l.now, line[:min(len(line), linesAtMost/2)]...)
	return len(line), nil
}

func (l *lastLines) text() []byte {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Concat(l.old, l.now)
}

// hostName is this host's name as kube-proxy spells node names: lower case.
func hostName() string {
	name, err := os.Hostname()
	if err != nil {
		return "localhost"
	}
	return strings.ToLower(name)
}
