package config

import (
	"net"
	"net/netip"
	"strconv"
)

// The ports of kube-proxy's servers, which are kproxy's too.
const (
	MetricsPort = 10249
	HealthzPort = 10256
)

// ModeOf returns the mode for one of kube-proxy's; others are returned as they
// are. "" is left to kproxy, as kube-proxy leaves it to itself: its default was
// another one before and will be again. kproxy programs no nftables rules; who
// asks for them asks for the fastest there is.
func ModeOf(kubeProxy string) string {
	if kubeProxy == "" || kubeProxy == "nftables" {
		return "auto"
	}
	return kubeProxy
}

// WithPort appends the port to an IP that comes without one.
func WithPort(address string, port int) string {
	if a, err := netip.ParseAddr(address); err == nil {
		return net.JoinHostPort(a.String(), strconv.Itoa(port))
	}
	return address
}
