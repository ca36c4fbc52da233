package config

import (
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"kproxy.dev/kproxy/service"
)

// What /configz shows and --write-config-to writes is a file that kproxy reads
// as what it came from.
func TestKubeProxyRoundTrip(t *testing.T) {
	for name, text := range map[string]string{
		"defaults":   "",
		"much":       "mode: ipvs\nipvs: {scheduler: wlc, tcpTimeout: 20m}\nclusterCIDR: 10.0.0.0/8,fd00::/48\nlogging: {verbosity: 6, format: json}\nbindAddress: fd00::1\nnodePortAddresses: [primary]\nclientConnection: {kubeconfig: /k, qps: 0.1}\noomScoreAdj: 0\n",
		"nftables":   "mode: nftables\nnftables: {masqueradeBit: 4, masqueradeAll: true}\n",
		"IPVS alone": "mode: ipvs\n",
		"no limit":   "clientConnection: {qps: -1, burst: 0}\n",
	} {
		t.Run(name, func(t *testing.T) {
			want := apply(t, head+text)
			b, err := want.KubeProxyYAML()
			if err != nil {
				t.Fatal(err)
			}
			got := apply(t, string(b))
			if d := cmp.Diff(want.inForce(), got.inForce(), cmpopts.EquateEmpty()); d != "" {
				t.Errorf("configuration (-want +got):\n%s\nfile:\n%s", d, b)
			}
			if lost, err := want.NotInFile(); err != nil || len(lost) > 0 {
				t.Errorf("lost: %v, %v", lost, err)
			}
		})
	}
}

// What flags say is in the file, or said to be lost.
func TestNotInFile(t *testing.T) {
	kubeconfig := AsKubeProxy()
	kubeconfig.Kubeconfig = "/k"
	for _, tt := range []struct {
		name string
		of   Config
		set  func(*Config)
		want []string
	}{
		{"nothing", kubeconfig, func(*Config) {}, nil},
		{"IPVS keeps what conntrack keeps", kubeconfig, func(c *Config) { c.Mode = "ipvs" }, nil},
		{"IPVS has the kernel's", kubeconfig, func(c *Config) { c.Mode, c.IPVS.TCPTimeout = "ipvs", "0" }, nil},
		{"IPVS has the kernel's, in another mode", kubeconfig, func(c *Config) { c.IPVS.TCPTimeout = "0" },
			[]string{`--ipvs-tcp-timeout=0s: no such file can say so; with this one it is "24h0m0s": give the flag beside it`}},
		{"IPVS keeps what the kernel's conntrack keeps", kubeconfig, func(c *Config) { c.Mode, c.Conntrack.TCPEstablished = "ipvs", 0 },
			[]string{`--ipvs-tcp-timeout=conntrack: no such file can say so; with this one it is "0s": give the flag beside it`}},
		{"no metrics", kubeconfig, func(c *Config) { c.MetricsBindAddress = "" },
			[]string{`--metrics-bind-address=: no such file can say so; with this one it is "127.0.0.1:10249": give the flag beside it`}},
		{"manifests", valid(), func(*Config) {}, []string{
			`--manifests=/etc/kproxy: no such file can say so; with this one it is "": give the flag beside it`,
			`--oom-score-adj: no file can leave it as it is; this one makes it -999, unless the flag says otherwise`,
		}},
		{"both families", kubeconfig, func(c *Config) { c.NodeIPs = []string{"192.0.2.1", "fd00::1"} },
			[]string{`--node-ip=192.0.2.1,fd00::1: no such file can say so; with this one it is "192.0.2.1": give the flag beside it`}},
		{"less than the usual log", kubeconfig, func(c *Config) { c.Verbosity = "error" },
			[]string{`--v=error: no such file can say so; with this one it is "info": give the flag beside it`}},
		{"all of the log", kubeconfig, func(c *Config) { c.Verbosity = "debug" }, nil},
		{"no fields for them", kubeconfig, func(c *Config) { c.ExcludeClusterCIDRs, c.OffloadAfter = []string{"10.1.0.0/16"}, time.Minute }, []string{
			`--exclude-cluster-cidr=10.1.0.0/16: no such file can say so; with this one it is "": give the flag beside it`,
			`--offload-after=1m0s: no such file can say so; with this one it is "10s": give the flag beside it`,
		}},
		{"checks", kubeconfig, func(c *Config) { c.Health.Check = service.CheckTCP },
			[]string{`--health-check=tcp: no such file can say so; with this one it is "": give the flag beside it`}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := tt.of
			tt.set(&c)
			lost, err := c.NotInFile()
			if err != nil {
				t.Fatal(err)
			}
			var got []string
			for _, l := range lost {
				got = append(got, fmt.Sprint(l))
			}
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("lost (-want +got):\n%s", d)
			}
		})
	}
}

// Whatever is lost can be named.
func TestEveryPartHasAFlag(t *testing.T) {
	for part := range Default().texts() {
		if none := part == "config" || part == "inCluster"; (FlagOf(part) == "") != none {
			t.Errorf("%s has the flag %q", part, FlagOf(part))
		}
	}
}
