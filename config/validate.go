package config

import (
	"errors"
	"fmt"
	"math"
	"net/netip"
	"net/url"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/util/validation"

	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/source"
	"kproxy.dev/kproxy/source/strict"
)

var checks = []func(*problems, Config){
	checkMode, checkSources, checkNode, checkNetworks, checkMarks,
	checkOffload, checkHealth, checkIPVS, checkAddresses, checkPaths, checkGrafana, checkLog,
}

// numbers are the least and the greatest value of flags that take a number.
var numbers = map[string][2]int{
	"kube-api-burst":          {0, math.MaxInt32},
	"iptables-masquerade-bit": {0, 31},
	"transparent-bit":         {1, 31},
	"route-table":             {1, math.MaxInt32},
	"health-rise":             {1, 100},
	"health-fall":             {1, 100},
	"health-max-rate":         {1, 100_000},
	"conntrack-max-per-core":  {0, math.MaxInt32},
	"conntrack-min":           {0, math.MaxInt32},
	"listen-tcp-port":         {0, 65535},
	"listen-udp-port":         {0, 65535},
	"metrics-service-limit":   {0, maxMetricsLimit},
	"metrics-endpoint-limit":  {0, maxMetricsLimit},
	"oom-score-adj":           {-1000, 1000},
}

// kernelTimeouts are the flags of the kernel's time-outs, in whole seconds.
var kernelTimeouts = []string{
	"conntrack-tcp-timeout-established", "conntrack-tcp-timeout-close-wait", "conntrack-udp-timeout", "conntrack-udp-timeout-stream",
	"ipvs-tcpfin-timeout", "ipvs-udp-timeout",
}

// Validate reports every problem, joined, each a [Problem] that names the flag and
// the remedy.
// It doesn't look at the host: whether files exist and ports are free shows
// when they are opened.
func (c Config) Validate() error {
	var found problems
	values := reflect.ValueOf(c)
	for _, part := range parts() {
		v := reflect.Indirect(values.FieldByIndex(part.index))
		if limits, ok := numbers[part.flag]; ok && v.IsValid() && (int(v.Int()) < limits[0] || int(v.Int()) > limits[1]) {
			found.add(part.flag, "%d is out of range; use %d to %d", v.Int(), limits[0], limits[1])
		}
		if slices.Contains(kernelTimeouts, part.flag) {
			found.kernelTimeout(part.flag, time.Duration(v.Int()))
		}
	}
	for _, check := range checks {
		check(&found, c)
	}
	var all []error
	for _, part := range parts() { // in the order of the flags
		for _, p := range found {
			if p.Flag == part.flag {
				all = append(all, p)
			}
		}
	}
	return errors.Join(all...)
}

// Problem is one of those that Validate reports.
type Problem struct {
	Flag string // without its dashes
	What string // is wrong with its value, and the remedy
	// Or is a further remedy, of the flag alone: the field of a file that sets the
	// same hasn't it.
	Or string
}

// Error returns "--flag: what".
func (p *Problem) Error() string {
	dashes := "--"
	if len(p.Flag) == 1 {
		dashes = "-"
	}
	return dashes + p.Flag + ": " + p.What + p.Or
}

// problems collects findings.
type problems []*Problem

func (p *problems) add(flag, format string, args ...any) *Problem {
	found := &Problem{Flag: flag, What: fmt.Sprintf(format, args...)}
	*p = append(*p, found)
	return found
}

func checkMode(p *problems, c Config) {
	if !slices.Contains(Modes, c.Mode) {
		p.add("mode", "%q is not a mode; use one of %s%s", c.Mode, strings.Join(Modes, ", "), strict.DidYouMean(c.Mode, Modes...))
	}
}

func checkSources(p *problems, c Config) {
	if c.Master != "" && !isServer(c.Master) {
		p.add("master", "%q is not a URL such as https://10.0.0.1:6443, nor HOST:PORT", c.Master)
	}
	switch {
	case len(c.Manifests) > 0 && c.Kubernetes():
		p.add("manifests", "services come from files or from the Kubernetes API (--kubeconfig, --master, clientConnection.kubeconfig), not from both; remove one")
	case len(c.Manifests) == 0 && !c.Kubernetes():
		p.add("manifests", "there is nothing to serve; name a file or directory with Services and EndpointSlices, or the Kubernetes API with --kubeconfig FILE")
	}
	for _, m := range c.Manifests {
		if m == "" {
			p.add("manifests", "the path is empty; name a file or directory")
		}
	}
	// Numbers that client-go's types don't hold. Negative requests a second are no limit there.
	qps := float32(c.Client.QPS)
	if math.IsNaN(c.Client.QPS) || math.IsInf(float64(qps), 0) || qps == 0 && c.Client.QPS != 0 {
		p.add("kube-api-qps", "%v is no number of requests a second; use 5, for example, or -1 for no limit", c.Client.QPS)
	}
}

// isServer reports whether client-go (rest.DefaultServerURL) takes s for a
// server: a URL, or a host with or without a port, which it puts the scheme before.
func isServer(s string) bool {
	if u, err := url.Parse(s); err == nil && u.Scheme != "" && u.Host != "" {
		return true
	}
	u, err := url.Parse("http://" + s)
	return err == nil && u.Host != "" && (u.Path == "" || u.Path == "/")
}

func checkNode(p *problems, c Config) {
	if h := c.HostnameOverride; h != "" && len(validation.IsDNS1123Subdomain(h)) > 0 {
		p.add("hostname-override", "%q is not a node name; use lower-case letters, digits, '-' and '.', at most 253 of them", h)
	}
	var seen [2]string
	for _, s := range c.NodeIPs {
		a, err := source.ParseAddr(s)
		if err != nil {
			p.add("node-ip", "%q is not an IP address such as 192.0.2.10 or 2001:db8::10", s)
			continue
		}
		if a.IsUnspecified() || a.IsMulticast() {
			p.add("node-ip", "%s is no node's address; give one that other nodes reach this node at", s).Or = ", or leave the flag out"
		}
		p.once("node-ip", &seen, service.FamilyOf(a), s)
	}
}

// once reports a second value of a family.
func (p *problems) once(flag string, seen *[2]string, f service.Family, s string) {
	if seen[f] != "" {
		p.add(flag, "%s and %s are both %s; give at most one per family", seen[f], s, f)
		return
	}
	seen[f] = s
}

func checkNetworks(p *problems, c Config) {
	const networks = "10.244.0.0/16 or fd00:244::/56"
	var seen [2]string
	for _, s := range c.ClusterCIDRs {
		if n, ok := p.network("cluster-cidr", s, networks); ok {
			p.once("cluster-cidr", &seen, service.FamilyOf(n.Addr()), s)
		}
	}
	for _, s := range c.ExcludeClusterCIDRs {
		p.network("exclude-cluster-cidr", s, networks)
	}
	for _, s := range c.ServiceCIDRs {
		p.network("service-cidr", s, "10.96.0.0/12 or fd00:96::/112")
	}
	for _, s := range c.NodePortAddresses {
		if _, word := nodePortWords[s]; word || s == PrimaryAddresses {
			continue
		}
		p.network("nodeport-addresses", s, "192.0.2.0/24; use one, or primary, localhost or all")
	}
	checkDetector(p, c)
}

func checkDetector(p *problems, c Config) {
	p.linkName("pod-bridge-interface", c.PodBridge)
	p.linkName("pod-interface-name-prefix", c.PodInterfacePrefix)
	switch c.DetectLocalMode {
	case "", "ClusterCIDR", "NodeCIDR":
	case "BridgeInterface":
		if c.PodBridge == "" {
			p.add("detect-local-mode", "BridgeInterface needs the name of the bridge that pods are at; give it, cni0 for example, with --pod-bridge-interface or detectLocal.bridgeInterface")
		}
	case "InterfaceNamePrefix":
		if c.PodInterfacePrefix == "" {
			p.add("detect-local-mode", "InterfaceNamePrefix needs what the names of pods' interfaces begin with; give it, veth for example, with --pod-interface-name-prefix or detectLocal.interfaceNamePrefix")
		}
	default:
		p.add("detect-local-mode", "%q is not a mode; use one of %s", c.DetectLocalMode, strings.Join(DetectLocalModes, ", "))
	}
}

// linkName checks what an interface may be called (dev_valid_name in
// net/core/dev.c; IFNAMSIZ is 16 with the terminating NUL).
func (p *problems) linkName(flag, s string) {
	if len(s) > 15 || s == "." || s == ".." || strings.ContainsAny(s, "/: \t\n\v\f\r") {
		p.add(flag, "%q is no name of an interface; it has at most 15 bytes, none of them a blank, / or :", s)
	}
}

func (p *problems) network(flag, s, example string) (netip.Prefix, bool) {
	n, err := source.ParsePrefix(s)
	if err != nil {
		p.add(flag, "%q is not a network such as %s", s, example)
	} else if mapped, _ := netip.ParsePrefix(strings.TrimSpace(s)); mapped.Addr().Is4In6() {
		p.add(flag, "%q is an IPv4 network as IPv6 maps it; write it as IPv4, such as 192.0.2.0/24", s)
		return n, false
	}
	return n, err == nil
}

func checkMarks(p *problems, c Config) {
	switch {
	case c.MasqueradeBit != c.TransparentBit && c.MasqueradeBit != c.TransparentBit-1:
	case c.TransparentBit == Default().TransparentBit: // it is the other that was chosen
		p.add("iptables-masquerade-bit", "bit %d is taken: %d and %d are those of --transparent-bit %d; choose another, such as 14",
			c.MasqueradeBit, c.TransparentBit-1, c.TransparentBit, c.TransparentBit)
	default:
		p.add("transparent-bit", "bit %d and the one below are used, and bit %d is --iptables-masquerade-bit; choose another",
			c.TransparentBit, c.MasqueradeBit)
	}
	if c.RouteTable >= 253 && c.RouteTable <= 255 {
		// rt_tables: default, main, local.
		p.add("route-table", "%d is one of the system's own tables (253-255); choose another, such as 10249", c.RouteTable)
	}
}

func checkOffload(p *problems, c Config) {
	if c.OffloadAfter < 0 {
		p.add("offload-after", "%s is negative; use 0s to offload at once", c.OffloadAfter)
	}
	if c.OffloadMinConnections < 0 {
		p.add("offload-min-connections", "%d is negative; use 0 to offload before the first connection", c.OffloadMinConnections)
	}
	// ipset timeouts are whole seconds, at most 2147483 (ipset(8)); an hour is
	// already far beyond what clients wait for.
	if c.AliveTimeout < time.Second || c.AliveTimeout > time.Hour || c.AliveTimeout%time.Second != 0 {
		p.add("alive-timeout", "%s can't be used; give whole seconds from 1s to 1h", c.AliveTimeout)
	}
	if c.DrainTimeout < 0 {
		p.add("drain-timeout", "%s is negative; use 0s not to drain", c.DrainTimeout)
	}
}

func checkHealth(p *problems, c Config) {
	h := c.Health
	switch h.Check {
	case service.CheckDefault, service.CheckOff, service.CheckTCP, service.CheckHTTP, service.CheckUDP, service.CheckGRPC:
	default:
		p.add("health-check", "%q is not a check; use one of off, tcp, http, udp, grpc", string(h.Check))
	}
	if h.Interval < 100*time.Millisecond || h.Interval > time.Hour {
		p.add("health-interval", "%s is out of range; use 100ms to 1h", h.Interval)
	}
	if h.Timeout <= 0 {
		p.add("health-timeout", "%s is not a time a probe can take; use 1s, for example", h.Timeout)
	} else if h.Timeout > h.Interval {
		p.add("health-timeout", "%s is longer than --health-interval %s; probes of one endpoint would overlap", h.Timeout, h.Interval)
	}
	if h.MinInterval < 10*time.Millisecond || h.MinInterval > time.Hour {
		p.add("health-min-interval", "%s is out of range; use 10ms to 1h", h.MinInterval)
	}
}

// maxKernelTimeout is what ip_vs_set_timeout (net/netfilter/ipvs/ip_vs_ctl.c) and
// proc_dointvec_jiffies (kernel/sysctl.c) take, INT_MAX / HZ, on a kernel with the
// highest HZ, 1000.
const maxKernelTimeout = math.MaxInt32 / 1000 * time.Second

func checkIPVS(p *problems, c Config) {
	i := c.IPVS
	if i.Scheduler != "" && !service.IsScheduler(i.Scheduler) {
		p.add("ipvs-scheduler", "%q is not the name of a scheduler; use rr, wlc or sed, for example", i.Scheduler).Or = ", or leave the flag out"
	}
	if i.TCPTimeout != LikeConntrack {
		if d, err := time.ParseDuration(i.TCPTimeout); err != nil {
			p.add("ipvs-tcp-timeout", "%q is no duration; use 15m, for example, %s for conntrack's own, or 0 to leave the kernel's setting", i.TCPTimeout, LikeConntrack)
		} else {
			p.kernelTimeout("ipvs-tcp-timeout", d)
		}
	}
}

func (p *problems) kernelTimeout(flag string, d time.Duration) {
	switch {
	case d < 0 || d > maxKernelTimeout:
		p.add(flag, "%s is out of range; use up to %s, or 0 to leave the kernel's setting", d, maxKernelTimeout)
	case d%time.Second != 0:
		p.add(flag, "%s can't be used; the kernel counts whole seconds", d)
	}
}

func checkAddresses(p *problems, c Config) {
	metrics := p.bind("metrics-bind-address", c.MetricsBindAddress)
	healthz := p.bind("healthz-bind-address", c.HealthzBindAddress)
	if metrics.IsValid() && healthz.IsValid() && metrics.Port() == healthz.Port() && overlap(metrics.Addr(), healthz.Addr()) {
		flag, at, other, taken := "healthz-bind-address", healthz, "metrics-bind-address", metrics
		if healthz.Port() == HealthzPort { // where it belongs
			flag, at, other, taken = other, taken, flag, at
		}
		p.add(flag, "%s is taken by --%s %s; choose another port", at, other, taken)
	}
	for _, b := range []struct {
		flag string
		at   netip.AddrPort
	}{{"metrics-bind-address", metrics}, {"healthz-bind-address", healthz}} {
		switch {
		case !b.at.IsValid() || c.ListenTCPPort != int(b.at.Port()):
		case c.ListenTCPPort == Default().ListenTCPPort: // it is the other that was chosen
			p.add(b.flag, "%d is the port of --listen-tcp-port, kproxy's shared listener; choose another", c.ListenTCPPort)
		default:
			p.add("listen-tcp-port", "%d is the port of --%s; choose another, or 0 to let the kernel choose", c.ListenTCPPort, b.flag)
		}
	}
}

// maxMetricsLimit is far beyond what a Prometheus can hold of every node.
const maxMetricsLimit = 1_000_000

// bind parses an address to listen on; an empty one serves nothing.
func (p *problems) bind(flag, s string) netip.AddrPort {
	if s == "" {
		return netip.AddrPort{}
	}
	a, err := netip.ParseAddrPort(s)
	if err != nil || a.Port() == 0 {
		p.add(flag, "%q is not IP:PORT such as 127.0.0.1:10249 or [::1]:10249", s).Or = "; leave it empty to serve nothing there"
		return netip.AddrPort{}
	}
	return a
}

// overlap reports whether two listeners on one port at a and b get in each
// other's way: [::] takes both families (IPV6_V6ONLY is off).
func overlap(a, b netip.Addr) bool {
	return a == b || covers(a, b) || covers(b, a)
}

func covers(all, a netip.Addr) bool {
	return all.IsUnspecified() && (all.Is6() || a.Is4())
}

// maxSocketPath is sun_path without its terminating NUL (unix(7)).
const maxSocketPath = 107

func checkPaths(p *problems, c Config) {
	if !filepath.IsAbs(c.Socket) {
		p.add("socket", "%q is not an absolute path; use /run/kproxy/kproxy.sock, for example", c.Socket)
	} else if len(c.Socket) > maxSocketPath {
		p.add("socket", "the path has %d bytes; a Unix socket's has at most %d", len(c.Socket), maxSocketPath)
	}
	if !filepath.IsAbs(c.StateDir) {
		p.add("state-dir", "%q is not an absolute path; use /var/lib/kproxy, for example", c.StateDir)
	}
	if c.StateMaxAge < 0 {
		p.add("state-max-age", "%s is negative; use 0s to save no state", c.StateMaxAge)
	}
}

func checkGrafana(p *problems, c Config) {
	u, err := url.Parse(c.GrafanaURL)
	if c.GrafanaURL != "" && (err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "") {
		p.add("grafana-url", "%q is not a URL such as https://grafana.example or https://example/grafana", c.GrafanaURL)
	}
}

func checkLog(p *problems, c Config) {
	if !slices.Contains(LogFormats, c.LogFormat) {
		p.add("log-format", "%q is not a format; use one of %s", c.LogFormat, strings.Join(LogFormats, ", "))
	}
	if _, err := parseLevel(c.Verbosity); err != nil {
		p.add("v", "%q is not a log level; use debug, info, warn, error, or kube-proxy's number", c.Verbosity)
	}
}
