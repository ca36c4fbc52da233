package source

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	netutils "k8s.io/utils/net"
)

// ParseAddr reads an IP address as Kubernetes does: leading zeros in IPv4
// octets are decimal (010.0.0.1 is 10.0.0.1), and an IPv4-mapped IPv6 address
// is the IPv4 address. Zones (fe80::1%eth0) are refused: they mean nothing on
// another node.
func ParseAddr(s string) (netip.Addr, error) {
	if a, err := netip.ParseAddr(s); err == nil {
		if a.Zone() != "" {
			return netip.Addr{}, fmt.Errorf("%s has a zone, which no service address can have", quoted(s))
		}
		return a.Unmap(), nil
	}
	if a, ok := netip.AddrFromSlice(netutils.ParseIPSloppy(s)); ok {
		return a.Unmap(), nil
	}
	return netip.Addr{}, fmt.Errorf("%s is not an IP address", quoted(s))
}

// ParsePrefix reads a network in CIDR notation, trimmed of white space, with
// leading zeros and IPv4-mapped addresses as in ParseAddr. Bits beyond the
// prefix length are cleared.
func ParsePrefix(s string) (netip.Prefix, error) {
	s = strings.TrimSpace(s)
	p, err := netip.ParsePrefix(s)
	if err != nil {
		_, n, err := netutils.ParseCIDRSloppy(s)
		if err != nil {
			return netip.Prefix{}, fmt.Errorf("%s is not a network in CIDR notation", quoted(s))
		}
		a, _ := netip.AddrFromSlice(n.IP)
		ones, _ := n.Mask.Size()
		p = netip.PrefixFrom(a, ones)
	}
	if p.Addr().Is4In6() && p.Bits() >= 96 {
		p = netip.PrefixFrom(p.Addr().Unmap(), p.Bits()-96)
	}
	return p.Masked(), nil
}

// Addrs returns what ParseAddr reads, and leaves out the rest.
func Addrs(in []string) []netip.Addr { return parsed(in, ParseAddr) }

// Prefixes returns what ParsePrefix reads, and leaves out the rest.
func Prefixes(in []string) []netip.Prefix { return parsed(in, ParsePrefix) }

func parsed[T any](in []string, parse func(string) (T, error)) (out []T) {
	for _, s := range in {
		if x, err := parse(s); err == nil {
			out = append(out, x)
		}
	}
	return out
}

// addrs returns what Addrs does, of the wanted families only.
func addrs(in []string, want families) []netip.Addr {
	return slices.DeleteFunc(Addrs(in), func(a netip.Addr) bool { return !want.has(a) })
}
