package config

import (
	"cmp"
	"fmt"
	"log/slog"
	"slices"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/kube-proxy/config/v1alpha1"
	"sigs.k8s.io/yaml"
)

const modeNFTables = "nftables"

// Apply sets in c what the file says, and for what it doesn't say kube-proxy's
// defaults, whatever c held. What the file has no fields for stays.
func (f *File) Apply(c *Config) {
	k := &f.kubeProxy
	c.File, c.Kubeconfig = f.Name, k.ClientConnection.Kubeconfig
	c.Client = Client{
		QPS:         decimalOf(cmp.Or(k.ClientConnection.QPS, 5)),
		Burst:       int(cmp.Or(k.ClientConnection.Burst, 10)),
		ContentType: cmp.Or(k.ClientConnection.ContentType, Protobuf),
	}
	c.Mode = ModeOf(string(k.Mode))
	c.Profiling = k.EnableProfiling
	c.LogFormat = cmp.Or(k.Logging.Format, LogFormats[0])
	if v := k.Logging.Verbosity; v != 0 {
		c.Verbosity = strconv.Itoa(int(v))
	}
	oom := int(deref(k.OOMScoreAdj, -999))
	c.OOMScoreAdj = &oom
	applyNode(k, c)
	applyServers(k, c)
	applyNodePorts(k, c)
	applyKernel(k, c)
}

func applyNode(k *v1alpha1.KubeProxyConfiguration, c *Config) {
	c.HostnameOverride = strings.ToLower(strings.TrimSpace(k.HostnameOverride))
	c.NodeIPs = nil
	if a, err := ParseAddr(k.BindAddress); k.BindAddress != "" && (err != nil || !a.IsUnspecified()) {
		c.NodeIPs = []string{k.BindAddress}
	}
	c.ClusterCIDRs = nil
	if k.ClusterCIDR != "" {
		for s := range strings.SplitSeq(k.ClusterCIDR, ",") {
			c.ClusterCIDRs = append(c.ClusterCIDRs, strings.TrimSpace(s))
		}
	}
	c.DetectLocalMode = cmp.Or(string(k.DetectLocalMode), DetectLocalModes[0])
	c.PodBridge, c.PodInterfacePrefix = k.DetectLocal.BridgeInterface, k.DetectLocal.InterfaceNamePrefix
}

func applyServers(k *v1alpha1.KubeProxyConfiguration, c *Config) {
	all, loopback := "0.0.0.0", "127.0.0.1"
	if a, err := ParseAddr(k.BindAddress); err == nil && a.Is6() {
		all, loopback = "::", "::1"
	}
	c.HealthzBindAddress = WithPort(cmp.Or(k.HealthzBindAddress, all), HealthzPort)
	c.MetricsBindAddress = WithPort(cmp.Or(k.MetricsBindAddress, loopback), MetricsPort)
}

func applyNodePorts(k *v1alpha1.KubeProxyConfiguration, c *Config) {
	c.NodePortAddresses = slices.Clone(k.NodePortAddresses)
	if len(c.NodePortAddresses) == 0 && k.Mode == modeNFTables {
		c.NodePortAddresses = []string{PrimaryAddresses}
	}
	c.LocalhostNodePorts = deref(k.IPTables.LocalhostNodePorts, k.Mode != "ipvs" && k.Mode != modeNFTables)
}

func applyKernel(k *v1alpha1.KubeProxyConfiguration, c *Config) {
	bit, all := k.IPTables.MasqueradeBit, k.IPTables.MasqueradeAll
	if k.Mode == modeNFTables {
		bit, all = k.NFTables.MasqueradeBit, k.NFTables.MasqueradeAll
	}
	c.MasqueradeBit, c.MasqueradeAll = int(deref(bit, 14)), all
	standard := AsKubeProxy().Conntrack
	c.Conntrack = Conntrack{
		MaxPerCore:     int(deref(k.Conntrack.MaxPerCore, int32(standard.MaxPerCore))),
		Min:            int(deref(k.Conntrack.Min, int32(standard.Min))),
		TCPEstablished: deref(k.Conntrack.TCPEstablishedTimeout, metav1.Duration{Duration: standard.TCPEstablished}).Duration,
		TCPCloseWait:   deref(k.Conntrack.TCPCloseWaitTimeout, metav1.Duration{Duration: standard.TCPCloseWait}).Duration,
		UDP:            k.Conntrack.UDPTimeout.Duration,
		UDPStream:      k.Conntrack.UDPStreamTimeout.Duration,
		TCPBeLiberal:   k.Conntrack.TCPBeLiberal,
	}
	c.IPVS = IPVS{
		Scheduler: k.IPVS.Scheduler, StrictARP: k.IPVS.StrictARP,
		TCPTimeout: ipvsTCPTimeout(k), TCPFinTimeout: k.IPVS.TCPFinTimeout.Duration, UDPTimeout: k.IPVS.UDPTimeout.Duration,
	}
}

// ipvsTCPTimeout reads ipvs.tcpTimeout. Every file has it, as 0s: kubeadm writes
// all fields. Who chose ipvs has lived with the kernel's 15 minutes. Who didn't
// is used to conntrack's, and would see idle connections break.
func ipvsTCPTimeout(k *v1alpha1.KubeProxyConfiguration) string {
	switch d := k.IPVS.TCPTimeout.Duration; {
	case d != 0:
		return d.String()
	case k.Mode == "ipvs":
		return "0"
	}
	return LikeConntrack
}

// KubeProxy returns c as a KubeProxyConfiguration in which everything is spelt
// out: for /configz, and to write a file to begin with. What kproxy ignores has
// kube-proxy's default; NotInFile says what of c it doesn't hold.
func (c Config) KubeProxy() v1alpha1.KubeProxyConfiguration {
	var k v1alpha1.KubeProxyConfiguration
	k.APIVersion, k.Kind = apiVersion, kind
	k.FeatureGates = map[string]bool{}
	k.ClientConnection.Kubeconfig, k.ClientConnection.ContentType = c.Kubeconfig, c.Client.ContentType
	k.ClientConnection.QPS, k.ClientConnection.Burst = float32(c.Client.QPS), int32(c.Client.Burst)
	k.Logging.Format, k.Logging.FlushFrequency.Duration = c.LogFormat, metav1.Duration{Duration: 5 * time.Second}
	k.Logging.FlushFrequency.SerializeAsString = true
	k.Logging.Verbosity = c.verbosity()
	k.HostnameOverride, k.BindAddress = c.HostnameOverride, "0.0.0.0"
	if len(c.NodeIPs) > 0 {
		k.BindAddress = c.NodeIPs[0]
	}
	k.HealthzBindAddress, k.MetricsBindAddress = c.HealthzBindAddress, c.MetricsBindAddress
	k.EnableProfiling, k.Mode = c.Profiling, v1alpha1.ProxyMode(c.Mode)
	k.DetectLocalMode = v1alpha1.LocalMode(cmp.Or(c.DetectLocalMode, DetectLocalModes[0]))
	k.DetectLocal.BridgeInterface, k.DetectLocal.InterfaceNamePrefix = c.PodBridge, c.PodInterfacePrefix
	k.ClusterCIDR, k.NodePortAddresses = strings.Join(c.ClusterCIDRs, ","), c.NodePortAddresses
	if c.OOMScoreAdj != nil {
		oom := int32(*c.OOMScoreAdj)
		k.OOMScoreAdj = &oom
	}
	k.ConfigSyncPeriod.Duration = 15 * time.Minute
	c.fillKernel(&k)
	return k
}

// KubeProxyYAML returns the same as a file's content.
func (c Config) KubeProxyYAML() ([]byte, error) { return yaml.Marshal(c.KubeProxy()) }

// fillKernel fills the sections about what is programmed.
func (c Config) fillKernel(k *v1alpha1.KubeProxyConfiguration) {
	bit, localhost := int32(c.MasqueradeBit), c.LocalhostNodePorts
	period, second := metav1.Duration{Duration: 30 * time.Second}, metav1.Duration{Duration: time.Second}
	k.IPTables = v1alpha1.KubeProxyIPTablesConfiguration{
		MasqueradeBit: &bit, MasqueradeAll: c.MasqueradeAll, LocalhostNodePorts: &localhost, SyncPeriod: period, MinSyncPeriod: second,
	}
	k.NFTables = v1alpha1.KubeProxyNFTablesConfiguration{MasqueradeBit: &bit, MasqueradeAll: c.MasqueradeAll, SyncPeriod: period, MinSyncPeriod: second}
	k.IPVS = v1alpha1.KubeProxyIPVSConfiguration{
		SyncPeriod: period, Scheduler: c.IPVS.Scheduler, StrictARP: c.IPVS.StrictARP,
		TCPTimeout:    metav1.Duration{Duration: c.IPVS.TCPTimeoutOf(c.Conntrack.TCPEstablished)},
		TCPFinTimeout: metav1.Duration{Duration: c.IPVS.TCPFinTimeout}, UDPTimeout: metav1.Duration{Duration: c.IPVS.UDPTimeout},
	}
	t := c.Conntrack
	most, least := int32(t.MaxPerCore), int32(t.Min)
	k.Conntrack = v1alpha1.KubeProxyConntrackConfiguration{
		MaxPerCore: &most, Min: &least, TCPBeLiberal: t.TCPBeLiberal,
		TCPEstablishedTimeout: &metav1.Duration{Duration: t.TCPEstablished},
		TCPCloseWaitTimeout:   &metav1.Duration{Duration: t.TCPCloseWait},
		UDPTimeout:            metav1.Duration{Duration: t.UDP},
		UDPStreamTimeout:      metav1.Duration{Duration: t.UDPStream},
	}
}

// verbosity is kube-proxy's number for -v; there is none for less than usual.
func (c Config) verbosity() logsapi.VerbosityLevel {
	if n, err := strconv.ParseUint(c.Verbosity, 10, 32); err == nil {
		return logsapi.VerbosityLevel(n)
	}
	if c.LogLevel() == slog.LevelDebug {
		return 4
	}
	return 0
}

func deref[T any](p *T, or T) T {
	if p == nil {
		return or
	}
	return *p
}

// decimalOf keeps 0.1 from becoming 0.10000000149011612.
func decimalOf(f float32) float64 {
	d, _ := strconv.ParseFloat(strconv.FormatFloat(float64(f), 'g', -1, 32), 64)
	return d
}

// Lost is a part of a Config that a KubeProxyConfiguration doesn't hold.
type Lost struct {
	Flag  string // that says it, beside the file
	Value string // in the Config
	Read  string // what the file makes of it
}

// String names the flag, what is lost, and what to do.
func (l Lost) String() string {
	if l.Flag == "oom-score-adj" { // without a value, which no flag says either
		return fmt.Sprintf("--oom-score-adj: no file can leave it as it is; this one makes it %s, unless the flag says otherwise", l.Read)
	}
	return fmt.Sprintf("--%s=%s: no such file can say so; with this one it is %q: give the flag beside it", l.Flag, l.Value, l.Read)
}

// NotInFile returns what is lost when c is written by KubeProxyYAML: it reads
// the file as `kproxy run --config` does, and compares.
func (c Config) NotInFile() ([]Lost, error) {
	text, err := c.KubeProxyYAML()
	if err != nil {
		return nil, err
	}
	f, err := Parse(c.File, text)
	if err != nil {
		return nil, fmt.Errorf("read what was written: %w", err)
	}
	back := AsKubeProxy()
	f.Apply(&back)
	back.InCluster = c.InCluster // that is where it runs, not what it says
	var out []Lost
	for _, change := range c.inForce().Changes(back.inForce()) {
		out = append(out, Lost{FlagOf(change.Part), change.From, change.To})
	}
	return out, nil
}

// inForce spells out what has several spellings for the same.
func (c Config) inForce() Config {
	c.Verbosity = strings.ToLower(c.LogLevel().String())
	c.DetectLocalMode = cmp.Or(c.DetectLocalMode, DetectLocalModes[0])
	c.Client.QPS, c.Client.Burst = cmp.Or(c.Client.QPS, 5), cmp.Or(c.Client.Burst, 10) // as client-go does
	established := c.Conntrack.TCPEstablished
	switch d, err := time.ParseDuration(c.IPVS.TCPTimeout); {
	case err == nil:
		c.IPVS.TCPTimeout = d.String()
	case established != 0:
		c.IPVS.TCPTimeout = c.IPVS.TCPTimeoutOf(established).String()
	}
	return c
}
