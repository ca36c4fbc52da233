package main

import (
	"cmp"
	"os"
	"slices"

	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/config"
	kubeobjects "kproxy.dev/kproxy/source"
)

// configured holds what the flags and the file say together.
type configured struct {
	config.Config
	file  *config.File // nil without --config
	flags *cli.Context
}

// configure reads the file of --config and puts the flags over it. It does so
// again when the file may have changed; the flags stay what they are.
func configure(c *cli.Context) (configured, error) {
	out := configured{Config: config.Default(), flags: c}
	pod := isPod() || c.IsSet("write-config-to") // a file that names no services is for pods
	if c.IsSet("config") || c.IsSet("kubeconfig") || c.IsSet("master") || pod && !c.IsSet("manifests") {
		out.Config = config.AsKubeProxy()
	}
	if c.IsSet("config") {
		var err error
		if out.file, err = config.Read(c.String("config")); err != nil {
			return configured{}, err
		}
		out.file.Apply(&out.Config)
	}
	for _, s := range settings() {
		if slices.ContainsFunc(s.flag.Names(), c.IsSet) {
			s.set(c, &out.Config)
		}
	}
	switch {
	case c.IsSet("manifests") && !c.IsSet("kubeconfig"):
		out.Kubeconfig = "" // the file's; a flag wins
	case !c.IsSet("manifests"):
		out.InCluster = out.Kubeconfig == "" && out.Master == "" && pod
	}
	return out, nil
}

// validate reports every problem, those of the file with their lines.
func (c configured) validate() error {
	err := c.Validate()
	if c.file != nil {
		err = c.file.Locate(err, c.isGiven)
	}
	return err
}

// outcomes says what came of the fields of the file and of the ignored flags.
func (c configured) outcomes() []config.Outcome {
	if c.file == nil {
		return nil
	}
	return c.file.Outcomes(c.Config, c.isGiven)
}

// alsoBy are further flags that set the same.
var alsoBy = map[string]string{
	"mode":                 "proxy-mode",
	"node-ip":              "bind-address",
	"healthz-bind-address": "healthz-port",
	"metrics-bind-address": "metrics-port",
}

// isGiven reports whether the flag, or another that sets the same, is on the
// command line.
func (c configured) isGiven(flag string) bool {
	return c.flags.IsSet(flag) || alsoBy[flag] != "" && c.flags.IsSet(alsoBy[flag])
}

// isPod reports whether this process can reach the Kubernetes API as the pods of
// the cluster do (client-go's rest.InClusterConfig).
func isPod() bool {
	return os.Getenv("KUBERNETES_SERVICE_HOST") != "" && os.Getenv("KUBERNETES_SERVICE_PORT") != ""
}

// bindAddressSetting is kube-proxy's name for the node's address. It binds
// nothing, but chooses the family of the defaults of those that do.
func bindAddressSetting() setting {
	return setting{
		flag: &cli.StringFlag{Name: "bind-address", Usage: "kube-proxy's name for --node-ip; 0.0.0.0, :: and an empty one leave the address to the Node object"},
		set: func(c *cli.Context, cfg *config.Config) {
			a, err := kubeobjects.ParseAddr(cmp.Or(c.String("bind-address"), "0.0.0.0"))
			if err == nil && a.Is6() && !c.IsSet("config") {
				cfg.MetricsBindAddress = config.WithPort("::1", config.MetricsPort)
				cfg.HealthzBindAddress = config.WithPort("::", config.HealthzPort)
			}
			if cfg.NodeIPs = nil; err != nil || !a.IsUnspecified() {
				cfg.NodeIPs = []string{c.String("bind-address")}
			}
		},
	}
}

// refused are flags of kube-proxy's that are commands of their own here.
func refused(c *cli.Context) error {
	if c.Bool("cleanup") {
		return usageError("--cleanup: use `kproxy cleanup`, and `kproxy cleanup --kube-proxy` for what kube-proxy has left")
	}
	if b := c.String("bind-address"); b != "" {
		if _, err := kubeobjects.ParseAddr(b); err != nil {
			return usageError("--bind-address: %q is not an IP address; use this node's, or 0.0.0.0 to leave it to the Node object", b)
		}
	}
	return nil
}
