package main

import (
	"cmp"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/agent/offline"
	"kproxy.dev/kproxy/config"
	"kproxy.dev/kproxy/plan"
)

func checkCommand() *cli.Command {
	return &cli.Command{
		Name:  "check",
		Usage: "validate manifests and the configuration and print every problem as `file:line: what`; needs no root",
		Description: "With --config, and any flag of kproxy run, it says of every field of the file and of every flag\n" +
			"what comes of it. With --host, which needs root, it says instead what this host lacks for each mode.",
		// Those of `kproxy run`, so that its command line can be checked as it is.
		Flags: append(runFlags(), nodeFlag(),
			&cli.BoolFlag{Name: "host", Usage: "say what this host lacks for each mode, and change nothing of it; fails with status 3 where --mode, else userspace, isn't possible"}),
		Action: func(c *cli.Context) error {
			if c.Bool("host") {
				return checkHost(c)
			}
			configured := slices.ContainsFunc(runFlags(), func(f cli.Flag) bool {
				return f.Names()[0] != "manifests" && slices.ContainsFunc(f.Names(), c.IsSet)
			})
			if !configured && !c.IsSet("manifests") {
				return usageError("nothing to check: pass --config FILE, --manifests PATH or --host")
			}
			problems := 0
			if configured {
				problems += checkConfig(c, c.App.Writer)
			}
			if c.IsSet("manifests") {
				n, err := checkManifests(c, c.App.Writer)
				if err != nil {
					return &exitError{exitUsage, err}
				}
				problems += n
			}
			switch problems {
			case 0:
				return nil
			case 1:
				return usageError("one problem")
			}
			return usageError("%d problems", problems)
		},
	}
}

// checkConfig prints what comes of the configuration and returns how many
// problems there are.
func checkConfig(c *cli.Context, w io.Writer) int {
	cfg, err := configure(c)
	if err == nil {
		// The services needn't be there to say whether the rest is right.
		if len(cfg.Manifests) == 0 && !cfg.Kubernetes() {
			cfg.InCluster = true
		}
		err = cfg.validate()
	}
	if err == nil {
		err = refused(c)
	}
	if err != nil {
		fmt.Fprintln(w, err)
		return len(strings.Split(err.Error(), "\n"))
	}
	for _, o := range cfg.outcomes() {
		fmt.Fprintf(w, "%s:%d: %s\n", cfg.File, o.Line, o)
	}
	for _, f := range ignored(c) {
		fmt.Fprintln(w, f.line(c))
	}
	for _, line := range idle(c, cfg.Config) {
		fmt.Fprintln(w, line)
	}
	summarize(cfg.Config, w)
	return 0
}

// summarize prints what it comes down to.
func summarize(cfg config.Config, w io.Writer) {
	lines := [][2]string{
		{"mode", cfg.Mode},
		{"services from", sourceOf(cfg)},
		{"pods", podsOf(cfg)},
		{"node ports on", nodePortsOf(cfg)},
		{"API and metrics at", cmp.Or(cfg.MetricsBindAddress, "none")},
		{"health at", cmp.Or(cfg.HealthzBindAddress, "none")},
	}
	for _, l := range lines {
		fmt.Fprintf(w, "%-20s%s\n", l[0]+":", l[1])
	}
}

func sourceOf(cfg config.Config) string {
	switch {
	case len(cfg.Manifests) > 0:
		return "manifests: " + strings.Join(cfg.Manifests, ", ")
	case cfg.Master != "":
		return "the Kubernetes API at " + cfg.Master
	case cfg.Kubeconfig != "":
		return "the Kubernetes API, as " + cfg.Kubeconfig + " says"
	}
	return "the Kubernetes API of the cluster that this pod runs in"
}

func podsOf(cfg config.Config) string {
	switch cfg.DetectLocalMode {
	case "NodeCIDR":
		return "recognized by the pod networks of this node"
	case "BridgeInterface":
		return "recognized by the interface " + cfg.PodBridge
	case "InterfaceNamePrefix":
		return "recognized by interfaces named " + cfg.PodInterfacePrefix + "…"
	}
	if len(cfg.ClusterCIDRs) == 0 {
		return "not distinguished from other clients (no cluster CIDR)"
	}
	return "recognized by the networks " + strings.Join(cfg.ClusterCIDRs, ", ")
}

func nodePortsOf(cfg config.Config) string {
	where := "every address of the node"
	if len(cfg.NodePortAddresses) > 0 {
		where = strings.Join(cfg.NodePortAddresses, ", ")
	}
	if cfg.LocalhostNodePorts {
		return where
	}
	return where + ", but not on loopback"
}

// checkManifests prints what is wrong with manifests and returns how much.
func checkManifests(c *cli.Context, w io.Writer) (int, error) {
	report, err := offline.Check(c.StringSlice("manifests"), c.String("node"))
	if err != nil {
		return 0, err
	}
	for _, p := range report.Problems {
		fmt.Fprintln(w, p)
	}
	if len(report.Problems) == 0 {
		fmt.Fprintf(w, "%d service ports, %d endpoints: no problem\n", report.Services, report.Endpoints)
	}
	return len(report.Problems), nil
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
	report, err := offline.CheckHost(c.Context)
	if err != nil {
		return hostError(err)
	}
	if err := printHost(c.App.Writer, report); err != nil {
		return err
	}
	fmt.Fprintln(c.App.Writer, verdict(report, mode, c.IsSet("mode")))
	if report.Missing[mode] != nil {
		return &exitError{exitHost, fmt.Errorf("mode %s isn't possible on this host", mode)}
	}
	return nil
}

// verdict says in a line whether kproxy can run on a host, and in which mode.
func verdict(r offline.HostReport, mode plan.Mode, asked bool) string {
	switch {
	case asked && r.Missing[mode] != nil:
		return fmt.Sprintf("VERDICT: this host can't run kproxy in mode %s; the lines above say what to get", mode)
	case asked:
		return fmt.Sprintf("VERDICT: this host can run kproxy in mode %s", mode)
	case r.Missing[plan.ModeAuto] == nil:
		return fmt.Sprintf("VERDICT: this host can run kproxy: mode auto takes %s", r.Auto[0])
	case r.Missing[plan.ModeUserspace] == nil:
		return "VERDICT: this host can run kproxy, in mode userspace only; the lines above say what to get for more"
	}
	return "VERDICT: this host can't run kproxy; the lines above say what to get"
}

func printHost(w io.Writer, r offline.HostReport) error {
	var b strings.Builder
	for _, m := range config.Modes {
		err := r.Missing[plan.Mode(m)]
		if err == nil {
			with := ""
			if plan.Mode(m) == plan.ModeAuto {
				if with = ", with " + strings.Join(r.Auto, " and "); r.PassedOver != "" {
					with += "\n  " + r.PassedOver
				}
			}
			fmt.Fprintf(&b, "%-12spossible%s\n", m+":", with)
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
