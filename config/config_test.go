package config

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"math"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"kproxy.dev/kproxy/service"
)

// valid is the smallest Config that can run.
func valid() Config {
	c := Default()
	c.Manifests = []string{"/etc/kproxy"}
	return c
}

func TestDefaultNeedsOnlyManifests(t *testing.T) {
	if err := valid().Validate(); err != nil {
		t.Errorf("the defaults with --manifests are not valid: %v", err)
	}
	err := Default().Validate()
	if err == nil || !strings.HasPrefix(err.Error(), "--manifests: there is nothing to serve") {
		t.Errorf("the defaults alone: got %v, want that there is nothing to serve", err)
	}
}

func TestValidate(t *testing.T) {
	tests := []struct {
		name string
		set  func(*Config)
		want string // prefixes of the lines, separated by newlines; empty means valid
	}{
		{"every mode", func(c *Config) { c.Mode = "ipvs" }, ""},
		{"unknown mode", func(c *Config) { c.Mode = "nft" }, `--mode: "nft" is not a mode; use one of auto,`},
		{"Kubernetes", func(c *Config) { c.Manifests, c.Kubeconfig = nil, "/k" }, ""},
		{"in a pod", func(c *Config) { c.Manifests, c.InCluster = nil, true }, ""},
		{"two sources", func(c *Config) { c.Kubeconfig = "/k" }, "--manifests: services come from files or from the Kubernetes API"},
		{"master", func(c *Config) { c.Manifests, c.Master = nil, "https:///api" }, "--master: \"https:///api\" is not a URL such as https://10.0.0.1:6443, nor HOST:PORT"},
		{"master with a path alone", func(c *Config) { c.Manifests, c.Master = nil, "10.0.0.1:6443/api" }, "--master: \"10.0.0.1:6443/api\" is not a URL"},
		{"master without a scheme", func(c *Config) { c.Manifests, c.Master = nil, "10.0.0.1:6443" }, ""},
		{"master's name without a scheme", func(c *Config) { c.Manifests, c.Master = nil, "localhost:8080" }, ""},
		{"leading zeros", func(c *Config) {
			c.NodeIPs, c.ClusterCIDRs, c.NodePortAddresses = []string{"010.0.0.1"}, []string{"010.0.0.0/8"}, []string{"192.000.002.0/24"}
		}, ""},
		{"config file", func(c *Config) { c.File = "/c" }, ""},
		{"client", func(c *Config) { c.Client = Client{QPS: -1, Burst: -1} }, "--kube-api-burst: -1 is out"},
		{"no limit of requests", func(c *Config) { c.Client.QPS = -1 }, ""},
		{"no number of requests", func(c *Config) { c.Client.QPS = math.NaN() }, "--kube-api-qps: NaN is no number of requests a second; use 5,"},
		{"endless requests", func(c *Config) { c.Client.QPS = math.Inf(-1) }, "--kube-api-qps: -Inf is no number"},
		{"more requests than client-go counts", func(c *Config) { c.Client = Client{QPS: 1e300, Burst: math.MaxInt32 + 1} }, "--kube-api-qps: 1e+300 is no number\n--kube-api-burst: 2147483648 is out"},
		{"less than client-go counts", func(c *Config) { c.Client.QPS = 1e-300 }, "--kube-api-qps: 1e-300 is no number"},
		{"empty manifest path", func(c *Config) { c.Manifests = []string{""} }, "--manifests: the path is empty"},
		{"node name", func(c *Config) { c.HostnameOverride = "node-1.example" }, ""},
		{"upper-case node name", func(c *Config) { c.HostnameOverride = "Node1" }, `--hostname-override: "Node1" is not a node name`},
		{"dual-stack node", func(c *Config) { c.NodeIPs = []string{"10.0.0.1", "fd00::1"} }, ""},
		{"two addresses of a family", func(c *Config) { c.NodeIPs = []string{"10.0.0.1", "10.0.0.2"} }, "--node-ip: 10.0.0.1 and 10.0.0.2 are both ipv4"},
		{"no address", func(c *Config) { c.NodeIPs = []string{"eth0", "0.0.0.0"} }, "--node-ip: \"eth0\" is not an IP\n--node-ip: 0.0.0.0 is no node's address; give one that other nodes reach this node at, or leave the flag out"},
		{"dual-stack pods", func(c *Config) { c.ClusterCIDRs = []string{"10.244.0.0/16", "fd00::/48"} }, ""},
		{"no network", func(c *Config) { c.ClusterCIDRs = []string{"10.244.0.0"} }, `--cluster-cidr: "10.244.0.0" is not a network`},
		{"a network of IPv4 as IPv6 maps it", func(c *Config) { c.ClusterCIDRs = []string{"::ffff:10.244.0.0/112"} }, `--cluster-cidr: "::ffff:10.244.0.0/112" is an IPv4 network as IPv6 maps it`},
		{"a node port network of IPv4 as IPv6 maps it", func(c *Config) { c.NodePortAddresses = []string{"::FFFF:0:0/90"} }, `--nodeport-addresses: "::FFFF:0:0/90" is an IPv4 network`},
		{"pods excluded", func(c *Config) { c.ExcludeClusterCIDRs = []string{"10.245.0.0/16", "10.246.0.0/16"} }, ""},
		{"networks of cluster IPs", func(c *Config) { c.ServiceCIDRs = []string{"10.96.0.0/12", "10.112.0.0/16", "fd00:96::/112"} }, ""},
		{"no network of cluster IPs", func(c *Config) { c.ServiceCIDRs = []string{"10.96.0.0"} }, `--service-cidr: "10.96.0.0" is not a network`},
		{"excluded nonsense", func(c *Config) { c.ExcludeClusterCIDRs = []string{"10.245"} }, `--exclude-cluster-cidr: "10.245" is not a network`},
		{"node port addresses", func(c *Config) {
			c.NodePortAddresses = []string{"192.0.2.0/24", "primary", "localhost", "all"}
		}, ""},
		{"node port address", func(c *Config) { c.NodePortAddresses = []string{"192.0.2.1"} }, `--nodeport-addresses: "192.0.2.1" is not a network`},
		{"node's pods", func(c *Config) { c.DetectLocalMode = "NodeCIDR" }, ""},
		{"bridge", func(c *Config) { c.DetectLocalMode, c.PodBridge = "BridgeInterface", "cni0" }, ""},
		{"bridge without a name", func(c *Config) { c.DetectLocalMode = "BridgeInterface" }, "--detect-local-mode: BridgeInterface needs"},
		{"prefix without a name", func(c *Config) { c.DetectLocalMode = "InterfaceNamePrefix" }, "--detect-local-mode: InterfaceNamePrefix needs"},
		{"no name of a link", func(c *Config) {
			c.PodBridge, c.PodInterfacePrefix = "a name with blanks", "sixteen-letters-"
		}, "--pod-bridge-interface: \"a name with blanks\" is no\n--pod-interface-name-prefix: \"sixteen-letters-\" is no"},
		{"unknown detector", func(c *Config) { c.DetectLocalMode = "Guess" }, `--detect-local-mode: "Guess" is not`},
		{"bits out of range", func(c *Config) { c.MasqueradeBit, c.TransparentBit = 32, -1 }, "--iptables-masquerade-bit: 32 is out\n--transparent-bit: -1 is out"},
		{"one bit for both", func(c *Config) { c.TransparentBit = c.MasqueradeBit }, "--transparent-bit: bit 14 and the one below are used"},
		{"bit below is the masquerade bit", func(c *Config) { c.TransparentBit = 15 }, "--transparent-bit: bit 15 and the one below are used, and bit 14 is --iptables-masquerade-bit"},
		{"bit without one below", func(c *Config) { c.TransparentBit = 0 }, "--transparent-bit: 0 is out"},
		{"masquerade bit is one of the others", func(c *Config) { c.MasqueradeBit = 11 }, "--iptables-masquerade-bit: bit 11 is taken: 11 and 12 are those of --transparent-bit 12; choose another, such as 14"},
		{"main table", func(c *Config) { c.RouteTable = 254 }, "--route-table: 254 is one of the system's"},
		{"offload at once", func(c *Config) { c.OffloadAfter, c.OffloadMinConnections = 0, 0 }, ""},
		{"negative offload", func(c *Config) { c.OffloadAfter, c.OffloadMinConnections = -1, -1 }, "--offload-after: -1ns is\n--offload-min-connections: -1 is"},
		{"fraction of a second", func(c *Config) { c.AliveTimeout = 1500 * time.Millisecond }, "--alive-timeout: 1.5s can't be used"},
		{"no alive time-out", func(c *Config) { c.AliveTimeout = 0 }, "--alive-timeout: 0s can't be used"},
		{"no drain", func(c *Config) { c.DrainTimeout = 0 }, ""},
		{"negative drain", func(c *Config) { c.DrainTimeout = -time.Second }, "--drain-timeout: -1s is negative"},
		{"unknown check", func(c *Config) { c.Health.Check = "icmp" }, `--health-check: "icmp" is not a check`},
		{"overlapping probes", func(c *Config) { c.Health.Timeout = 3 * time.Second }, "--health-timeout: 3s is longer than --health-interval 2s"},
		{"no rise and fall", func(c *Config) { c.Health.Rise, c.Health.Fall = 0, 101 }, "--health-rise: 0 is out\n--health-fall: 101 is out"},
		{"probes too often", func(c *Config) { c.Health.Interval, c.Health.Timeout = time.Millisecond, 0 }, "--health-interval: 1ms is out\n--health-timeout: 0s is not"},
		{"IPVS as kube-proxy has it", func(c *Config) {
			c.IPVS = IPVS{Scheduler: "wlc", StrictARP: true, TCPTimeout: "0", TCPFinTimeout: 2 * time.Minute, UDPTimeout: 5 * time.Minute}
		}, ""},
		{"no scheduler", func(c *Config) { c.IPVS.Scheduler = "Least connections" }, `--ipvs-scheduler: "Least connections" is not the name`},
		{"long scheduler", func(c *Config) { c.IPVS.Scheduler = "sixteen-letters-" }, `--ipvs-scheduler: "sixteen-letters-" is not the name`},
		{"no duration", func(c *Config) { c.IPVS.TCPTimeout = "900" }, `--ipvs-tcp-timeout: "900" is no duration; use 15m, for example, conntrack for`},
		{"no duration at all", func(c *Config) { c.IPVS.TCPTimeout = "" }, `--ipvs-tcp-timeout: "" is no duration`},
		{"negative IPVS time-outs", func(c *Config) {
			c.IPVS.TCPTimeout, c.IPVS.TCPFinTimeout, c.IPVS.UDPTimeout = "-1s", -1, -time.Hour
		}, "--ipvs-tcp-timeout: -1s is out of range\n--ipvs-tcpfin-timeout: -1ns is out of range\n--ipvs-udp-timeout: -1h0m0s is out of range"},
		{"longest IPVS time-out", func(c *Config) { c.IPVS.TCPTimeout, c.IPVS.UDPTimeout = "2147483s", maxKernelTimeout+time.Second }, "--ipvs-udp-timeout: 596h31m24s is out of range; use up to 596h31m23s"},
		{"parts of a second", func(c *Config) { c.IPVS.TCPTimeout, c.IPVS.TCPFinTimeout = "1500ms", time.Millisecond }, "--ipvs-tcp-timeout: 1.5s can't be used; the kernel counts whole seconds\n--ipvs-tcpfin-timeout: 1ms can't be used"},
		{"conntrack as kube-proxy has it", func(c *Config) { c.Conntrack = AsKubeProxy().Conntrack }, ""},
		{"conntrack", func(c *Config) {
			c.Conntrack = Conntrack{MaxPerCore: -1, Min: -1, TCPEstablished: -1, UDP: time.Millisecond}
		}, "--conntrack-max-per-core: -1 is out\n--conntrack-min: -1 is out\n--conntrack-tcp-timeout-established: -1ns is out\n--conntrack-udp-timeout: 1ms can't be used"},
		{"unkillable", func(c *Config) { oom := -1001; c.OOMScoreAdj = &oom }, "--oom-score-adj: -1001 is out"},
		{"no servers", func(c *Config) { c.MetricsBindAddress, c.HealthzBindAddress = "", "" }, ""},
		{"port alone", func(c *Config) { c.MetricsBindAddress = ":10249" }, `--metrics-bind-address: ":10249" is not IP:PORT such as 127.0.0.1:10249 or [::1]:10249; leave it empty to serve nothing there`},
		{"one address for both", func(c *Config) { c.HealthzBindAddress = "0.0.0.0:10249" }, "--healthz-bind-address: 0.0.0.0:10249 is taken by --metrics-bind-address"},
		{"both families at once", func(c *Config) { c.HealthzBindAddress = "[::]:10249" }, "--healthz-bind-address: [::]:10249 is taken"},
		{"same port, other address", func(c *Config) { c.HealthzBindAddress = "127.0.0.2:10249" }, ""},
		{"listener on a server's port", func(c *Config) { c.ListenTCPPort = 10256 }, "--listen-tcp-port: 10256 is the port of --healthz-bind-address"},
		{"server on the listener's port", func(c *Config) { c.HealthzBindAddress = "0.0.0.0:10244" }, "--healthz-bind-address: 10244 is the port of --listen-tcp-port"},
		{"metrics on the port for health", func(c *Config) { c.MetricsBindAddress = "127.0.0.1:10256" }, "--metrics-bind-address: 127.0.0.1:10256 is taken by --healthz-bind-address 0.0.0.0:10256; choose another port"},
		{"no number of series", func(c *Config) { c.MetricsServices = -1 }, "--metrics-service-limit: -1 is out"},
		{"too many series", func(c *Config) { c.MetricsEndpoints = 2e6 }, "--metrics-endpoint-limit: 2000000 is out"},
		{"port out of range", func(c *Config) { c.ListenUDPPort = 70000 }, "--listen-udp-port: 70000 is out"},
		{"relative paths", func(c *Config) { c.Socket, c.StateDir = "s", "" }, "--socket: \"s\" is not\n--state-dir: \"\" is not"},
		{"long socket", func(c *Config) { c.Socket = "/" + strings.Repeat("x", 107) }, "--socket: the path has 108 bytes"},
		{"no URL", func(c *Config) { c.GrafanaURL = "grafana.example" }, `--grafana-url: "grafana.example" is not a URL such as`},
		{"log", func(c *Config) { c.LogFormat, c.Verbosity = "logfmt", "loud" }, "--log-format: \"logfmt\" is not\n-v: \"loud\" is not"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := valid()
			tt.set(&c)
			var got, want []string
			if err := c.Validate(); err != nil {
				got = strings.Split(err.Error(), "\n")
			}
			if tt.want != "" {
				want = strings.Split(tt.want, "\n")
			}
			prefix := cmp.Comparer(func(a, b string) bool { return strings.HasPrefix(a, b) || strings.HasPrefix(b, a) })
			if d := cmp.Diff(want, got, prefix, cmpopts.EquateEmpty()); d != "" {
				t.Errorf("problems (-want +got):\n%s", d)
			}
		})
	}
}

func TestHealthCheckDependsOnSource(t *testing.T) {
	c := valid()
	if got := c.HealthCheck(); got != service.CheckTCP {
		t.Errorf("manifests: got %q, want tcp", got)
	}
	c.Manifests, c.InCluster = nil, true
	if got := c.HealthCheck(); got != service.CheckOff {
		t.Errorf("Kubernetes: got %q, want off", got)
	}
	c.Health.Check = service.CheckHTTP
	if got := c.HealthCheck(); got != service.CheckHTTP {
		t.Errorf("chosen: got %q, want http", got)
	}
}

func TestIPVSTCPTimeout(t *testing.T) {
	for _, tt := range []struct {
		flag      string
		conntrack time.Duration
		want      time.Duration
	}{
		{Default().IPVS.TCPTimeout, 5 * 24 * time.Hour, 5 * 24 * time.Hour},
		{LikeConntrack, 365 * 24 * time.Hour, maxKernelTimeout},
		{LikeConntrack, 0, 0}, // it isn't known
		{"15m", time.Hour, 15 * time.Minute},
		{"0", time.Hour, 0},
	} {
		if got := (IPVS{TCPTimeout: tt.flag}).TCPTimeoutOf(tt.conntrack); got != tt.want {
			t.Errorf("%q with conntrack's %s: %s, want %s", tt.flag, tt.conntrack, got, tt.want)
		}
	}
}

func TestParsedForms(t *testing.T) {
	c := valid()
	c.NodeIPs = []string{"010.0.0.1", "bad", "fd00::1"}
	c.ClusterCIDRs = []string{"10.244.3.0/16", "bad"}
	opt := cmpopts.EquateComparable(netip.Addr{}, netip.Prefix{})
	if d := cmp.Diff([]netip.Addr{netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")}, c.NodeAddresses(), opt); d != "" {
		t.Errorf("node addresses (-want +got):\n%s", d)
	}
	if d := cmp.Diff([]netip.Prefix{netip.MustParsePrefix("10.244.0.0/16")}, c.PodNetworks(), opt); d != "" {
		t.Errorf("pod networks (-want +got):\n%s", d)
	}
	c.ExcludeClusterCIDRs = []string{"10.245.0.0/16", "10.246.0.0/16"}
	if got := c.ExcludedNetworks(); len(got) != 2 || got[1] != netip.MustParsePrefix("10.246.0.0/16") {
		t.Errorf("excluded networks: %v", got)
	}
	if c.MasqueradeMark() != 0x4000 || c.TransparentMark() != 0x1000 {
		t.Errorf("marks: got %#x and %#x, want 0x4000 and 0x1000", c.MasqueradeMark(), c.TransparentMark())
	}
}

func TestNodePortNetworks(t *testing.T) {
	for _, tt := range []struct {
		flag     []string
		networks string
		primary  bool
	}{
		{nil, "[]", false},
		{[]string{"192.0.2.9/24", "2001:db8::/64"}, "[192.0.2.0/24 2001:db8::/64]", false},
		{[]string{"primary"}, "[]", true},
		{[]string{"010.0.0.0/8"}, "[10.0.0.0/8]", false},
		{[]string{"localhost", "primary", "192.0.2.0/24"}, "[127.0.0.0/8 ::1/128 192.0.2.0/24]", true},
		{[]string{"all"}, "[0.0.0.0/0 ::/0]", false},
	} {
		networks, primary := Config{NodePortAddresses: tt.flag}.NodePortNetworks()
		if got := fmt.Sprint(networks); got != tt.networks || primary != tt.primary {
			t.Errorf("%q: got %s, primary %t, want %s, primary %t", tt.flag, got, primary, tt.networks, tt.primary)
		}
	}
}

func TestLogLevel(t *testing.T) {
	for v, want := range map[string]slog.Level{
		"debug": slog.LevelDebug, "INFO": slog.LevelInfo, "warn": slog.LevelWarn, "error": slog.LevelError,
		"0": slog.LevelInfo, "2": slog.LevelInfo, "4": slog.LevelDebug, "10": slog.LevelDebug,
	} {
		c := valid()
		c.Verbosity = v
		if got := c.LogLevel(); got != want || c.Validate() != nil {
			t.Errorf("-v %s: got %s (%v), want %s", v, got, c.Validate(), want)
		}
	}
	for _, v := range []string{"info+2", "debuging", "-1"} {
		c := valid()
		if c.Verbosity = v; c.Validate() == nil {
			t.Errorf("-v %s is taken", v)
		}
	}
}

func TestJSONShowsEveryFieldReadably(t *testing.T) {
	b, err := json.Marshal(valid())
	if err != nil {
		t.Fatal(err)
	}
	var got map[string]any
	if err := json.Unmarshal(b, &got); err != nil {
		t.Fatal(err)
	}
	if got["offloadAfter"] != "10s" || got["drainTimeout"] != "30s" || got["aliveTimeout"] != "3s" {
		t.Errorf("durations are not readable: %s", b)
	}
	if i := got["ipvs"].(map[string]any); i["tcpTimeout"] != "conntrack" || i["udpTimeout"] != "0s" || i["strictARP"] != false {
		t.Errorf("ipvs is not readable: %v", i)
	}
	if h := got["health"].(map[string]any); h["interval"] != "2s" || h["timeout"] != "1s" || h["rise"] != 2.0 {
		t.Errorf("health is not readable: %v", h)
	}
}

// Whatever a file holds, it is a mistake with its place, or a configuration that
// can be judged, explained, and written as a file that is read again as the same.
func FuzzParse(f *testing.F) {
	kubeadm, err := os.ReadFile("testdata/kubeadm.conf")
	if err != nil {
		f.Fatal(err)
	}
	f.Add(string(kubeadm))
	f.Add(head + "mode: nftables\nnftables: {masqueradeBit: 4}\nnodePortAddresses: [primary, localhost]\n")
	f.Add(head + "conntrack: {max: 1, maxPerCore: -1, tcpEstablishedTimeout: 1.5s}\nudpIdleTimeout: 1s\n")
	f.Add(head + "bindAddress: 'fe80::1%eth0'\nhealthzBindAddress: '[::1]'\nclusterCIDR: ' ,'\n")
	f.Add(head + "clientConnection: {qps: -0.5, burst: 2147483647}\nlogging: {verbosity: 4294967295, vmodule: [{filePattern: a, verbosity: 1}]}\n")
	f.Add(head + "iptables: &x {syncPeriod: 2562047h47m16s}\nipvs: {<<: *x}\n")
	f.Fuzz(func(t *testing.T, text string) {
		file, err := Parse("f.conf", []byte(text))
		if err != nil {
			if !strings.HasPrefix(err.Error(), "f.conf:") {
				t.Errorf("no place in %q: %q", err, text)
			}
			return
		}
		c := AsKubeProxy()
		file.Apply(&c)
		c.InCluster = c.Kubeconfig == ""
		for _, o := range file.Outcomes(c, none) {
			if o.Line < 1 || o.String() == "" {
				t.Errorf("outcome %+v of %q", o, text)
			}
		}
		if file.Locate(c.Validate(), none) != nil {
			return
		}
		out, err := c.KubeProxyYAML()
		if err != nil {
			t.Fatal(err)
		}
		if _, err := Parse("g.conf", out); err != nil {
			t.Errorf("what was written can't be read: %v\nfrom %q", err, text)
		}
		if lost, err := c.NotInFile(); err != nil || len(lost) > 0 {
			t.Errorf("what a file said is lost in one that is written: %v, %v\nfrom %q", lost, err, text)
		}
	})
}
