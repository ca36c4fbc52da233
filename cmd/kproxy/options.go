package main

import (
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/service"
)

// settings are the flags of `kproxy run` in the order of its help. kube-proxy's
// have its names and mean what they mean there.
func settings() []setting {
	return slices.Concat(
		group("Services", sourceSettings()), group("Node and cluster", nodeSettings()), group("Marks and routes", markSettings()),
		group("Offload", offloadSettings()), group("Health checks", healthSettings()), group("Conntrack", conntrackSettings()),
		group("IPVS", ipvsSettings()), group("Servers and listeners", serverSettings()), group("Process and log", processSettings()),
	)
}

// group puts settings under a heading of their own in the help.
func group(name string, settings []setting) []setting {
	inGroup(name, flagsOf(settings)...)
	return settings
}

func sourceSettings() []setting {
	return []setting{
		words("mode", "the furthest data plane", config.Modes, func(c *config.Config) *string { return &c.Mode }),
		{
			&cli.StringFlag{Name: "proxy-mode", Usage: "kube-proxy's name for --mode; nftables, which kproxy doesn't program, means auto"},
			func(c *cli.Context, cfg *config.Config) {
				if !c.IsSet("mode") {
					cfg.Mode = config.ModeOf(c.String("proxy-mode"))
				}
			},
		},
		{manifestsFlag(), func(c *cli.Context, cfg *config.Config) { cfg.Manifests = c.StringSlice("manifests") }},
		text("kubeconfig", "`FILE` that says how to reach the Kubernetes API", func(c *config.Config) *string { return &c.Kubeconfig }),
		text("master", "`URL` of the Kubernetes API; wins over the one in --kubeconfig", func(c *config.Config) *string { return &c.Master }),
		decimal("kube-api-qps", "requests a second to the Kubernetes API; negative for no limit", func(c *config.Config) *float64 { return &c.Client.QPS }),
		number("kube-api-burst", "so many more requests at a time", func(c *config.Config) *int { return &c.Client.Burst }),
		text("kube-api-content-type", "what the Kubernetes API is asked for objects in", func(c *config.Config) *string { return &c.Client.ContentType }),
	}
}

func nodeSettings() []setting {
	return []setting{
		{
			&cli.StringFlag{Name: "hostname-override", Usage: "`NAME` of this node (default: the host name)"},
			func(c *cli.Context, cfg *config.Config) {
				cfg.HostnameOverride = strings.ToLower(strings.TrimSpace(c.String("hostname-override")))
			},
		},
		bindAddressSetting(),
		texts("node-ip", "`ADDRESS` of this node, one per family (default: those of its Node object)", func(c *config.Config) *[]string { return &c.NodeIPs }),
		texts("cluster-cidr", "`CIDR` of the pods, one per family; clients outside are masqueraded", func(c *config.Config) *[]string { return &c.ClusterCIDRs }),
		texts("exclude-cluster-cidr", "`CIDR` of pods that another proxy serves; repeatable", func(c *config.Config) *[]string { return &c.ExcludeClusterCIDRs }),
		words("detect-local-mode", "how pods of this cluster are told from other clients", config.DetectLocalModes, func(c *config.Config) *string { return &c.DetectLocalMode }),
		text("pod-bridge-interface", "`NAME` of the bridge that pods are at, for BridgeInterface", func(c *config.Config) *string { return &c.PodBridge }),
		text("pod-interface-name-prefix", "what the names of pods' interfaces begin with, for InterfaceNamePrefix", func(c *config.Config) *string { return &c.PodInterfacePrefix }),
		texts("nodeport-addresses", "`CIDR` of the node's addresses that node ports answer on, or primary, localhost, all (default: all)", func(c *config.Config) *[]string { return &c.NodePortAddresses }),
		onOff("iptables-localhost-nodeports", "node ports answer on loopback addresses too", func(c *config.Config) *bool { return &c.LocalhostNodePorts }),
	}
}

func markSettings() []setting {
	return []setting{
		onOff("masquerade-all", "every connection reaches its endpoint with the node's address", func(c *config.Config) *bool { return &c.MasqueradeAll }),
		number("iptables-masquerade-bit", "`BIT` of the packet mark for masquerade, 0-31", func(c *config.Config) *int { return &c.MasqueradeBit }),
		number("transparent-bit", "`BIT` of the packet mark for replies to transparent sockets, 1-31; kproxy's own packets bear it and the bit below", func(c *config.Config) *int { return &c.TransparentBit }),
		number("route-table", "routing `TABLE` for replies to transparent sockets", func(c *config.Config) *int { return &c.RouteTable }),
	}
}

func offloadSettings() []setting {
	return []setting{
		length("offload-after", "how long a service must be steady before offload; 0s at once", func(c *config.Config) *time.Duration { return &c.OffloadAfter }),
		number("offload-min-connections", "successful connections or sessions before offload", func(c *config.Config) *int { return &c.OffloadMinConnections }),
		length("alive-timeout", "how long after its last heartbeat a dead kproxy keeps attracting new connections; whole seconds", func(c *config.Config) *time.Duration { return &c.AliveTimeout }),
		length("drain-timeout", "bound on draining userspace connections at exit, and real servers of IPVS that were removed", func(c *config.Config) *time.Duration { return &c.DrainTimeout }),
	}
}

func healthSettings() []setting {
	return []setting{
		{
			&cli.StringFlag{Name: "health-check", Usage: "default active check of endpoints: off, tcp, http, udp, grpc (default: tcp for manifests, off for Kubernetes)"},
			func(c *cli.Context, cfg *config.Config) { cfg.Health.Check = service.Check(c.String("health-check")) },
		},
		length("health-interval", "time between two probes of an endpoint", func(c *config.Config) *time.Duration { return &c.Health.Interval }),
		length("health-timeout", "bound on one probe", func(c *config.Config) *time.Duration { return &c.Health.Timeout }),
		number("health-rise", "successes in a row that make an endpoint up", func(c *config.Config) *int { return &c.Health.Rise }),
		number("health-fall", "failures in a row that make an endpoint down", func(c *config.Config) *int { return &c.Health.Fall }),
		onOff("health-annotations", "Services may ask for health checks of their own by annotation", func(c *config.Config) *bool { return &c.Health.Annotations }),
		length("health-min-interval", "the least between two probes that an annotation may ask for, unless --health-interval is less", func(c *config.Config) *time.Duration { return &c.Health.MinInterval }),
		number("health-max-rate", "probes a second, of all endpoints; namespaces that ask for more than their share are probed less often", func(c *config.Config) *int { return &c.Health.MaxRate }),
	}
}

// onCluster is what the help says of defaults that depend on where kproxy runs.
const onCluster = " with --config or the Kubernetes API, else the kernel's setting"

func conntrackSettings() []setting {
	return []setting{
		standard("32768"+onCluster, number("conntrack-max-per-core", "connections that are tracked, times the number of CPUs; 0 for the kernel's setting", func(c *config.Config) *int { return &c.Conntrack.MaxPerCore })),
		standard("131072"+onCluster, number("conntrack-min", "connections that are tracked at least, unless --conntrack-max-per-core is 0", func(c *config.Config) *int { return &c.Conntrack.Min })),
		standard("24h"+onCluster, length("conntrack-tcp-timeout-established", "after which an idle TCP connection is forgotten; 0 for the kernel's setting", func(c *config.Config) *time.Duration { return &c.Conntrack.TCPEstablished })),
		standard("1h"+onCluster, length("conntrack-tcp-timeout-close-wait", "the same after one end has closed it; 0 for the kernel's setting", func(c *config.Config) *time.Duration { return &c.Conntrack.TCPCloseWait })),
		length("conntrack-udp-timeout", "the same for UDP without an answer yet; 0 for the kernel's setting", func(c *config.Config) *time.Duration { return &c.Conntrack.UDP }),
		length("conntrack-udp-timeout-stream", "the same for UDP that was answered; 0 for the kernel's setting", func(c *config.Config) *time.Duration { return &c.Conntrack.UDPStream }),
		onOff("conntrack-tcp-be-liberal", "don't take packets outside of the TCP window for invalid, nor drop them", func(c *config.Config) *bool { return &c.Conntrack.TCPBeLiberal }),
	}
}

func ipvsSettings() []setting {
	return []setting{
		text("ipvs-scheduler", "`NAME` of the kernel's scheduler for services that ask for none, nor for an algorithm (default: rr)", func(c *config.Config) *string { return &c.IPVS.Scheduler }),
		onOff("ipvs-strict-arp", "answer ARP only for addresses of the link that is asked, as load balancers that announce addresses need it", func(c *config.Config) *bool { return &c.IPVS.StrictARP }),
		text("ipvs-tcp-timeout", "`TIME` after which IPVS forgets an idle TCP connection: 15m, "+config.LikeConntrack+" for as long as conntrack keeps it, 0 for the kernel's setting", func(c *config.Config) *string { return &c.IPVS.TCPTimeout }),
		length("ipvs-tcpfin-timeout", "the same after a FIN; 0 for the kernel's setting", func(c *config.Config) *time.Duration { return &c.IPVS.TCPFinTimeout }),
		length("ipvs-udp-timeout", "the same for UDP; 0 for the kernel's setting", func(c *config.Config) *time.Duration { return &c.IPVS.UDPTimeout }),
	}
}

func processSettings() []setting {
	return []setting{
		{
			&cli.IntFlag{Name: "oom-score-adj", Usage: "of this process, -1000 to 1000", DefaultText: "-999 with --config or the Kubernetes API, else unchanged"},
			func(c *cli.Context, cfg *config.Config) {
				adj := c.Int("oom-score-adj")
				cfg.OOMScoreAdj = &adj
			},
		},
		{
			&cli.StringFlag{Name: "log-format", Aliases: []string{"logging-format"}, Value: defaults.LogFormat, Usage: strings.Join(config.LogFormats, " or ")},
			func(c *cli.Context, cfg *config.Config) { cfg.LogFormat = c.String("log-format") },
		},
		text("v", "log `LEVEL`: debug, info, warn, error, or kube-proxy's number", func(c *config.Config) *string { return &c.Verbosity }),
	}
}
