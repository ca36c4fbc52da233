package main

import (
	"fmt"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
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
		group("Services",
			words("mode", "the furthest data plane", config.Modes),
			setting{
				flag: &cli.StringFlag{Name: "proxy-mode", Usage: "kube-proxy's name for --mode"},
				set: func(c *cli.Context, cfg *config.Config) {
					if !c.IsSet("mode") {
						cfg.Mode = config.ModeOf(c.String("proxy-mode"))
					}
				},
			},
			setting{flag: manifestsFlag(), set: func(c *cli.Context, cfg *config.Config) { cfg.Manifests = c.StringSlice("manifests") }},
			decisive(set("kubeconfig", "`FILE` that says how to reach the Kubernetes API")),
			decisive(set("master", "`URL` of the Kubernetes API; wins over the one in --kubeconfig")),
			set("kube-api-qps", "requests a second to the Kubernetes API; negative for no limit"),
			set("kube-api-burst", "so many more requests at a time"),
			set("kube-api-content-type", "what the Kubernetes API is asked for objects in"),
		),
		group("Node and cluster",
			setting{
				flag: &cli.StringFlag{Name: "hostname-override", Usage: "`NAME` of this node (default: the host name)"},
				set: func(c *cli.Context, cfg *config.Config) {
					cfg.HostnameOverride = strings.ToLower(strings.TrimSpace(c.String("hostname-override")))
				},
			},
			bindAddressSetting(),
			set("node-ip", "`ADDRESS` of this node, one per family (default: those of its Node object)"),
			decisive(set("cluster-cidr", "`CIDR` of the pods, one per family; clients outside are masqueraded")),
			decisive(set("exclude-cluster-cidr", "`CIDR` of pods that another proxy serves; repeatable")),
			decisive(set("service-cidr", "`CIDR` of cluster IPs, besides the ServiceCIDRs that the Kubernetes API names; repeatable")),
			decisive(set("close-cluster-ips", "refuse what is to a cluster IP by a port that no Service has there, drop what is to an address of the ServiceCIDRs that no Service has")),
			decisive(words("detect-local-mode", "how pods of this cluster are told from other clients", config.DetectLocalModes)),
			decisive(set("pod-bridge-interface", "`NAME` of the bridge that pods are at, for BridgeInterface")),
			decisive(set("pod-interface-name-prefix", "what the names of pods' interfaces begin with, for InterfaceNamePrefix")),
			decisive(set("nodeport-addresses", "`CIDR` of the node's addresses that node ports answer on, or primary, localhost, all (default: all)")),
			decisive(set("iptables-localhost-nodeports", "node ports answer on loopback addresses too")),
		),
		group("Marks and routes",
			decisive(set("masquerade-all", "every connection reaches its endpoint with the node's address")),
			decisive(set("iptables-masquerade-bit", "`BIT` of the packet mark for masquerade, 0-31")),
			decisive(set("transparent-bit", "`BIT` of the packet mark for replies to transparent sockets, 1-31; kproxy's own packets bear it and the bit below")),
			set("route-table", "routing `TABLE` for replies to transparent sockets"),
		),
		group("Offload",
			set("offload-after", "how long a service must be steady before offload; 0s at once"),
			set("offload-min-connections", "successful connections or sessions before offload"),
			set("alive-timeout", "how long after its last heartbeat a dead kproxy keeps attracting new connections; whole seconds"),
			set("drain-timeout", "bound on draining userspace connections at exit, and real servers of IPVS that were removed"),
		),
		group("Health checks",
			setting{
				flag: &cli.StringFlag{Name: "health-check", Usage: "default active check of endpoints: off, tcp, http, udp, grpc (default: tcp for manifests, off for Kubernetes)"},
				set:  func(c *cli.Context, cfg *config.Config) { cfg.Health.Check = service.Check(c.String("health-check")) },
			},
			set("health-interval", "time between two probes of an endpoint"),
			set("health-timeout", "bound on one probe"),
			set("health-rise", "successes in a row that make an endpoint up"),
			set("health-fall", "failures in a row that make an endpoint down"),
			set("health-annotations", "Services may ask for health checks of their own by annotation"),
			set("health-min-interval", "the least between two probes that an annotation may ask for, unless --health-interval is less"),
			set("passive-health", "eject endpoints that clients' own packets find silent or refusing, once probes find so too"),
			set("reset-dead-connections", "reset connections to endpoints that have left the API and whose hosts are silent, unless --passive-health is off"),
			set("healthz-isolated", "/healthz fails while most endpoints on other nodes are silent to this node, so that load balancers leave it out"),
			set("health-max-rate", "probes a second, of all endpoints; namespaces that ask for more than their share are probed less often"),
		),
		group("Conntrack",
			standard("32768"+onCluster, set("conntrack-max-per-core", "connections that are tracked, times the number of CPUs; 0 for the kernel's setting")),
			standard("131072"+onCluster, set("conntrack-min", "connections that are tracked at least, unless --conntrack-max-per-core is 0")),
			standard("24h"+onCluster, set("conntrack-tcp-timeout-established", "after which an idle TCP connection is forgotten; 0 for the kernel's setting")),
			standard("1h"+onCluster, set("conntrack-tcp-timeout-close-wait", "the same after one end has closed it; 0 for the kernel's setting")),
			set("conntrack-udp-timeout", "the same for UDP without an answer yet; 0 for the kernel's setting"),
			set("conntrack-udp-timeout-stream", "the same for UDP that was answered; 0 for the kernel's setting"),
			set("conntrack-tcp-be-liberal", "don't take packets outside of the TCP window for invalid, nor drop them"),
		),
		group("IPVS",
			decisive(set("ipvs-scheduler", "`NAME` of the kernel's scheduler for services that ask for none, nor for an algorithm (default: rr)")),
			set("ipvs-strict-arp", "answer ARP only for addresses of the link that is asked, as load balancers that announce addresses need it"),
			set("ipvs-tcp-timeout", "`TIME` after which IPVS forgets an idle TCP connection: 15m, "+config.LikeConntrack+" for as long as conntrack keeps it, 0 for the kernel's setting"),
			set("ipvs-tcpfin-timeout", "the same after a FIN; 0 for the kernel's setting"),
			set("ipvs-udp-timeout", "the same for UDP; 0 for the kernel's setting"),
		),
		group("nftables",
			decisive(set("nftables-flowtable", "established connections to endpoints pass by a flowtable: faster, and by no rule of other programs either")),
		),
		group("Servers and listeners",
			bindSetting("metrics", "`IP:PORT` of JSON API and metrics; empty for none", config.MetricsPort, func(c *config.Config) *string { return &c.MetricsBindAddress }),
			portSetting("metrics", config.MetricsPort, func(c *config.Config) *string { return &c.MetricsBindAddress }),
			bindSetting("healthz", "`IP:PORT` of /healthz, /livez, /readyz; empty for none", config.HealthzPort, func(c *config.Config) *string { return &c.HealthzBindAddress }),
			portSetting("healthz", config.HealthzPort, func(c *config.Config) *string { return &c.HealthzBindAddress }),
			set("metrics-service-limit", "so many service ports have series of their own in /metrics, the others share one"),
			set("metrics-endpoint-limit", "the same for endpoints of those"),
			set("grafana-url", "`URL` of the Grafana that has the dashboard of deploy/monitoring, for links to it"),
			set("profiling", "serve Go's profiles at /debug/pprof on --metrics-bind-address"),
			set("socket", "control socket, a `PATH`"),
			set("state-dir", "`DIR` for what survives a restart: pins, and the last state of the Kubernetes API"),
			set("state-max-age", "how old that state may be, to be served while the API is away at the start; 0s saves none"),
			decisive(set("listen-tcp-port", "`PORT` of the shared TCP listener; 0 lets the kernel choose")),
			decisive(set("listen-udp-port", "`PORT` of the shared UDP listener; 0 lets the kernel choose")),
		),
		group("Process and log",
			set("supervise", "work in another process; should it crash, the next one goes on with its connections"),
			setting{
				flag: &cli.IntFlag{Name: "oom-score-adj", Usage: "of this process, -1000 to 1000", DefaultText: "-999 with --config or the Kubernetes API, else unchanged"},
				set: func(c *cli.Context, cfg *config.Config) {
					adj := c.Int("oom-score-adj")
					cfg.OOMScoreAdj = &adj
				},
			},
			setting{
				flag: &cli.StringFlag{Name: "log-format", Aliases: []string{"logging-format"}, Value: defaults.LogFormat, Usage: strings.Join(config.LogFormats, " or ")},
				set:  func(c *cli.Context, cfg *config.Config) { cfg.LogFormat = c.String("log-format") },
			},
			set("v", "log `LEVEL`: debug, info, warn, error, or kube-proxy's number"),
		),
	)
}

// group puts settings under a heading of their own in the help.
func group(name string, settings ...setting) []setting {
	for _, s := range settings {
		setText(s.flag, "Category", name)
	}
	return settings
}

// setText sets a text that every type of flag has a field of its own for.
func setText(f cli.Flag, field, text string) {
	reflect.ValueOf(f).Elem().FieldByName(field).SetString(text)
}

// onCluster is what the help says of defaults that depend on where kproxy runs.
const onCluster = " with --config or the Kubernetes API, else the kernel's setting"

// bindSetting takes an IP alone too, as kube-proxy does.
func bindSetting(name, usage string, port int, at func(*config.Config) *string) setting {
	flag := name + "-bind-address"
	return setting{
		flag: &cli.StringFlag{Name: flag, Value: *at(&defaults), Usage: usage},
		set:  func(c *cli.Context, cfg *config.Config) { *at(cfg) = config.WithPort(c.String(flag), port) },
	}
}

// portSetting is kube-proxy's older flag for the port alone. One that comes with
// the address wins.
func portSetting(name string, port int, at func(*config.Config) *string) setting {
	flag, address := name+"-port", name+"-bind-address"
	return setting{
		flag: &cli.IntFlag{Name: flag, Usage: "`PORT` for --" + address + "; 0 for none", DefaultText: strconv.Itoa(port)},
		set: func(c *cli.Context, cfg *config.Config) {
			given := c.Int(flag)
			_, notIP := netip.ParseAddr(c.String(address))
			switch host, _, err := net.SplitHostPort(*at(cfg)); {
			case given == 0:
				*at(cfg) = ""
			case err == nil && !c.IsSet(address), notIP == nil:
				*at(cfg) = net.JoinHostPort(host, strconv.Itoa(given))
			}
		},
	}
}

// setting is a flag of `kproxy run` and the part of the configuration that it
// sets. Flags that aren't given set nothing: what a file says stays.
type setting struct {
	flag cli.Flag
	set  func(*cli.Context, *config.Config)
	// decides is whether what is rendered depends on it: it says where Services come from, or rules
	// depend on it and it isn't about this host.
	decides bool
}

func decisive(s setting) setting {
	s.decides = true
	return s
}

func flagsOf(settings []setting) []cli.Flag {
	out := make([]cli.Flag, len(settings))
	for i, s := range settings {
		out[i] = s.flag
	}
	return out
}

// defaults is where flags have from what their help calls their default.
var defaults = config.Default()

// set makes a setting of the type and default of the part of the configuration that the
// flag sets. A list may be given several times, or once with commas; a
// single empty value is none, as in kube-proxy: templates leave one.
func set(name, usage string) setting {
	set := func(c *cli.Context, cfg *config.Config) {
		part := cfg.SetBy(name)
		list, ok := part.(*[]string)
		if !ok {
			reflect.ValueOf(part).Elem().Set(reflect.ValueOf(c.Value(name))) // flagOf chose the type
		} else if *list = c.StringSlice(name); slices.Equal(*list, []string{""}) {
			*list = nil
		}
	}
	return setting{flag: flagOf(name, defaults.SetBy(name), usage), set: set}
}

// flagOf makes a flag of the type that value points to. Lists have no default.
func flagOf(name string, value any, usage string) cli.Flag {
	switch v := value.(type) {
	case *string:
		return &cli.StringFlag{Name: name, Value: *v, Usage: usage}
	case *[]string:
		return &cli.StringSliceFlag{Name: name, Usage: usage}
	case *int:
		return &cli.IntFlag{Name: name, Value: *v, Usage: usage}
	case *float64:
		return &cli.Float64Flag{Name: name, Value: *v, Usage: usage}
	case *bool:
		return &cli.BoolFlag{Name: name, Value: *v, Usage: usage}
	case *time.Duration:
		return &cli.DurationFlag{Name: name, Value: *v, Usage: usage}
	}
	panic("no flag has this type")
}

// words is set with a few values, which the configuration's Validate checks.
func words(name, usage string, values []string) setting {
	s := set(name, usage+": "+strings.Join(values, ", "))
	if f, ok := s.flag.(*cli.StringFlag); ok {
		s.flag = &choice{f, values}
	}
	return s
}

// standard has the help give what as the default, in place of the zero that stands for it.
func standard(what string, s setting) setting {
	setText(s.flag, "DefaultText", what)
	return s
}

// ignoredFlag is one of kube-proxy's that is taken, so that its command line
// can stay as it is, and has no effect.
type ignoredFlag struct {
	flag cli.Flag
	why  string // as the table of fields says of the same in a KubeProxyConfiguration
}

// ignoredFlags take values of the type they have in kube-proxy, so that a slip
// is found here too.
func ignoredFlags() []ignoredFlag {
	duration, word, words, onOff := new(time.Duration), new(string), new([]string), new(bool)
	var all []ignoredFlag
	for _, f := range []struct {
		name  string
		kind  any
		field string
	}{
		{"bind-address-hard-fail", onOff, "bindAddressHardFail"},
		{"config-sync-period", duration, "configSyncPeriod"},
		{"feature-gates", word, "featureGates"},
		{"iptables-sync-period", duration, "iptables.syncPeriod"},
		{"iptables-min-sync-period", duration, "iptables.minSyncPeriod"},
		{"ipvs-sync-period", duration, "ipvs.syncPeriod"},
		{"ipvs-min-sync-period", duration, "ipvs.minSyncPeriod"},
		{"ipvs-exclude-cidrs", words, "ipvs.excludeCIDRs"},
		{"log-flush-frequency", duration, "logging.flushFrequency"},
		{"log-text-split-stream", onOff, "logging.options.text.splitStream"},
		{"log-text-info-buffer-size", word, "logging.options.text.infoBufferSize"},
		{"log-json-split-stream", onOff, "logging.options.json.splitStream"},
		{"log-json-info-buffer-size", word, "logging.options.json.infoBufferSize"},
		{"proxy-port-range", word, "portRange"},
		{"show-hidden-metrics-for-version", word, "showHiddenMetricsForVersion"},
		{"vmodule", word, "logging.vmodule"},
	} {
		fields := config.Fields()
		i := slices.IndexFunc(fields, func(x config.Field) bool { return x.Path == f.field })
		why := fields[i].Ignored
		all = append(all, ignoredFlag{flagOf(f.name, f.kind, "kube-proxy's; ignored: "+why), why})
	}
	return all
}

func (f ignoredFlag) name() string { return f.flag.Names()[0] }

// line says what became of the flag on c's command line.
func (f ignoredFlag) line(c *cli.Context) string {
	return fmt.Sprintf("--%s=%v: ignored: %s", f.name(), c.Value(f.name()), f.why)
}

// ignored returns those on the command line.
func ignored(c *cli.Context) []ignoredFlag {
	return slices.DeleteFunc(ignoredFlags(), func(f ignoredFlag) bool { return !c.IsSet(f.name()) })
}

// idle are lines about those that have no effect beside others.
func idle(c *cli.Context, cfg config.Config) []string {
	var out []string
	for _, s := range settings() {
		name := s.flag.Names()[0]
		if why := cfg.Idle(name); why != "" && c.IsSet(name) {
			out = append(out, fmt.Sprintf("--%s: ignored: %s", name, why))
		}
	}
	return out
}
