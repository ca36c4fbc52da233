package config

import (
	"cmp"
	"log/slog"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"kproxy.dev/kproxy/service"
	"kproxy.dev/kproxy/source"
)

// The methods below give the parsed form of a Config. They are meaningful once
// Validate has found nothing: text that doesn't parse is left out.

// Kubernetes reports whether services come from the Kubernetes API.
func (c Config) Kubernetes() bool { return c.Kubeconfig != "" || c.Master != "" || c.InCluster }

// HealthCheck returns the default active check, which depends on the source.
func (c Config) HealthCheck() service.Check {
	switch {
	case c.Health.Check != service.CheckDefault:
		return c.Health.Check
	case c.Kubernetes():
		return service.CheckOff
	}
	return service.CheckTCP
}

// NodeAddresses returns --node-ip.
func (c Config) NodeAddresses() []netip.Addr { return source.Addrs(c.NodeIPs) }

// PodNetworks returns --cluster-cidr.
func (c Config) PodNetworks() []netip.Prefix { return source.Prefixes(c.ClusterCIDRs) }

// ExcludedNetworks returns --exclude-cluster-cidr.
func (c Config) ExcludedNetworks() []netip.Prefix { return source.Prefixes(c.ExcludeClusterCIDRs) }

// ServiceNetworks returns --service-cidr.
func (c Config) ServiceNetworks() []netip.Prefix { return source.Prefixes(c.ServiceCIDRs) }

// NodePortNetworks returns --nodeport-addresses with AllAddresses and
// LocalhostAddresses spelt out; primary says that the node's primary addresses
// are among them. Neither means that node ports answer on every address.
func (c Config) NodePortNetworks() (networks []netip.Prefix, primary bool) {
	for _, s := range c.NodePortAddresses {
		if s == PrimaryAddresses {
			primary = true
			continue
		}
		networks = append(networks, nodePortWords[s]...)
		networks = append(networks, source.Prefixes([]string{s})...)
	}
	return networks, primary
}

var nodePortWords = map[string][]netip.Prefix{
	AllAddresses:       source.Prefixes([]string{"0.0.0.0/0", "::/0"}),
	LocalhostAddresses: source.Prefixes([]string{"127.0.0.0/8", "::1/128"}),
}

// TCPTimeoutOf returns --ipvs-tcp-timeout, given conntrack's time-out for
// established connections; 0 leaves the kernel's setting.
func (i IPVS) TCPTimeoutOf(conntrack time.Duration) time.Duration {
	if i.TCPTimeout == LikeConntrack {
		return min(conntrack.Truncate(time.Second), maxKernelTimeout)
	}
	d, _ := time.ParseDuration(i.TCPTimeout)
	return d
}

// MasqueradeMark returns the packet mark of --iptables-masquerade-bit.
func (c Config) MasqueradeMark() uint32 { return 1 << uint(c.MasqueradeBit&31) }

// TransparentMark returns the packet mark of --transparent-bit, without the bit below.
func (c Config) TransparentMark() uint32 { return 1 << uint(c.TransparentBit&31) }

// LogLevel returns -v. kube-proxy's numbers are understood: from 4 on, klog's
// "debug level verbosity", they mean debug.
func (c Config) LogLevel() slog.Level {
	l, _ := parseLevel(c.Verbosity)
	return l
}

func parseLevel(s string) (slog.Level, error) {
	if n, err := strconv.Atoi(s); err == nil && n >= 0 {
		if n >= 4 {
			return slog.LevelDebug, nil
		}
		return slog.LevelInfo, nil
	}
	switch strings.ToLower(s) {
	case "debug":
		return slog.LevelDebug, nil
	case "info":
		return slog.LevelInfo, nil
	case "warn", "warning":
		return slog.LevelWarn, nil
	case "error":
		return slog.LevelError, nil
	}
	return slog.LevelInfo, strconv.ErrSyntax
}

// The ports of kube-proxy's servers, which are kproxy's too.
const (
	MetricsPort = 10249
	HealthzPort = 10256
)

// ModeOf returns the mode for one of kube-proxy's; others are returned as they
// are. "" is left to kproxy, as kube-proxy leaves it to itself: its default was
// another one before and will be again.
func ModeOf(kubeProxy string) string {
	return cmp.Or(kubeProxy, "auto")
}

// WithPort appends the port to an IP that comes without one.
func WithPort(address string, port int) string {
	if a, err := netip.ParseAddr(address); err == nil {
		return net.JoinHostPort(a.String(), strconv.Itoa(port))
	}
	return address
}
