// Package netfilter follows a packet through what is in the kernel's netfilter:
// the rules of both variants of iptables and native nftables, with their
// counters, and ipsets. Everything is read back from the kernel; nothing is
// rendered from a plan, and nothing is changed.
//
// [Read] makes a [Tables], a value; [Tables.Walk] follows a [Packet] through the
// base chains of one hook, in the kernel's order. Rules of chance (statistic)
// give several outcomes with their exact probabilities. A match that can't be
// decided, because this package doesn't know it or because it hangs on more than
// the packet (limit, recent, time), makes "maybe": both ways are followed, and
// what comes of them is marked as uncertain. Nothing is ever guessed.
//
// What a walk doesn't do: routing, IPVS, sockets that receive. They lie between
// hooks, see [Span] for those that lie between the base chains of one hook.
//
// A Tables is for one goroutine at a time: it reads sets when a rule first asks
// for them.
package netfilter

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"kproxy.dev/kproxy/kernel"
	"kproxy.dev/kproxy/service"
)

// Tables holds what is in netfilter for one address family.
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
	// handles are those of rules, where they were asked for.
	handles handles
}

// setRead holds what came of reading a set.
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
	Devices  []string // of an ingress or egress chain; "eth*" are those that begin so
	Policy   Verdict
	Policies Counter
	Rules    int // their number, without those of the chains that they lead to

	set  *ruleset // that its chains are in
	made int      // its place in the order in which nftables' chains were made; 0 for legacy ones
}

// Counter holds what iptables-save -c prints in brackets; nil if there is none.
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
	// Listens returns the socket that gets what is new at an address and port.
	Listens(proto service.Protocol, a netip.AddrPort) (Socket, error)
}

// Socket is one that waits for connections or datagrams.
type Socket struct {
	Found       bool
	Wildcard    bool // it is bound to no address
	Transparent bool // it may get what is sent to other hosts (IP_TRANSPARENT)
}

// SetReader reads sets, kproxy's and others'; [kernel.IPSets] does.
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

// Sources of rules.
const (
	sourceXTNFT    = "iptables-nft"
	sourceXTLegacy = "iptables-legacy"
	sourceNFT      = "nftables"
)

// Config holds what Read works with.
type Config struct {
	Runner kernel.Runner
	// Variant of iptables that holds kproxy's rules; the other one's are read as
	// well, if there are any.
	Variant kernel.Variant
	// Sets reads sets when a rule asks for them; nil for none.
	Sets SetReader
	// Host answers what rules ask about it.
	Host Host
}

// DefaultConfig is for this host's own programs. The set reader is the caller's to
// open and close.
func DefaultConfig() Config {
	return Config{Runner: kernel.Exec{}, Variant: kernel.DefaultVariant()}
}

// Read reads back everything that packets of a family meet, in the network
// namespace of the calling thread. What can't be read but may be there is in the
// result as a note.
func Read(ctx context.Context, c Config, f service.Family) (*Tables, error) {
	t := &Tables{Family: f, bridged: No, host: c.Host, sets: c.Sets}
	if kernel.BridgeCallsNetfilter(f) {
		t.bridged = Maybe
	}
	main := c.Variant
	if main.Name == "" {
		main.Name = c.variantName(ctx)
	}
	other := kernel.VariantLegacy()
	if main.Name == "legacy" {
		other = kernel.VariantNFT()
	}
	printed := map[string]bool{} // base chains of nftables that iptables has printed: "ip nat PREROUTING"
	err := t.readIPTables(ctx, c.Runner, main, printed)
	if err != nil && !errors.Is(err, kernel.ErrNoProgram) {
		return nil, err
	}
	otherErr := t.readIPTables(ctx, c.Runner, other, printed)
	if otherErr != nil && !errors.Is(otherErr, kernel.ErrNoProgram) {
		t.Notes = append(t.Notes, fmt.Sprintf("the rules of %s can't be read: %v", other.Program[f], otherErr))
	}
	if len(kernel.LegacyTables(f)) > 0 && !slices.ContainsFunc(t.Bases, func(b *Base) bool { return b.Source == sourceXTLegacy }) && errors.Is(errors.Join(err, otherErr), kernel.ErrNoProgram) {
		t.Notes = append(t.Notes, fmt.Sprintf("rules of the legacy variant can't be read: there is no %s", kernel.VariantLegacy().Program[f]))
	}
	if err := t.readNFT(printed); err != nil {
		return nil, err
	}
	t.sort()
	return t, nil
}

// variantName finds out which variant the host's own is; nft if it can't.
func (c Config) variantName(ctx context.Context) string {
	out, err := c.Runner.Run(ctx, nil, c.Variant.Program[service.IPv4], "--version")
	if err == nil && strings.Contains(string(out), "legacy") {
		return "legacy"
	}
	return "nft"
}

// Parse makes a Tables of what iptables-save -c of the nft variant printed.
func Parse(f service.Family, text string, sets SetReader, host Host) (*Tables, error) {
	t := &Tables{Family: f, sets: sets, host: host}
	if err := t.addSave(sourceXTNFT, text, map[string]bool{}); err != nil {
		return nil, err
	}
	t.sort()
	return t, nil
}

func (t *Tables) readIPTables(ctx context.Context, run kernel.Runner, v kernel.Variant, printed map[string]bool) error {
	text, err := run.Run(ctx, nil, v.Program[t.Family]+"-save", "-c")
	if err != nil {
		return fmt.Errorf("read %s rules: %w", t.Family, err)
	}
	source := sourceXTNFT
	if v.Name == "legacy" {
		source = sourceXTLegacy
	}
	if err := t.addSave(source, string(text), printed); err != nil {
		return fmt.Errorf("read %s rules: %w", t.Family, err)
	}
	return nil
}

// addSave adds the base chains of what iptables-save printed.
func (t *Tables) addSave(source, text string, printed map[string]bool) error {
	set, err := parseSave(source, t.Family, text)
	if err != nil {
		return err
	}
	for _, c := range set.chains {
		h := Hook(c.name)
		p, ok := priority(c.table, h)
		if !ok || c.policy == "" {
			continue
		}
		b := &Base{
			Source: source, Table: c.table, Chain: c.name, Type: "filter", Hook: h, Priority: p,
			Policy: c.policy, Policies: c.counter, Rules: len(c.rules), set: set,
		}
		if c.table == "nat" {
			b.Type = "nat"
		}
		t.Bases = append(t.Bases, b)
		if source == sourceXTNFT {
			printed[nftFamily[t.Family]+" "+c.table+" "+c.name] = true
		}
	}
	return nil
}

// sort brings base chains in the kernel's order. Of those of one priority, the one that was registered
// last comes first (nf_hook_entries_grow in net/netfilter/core.c). Of nftables' that is the one made last, as far as the
// order of tables, and of chains in each, tells; of legacy tables nothing tells, see walker.walkNAT.
func (t *Tables) sort() {
	slices.SortStableFunc(t.Bases, func(a, b *Base) int {
		return cmp.Or(
			cmp.Compare(a.Hook, b.Hook), cmp.Compare(a.order(), b.order()), cmp.Compare(a.Priority, b.Priority), cmp.Compare(b.made, a.made))
	})
}

// nftFamily is what nftables calls a family.
var nftFamily = [2]string{service.IPv4: "ip", service.IPv6: "ip6"}
