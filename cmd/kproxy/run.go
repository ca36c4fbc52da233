package main

import (
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"strings"
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
			if c.Args().Present() {
				return usageError("run takes no argument, got %q", c.Args().First())
			}
			if c.IsSet("config") {
				return usageError("--config: this version doesn't read KubeProxyConfiguration files yet; use the flags instead")
			}
			cfg := configOf(c)
			if err := cfg.Validate(); err != nil {
				return &exitError{exitUsage, err}
			}
			if c.Bool("init-only") {
				return hostError(agent.New(agent.Options{Config: cfg, Version: version, Log: newLogger(cfg)}).Prepare(c.Context))
			}
			reread := make(chan os.Signal, 1)
			signal.Notify(reread, syscall.SIGHUP)
			return hostError(runProxy(c.Context, agent.Options{
				Config: cfg, Version: version, Log: newLogger(cfg), Reread: reread,
			}))
		},
	}
}

func runFlags() []cli.Flag {
	config := &cli.StringFlag{Name: "config", Usage: "`FILE` with a KubeProxyConfiguration; flags win over it"}
	initOnly := &cli.BoolFlag{Name: "init-only", Usage: "only do what needs a privileged container (kernel settings, modules) and end; then CAP_NET_ADMIN and CAP_NET_RAW are enough to run"}
	return slices.Concat([]cli.Flag{config, initOnly}, flagsOf(settings()))
}

// configOf is what the command line says.
func configOf(c *cli.Context) config.Config {
	cfg := config.Default()
	if onNode := c.IsSet("kubeconfig") || c.IsSet("master") || inCluster(c); onNode || c.IsSet("config") {
		cfg = config.AsKubeProxy()
	}
	cfg.File, cfg.InCluster = c.String("config"), inCluster(c)
	given(c, settings(), &cfg)
	return cfg
}

// inCluster reports whether services come from the Kubernetes API because this
// is a pod and nothing else was said.
func inCluster(c *cli.Context) bool {
	return !c.IsSet("manifests") && !c.IsSet("kubeconfig") && !c.IsSet("master") &&
		os.Getenv("KUBERNETES_SERVICE_HOST") != "" && os.Getenv("KUBERNETES_SERVICE_PORT") != ""
}

// newLogger logs to stderr.
func newLogger(cfg config.Config) *slog.Logger {
	opts := &slog.HandlerOptions{Level: cfg.LogLevel()}
	if cfg.LogFormat == "json" {
		return slog.New(slog.NewJSONHandler(os.Stderr, opts))
	}
	return slog.New(slog.NewTextHandler(os.Stderr, opts))
}

// hostName is this host's name as kube-proxy spells node names: lower case.
func hostName() string {
	name, err := os.Hostname()
	if err != nil {
		return "localhost"
	}
	return strings.ToLower(name)
}
