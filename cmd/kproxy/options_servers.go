package main

import (
	"net"
	"net/netip"
	"strconv"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/config"
)

func serverSettings() []setting {
	return []setting{
		bindSetting("metrics", "`IP:PORT` of JSON API and metrics; empty for none", config.MetricsPort, func(c *config.Config) *string { return &c.MetricsBindAddress }),
		portSetting("metrics", config.MetricsPort, func(c *config.Config) *string { return &c.MetricsBindAddress }),
		bindSetting("healthz", "`IP:PORT` of /healthz, /livez, /readyz; empty for none", config.HealthzPort, func(c *config.Config) *string { return &c.HealthzBindAddress }),
		portSetting("healthz", config.HealthzPort, func(c *config.Config) *string { return &c.HealthzBindAddress }),
		number("metrics-service-limit", "so many service ports have series of their own in /metrics, the others share one", func(c *config.Config) *int { return &c.MetricsServices }),
		number("metrics-endpoint-limit", "the same for endpoints of those", func(c *config.Config) *int { return &c.MetricsEndpoints }),
		onOff("profiling", "serve Go's profiles at /debug/pprof on --metrics-bind-address", func(c *config.Config) *bool { return &c.Profiling }),
		text("socket", "control socket, a `PATH`", func(c *config.Config) *string { return &c.Socket }),
		text("state-dir", "`DIR` for what survives a restart: pins", func(c *config.Config) *string { return &c.StateDir }),
		number("listen-tcp-port", "`PORT` of the shared TCP listener; 0 lets the kernel choose", func(c *config.Config) *int { return &c.ListenTCPPort }),
		number("listen-udp-port", "`PORT` of the shared UDP listener; 0 lets the kernel choose", func(c *config.Config) *int { return &c.ListenUDPPort }),
	}
}

// bindSetting takes an IP alone too, as kube-proxy does.
func bindSetting(name, usage string, port int, at func(*config.Config) *string) setting {
	flag := name + "-bind-address"
	return setting{
		&cli.StringFlag{Name: flag, Value: *at(&defaults), Usage: usage},
		func(c *cli.Context, cfg *config.Config) { *at(cfg) = config.WithPort(c.String(flag), port) },
	}
}

// portSetting is kube-proxy's older flag for the port alone. One that comes with
// the address wins.
func portSetting(name string, port int, at func(*config.Config) *string) setting {
	flag, address := name+"-port", name+"-bind-address"
	return setting{
		&cli.IntFlag{Name: flag, Usage: "`PORT` for --" + address + "; 0 for none", DefaultText: strconv.Itoa(port)},
		func(c *cli.Context, cfg *config.Config) {
			given := c.Int(flag)
			switch host, _, err := net.SplitHostPort(*at(cfg)); {
			case given == 0:
				*at(cfg) = ""
			case err == nil && !c.IsSet(address), isIP(c.String(address)):
				*at(cfg) = net.JoinHostPort(host, strconv.Itoa(given))
			}
		},
	}
}

func isIP(s string) bool {
	_, err := netip.ParseAddr(s)
	return err == nil
}
