package config

import (
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"kproxy.dev/kproxy/service"
)

const head = "apiVersion: kubeproxy.config.k8s.io/v1alpha1\nkind: KubeProxyConfiguration\n"

func none(string) bool { return false }

func TestParseFindsMistakes(t *testing.T) {
	for _, tt := range []struct {
		name, text string
		want       string // lines
	}{
		{"nothing wrong", head + "---\n", ""},
		{"JSON", `{"apiVersion":"kubeproxy.config.k8s.io/v1alpha1","kind":"KubeProxyConfiguration","mode":"ipvs"}`, ""},
		{"empty", "# nothing\n", "f.conf: the file is empty; give it apiVersion: kubeproxy.config.k8s.io/v1alpha1 and kind: KubeProxyConfiguration, at least"},
		{"no object", "- a\n", "f.conf:1: expected a KubeProxyConfiguration, found a list"},
		{"no YAML", head + "mode: [\n", "f.conf:3: did not find expected node content"},
		{"no text", head + "mode: \xff\n", "f.conf:3: the file is not text in UTF-8"},
		{"a ConfigMap", "apiVersion: v1\nkind: ConfigMap\ndata: {}\n", "f.conf:2: this is a ConfigMap; give the file that is in it, under config.conf in kubeadm's"},
		{"other kind", "apiVersion: v1\nkind: Service\n", `f.conf:2: kind: "Service" is not KubeProxyConfiguration; correct it`},
		{"no kind", "\nmode: ipvs\n", `f.conf:2: kind: "" is not KubeProxyConfiguration; correct it`},
		{"other version", "kind: KubeProxyConfiguration\napiVersion: kubeproxy.config.k8s.io/v1\n", `f.conf:2: apiVersion: "kubeproxy.config.k8s.io/v1" is not kubeproxy.config.k8s.io/v1alpha1, the only version there is; correct it`},
		{"two documents", head + "---\n" + head, "f.conf:4: a second document; keep the KubeProxyConfiguration in a file of its own"},
		{"unknown field", head + "ipvs:\n  schedular: rr\n", "f.conf:4: ipvs.schedular: unknown field, did you mean scheduler?; kube-proxy has none of this name: correct or remove it"},
		{"other case", head + "clusterCidr: 10.0.0.0/8\n", "f.conf:3: clusterCidr: unknown field, did you mean clusterCIDR?; kube-proxy has none of this name: correct or remove it"},
		{"given twice", head + "mode: ipvs\nmode: iptables\n", "f.conf:4: mode: given twice, first on line 3"},
		{"wrong types, all at once", head + "mode: 1\niptables:\n  syncPeriod: 30\n  masqueradeBit: x\nnodePortAddresses: all\n",
			"f.conf:3: mode: expected a string, found the number 1: put it in quotes\n" +
				"f.conf:5: iptables.syncPeriod: expected a duration such as 30s or 1h30m, found the number 30\n" +
				"f.conf:6: iptables.masqueradeBit: expected a whole number of 32 bits, found the string \"x\"\n" +
				"f.conf:7: nodePortAddresses: expected a list, found the string \"all\""},
		{"former fields", head + "udpIdleTimeout: 250ms\nresourceContainer: /kube-proxy\nconntrack:\n  max: 1\n", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			_, err := Parse("f.conf", []byte(tt.text))
			got := ""
			if err != nil {
				got = err.Error()
			}
			if strings.TrimSpace(got) != tt.want {
				t.Errorf("got:\n%s\nwant:\n%s", got, tt.want)
			}
		})
	}
}

func TestReadNamesWhatCannotBeRead(t *testing.T) {
	_, err := Read("/no/such/file")
	if err == nil || err.Error() != "--config: read /no/such/file: no such file or directory" || !errors.Is(err, os.ErrNotExist) {
		t.Errorf("got %v", err)
	}
}

// What Validate finds is in the file where the file has it.
func TestLocate(t *testing.T) {
	f, err := Parse("f.conf", []byte(head+`mode: kernelspace
iptables:
  masqueradeBit: 40
nftables:
  masqueradeBit: 41
clusterCIDR: 10.0.0.0/8,10.1.0.0/16
nodePortAddresses: [primary, 10.0.0.1]
detectLocalMode: BridgeInterface
logging: {format: klog}
`))
	if err != nil {
		t.Fatal(err)
	}
	c := AsKubeProxy()
	f.Apply(&c)
	c.InCluster, c.AliveTimeout = true, 0
	got := f.Locate(c.Validate(), func(flag string) bool { return flag == "cluster-cidr" })
	want := `f.conf:3: mode: "kernelspace" is not a mode; use one of auto, userspace, iptables, ipvs, nftables
--cluster-cidr: 10.0.0.0/8 and 10.1.0.0/16 are both ipv4; give at most one per family
f.conf:10: detectLocalMode: BridgeInterface needs the name of the bridge that pods are at; give it, cni0 for example, with --pod-bridge-interface or detectLocal.bridgeInterface
f.conf:9: nodePortAddresses: "10.0.0.1" is not a network such as 192.0.2.0/24; use one, or primary, localhost or all
f.conf:5: iptables.masqueradeBit: 40 is out of range; use 0 to 31
--alive-timeout: 0s can't be used; give whole seconds from 1s to 1h
f.conf:11: logging.format: "klog" is not a format; use one of text, json`
	if d := cmp.Diff(strings.Split(want, "\n"), strings.Split(got.Error(), "\n")); d != "" {
		t.Errorf("problems (-want +got):\n%s", d)
	}
	if f.Locate(nil, none) != nil {
		t.Error("no problem became one")
	}
}

// A problem that a file causes is in the file, with a remedy that a file has.
func TestLocateWhatAFileCauses(t *testing.T) {
	for _, tt := range []struct{ text, want string }{
		{"iptables: {masqueradeBit: 12}\n", "f.conf:3: iptables.masqueradeBit: bit 12 is taken: 11 and 12 are those of --transparent-bit 12; choose another, such as 14"},
		{"mode: nftables\nnftables: {masqueradeBit: 11}\n", "f.conf:4: nftables.masqueradeBit: bit 11 is taken: 11 and 12 are those of --transparent-bit 12; choose another, such as 14"},
		{"metricsBindAddress: 0.0.0.0:10244\n", "f.conf:3: metricsBindAddress: 10244 is the port of --listen-tcp-port, kproxy's shared listener; choose another"},
		{"metricsBindAddress: 0.0.0.0:10256\n", "f.conf:3: metricsBindAddress: 0.0.0.0:10256 is taken by --healthz-bind-address 0.0.0.0:10256; choose another port"},
		{"healthzBindAddress: 0.0.0.0:10249\n", "f.conf:3: healthzBindAddress: 0.0.0.0:10249 is taken by --metrics-bind-address 127.0.0.1:10249; choose another port"},
		{"metricsBindAddress: 'localhost:10249'\n", `f.conf:3: metricsBindAddress: "localhost:10249" is not IP:PORT such as 127.0.0.1:10249 or [::1]:10249`},
		{"bindAddress: 224.0.0.1\n", "f.conf:3: bindAddress: 224.0.0.1 is no node's address; give one that other nodes reach this node at"},
		{"ipvs: {scheduler: Fair}\n", `f.conf:3: ipvs.scheduler: "Fair" is not the name of a scheduler; use rr, wlc or sed, for example`},
		{"clientConnection: {qps: 1e-46}\n", ""}, // the nearest float32 is 0, for kube-proxy too
		{"mode: kernelspace\nbindAddress: foo\n", "f.conf:3: mode: \"kernelspace\" is not a mode; use one of auto, userspace, iptables, ipvs, nftables\n" +
			"f.conf:4: bindAddress: \"foo\" is not an IP address such as 192.0.2.10 or 2001:db8::10"},
	} {
		f, err := Parse("f.conf", []byte(head+tt.text))
		if err != nil {
			t.Errorf("%q: %v", tt.text, err)
			continue
		}
		c := AsKubeProxy()
		f.Apply(&c)
		c.InCluster = true
		got := ""
		if err := f.Locate(c.Validate(), none); err != nil {
			got = err.Error()
		}
		if d := cmp.Diff(tt.want, got); d != "" {
			t.Errorf("%q: problems (-want +got):\n%s", tt.text, d)
		}
	}
	for _, huge := range []string{"1e300", ".nan", ".inf"} {
		if _, err := Parse("f.conf", []byte(head+"clientConnection: {qps: "+huge+"}\n")); err == nil || !strings.HasPrefix(err.Error(), "f.conf:") {
			t.Errorf("qps %s: got %v, want a mistake with its place", huge, err)
		}
	}
}

// kubeadm's file asks for kube-proxy's defaults, and gets them.
func TestKubeadm(t *testing.T) {
	f, err := Read("testdata/kubeadm.conf")
	if err != nil {
		t.Fatal(err)
	}
	c := AsKubeProxy()
	f.Apply(&c)
	want := AsKubeProxy()
	want.File, want.Kubeconfig = "testdata/kubeadm.conf", "/var/lib/kube-proxy/kubeconfig.conf"
	want.DetectLocalMode = "ClusterCIDR"
	want.ClusterCIDRs = []string{"10.244.0.0/16", "fd00:10:244::/56"}
	if d := cmp.Diff(want, c, cmpopts.EquateEmpty()); d != "" {
		t.Errorf("configuration (-want +got):\n%s", d)
	}
	if err := c.Validate(); err != nil {
		t.Errorf("it isn't valid: %v", err)
	}
	var asks []string
	for _, o := range f.Outcomes(c, none) {
		if o.Asks() {
			asks = append(asks, o.String())
		}
	}
	if d := cmp.Diff([]string{
		`bindAddress: "0.0.0.0": leaves --node-ip empty`,
		`clientConnection.kubeconfig: "/var/lib/kube-proxy/kubeconfig.conf": --kubeconfig=/var/lib/kube-proxy/kubeconfig.conf`,
		`clusterCIDR: "10.244.0.0/16,fd00:10:244::/56": --cluster-cidr=10.244.0.0/16,fd00:10:244::/56`,
	}, asks); d != "" {
		t.Errorf("fields that ask for something (-want +got):\n%s", d)
	}
}

func TestDefaultsDependOnOtherFields(t *testing.T) {
	for _, tt := range []struct{ name, text, part, want string }{
		{"metrics of an IPv6 node", "bindAddress: '::'\n", "metricsBindAddress", "[::1]:10249"},
		{"health of an IPv6 node", "bindAddress: 'fd00::1'\n", "healthzBindAddress", "[::]:10256"},
		{"no mode", "", "mode", "auto"},
		{"nftables", "mode: nftables\n", "mode", "nftables"},
		{"kproxy's own mode", "mode: userspace\n", "mode", "userspace"},
		{"nftables serves node ports on primary addresses", "mode: nftables\n", "nodePortAddresses", "primary"},
		{"nftables as asked", "mode: nftables\nnodePortAddresses: [all]\n", "nodePortAddresses", "all"},
		{"nftables doesn't serve on loopback", "mode: nftables\n", "localhostNodePorts", "false"},
		{"nor does ipvs", "mode: ipvs\n", "localhostNodePorts", "false"},
		{"unless asked", "mode: ipvs\niptables: {localhostNodePorts: true}\n", "localhostNodePorts", "true"},
		{"nftables has a bit of its own", "mode: nftables\niptables: {masqueradeBit: 3}\n", "iptablesMasqueradeBit", "14"},
		{"ipvs leaves its time-out", "mode: ipvs\n", "ipvs.tcpTimeout", "0"},
		{"who comes from iptables keeps idle connections", "mode: iptables\n", "ipvs.tcpTimeout", "conntrack"},
		{"verbosity none", "logging: {verbosity: 0}\n", "v", "info"},
	} {
		if got := apply(t, head+tt.text).texts()[tt.part]; got != tt.want {
			t.Errorf("%s: %s is %q, want %q", tt.name, tt.part, got, tt.want)
		}
	}
}

func TestOutcomes(t *testing.T) {
	f, err := Parse("f.conf", []byte(head+`udpIdleTimeout: 1s
mode: nftables
clientConnection: {kubeconfig: /k, qps: 7}
iptables:
  masqueradeBit: 3
  syncPeriod: 30s
  minSyncPeriod: 0s
nftables:
  masqueradeBit: 4
`))
	if err != nil {
		t.Fatal(err)
	}
	c := AsKubeProxy()
	f.Apply(&c)
	c.Client.QPS = 8
	var got []string
	for _, o := range f.Outcomes(c, func(flag string) bool { return flag == "manifests" || flag == "kube-api-qps" }) {
		got = append(got, o.String())
	}
	if d := cmp.Diff([]string{
		`udpIdleTimeout: "1s": ignored: ` + former[0].Ignored,
		`mode: "nftables": --mode=nftables`,
		`clientConnection.kubeconfig: "/k": ignored: --manifests is given`,
		`clientConnection.qps: 7: ignored: --kube-api-qps is given`,
		`iptables.masqueradeBit: 3: ignored: mode is "nftables"`,
		`iptables.syncPeriod: "30s": ignored: ` + whenChanged,
		`iptables.minSyncPeriod: "0s": asks for nothing`,
		`nftables.masqueradeBit: 4: --iptables-masquerade-bit=4`,
	}, got); d != "" {
		t.Errorf("outcomes (-want +got):\n%s", d)
	}
}

func TestChanges(t *testing.T) {
	a, b := AsKubeProxy(), AsKubeProxy()
	b.Mode, b.Verbosity, b.IPVS.UDPTimeout, b.ClusterCIDRs = "ipvs", "debug", time.Minute, []string{"10.0.0.0/8"}
	var got []string
	for _, c := range a.Changes(b) {
		line := c.String()
		if c.Live {
			line += " (live)"
		}
		got = append(got, line)
	}
	if d := cmp.Diff([]string{
		`clusterCIDR from "" to "10.0.0.0/8"`,
		`ipvs.udpTimeout from "0s" to "1m0s"`,
		`mode from "auto" to "ipvs"`,
		`v from "info" to "debug" (live)`,
	}, got); d != "" {
		t.Errorf("changes (-want +got):\n%s", d)
	}
	if got := a.Changes(a); len(got) > 0 {
		t.Errorf("nothing changed, but %v", got)
	}
	for _, part := range live {
		if _, ok := a.texts()[part]; !ok {
			t.Errorf("%s is taken over live, but no part of Config", part)
		}
	}
}

// A number that JSON doesn't hold hides no change.
func TestChangesBesidesWhatJSONCannotHold(t *testing.T) {
	a := AsKubeProxy()
	a.Client.QPS, a.Client.Burst = math.NaN(), 3_000_000
	b := a
	b.Client.Burst++
	b.Mode = "ipvs"
	if got := fmt.Sprint(a.Changes(b)); got != `[clientConnection.burst from "3000000" to "3000001" mode from "auto" to "ipvs"]` {
		t.Errorf("changes: %s", got)
	}
}

// The parts have the names and, but for lists, the values of /configz.
func TestPartsAreThoseOfJSON(t *testing.T) {
	c := AsKubeProxy()
	text, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	var object map[string]any
	if err := json.Unmarshal(text, &object); err != nil {
		t.Fatal(err)
	}
	want := map[string]string{}
	var visit func(prefix string, v any)
	visit = func(prefix string, v any) {
		switch v := v.(type) {
		case map[string]any:
			for name, v := range v {
				visit(strings.TrimPrefix(prefix+"."+name, "."), v)
			}
		case nil:
			want[prefix] = ""
		default:
			want[prefix] = fmt.Sprint(v)
		}
	}
	visit("", object)
	if d := cmp.Diff(want, c.texts()); d != "" {
		t.Errorf("parts (-JSON +parts):\n%s", d)
	}
}

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
