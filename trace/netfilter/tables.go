package netfilter

import (
	"net/netip"
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// Tables is what is in netfilter for one address family.
type Tables struct {
	Family service.Family
	// Bases are all base chains, in the order in which packets meet them at each
	// hook.
	Bases []*Base
	// Notes say what wasn't read, or can't be followed, a sentence each.
	Notes []string

	// bridged says whether packets between ports of a bridge come here.
	bridged Answer

	host Host
	sets SetReader
	read map[string]setRead
}

// setRead is what came of reading a set.
type setRead struct {
	set kernel.AnySet
	err error
}

// Base is a base chain.
type Base struct {
	Source   string // "iptables-nft", "iptables-legacy", "nftables"
	Table    string // of nftables, with its family: "inet filter"
	Chain    string
	Type     string // "filter", "nat" or "route"
	Hook     Hook
	Priority int
	Devices  []string // of an ingress or egress chain
	Policy   Verdict
	Policies Counter
	// Read says that its rules are known. If they aren't, a packet may fare any way
	// that Why tells of.
	Read  bool
	Why   string
	Rules int // their number, without those of the chains that they lead to

	set *ruleset // that its chains are in
}

// Counter is what iptables-save -c prints in brackets; nil if there is none.
type Counter struct{ Packets, Bytes *uint64 }

// Host answers what rules ask about the host besides the packet. A question that
// it can't answer makes the rule undecided.
type Host interface {
	// AddressType is the type of the route to an address, as the match addrtype
	// calls it: LOCAL, UNICAST, BROADCAST, ….
	AddressType(a netip.Addr) (string, error)
	// InterfaceAddress is where REDIRECT sends what comes in on an interface.
	InterfaceAddress(name string, f service.Family) (netip.Addr, error)
	// MasqueradeAddress is what MASQUERADE makes the source of a packet to dst that
	// leaves by an interface.
	MasqueradeAddress(out string, dst netip.Addr) (netip.Addr, error)
	// Listens reports whether a socket of this host is bound to exactly this
	// address and port, not to a wildcard, for the match socket.
	Listens(proto service.Protocol, a netip.AddrPort) (bool, error)
}

// SetReader reads sets of anybody's; [kernel.IPSets] does.
type SetReader interface {
	ReadAny(name string) (kernel.AnySet, error)
}

// Rules returns the rules of a chain of iptables as iptables-save prints them, without
// "-A CHAIN".
func (t *Tables) Rules(table, chain string) []string {
	for _, b := range t.Bases {
		if b.set == nil || !strings.HasPrefix(b.Source, "iptables") {
			continue
		}
		if c := b.set.chain(table, chain); c != nil {
			out := make([]string, len(c.rules))
			for i, r := range c.rules {
				out[i] = strings.TrimPrefix(r.text, "-A "+chain+" ")
			}
			return out
		}
	}
	return nil
}
