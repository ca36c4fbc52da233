package kernel

import "kproxy.dev/kproxy/service"

// Variant is one of the two implementations of iptables that a host may have.
// Each has its own rules in the kernel; kproxy's belong where the host's are.
type Variant struct {
	Name    string    // "nft" or "legacy"; empty if unknown
	Program [2]string // per service.Family; "-save" and "-restore" are appended
}

// The variants under the names that tell them apart.
func VariantNFT() Variant {
	return Variant{"nft", [2]string{service.IPv4: "iptables-nft", service.IPv6: "ip6tables-nft"}}
}

// VariantLegacy is the variant that predates nftables.
func VariantLegacy() Variant {
	return Variant{"legacy", [2]string{service.IPv4: "iptables-legacy", service.IPv6: "ip6tables-legacy"}}
}

// DefaultVariant is whichever the host calls iptables.
func DefaultVariant() Variant {
	return Variant{"", [2]string{service.IPv4: "iptables", service.IPv6: "ip6tables"}}
}
