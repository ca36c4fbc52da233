package config

import (
	"cmp"
	"fmt"
	"log/slog"
	"reflect"
	"strconv"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	logsapi "k8s.io/component-base/logs/api/v1"
	"k8s.io/kube-proxy/config/v1alpha1"
	"sigs.k8s.io/yaml"

	"kproxy.dev/kproxy/source"
)

const modeNFTables = "nftables"

// Apply sets in c what the file says, and for what it doesn't say kube-proxy's
// defaults, whatever c held. What the file has no fields for stays.
func (f *File) Apply(c *Config) {
	k, standard := &f.kubeProxy, AsKubeProxy()
	standard.DetectLocalMode = DetectLocalModes[0]
	for _, field := range fields {
		if field.Sets == "" || !f.isIn(field) {
			continue
		}
		to := fieldOf(reflect.ValueOf(c).Elem(), field.Sets)
		to.Set(fieldOf(reflect.ValueOf(&standard).Elem(), field.Sets))
		if from := fieldOf(reflect.ValueOf(k).Elem(), field.Path); !from.IsZero() {
			convert(to, from)
		}
	}
	c.File, c.Mode = f.Name, ModeOf(string(k.Mode))
	c.HostnameOverride = strings.ToLower(strings.TrimSpace(k.HostnameOverride))
	all, loopback := "0.0.0.0", "127.0.0.1"
	a, err := source.ParseAddr(k.BindAddress)
	if c.NodeIPs = nil; k.BindAddress != "" && !a.IsUnspecified() {
		c.NodeIPs = []string{k.BindAddress}
	}
	if err == nil && a.Is6() {
		all, loopback = "::", "::1"
	}
	c.HealthzBindAddress = WithPort(cmp.Or(k.HealthzBindAddress, all), HealthzPort)
	c.MetricsBindAddress = WithPort(cmp.Or(k.MetricsBindAddress, loopback), MetricsPort)
	if len(k.NodePortAddresses) == 0 && k.Mode == modeNFTables {
		c.NodePortAddresses = []string{PrimaryAddresses}
	}
	if k.IPTables.LocalhostNodePorts == nil {
		c.LocalhostNodePorts = k.Mode != "ipvs" && k.Mode != modeNFTables
	}
	// Every file has ipvs.tcpTimeout, as 0s: kubeadm writes all fields. A user of ipvs has had
	// the kernel's 15 minutes. One of another mode has had conntrack's, and would see idle
	// connections break.
	if k.IPVS.TCPTimeout.Duration == 0 && k.Mode == "ipvs" {
		c.IPVS.TCPTimeout = "0"
	}
}

// fieldOf finds a field of a struct by its names in JSON.
func fieldOf(v reflect.Value, path string) reflect.Value {
	first, rest, more := strings.Cut(path, ".")
	for f, field := range v.Fields() {
		switch name, _, _ := strings.Cut(f.Tag.Get("json"), ","); {
		case name == first && more:
			return fieldOf(field, rest)
		case name == first:
			return field
		}
	}
	return reflect.Value{} // a test knows that every path of the table is there
}

// convert sets to to from's value, where Config and KubeProxyConfiguration have types that
// stand for the same; where they have none, it leaves to as it is.
func convert(to, from reflect.Value) {
	if from = reflect.Indirect(from); !from.IsValid() {
		return
	}
	if d, ok := from.Interface().(metav1.Duration); ok {
		from = reflect.ValueOf(d.Duration)
	}
	if to.Kind() == reflect.Pointer {
		to.Set(reflect.New(to.Type().Elem()))
		to = to.Elem()
	}
	switch {
	case from.Kind() == reflect.String && to.Kind() == reflect.Slice:
		for s := range strings.SplitSeq(from.String(), ",") {
			to.Set(reflect.Append(to, reflect.ValueOf(strings.TrimSpace(s))))
		}
	case from.Kind() == reflect.Slice && to.Kind() == reflect.String:
		to.SetString(strings.Join(from.Interface().([]string), ","))
	case to.Kind() == reflect.String:
		to.SetString(fmt.Sprint(from.Interface()))
	case from.Kind() == reflect.Float32: // or 0.1 became 0.10000000149011612
		decimal, _ := strconv.ParseFloat(fmt.Sprint(from.Interface()), 64)
		to.SetFloat(decimal)
	case to.Type() == reflect.TypeFor[metav1.Duration]() && from.CanInt():
		to.Set(reflect.ValueOf(metav1.Duration{Duration: time.Duration(from.Int())}))
	case from.CanConvert(to.Type()):
		to.Set(from.Convert(to.Type()))
	}
}

// KubeProxy returns c as a KubeProxyConfiguration in which everything is spelt
// out: for /configz, and to write a file to begin with. What kproxy ignores has
// kube-proxy's default; NotInFile says what of c it doesn't hold.
func (c Config) KubeProxy() v1alpha1.KubeProxyConfiguration {
	var k v1alpha1.KubeProxyConfiguration
	k.APIVersion, k.Kind = apiVersion, kind
	k.FeatureGates = map[string]bool{}
	k.Logging.FlushFrequency.Duration.Duration = 5 * time.Second
	k.Logging.FlushFrequency.SerializeAsString = true
	k.ConfigSyncPeriod.Duration = 15 * time.Minute
	for _, period := range []*metav1.Duration{&k.IPTables.SyncPeriod, &k.NFTables.SyncPeriod, &k.IPVS.SyncPeriod} {
		period.Duration = 30 * time.Second
	}
	k.IPTables.MinSyncPeriod.Duration, k.NFTables.MinSyncPeriod.Duration = time.Second, time.Second
	for _, field := range fields {
		if field.Sets != "" {
			convert(fieldOf(reflect.ValueOf(&k).Elem(), field.Path), fieldOf(reflect.ValueOf(c), field.Sets))
		}
	}
	k.BindAddress = "0.0.0.0"
	if len(c.NodeIPs) > 0 {
		k.BindAddress = c.NodeIPs[0]
	}
	k.Logging.Verbosity = c.verbosity()
	k.DetectLocalMode = cmp.Or(k.DetectLocalMode, v1alpha1.LocalMode(DetectLocalModes[0]))
	k.IPVS.TCPTimeout.Duration = c.IPVS.TCPTimeoutOf(c.Conntrack.TCPEstablished)
	return k
}

// KubeProxyYAML returns the same as a file's content.
func (c Config) KubeProxyYAML() ([]byte, error) { return yaml.Marshal(c.KubeProxy()) }

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
