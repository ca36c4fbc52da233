package service

import (
	"cmp"
	"fmt"
	"net/netip"
	"strings"
)

// Protocol is a Layer-4 protocol, numbered as in the IP header (IANA protocol
// numbers), so it can be handed to the kernel as it is.
type Protocol uint8

// The protocols a Service port can have.
const (
	TCP  Protocol = 6
	UDP  Protocol = 17
	SCTP Protocol = 132
)

// String returns the name as iptables and ipset spell it: "tcp", "udp", "sctp".
func (p Protocol) String() string {
	switch p {
	case TCP:
		return "tcp"
	case UDP:
		return "udp"
	case SCTP:
		return "sctp"
	}
	return fmt.Sprintf("proto-%d", uint8(p))
}

// ParseProtocol accepts the names Kubernetes and iptables use, in any case.
func ParseProtocol(s string) (Protocol, error) {
	switch strings.ToLower(s) {
	case "tcp":
		return TCP, nil
	case "udp":
		return UDP, nil
	case "sctp":
		return SCTP, nil
	}
	return 0, fmt.Errorf("protocol %q is not one of TCP, UDP, SCTP", s)
}

// MarshalText makes protocols readable in JSON, in Kubernetes' spelling.
func (p Protocol) MarshalText() ([]byte, error) {
	return []byte(strings.ToUpper(p.String())), nil
}

// UnmarshalText is the inverse of MarshalText.
func (p *Protocol) UnmarshalText(b []byte) (err error) {
	*p, err = ParseProtocol(string(b))
	return err
}

// Family is an IP address family. It indexes the per-family arrays of plans
// and rulesets, so that both families go through one code path.
type Family uint8

// The two families, in the order they are always rendered.
const (
	IPv4 Family = iota
	IPv6
)

// Families lists both, for range loops.
var Families = [2]Family{IPv4, IPv6}

// Number is the family's in Linux: AF_INET or AF_INET6, which netfilter calls NFPROTO_IPV4 and NFPROTO_IPV6.
func (f Family) Number() uint8 { return [2]uint8{IPv4: 2, IPv6: 10}[f] }

// String returns "ipv4" or "ipv6".
func (f Family) String() string {
	if f == IPv6 {
		return "ipv6"
	}
	return "ipv4"
}

// Bits is the address length: 32 or 128.
func (f Family) Bits() int {
	if f == IPv6 {
		return 128
	}
	return 32
}

// FamilyOf returns the family of an address; an IPv4-mapped IPv6 address is IPv4.
func FamilyOf(a netip.Addr) Family {
	if a.Is4() || a.Is4In6() {
		return IPv4
	}
	return IPv6
}

// Key names one port of one Service. Protocol is part of the identity because
// one Service may use a port number for TCP and for UDP.
type Key struct {
	Namespace string
	Name      string
	Port      string // the port's name; empty for a Service's only, unnamed port
	Protocol  Protocol
}

// String returns "namespace/name", followed by ":port" where the port is named.
func (k Key) String() string { return string(k.Append(make([]byte, 0, 64))) }

// Append appends what String returns.
func (k Key) Append(b []byte) []byte {
	b = append(append(append(b, k.Namespace...), '/'), k.Name...)
	if k.Port != "" {
		b = append(append(b, ':'), k.Port...)
	}
	return b
}

// Compare orders keys by namespace, name, port name, then protocol.
func (k Key) Compare(o Key) int {
	return cmp.Or(
		strings.Compare(k.Namespace, o.Namespace),
		strings.Compare(k.Name, o.Name),
		strings.Compare(k.Port, o.Port),
		cmp.Compare(k.Protocol, o.Protocol),
	)
}
