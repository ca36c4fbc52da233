package main

import (
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/urfave/cli/v2"

	"kproxy.dev/kproxy/config"
)

// withFlags calls f with the flags of `kproxy run` as args give them.
func withFlags(t *testing.T, args []string, f func(*cli.Context)) error {
	t.Helper()
	app := &cli.App{
		Name: "kproxy", Writer: io.Discard, ErrWriter: io.Discard,
		Commands: []*cli.Command{{Name: "run", Flags: runFlags(), Action: func(c *cli.Context) error {
			f(c)
			return nil
		}}},
	}
	return app.Run(append([]string{"kproxy", "run"}, args...))
}

// outsideOfPods makes sure that the tests don't depend on where they run.
func outsideOfPods(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
}

func writeFile(t *testing.T, name, text string) string {
	t.Helper()
	name = filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return name
}

const fileHead = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

func TestConfigure(t *testing.T) {
	outsideOfPods(t)
	file := writeFile(t, "config.conf", fileHead+"mode: ipvs\nclusterCIDR: 10.0.0.0/8\nclientConnection: {kubeconfig: /k}\nipvs: {scheduler: wlc}\n")
	with := func(c config.Config, set func(*config.Config)) config.Config {
		set(&c)
		return c
	}
	fromFile := with(config.AsKubeProxy(), func(c *config.Config) {
		c.File, c.Mode, c.ClusterCIDRs, c.Kubeconfig, c.IPVS.Scheduler = file, "ipvs", []string{"10.0.0.0/8"}, "/k", "wlc"
		c.DetectLocalMode, c.LocalhostNodePorts, c.IPVS.TCPTimeout = "ClusterCIDR", false, "0"
	})
	manifests := with(config.Default(), func(c *config.Config) { c.Manifests = []string{"/m"} })
	kubeconfig := with(config.AsKubeProxy(), func(c *config.Config) { c.Kubeconfig = "/k" })
	for _, tt := range []struct {
		args string
		want config.Config
	}{
		{"", config.Default()},
		{"--manifests /m", manifests},
		{"--manifests /m --manifests /n,/o", with(manifests, func(c *config.Config) { c.Manifests = []string{"/m", "/n", "/o"} })},
		{"--kubeconfig /k", kubeconfig},
		{"--kubeconfig /k --conntrack-min 7 --oom-score-adj=5", with(kubeconfig, func(c *config.Config) {
			c.Conntrack.Min = 7
			oom := 5
			c.OOMScoreAdj = &oom
		})},
		{"--config " + file, fromFile},
		{"--config " + file + " --mode=iptables --cluster-cidr 10.1.0.0/16,fd00::/48 --ipvs-scheduler=", with(fromFile, func(c *config.Config) {
			c.Mode, c.ClusterCIDRs, c.IPVS.Scheduler = "iptables", []string{"10.1.0.0/16", "fd00::/48"}, ""
		})},
		{"--config " + file + " --manifests /m", with(fromFile, func(c *config.Config) { c.Manifests, c.Kubeconfig = []string{"/m"}, "" })},
		{"--config " + file + " --master https://10.0.0.1", with(fromFile, func(c *config.Config) { c.Master = "https://10.0.0.1" })},
		{"--manifests /m --proxy-mode nftables", with(manifests, func(c *config.Config) { c.Mode = "nftables" })},
		{"--manifests /m --proxy-mode ipvs --mode iptables", with(manifests, func(c *config.Config) { c.Mode = "iptables" })},
		{"--manifests /m --bind-address 0.0.0.0", manifests},
		{"--manifests /m --bind-address= --nodeport-addresses= --cluster-cidr= --node-ip=", manifests},
		{"--config " + file + " --bind-address= --cluster-cidr=", with(fromFile, func(c *config.Config) { c.ClusterCIDRs = nil })},
		{"--manifests /m --bind-address fd00::1", with(manifests, func(c *config.Config) {
			c.NodeIPs, c.MetricsBindAddress, c.HealthzBindAddress = []string{"fd00::1"}, "[::1]:10249", "[::]:10256"
		})},
		{"--manifests /m --bind-address 192.0.2.1 --node-ip 192.0.2.2,fd00::2", with(manifests, func(c *config.Config) { c.NodeIPs = []string{"192.0.2.2", "fd00::2"} })},
		{"--manifests /m --healthz-bind-address 192.0.2.1 --metrics-bind-address=", with(manifests, func(c *config.Config) {
			c.HealthzBindAddress, c.MetricsBindAddress = "192.0.2.1:10256", ""
		})},
		{"--manifests /m --healthz-port 0 --metrics-port 9999", with(manifests, func(c *config.Config) {
			c.HealthzBindAddress, c.MetricsBindAddress = "", "127.0.0.1:9999"
		})},
		{"--manifests /m --metrics-port 9999 --metrics-bind-address 0.0.0.0", with(manifests, func(c *config.Config) { c.MetricsBindAddress = "0.0.0.0:9999" })},
		{"--manifests /m --metrics-port 9999 --metrics-bind-address 0.0.0.0:8888", with(manifests, func(c *config.Config) { c.MetricsBindAddress = "0.0.0.0:8888" })},
		{"--manifests /m --logging-format json -v 4", with(manifests, func(c *config.Config) { c.LogFormat, c.Verbosity = "json", "4" })},
		{"--manifests /m --v=2 --hostname-override Node-1", with(manifests, func(c *config.Config) { c.Verbosity, c.HostnameOverride = "2", "node-1" })},
		{"--manifests /m --nodeport-addresses primary,10.0.0.0/8 --iptables-localhost-nodeports=false", with(manifests, func(c *config.Config) {
			c.NodePortAddresses, c.LocalhostNodePorts = []string{"primary", "10.0.0.0/8"}, false
		})},
	} {
		t.Run(tt.args, func(t *testing.T) {
			err := withFlags(t, strings.Fields(tt.args), func(c *cli.Context) {
				got, err := configure(c)
				if err != nil {
					t.Fatal(err)
				}
				if d := cmp.Diff(tt.want, got.Config, cmpopts.EquateEmpty()); d != "" {
					t.Errorf("configuration (-want +got):\n%s", d)
				}
			})
			if err != nil {
				t.Error(err)
			}
		})
	}
}

// In a pod with nothing said, services come from the cluster.
func TestConfigureInAPod(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
	t.Setenv("KUBERNETES_SERVICE_PORT", "443")
	for args, want := range map[string]bool{
		"": true, "--config " + writeFile(t, "f", fileHead): true,
		"--manifests /m": false, "--kubeconfig /k": false, "--master http://10.0.0.1": false,
		"--config " + writeFile(t, "f", fileHead+"clientConnection: {kubeconfig: /k}\n"): false,
	} {
		err := withFlags(t, strings.Fields(args), func(c *cli.Context) {
			got, err := configureValid(c)
			if err != nil || got.InCluster != want {
				t.Errorf("%s: in the cluster %t, %v", args, got.InCluster, err)
			}
		})
		if err != nil {
			t.Errorf("%s: %v", args, err)
		}
	}
}

// kubeProxyFlags are kube-proxy's, with a value of the right type each.
const kubeProxyFlags = `--bind-address=0.0.0.0 --bind-address-hard-fail --cluster-cidr=10.0.0.0/8 --config-sync-period=15m
--conntrack-max-per-core=1 --conntrack-min=1 --conntrack-tcp-be-liberal --conntrack-tcp-timeout-close-wait=1m
--conntrack-tcp-timeout-established=1h --conntrack-udp-timeout=1s --conntrack-udp-timeout-stream=1s --detect-local-mode=NodeCIDR
--feature-gates=A=true,B=false --healthz-bind-address=0.0.0.0 --healthz-port=10256 --hostname-override=a
--iptables-localhost-nodeports=false --iptables-masquerade-bit=14 --iptables-min-sync-period=1s --iptables-sync-period=30s
--ipvs-exclude-cidrs=10.0.0.0/8,10.1.0.0/16 --ipvs-min-sync-period=1s --ipvs-scheduler=rr --ipvs-strict-arp --ipvs-sync-period=30s
--ipvs-tcp-timeout=1m --ipvs-tcpfin-timeout=1m --ipvs-udp-timeout=1m --kube-api-burst=10 --kube-api-content-type=application/json
--kube-api-qps=5.5 --kubeconfig=/k --log-flush-frequency=5s --log-json-info-buffer-size=0 --log-json-split-stream
--log-text-info-buffer-size=0 --log-text-split-stream --logging-format=text --masquerade-all --master=https://10.0.0.1
--metrics-bind-address=127.0.0.1 --metrics-port=10249 --nodeport-addresses=primary --oom-score-adj=0 --pod-bridge-interface=cni0
--pod-interface-name-prefix=veth --profiling --proxy-mode=iptables --proxy-port-range=0-0 --show-hidden-metrics-for-version=1.36
--v=2 --vmodule=a=1 --write-config-to=/f --init-only --version --cleanup`

// kube-proxy's command line is taken as it is: every flag has an effect, or is
// reported as ignored, or refused for what to do instead.
func TestKubeProxyFlags(t *testing.T) {
	outsideOfPods(t)
	for _, arg := range strings.Fields(kubeProxyFlags) {
		name, _, _ := strings.Cut(strings.TrimPrefix(arg, "--"), "=")
		err := withFlags(t, []string{arg}, func(c *cli.Context) {
			if !c.IsSet(name) {
				t.Errorf("%s is not noticed", arg)
			}
			for _, f := range ignored(c) {
				if f.name() == name && f.why == "" {
					t.Errorf("%s is ignored for no reason", arg)
				}
			}
			cfg, err := configure(c)
			if err != nil {
				t.Errorf("%s: %v", arg, err)
			} else if lines := notices(c, cfg); len(ignored(c))+len(idle(c, cfg.Config)) != len(lines) {
				t.Errorf("%s: reported %q", arg, lines)
			}
		})
		if err != nil {
			t.Errorf("%s: %v", arg, err)
		}
	}
	for _, f := range ignoredFlags() {
		if !strings.Contains(kubeProxyFlags, "--"+f.name()) {
			t.Errorf("--%s is ignored, but none of kube-proxy's", f.name())
		}
	}
}

// What has no effect beside other flags, or in another mode, is said.
func TestIdleFlags(t *testing.T) {
	outsideOfPods(t)
	name := writeFile(t, "config.conf", fileHead+"mode: iptables\nipvs: {scheduler: wlc, strictARP: false}\nclusterCIDR: 10.0.0.0/8\ndetectLocalMode: NodeCIDR\n")
	for args, want := range map[string][]string{
		"--mode auto --ipvs-scheduler wlc --nftables-flowtable --cluster-cidr 10.0.0.0/8":        nil,
		"--mode userspace --nftables-flowtable":                                                  {"--nftables-flowtable: ignored: mode is \"userspace\""},
		"--mode nftables --ipvs-udp-timeout 1m":                                                  {"--ipvs-udp-timeout: ignored: mode is \"nftables\""},
		"--pod-bridge-interface cni0":                                                            {"--pod-bridge-interface: ignored: pods are told by ClusterCIDR"},
		"--detect-local-mode BridgeInterface --pod-bridge-interface b --cluster-cidr 10.0.0.0/8": {"--cluster-cidr: ignored: pods are told by BridgeInterface"},
		"--config " + name: {
			name + `:4: ipvs.scheduler: "wlc": ignored: mode is "iptables"`, name + `:5: clusterCIDR: "10.0.0.0/8": ignored: pods are told by NodeCIDR`,
		},
	} {
		err := withFlags(t, strings.Fields(args), func(c *cli.Context) {
			cfg, err := configure(c)
			if d := cmp.Diff(want, notices(c, cfg)); err != nil || d != "" {
				t.Errorf("%s: %v (-want +got):\n%s", args, err, d)
			}
		})
		if err != nil {
			t.Error(err)
		}
	}
}

func TestRefused(t *testing.T) {
	for args, want := range map[string]string{
		"--cleanup": "--cleanup: use `kproxy cleanup`", "--bind-address eth0": `--bind-address: "eth0" is not an IP`, "--mode ipvs": "", "--bind-address=": "", "--bind-address=010.0.0.1": "",
	} {
		err := withFlags(t, strings.Fields(args), func(c *cli.Context) {
			if err := refused(c); (err == nil) != (want == "") || err != nil && (!strings.HasPrefix(err.Error(), want) || statusOf(err) != exitUsage) {
				t.Errorf("%s: got %v, want %s", args, err, want)
			}
		})
		if err != nil {
			t.Error(err)
		}
	}
}

// What kube-proxy takes is valid here too.
func TestKubeProxySpellings(t *testing.T) {
	outsideOfPods(t)
	for _, args := range []string{
		"--kubeconfig /k --nodeport-addresses= --bind-address=", "--kubeconfig /k --nodeport-addresses=010.0.0.0/8 --bind-address=010.0.0.1",
		"--master=10.0.0.1:6443", "--master localhost:8080", "--kubeconfig /k --kube-api-qps=-1",
	} {
		err := withFlags(t, strings.Fields(args), func(c *cli.Context) {
			if _, err := configureValid(c); err != nil || refused(c) != nil {
				t.Errorf("%s: %v, %v", args, err, refused(c))
			}
		})
		if err != nil {
			t.Errorf("%s: %v", args, err)
		}
	}
}

// Every field that is said to have a flag has it.
func TestFieldsHaveTheirFlags(t *testing.T) {
	names := map[string]bool{}
	for _, f := range runFlags() {
		for _, n := range f.Names() {
			if names[n] {
				t.Errorf("--%s is there twice", n)
			}
			names[n] = true
		}
	}
	for _, f := range config.Fields() {
		if f.Flag() != "" && !names[f.Flag()] {
			t.Errorf("%s is said to be --%s, which isn't there", f.Path, f.Flag())
		}
	}
	for flag, also := range alsoBy {
		if !names[flag] || !names[also] {
			t.Errorf("--%s or --%s isn't there", flag, also)
		}
	}
}
