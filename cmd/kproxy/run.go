package main

import (
	"log/slog"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/agent"
	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/service"
)

func runCommand() *cli.Command {
	return &cli.Command{
		Name:  "run",
		Usage: "run the proxy on this node, in the foreground; logs go to stderr",
		Flags: runFlags(config.Default()),
		Action: func(c *cli.Context) error {
			if c.Args().Present() {
				return usageError("run takes no argument, got %q", c.Args().First())
			}
			cfg := configFrom(c)
			if err := cfg.Validate(); err != nil {
				return &exitError{exitUsage, err}
			}
			reread := make(chan os.Signal, 1)
			signal.Notify(reread, syscall.SIGHUP)
			return hostError(runProxy(c.Context, agent.Options{
				Config: cfg, Version: version, Log: newLogger(cfg), Reread: reread,
			}))
		},
	}
}

// runFlags are the flags of `kproxy run`; their defaults come from config.
func runFlags(d config.Config) []cli.Flag {
	flags := []cli.Flag{
		&cli.StringFlag{Name: "mode", Aliases: []string{"proxy-mode"}, Value: d.Mode, Usage: "the furthest data plane: " + strings.Join(config.Modes, ", ")},
		manifestsFlag(),
		&cli.StringFlag{Name: "kubeconfig", Usage: "`FILE` that says how to reach the Kubernetes API"},
		&cli.StringFlag{Name: "master", Usage: "`URL` of the Kubernetes API"},
		&cli.StringFlag{Name: "config", Usage: "`FILE` with a KubeProxyConfiguration"},
		&cli.StringFlag{Name: "hostname-override", Usage: "`NAME` of this node (default: the host name)"},
		&cli.StringSliceFlag{Name: "node-ip", Usage: "`ADDRESS` of this node, one per family (default: those of its Node object)"},
		&cli.StringSliceFlag{Name: "cluster-cidr", Usage: "`CIDR` of the pods, one per family; clients outside are masqueraded"},
		&cli.StringSliceFlag{Name: "exclude-cluster-cidr", Usage: "`CIDR` of pods that another proxy serves; repeatable"},
		&cli.StringFlag{Name: "detect-local-mode", Usage: "how pods are told from other clients: ClusterCIDR"},
		&cli.BoolFlag{Name: "masquerade-all", Usage: "every connection reaches its endpoint with the node's address"},
		&cli.IntFlag{Name: "iptables-masquerade-bit", Value: d.MasqueradeBit, Usage: "`BIT` of the packet mark for masquerade, 0-31"},
		&cli.IntFlag{Name: "transparent-bit", Value: d.TransparentBit, Usage: "`BIT` of the packet mark for replies to transparent sockets, 1-31; kproxy's own packets bear it and the bit below"},
		&cli.IntFlag{Name: "route-table", Value: d.RouteTable, Usage: "routing `TABLE` for replies to transparent sockets"},
		durationFlag("offload-after", d.OffloadAfter, "how long a service must be steady before offload; 0s at once"),
		&cli.IntFlag{Name: "offload-min-connections", Value: d.OffloadMinConnections, Usage: "successful connections or sessions before offload"},
		durationFlag("alive-timeout", d.AliveTimeout, "how long after its last heartbeat a dead kproxy keeps attracting new connections; whole seconds"),
		durationFlag("drain-timeout", d.DrainTimeout, "bound on draining userspace connections at exit, and real servers of IPVS that were removed"),
	}
	return slices.Concat(flags, healthFlags(d.Health), ipvsFlags(d.IPVS), serverFlags(d))
}

func healthFlags(d config.Health) []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "health-check", Usage: "default active check of endpoints: off, tcp, http, udp, grpc (default: tcp for manifests)"},
		durationFlag("health-interval", d.Interval, "time between two probes of an endpoint"),
		durationFlag("health-timeout", d.Timeout, "bound on one probe"),
		&cli.IntFlag{Name: "health-rise", Value: d.Rise, Usage: "successes in a row that make an endpoint up"},
		&cli.IntFlag{Name: "health-fall", Value: d.Fall, Usage: "failures in a row that make an endpoint down"},
	}
}

func ipvsFlags(d config.IPVS) []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "ipvs-scheduler", Value: d.Scheduler, Usage: "`NAME` of the kernel's scheduler for services that ask for none, nor for an algorithm (default: rr)"},
		&cli.BoolFlag{Name: "ipvs-strict-arp", Value: d.StrictARP, Usage: "answer ARP only for addresses of the link that is asked, as load balancers that announce addresses need it"},
		&cli.StringFlag{Name: "ipvs-tcp-timeout", Value: d.TCPTimeout, Usage: "`TIME` after which IPVS forgets an idle TCP connection: 15m, " + config.LikeConntrack + " for as long as conntrack keeps it, 0 for the kernel's setting"},
		durationFlag("ipvs-tcpfin-timeout", d.TCPFinTimeout, "the same after a FIN; 0 for the kernel's setting"),
		durationFlag("ipvs-udp-timeout", d.UDPTimeout, "the same for UDP; 0 for the kernel's setting"),
	}
}

func serverFlags(d config.Config) []cli.Flag {
	return []cli.Flag{
		&cli.StringFlag{Name: "metrics-bind-address", Value: d.MetricsBindAddress, Usage: "`IP:PORT` of JSON API and metrics; empty for none"},
		&cli.StringFlag{Name: "healthz-bind-address", Value: d.HealthzBindAddress, Usage: "`IP:PORT` of /healthz, /livez, /readyz; empty for none"},
		&cli.StringFlag{Name: "socket", Value: d.Socket, Usage: "control socket, a `PATH`"},
		&cli.StringFlag{Name: "state-dir", Value: d.StateDir, Usage: "`DIR` for what survives a restart: pins"},
		&cli.IntFlag{Name: "listen-tcp-port", Value: d.ListenTCPPort, Usage: "`PORT` of the shared TCP listener; 0 lets the kernel choose"},
		&cli.IntFlag{Name: "listen-udp-port", Value: d.ListenUDPPort, Usage: "`PORT` of the shared UDP listener; 0 lets the kernel choose"},
		&cli.StringFlag{Name: "log-format", Value: d.LogFormat, Usage: "text or json"},
		&cli.StringFlag{Name: "v", Value: d.Verbosity, Usage: "log `LEVEL`: debug, info, warn, error"},
	}
}

func durationFlag(name string, value time.Duration, usage string) cli.Flag {
	return &cli.DurationFlag{Name: name, Value: value, Usage: usage}
}

// configFrom reads the flags back.
func configFrom(c *cli.Context) config.Config {
	cfg := config.Default()
	cfg.Mode = c.String("mode")
	cfg.Manifests = c.StringSlice("manifests")
	cfg.Kubeconfig, cfg.Master, cfg.File = c.String("kubeconfig"), c.String("master"), c.String("config")
	cfg.HostnameOverride = c.String("hostname-override")
	cfg.NodeIPs, cfg.ClusterCIDRs = c.StringSlice("node-ip"), c.StringSlice("cluster-cidr")
	cfg.ExcludeClusterCIDRs, cfg.DetectLocalMode = c.StringSlice("exclude-cluster-cidr"), c.String("detect-local-mode")
	cfg.MasqueradeAll = c.Bool("masquerade-all")
	cfg.MasqueradeBit, cfg.TransparentBit, cfg.RouteTable = c.Int("iptables-masquerade-bit"), c.Int("transparent-bit"), c.Int("route-table")
	cfg.OffloadAfter, cfg.OffloadMinConnections = c.Duration("offload-after"), c.Int("offload-min-connections")
	cfg.AliveTimeout, cfg.DrainTimeout = c.Duration("alive-timeout"), c.Duration("drain-timeout")
	cfg.Health = config.Health{
		Check: service.Check(c.String("health-check")), Interval: c.Duration("health-interval"),
		Timeout: c.Duration("health-timeout"), Rise: c.Int("health-rise"), Fall: c.Int("health-fall"),
	}
	cfg.IPVS = config.IPVS{
		Scheduler: c.String("ipvs-scheduler"), StrictARP: c.Bool("ipvs-strict-arp"),
		TCPTimeout: c.String("ipvs-tcp-timeout"), TCPFinTimeout: c.Duration("ipvs-tcpfin-timeout"), UDPTimeout: c.Duration("ipvs-udp-timeout"),
	}
	cfg.MetricsBindAddress, cfg.HealthzBindAddress = c.String("metrics-bind-address"), c.String("healthz-bind-address")
	cfg.Socket, cfg.StateDir = c.String("socket"), c.String("state-dir")
	cfg.ListenTCPPort, cfg.ListenUDPPort = c.Int("listen-tcp-port"), c.Int("listen-udp-port")
	cfg.LogFormat, cfg.Verbosity = c.String("log-format"), c.String("v")
	return cfg
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
