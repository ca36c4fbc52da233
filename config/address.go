package config

import (
	"fmt"
	"net/netip"

	netutils "k8s.io/utils/net"
)

// ParseAddr reads an IP address as kube-proxy does: leading zeros in IPv4 octets
// are decimal (010.0.0.1 is 10.0.0.1).
func ParseAddr(s string) (netip.Addr, error) {
	a, err := netip.ParseAddr(s)
	if err == nil {
		return a, nil
	}
	if a, ok := netip.AddrFromSlice(netutils.ParseIPSloppy(s)); ok {
		return a.Unmap(), nil
	}
	return netip.Addr{}, err
}

// parsePrefix reads a network, with leading zeros as in ParseAddr.
func parsePrefix(s string) (netip.Prefix, error) {
	if p, err := netip.ParsePrefix(s); err == nil {
		return p, nil
	}
	_, n, err := netutils.ParseCIDRSloppy(s)
	if err != nil {
		return netip.Prefix{}, fmt.Errorf("%q is not a network in CIDR notation", s)
	}
	a, _ := netip.AddrFromSlice(n.IP)
	ones, _ := n.Mask.Size()
	return netip.PrefixFrom(a, ones), nil
}
